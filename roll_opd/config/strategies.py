"""Reads a role's `strategy_args`: which engine, spread how over which devices.

A strategy of ROLL's that does not exist here becomes its nearest, said in a warning (or refused, with
`strict_strategies: true`). What the engine knows passes through untouched.
"""

import difflib
from dataclasses import dataclass
from typing import Any

from roll_opd.config.errors import Findings
from roll_opd.config.known_names import (
    IGNORED_MEGATRON,
    IGNORED_VLLM,
    MEGATRON_DECIDED,
    MEGATRON_FIELDS,
    NEAREST_STRATEGY,
    STRATEGY,
    VLLM_ARGUMENTS,
)
from roll_opd.config.plan import Layout
from roll_opd.config.ranges import parse_device_mapping, short_devices
from roll_opd.config.schema import Worker

SIZES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "virtual_pipeline_model_parallel_size": "vpp",
}
SWITCHES = ("sequence_parallel", "use_distributed_optimizer", "bf16", "fp16")


@dataclass(frozen=True)
class Megatron:
    """A Megatron role's strategy. `layout` is None where devices and sizes do not fit together."""

    devices: tuple[int, ...] | None
    layout: Layout | None
    dtype: str | None  # from bf16/fp16
    use_distributed_optimizer: bool
    args: dict[str, Any]


@dataclass(frozen=True)
class Vllm:
    """The rollout role's strategy."""

    devices: tuple[int, ...] | None
    tp: int
    max_model_len: int | None
    args: dict[str, Any]


def read_devices(worker: Worker, path: str, findings: Findings) -> tuple[int, ...] | None:
    """Return the devices that are written for a role, or None with a problem reported."""
    key = f"{path}.device_mapping"
    if worker.device_mapping is None:
        findings.problem(key, 'is missing; say which devices (CPU slots) the role owns, e.g. "list(range(0,8))"')
        return None
    try:
        return parse_device_mapping(worker.device_mapping)
    except ValueError as error:
        findings.problem(key, str(error))
        return None


def read_strategy(worker: Worker, path: str, job: str, strict: bool, findings: Findings) -> dict[str, Any] | None:
    """Return the strategy_config of a role that does `job` (train, score, rollout), None if it is wrong."""
    wanted = STRATEGY[job]
    key = f"{path}.strategy_args.strategy_name"
    if worker.strategy_args is None:
        return {}
    name, config = worker.strategy_args.strategy_name, worker.strategy_args.strategy_config or {}
    if name == wanted:
        return config
    if name in NEAREST_STRATEGY[job]:
        if strict:
            findings.problem(key, f"{name!r} does not exist here and strict_strategies is true; write {wanted!r}")
            return None
        dropped = f" (its strategy_config is dropped: {', '.join(sorted(config))})" if config else ""
        findings.warn(f"{key}: {name!r} does not exist here; {wanted!r} takes its place{dropped}")
        return {}
    hint = " (a vLLM engine does not return teacher log-probs here)" if job == "score" and name == "vllm" else ""
    findings.problem(key, f"{name!r} cannot do this role's work{hint}; write {wanted!r}")
    return None


def read_megatron(
    worker: Worker, path: str, job: str, strict: bool, findings: Findings, student: Megatron | None = None
) -> Megatron | None:
    """Return the layout and pass-through arguments of a Megatron role, None if its strategy is wrong.

    A role beside the student may leave its devices out, as ROLL's documents do for those that score: it then takes
    turns with `student`, in the student's layout unless it writes one of its own.
    """
    if worker.device_mapping is None and student is not None:
        devices = student.devices
        if devices is None:
            return None  # told of the student
        findings.warn(f"{path}.device_mapping: is not written; it shares the student's {short_devices(devices)}")
        if worker.strategy_args is None and student.layout is not None:
            return Megatron(devices, student.layout, None, True, {})
    else:
        devices = read_devices(worker, path, findings)
    config = read_strategy(worker, path, job, strict, findings)
    if config is None:
        return None
    prefix = f"{path}.strategy_args.strategy_config"
    before = len(findings.problems)
    sizes, switches, args = _sort_settings(config, prefix, findings)
    layout = None
    if devices is not None and len(findings.problems) == before:
        layout = _layout(sizes, switches.get("sequence_parallel"), devices, path, findings)
    dtype = next((name for name in ("bf16", "fp16") if switches.get(name)), None)
    return Megatron(devices, layout, dtype, switches.get("use_distributed_optimizer", True), args)


