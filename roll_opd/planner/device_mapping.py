"""Read `device_mapping`, and check devices: existence, sharing, and memory."""

import ast
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import combinations

from roll_opd.config.diagnostics import Diagnostics
from roll_opd.config.plan import RunPlan
from roll_opd.config.schema import Run, Worker
from roll_opd.models.device_phases import members_on_gpus
from roll_opd.models.memory import device_memory, readable_bytes

ACCEPTED = 'write it as "list(range(0,8))", "range(0,8)", "[0,1,2]" or a YAML list, joined with + if needed'
MAX_DEVICES = 1_000_000  # so that a typing error such as range(0, 10**9) gives an error and does not fill the memory


def nodes(roles: list[Worker], top: Run) -> int:
    """Return the number of nodes of a run.

    This is num_nodes, or the number of nodes in the device mappings if it is larger, as in ROLL.
    """
    last = max((max(role.devices) for role in roles if role.devices), default=0)
    return max(top.num_nodes or 1, last // top.num_gpus_per_node + 1)


def check_devices(roles: list[Worker], top: Run) -> None:
    """Check that all devices exist. The devices of two roles must be equal, disjoint or nested."""
    total = (top.num_nodes or nodes(roles, top)) * top.num_gpus_per_node
    known = [(role, set(role.devices)) for role in roles if role.devices]
    for role, devices in known:
        if max(devices) >= total:
            role.diag.unsupported(  # ROLL's YAML files use devices beyond num_nodes, which ROLL overwrites
                "device_mapping",
                f"device {max(devices)} does not exist: num_nodes {top.num_nodes} x num_gpus_per_node"
                f" {top.num_gpus_per_node} gives devices 0 to {total - 1}; raise or remove num_nodes, or change"
                " device_mapping",
            )
        layout = role.layout
        if role.job == "rollout" and layout and layout.tp > top.num_gpus_per_node:
            role.diag.unsupported(
                "strategy_args.strategy_config.tensor_parallel_size",
                f"{layout.tp}: engines on several nodes of {top.num_gpus_per_node} devices are not available yet; write"
                f" at most {top.num_gpus_per_node}",
            )
        elif layout and (apart := _apart(role.devices or (), layout.tp, top.num_gpus_per_node)):
            where = f"devices {short_devices(apart)} are on several nodes of {top.num_gpus_per_node} devices each"
            if role.job == "rollout":
                role.diag.unsupported(
                    "device_mapping",
                    f"an engine's {where}, which is not available yet; choose devices of a single node",
                )
            else:
                role.diag.note(
                    "device_mapping",
                    f"{where} but form one tensor-parallel group, which communicates in every layer; this is slow over"
                    " a network",
                )
    for (one, mine), (other, theirs) in combinations(known, 2):
        shared = mine & theirs
        if shared and shared != mine and shared != theirs:
            here, there, both = (short_devices(sorted(devices)) for devices in (theirs, mine, shared))
            other.diag.error(
                "device_mapping",
                f"{here} and {one.path}'s {there} have only {both} in common; make them equal, nested or disjoint",
            )


def _apart(devices: Sequence[int], tp: int, per_node: int) -> Sequence[int]:
    """Return the first group of `tp` consecutive devices that spans several nodes, or () if there is none."""
    groups = (devices[start : start + tp] for start in range(0, len(devices), tp))
    return next((group for group in groups if len({device // per_node for device in group}) > 1), ())


def check_m2n(plan: RunPlan, diag: Diagnostics, *, on_cpu: bool) -> None:
    """Check that `weight_sync: m2n` can connect the student's devices with those of the engines."""
    if plan.weight_sync != "m2n" or plan.rollout is None:
        return
    if plan.rollout.adapter:
        diag.note("weight_sync", "is shared_memory, as the engines get only the student's adapter")
        return
    if shared := sorted(set(plan.student.devices) & set(plan.rollout.devices)):
        text = f"m2n sends between different devices, but student and engines share {', '.join(map(str, shared))}"
        diag.error("weight_sync", f"{text}; use auto, or other devices")
    if on_cpu:
        diag.unsupported_here("weight_sync", "m2n sends between GPUs; use auto")
    elif not (find_spec("nccl") and find_spec("nccl.m2n")):
        diag.unsupported_here("weight_sync", "m2n needs the package nccl-extensions; install it, or use auto")


def check_memory(plan: RunPlan, diag: Diagnostics) -> None:
    """Refuse devices that are too small for the resident memory. Warn if activations would fill a device."""
    if plan.device_memory_gb is None:
        return
    limit = int(plan.device_memory_gb * 2**30)
    for computing in (False, True):
        needs = device_memory(plan, limit, computing=computing)
        full = [device for device, size in needs.items() if size > limit]
        if full:
            most = max(full, key=needs.__getitem__)
            names = " and ".join(name for name, role in plan.roles().items() if most in role.devices)
            all_there = "even in turns" if members_on_gpus(plan) else "since all of them stay in memory"
            what = all_there if computing else "without any activations"
            text = (
                f"devices {short_devices(full)} have {plan.device_memory_gb:g} GiB each and need about"
                f" {readable_bytes(needs[most])} for {names}, {what}; give the roles separate devices, split them"
                f" further, or lower gpu_memory_utilization{' or the tokens of a micro-batch' if computing else ''}"
            )
            return diag.add_warning(text) if computing else diag.unsupported_here("device_memory_gb", text)
    return None


def parse_device_mapping(value: str | int | Sequence[int]) -> tuple[int, ...]:
    """Return the device numbers that `value` lists, in the same order.

    Raises ValueError if the list is empty, if it contains a device twice, or if it contains anything but non-negative
    whole numbers. The message is a sentence for the user.
    """
    devices = _parse_text(value) if isinstance(value, str) else _literal_list(value)
    if not devices:
        raise ValueError(f"{value!r} lists no device; {ACCEPTED}")
    seen: set[int] = set()
    for device in devices:
        if device < 0:
            raise ValueError(f"device {device} is negative; use numbers from 0, counted over all nodes")
        if device in seen:
            raise ValueError(f"device {device} is listed twice; remove one of the two")
        seen.add(device)
    return tuple(devices)


def short_devices(devices: Sequence[int]) -> str:
    """Write [0, 1, 2, 3, 6] as "0-3,6"."""
    parts: list[list[int]] = []
    for device in devices:
        if parts and device == parts[-1][-1] + 1:
            parts[-1].append(device)
        else:
            parts.append([device])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _literal_list(value: int | Sequence[int]) -> list[int]:
    items = [value] if type(value) is int else value
    if not isinstance(items, list | tuple):
        raise ValueError(f"{value!r} is not a list of devices; {ACCEPTED}")
    for item in items:
        if type(item) is not int:
            raise ValueError(f"{item!r} is not a whole number; {ACCEPTED}")
    return list(items)


def _parse_text(text: str) -> list[int]:
    try:
        value = _interpret(ast.parse(text.strip(), mode="eval").body, text)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{text!r} cannot be read; {ACCEPTED}") from None
    return [value] if isinstance(value, int) else value


def _interpret(node: ast.expr, text: str) -> int | list[int]:
    """Return the value of a node of the syntax tree. Only lists, range() and sums are accepted."""
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand, text)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_number(item, text) for item in items]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _list(left, text) + _list(right, text)
        case ast.Call(func=ast.Name(id="list"), args=[items], keywords=[]):
            return _list(items, text)
        case ast.Call(func=ast.Name(id="range"), args=[_, *_] as arguments, keywords=[]) if len(arguments) <= 3:
            return _range([_number(argument, text) for argument in arguments])
    raise ValueError(f"{ast.unparse(node)!r} is not allowed in {text!r}; {ACCEPTED}")


def _range(arguments: list[int]) -> list[int]:
    if len(arguments) == 3 and arguments[2] == 0:
        raise ValueError("range() needs a step other than 0")
    numbers = range(*arguments)
    if len(numbers) > MAX_DEVICES:
        raise ValueError(f"{numbers} lists more than {MAX_DEVICES} devices")
    return list(numbers)


def _number(node: ast.expr, text: str) -> int:
    value = _interpret(node, text)
    if not isinstance(value, int):
        raise ValueError(f"{ast.unparse(node)!r} in {text!r} is not a whole number; {ACCEPTED}")
    return value


def _list(node: ast.expr, text: str) -> list[int]:
    value = _interpret(node, text)
    if isinstance(value, int):
        raise ValueError(f"{ast.unparse(node)!r} in {text!r} is not a list; {ACCEPTED}")
    return value
