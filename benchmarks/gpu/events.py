"""Figures from the profiler's events: time of each kernel family, idle time of the device, waits of the host, memory.

A kernel belongs to the innermost part (`parts.py`) around the operator that launched it; in the backward pass, around
the operator of the forward pass with the same sequence number. Without a device, operators replace kernels, with their
exclusive time.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from parts import PREFIX

LONG_GAP = 20_000  # ns
POINTS = 200  # of the memory curve
WAITS = re.compile(r"cuda(Device|Stream|Event)Synchronize|cuda(Memcpy|Memset)$")
LAUNCHES = re.compile(r"(cuda|cu)LaunchKernel")
PRODUCT = re.compile(r"gemm|nvjet|cutlass|xmma|aten::(mm|bmm|addmm|matmul)|splitK", re.I)
ATTENTION = re.compile(r"flash|fmha|attention", re.I)
BACKWARD = "autograd::engine::evaluate_function"


@dataclass
class Event:
    """An operator or a range on the host, or a kernel on the device; times in ns."""

    name: str
    start: int
    end: int
    thread: int = 0
    number: int = 0  # connects a kernel with the operator that launched it
    sequence: int = -1  # connects a backward operator with its forward operator
    parent: "Event | None" = None
    inside: list["Event"] = field(default_factory=list)


def figures(events: Iterable[Any]) -> dict[str, Any]:
    """Return families, gaps, host and memory from the events of Kineto."""
    host: dict[int, Event] = {}
    kernels: list[tuple[Event, int]] = []
    runtime: list[Event] = []
    memory: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for one in events:
        on_device = one.device_type().name == "CUDA"
        if one.name() == "[memory]":
            memory["device" if on_device else "host"].append((one.start_ns(), one.nbytes()))
            continue
        event = Event(one.name(), one.start_ns(), one.start_ns() + one.duration_ns())
        if on_device:
            if not one.is_user_annotation() and not event.name.startswith(PREFIX):
                kernels.append((event, one.linked_correlation_id()))
        elif one.name().startswith(("cuda", "cuLaunch")):
            runtime.append(event)
        else:
            event.thread, event.number = one.start_thread_id(), one.correlation_id()
            event.sequence = one.sequence_nr()
            host[id(event)] = event
    operators = list(host.values())
    nest(operators)
    parts = parts_of(operators)
    by_number = {event.number: event for event in operators if event.number}
    if kernels:
        timed = [(kernel, family(kernel.name, parts, by_number.get(number))) for kernel, number in kernels]
    else:
        timed = [(alone, family(alone.name, parts, event)) for event in operators for alone in [own_time(event)]]
        timed = [pair for pair in timed if not pair[0].name.startswith(PREFIX)]
    return summary(timed, bool(kernels)) | {
        "host": waits(runtime),
        "memory": {place: curve(changes) for place, changes in memory.items()},
    }


def nest(operators: Sequence[Event]) -> None:
    """Set the parent of each operator: the innermost enclosing operator of its thread."""
    stacks: dict[int, list[Event]] = defaultdict(list)
    for event in sorted(operators, key=lambda event: (event.start, -event.end)):
        stack = stacks[event.thread]
        while stack and stack[-1].end < event.end:
            stack.pop()
        if stack:
            event.parent = stack[-1]
            stack[-1].inside.append(event)
        stack.append(event)


def parts_of(operators: Sequence[Event]) -> dict[int, str]:
    """Return id of an operator -> its part."""
    found: dict[int, str] = {}
    forward: dict[int, str] = {}
    ordered = sorted(operators, key=lambda event: (event.start, -event.end))
    for event in ordered:  # enclosing operators come first
        if event.name.startswith(PREFIX):
            found[id(event)] = event.name.removeprefix(PREFIX)
        elif event.parent is not None and id(event.parent) in found:
            found[id(event)] = found[id(event.parent)]
        if id(event) in found and event.sequence >= 0 and not event.name.startswith(BACKWARD):
            forward[event.sequence] = found[id(event)]
    for event in ordered:
        if id(event) in found:
            continue
        if event.name.startswith(BACKWARD):
            if "AccumulateGrad" in event.name:
                found[id(event)] = "gradient accumulation"
            elif event.sequence in forward:
                found[id(event)] = forward[event.sequence]
        elif event.parent is not None and id(event.parent) in found:
            found[id(event)] = found[id(event.parent)]
    return found


def family(kernel: str, parts: dict[int, str], operator: Event | None) -> str:
    """Return the family of a kernel that `operator` launched."""
    part = parts.get(id(operator), "other") if operator is not None else "other"
    lowered = kernel.lower()
    if "nccl" in lowered:
        return "collectives"
    if "memcpy" in lowered and "dtod" not in lowered:
        return "copies to and from the host"
    if part == "residual" and "SwiGLU" in _names(operator):
        return "SwiGLU"
    if part == "attention":
        return "attention" if ATTENTION.search(kernel) else "attention layout"
    if PRODUCT.search(kernel):
        return "products of the head" if part == "head" else "products"
    if part == "products":
        return "beside products"
    return "loss and softmax of the head" if part == "head" else part


def _names(operator: Event | None) -> str:
    """Return the names of an operator and of the operators around it."""
    names = []
    while operator is not None:
        names.append(operator.name)
        operator = operator.parent
    return " ".join(names)


def own_time(event: Event) -> Event:
    """Return an operator with its exclusive time: its time without the operators inside it."""
    inside = sum(one.end - one.start for one in event.inside)
    return Event(event.name, event.start, max(event.start, event.end - inside))


def summary(timed: Sequence[tuple[Event, str]], has_device: bool) -> dict[str, Any]:
    """Return the time by family and by kernel, and the idle time of the device between its first and last kernel."""
    families: dict[str, dict[str, Any]] = defaultdict(lambda: {"seconds": 0.0, "kernels": 0})
    names: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0])
    for event, group in timed:
        seconds = (event.end - event.start) / 1e9
        families[group]["seconds"] += seconds
        families[group]["kernels"] += 1
        names[group, event.name[:140]][0] += seconds
        names[group, event.name[:140]][1] += 1
    longest = sorted(names.items(), key=lambda item: -item[1][0])[:60]
    busy, gaps = (
        spans([event for event, _ in timed]) if has_device else (sum(f["seconds"] for f in families.values()), [])
    )
    whole = (max(e.end for e, _ in timed) - min(e.start for e, _ in timed)) / 1e9 if timed else 0.0
    long = [gap for gap in gaps if gap >= LONG_GAP]
    return {
        "families": dict(families),
        "kernels": [[group, name, seconds, count] for (group, name), (seconds, count) in longest],
        "span_seconds": whole,
        "busy_seconds": busy,
        "gaps": {"seconds": sum(gaps) / 1e9, "long": len(long), "long_seconds": sum(long) / 1e9},
    }


def spans(events: Sequence[Event]) -> tuple[float, list[int]]:
    """Return the time in which any kernel ran, and the gaps between kernels, in ns."""
    busy, gaps, end = 0, [], None
    for event in sorted(events, key=lambda event: event.start):
        if end is not None and event.start > end:
            gaps.append(event.start - end)
        busy += max(0, event.end - max(event.start, end or event.start))
        end = max(event.end, end or event.end)
    return busy / 1e9, gaps


def waits(runtime: Sequence[Event]) -> dict[str, Any]:
    """Return the number of launches, and how often and how long the host waited for the device."""
    waiting = [event for event in runtime if WAITS.search(event.name)]
    return {
        "launches": sum(bool(LAUNCHES.search(event.name)) for event in runtime),
        "waits": len(waiting),
        "wait_seconds": sum(event.end - event.start for event in waiting) / 1e9,
    }


def curve(changes: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Return the memory over time (seconds, bytes above the start), and its maximum."""
    if not changes:
        return {}
    total, most, times, values = 0, 0, [], []
    ordered = sorted(changes)
    for at, size in ordered:
        total += size
        most = max(most, total)
        times.append((at - ordered[0][0]) / 1e9)
        values.append(total)
    step = times[-1] / POINTS or 1.0
    picked = sorted({max(0, bisect_right(times, number * step) - 1) for number in range(POINTS + 1)})
    return {"most": most, "points": [[round(times[n], 5), values[n]] for n in picked]}