def _sort_settings(
    config: dict[str, Any], prefix: str, findings: Findings
) -> tuple[dict[str, int], dict[str, bool], dict[str, Any]]:
    """Split a Megatron strategy_config into parallel sizes, switches and what passes through."""
    sizes: dict[str, int] = {}
    switches: dict[str, bool] = {}
    args: dict[str, Any] = {}
    for key, value in config.items():
        if value is None:
            continue
        if key in SIZES:
            if _is_positive(value):
                sizes[SIZES[key]] = value
            else:
                findings.problem(f"{prefix}.{key}", f"should be a whole number from 1, got {value!r}")
        elif key in SWITCHES:
            if isinstance(value, bool):
                switches[key] = value
            else:
                findings.problem(f"{prefix}.{key}", f"should be true or false, got {value!r}")
        elif key in IGNORED_MEGATRON:
            findings.ignore(f"{prefix}.{key}")
        elif key in MEGATRON_FIELDS:
            args[key] = value
        else:
            findings.problem(f"{prefix}.{key}", _unknown(key))
    if sizes.get("vpp") == 1:
        del sizes["vpp"]  # one virtual stage a rank is no virtual pipeline
    return sizes, switches, args


def _is_positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _unknown(key: str) -> str:
    if key in MEGATRON_DECIDED:
        return "is decided by the model's config.json, model_args or the engine itself; remove it"
    known = sorted({*SIZES, *SWITCHES, *MEGATRON_FIELDS, *IGNORED_MEGATRON})
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"unknown key for a Megatron strategy; {f'did you mean {near[0]!r}?' if near else 'remove it'}"


def _layout(
    sizes: dict[str, int], sequence_parallel: bool | None, devices: tuple[int, ...], path: str, findings: Findings
) -> Layout | None:
    tp = sizes.get("tp", 1)
    one_copy = tp * sizes.get("pp", 1) * sizes.get("cp", 1)
    if len(devices) % one_copy:
        shape = " x ".join(f"{name} {sizes[name]}" for name in ("tp", "pp", "cp") if sizes.get(name, 1) > 1)
        findings.problem(
            f"{path}.device_mapping",
            f"{len(devices)} devices cannot hold whole copies of a model spread over {one_copy} ({shape});"
            f" give a multiple of {one_copy} devices",
        )
        return None
    if sequence_parallel is None and tp > 1 and sizes.get("ep", 1) > 1:
        sequence_parallel = (
            True  # Megatron-core requires it for experts with tensor parallelism, so ROLL's YAML omit it
        )
    sequence_parallel = bool(sequence_parallel and tp > 1)
    return Layout(**{**sizes, "dp": len(devices) // one_copy, "sequence_parallel": sequence_parallel})


def read_vllm(worker: Worker, path: str, strict: bool, findings: Findings) -> Vllm | None:
    """Return the rollout role's engines, None if its strategy is wrong."""
    devices = read_devices(worker, path, findings)
    config = read_strategy(worker, path, "rollout", strict, findings)
    if config is None:
        return None
    prefix = f"{path}.strategy_args.strategy_config"
    for key in sorted(IGNORED_VLLM.intersection(config)):
        findings.ignore(f"{prefix}.{key}")
    args = {key: value for key, value in config.items() if key not in IGNORED_VLLM and value is not None}
    tp, length = args.pop("tensor_parallel_size", 1), args.pop("max_model_len", None)
    for key, value in (("tensor_parallel_size", tp), ("max_model_len", length)):
        if value is not None and not _is_positive(value):
            findings.problem(f"{prefix}.{key}", f"should be a whole number from 1, got {value!r}")
            return None
    for key in ("pipeline_parallel_size", "data_parallel_size"):
        if args.pop(key, 1) != 1:
            findings.problem(f"{prefix}.{key}", "only 1 is possible here; spread the engine with tensor_parallel_size")
    if devices is not None and len(devices) % tp:
        findings.problem(
            f"{path}.device_mapping",
            f"{len(devices)} devices cannot hold whole engines of tensor_parallel_size {tp}; give a multiple of {tp}",
        )
        devices = None
    for key in ("model", "seed", "dtype", "tokenizer", "logprobs_mode", "weight_transfer_config"):
        if key in args:
            findings.problem(f"{prefix}.{key}", "is set by the run itself; remove it")
    for key in sorted(set(args) - VLLM_ARGUMENTS):
        near = difflib.get_close_matches(key, VLLM_ARGUMENTS, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        findings.problem(f"{prefix}.{key}", f"unknown engine argument of vLLM{hint}")
    return Vllm(devices, tp, length, args)
