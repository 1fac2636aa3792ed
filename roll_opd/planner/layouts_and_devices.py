"""Read and check the layout and the devices of a role, from its `strategy_args` and `device_mapping`.

A strategy of ROLL that does not exist here is replaced by the nearest one, with a warning. If strict_strategies is
true, such a strategy is refused. Options of the engine are passed on unchanged.

ROLL users write Python in a device_mapping, such as "list(range(0, 8)) + [12, 13]". The text is parsed, and its syntax
tree is interpreted node by node. It is never evaluated as Python code.
"""

from collections.abc import Sequence
from typing import Any

from roll_opd.base import hardware
from roll_opd.config.diagnostics import Diagnostics
from roll_opd.config.plan import Layout
from roll_opd.config.roll_keys import IGNORED_MEGATRON, IGNORED_VLLM, NEAREST_STRATEGY, STRATEGY, report_ignored
from roll_opd.config.schema import Dtype, TrainingArgs, Worker, keys_of
from roll_opd.models import megatron_support
from roll_opd.models.engine_options import no_effect, option_problem
from roll_opd.planner.device_mapping import parse_device_mapping, short_devices

OPTIONS = "strategy_args.strategy_config"  # key of the engine's options in a role
SIZES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "virtual_pipeline_model_parallel_size": "vpp",
    "expert_tensor_parallel_size": "etp",
}
OVERLAPS = ("overlap_grad_reduce", "overlap_param_gather")
SWITCHES = ("sequence_parallel", "use_distributed_optimizer", "bf16", "fp16", *OVERLAPS)
# options that ROLL sets with recompute_granularity: full (one layer at a time); Megatron-core has no default
RECOMPUTED = {"recompute_method": "uniform", "recompute_num_layers": 1}
SLEEP_LEVELS = (1, 2)  # vLLM's
# option of sglang -> option of vLLM
SGLANG = {
    "mem_fraction_static": "gpu_memory_utilization",
    "context_length": "max_model_len",
    "max_running_requests": "max_num_seqs",
}


def read_devices(worker: Worker, student: Worker | None, every: int) -> tuple[int, ...] | None:
    """Return the devices of a role; return None if a problem was reported.

    By default, the student has all devices of the run, and the other roles take turns on the student's devices. This is
    the rule in ROLL's documentation.

    Args:
        student: the student; None for the student itself, and for a role without default devices.
        every: number of devices of the run; 0 for a role without default devices.
    """
    if worker.device_mapping is not None:
        with worker.diag.catching("device_mapping", ValueError):
            return parse_device_mapping(worker.device_mapping)
        return None
    if student is None and every:
        return tuple(range(every))
    if student is None:
        text = 'is missing; write the devices (CPU slots) of the role, e.g. "list(range(0,8))"'
        worker.diag.error("device_mapping", text)
        return None
    if student.devices is not None and len(student.devices) < every:
        text = f"is not written, so this role shares the student's devices {short_devices(student.devices)}"
        worker.diag.note("device_mapping", text)
    return student.devices


def read_strategy(worker: Worker, job: str, strict: bool) -> dict[str, Any] | None:
    """Return the strategy_config of a role; return None if a problem was reported.

    Args:
        job: task of the role: train, frozen or rollout.
        strict: whether a strategy that does not exist here is refused instead of replaced.
    """
    wanted, key = STRATEGY[job], "strategy_args.strategy_name"
    if worker.strategy_args is None:
        return {}
    name, config = worker.strategy_args.strategy_name, worker.strategy_args.strategy_config or {}
    if not name:
        worker.diag.error(key, f"is missing; write {wanted!r}")
        return None
    if name == wanted:  # report sizes that only other strategies read
        sizes = {"num_gpus_per_worker": worker.num_gpus_per_worker}
        sizes["model_args.ulysses_size"] = worker.model_args.ulysses_size
        worker.diag.unused(*(unread for unread, size in sizes.items() if size))
        return config
    if name in NEAREST_STRATEGY[job]:
        if strict:
            worker.diag.error(key, f"{name!r} does not exist here and strict_strategies is true; write {wanted!r}")
            return None
        kept = _carried_over(worker, name, job)
        rest = sorted(config.keys() - (SGLANG.keys() | {"tensor_parallel_size"} if name == "sglang" else set()))
        dropped = f" (keys of its strategy_config that are dropped: {', '.join(rest)})" if rest else ""
        carried = f", with {', '.join(f'{option} {value}' for option, value in kept.items())}" if kept else ""
        worker.diag.note(key, f"{name!r} does not exist here; {wanted!r} takes its place{carried}{dropped}")
        return kept
    hint = " (a vLLM engine does not return teacher log-probs here)" if job == "frozen" and name == "vllm" else ""
    worker.diag.error(key, f"{name!r} cannot do this role's work{hint}; write {wanted!r}")
    return None


def _carried_over(worker: Worker, name: str, job: str) -> dict[str, Any]:
    """Convert the parallel sizes of another engine to options of the engine that replaces it.

    Ulysses splits a sequence over devices that hold shards of the model. Tensor parallelism with sequence parallelism
    does the same, so the Ulysses size becomes the tensor-parallel size. In both cases, the data-parallel size is the
    number of devices divided by this size. An sglang or Hugging Face engine has num_gpus_per_worker devices.
    """
    assert worker.strategy_args is not None
    config = worker.strategy_args.strategy_config or {}
    if job != "rollout":
        size = worker.model_args.ulysses_size or 1
        sizes = {"tensor_model_parallel_size": size, "sequence_parallel": True}
        return sizes if name.startswith("fsdp2") and size > 1 else {}
    found = {}
    if name == "sglang":
        found = {SGLANG[key]: value for key, value in config.items() if key in SGLANG and value is not None}
    size = worker.num_gpus_per_worker or config.get("tensor_parallel_size") or 1
    return {"tensor_parallel_size": size, **found} if size != 1 else found


def read_megatron(
    worker: Worker, job: str, strict: bool, student: Worker | None = None, *, every: int = 0
) -> dict[str, Any]:
    """Return the derived values of a Megatron role: devices, layout and options of the engine.

    A role that takes turns with the student has the student's layout by default. For `student` and `every`, see
    `read_devices`.
    """
    devices = read_devices(worker, student, every)
    if devices is None and worker.device_mapping is None:
        return {}
    if worker.device_mapping is None and worker.strategy_args is None and student is not None and student.layout:
        return {"devices": devices, "layout": student.layout}
    config = read_strategy(worker, job, strict)
    if config is None:
        return {}
    before, layout = len(worker.diag.problems), None
    sizes, switches, args = _sort_settings(config, worker.diag.below(OPTIONS))
    if devices is not None and len(worker.diag.problems) == before:
        layout = _layout(worker, sizes, switches.get("sequence_parallel"), devices)
    dtype: Dtype | None = "bf16" if switches.get("bf16") else "fp16" if switches.get("fp16") else None
    distributed = switches.get("use_distributed_optimizer", True)
    overlaps = tuple(name for name in OVERLAPS if switches.get(name))
    if OVERLAPS[1] in overlaps and (OVERLAPS[0] not in overlaps or not distributed):
        needs = "use_distributed_optimizer and overlap_grad_reduce"
        worker.diag.error(f"{OPTIONS}.{OVERLAPS[1]}", f"true needs {needs} to be true as well, as in Megatron")
    return {
        **{"devices": devices, "layout": layout, "engine_args": args, "engine_dtype": dtype, "overlaps": overlaps},
        "use_distributed_optimizer": distributed,
    }


def _sort_settings(config: dict[str, Any], diag: Diagnostics) -> tuple[dict[str, int], dict[str, bool], dict[str, Any]]:
    """Return (parallel sizes, switches, options for the engine) of a Megatron strategy_config."""
    sizes: dict[str, int] = {}
    switches: dict[str, bool] = {}
    args: dict[str, Any] = {}
    for key, value in config.items():
        if value is None:
            continue
        if key == "recompute_modules" and isinstance(value, str):
            value = value.split(",")  # ROLL accepts a string of names
        if key in SIZES:
            if _is_positive(key, value, diag):
                sizes[SIZES[key]] = value
        elif key in SWITCHES:
            switches[key] = value
            if not isinstance(value, bool):
                diag.error(key, f"should be true or false, got {value!r}")
        elif key in IGNORED_MEGATRON:
            report_ignored(key, value, diag)
        elif key in keys_of(TrainingArgs):
            diag.error(key, "is a key of training_args here; write it in training_args")
        elif _counts("Megatron", key, value, diag, (*SIZES, *SWITCHES, *IGNORED_MEGATRON)):
            args[key] = value
    if args.get("recompute_granularity") == "full" and not RECOMPUTED.keys() & args.keys():
        args |= RECOMPUTED
    if sizes.get("vpp") == 1:
        del sizes["vpp"]  # one virtual stage per rank means no virtual pipeline
    return sizes, switches, args


def _counts(engine: str, key: str, value: Any, diag: Diagnostics, also_known: Sequence[str] = ()) -> bool:
    """Return whether an option is passed to the engine; report an option that is wrong or has no effect."""
    if remark := no_effect(engine, key):
        diag.note(key, remark)
    elif problem := option_problem(engine, key, value, also_known):
        diag.error(key, problem)
    elif engine == "Megatron":
        return _is_taken(key, value, diag)
    return not remark


def _is_taken(key: str, value: Any, diag: Diagnostics) -> bool:
    """Return whether a Megatron option is passed to the engine; report an option that is refused or has no effect."""
    if refusal := megatron_support.refusal(key, value):
        diag.unsupported(key, refusal)
    elif remark := megatron_support.remark(key, has_gpus=hardware.gpu_memory_gb() is not None):
        diag.note(key, remark)
    return refusal is None and key not in megatron_support.WITHOUT_EFFECT


def _is_positive(key: str, value: Any, diag: Diagnostics) -> bool:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return True
    diag.error(key, f"should be a whole number from 1, got {value!r}")
    return False


def _layout(
    worker: Worker, sizes: dict[str, int], sequence_parallel: bool | None, devices: tuple[int, ...]
) -> Layout | None:
    tp = sizes.get("tp", 1)
    one_copy = tp * sizes.get("pp", 1) * sizes.get("cp", 1)
    if len(devices) % one_copy:
        shape = " x ".join(f"{name} {sizes[name]}" for name in ("tp", "pp", "cp") if sizes.get(name, 1) > 1)
        worker.diag.error(
            "device_mapping", f"{len(devices)} devices hold no whole copies of {shape}; give a multiple of {one_copy}"
        )
        return None
    return Layout(**sizes, dp=len(devices) // one_copy, sequence_parallel=bool(sequence_parallel and tp > 1))


def read_vllm(worker: Worker, strict: bool, student: Worker | None = None, *, every: int = 0) -> dict[str, Any]:
    """Return the derived values of a role's engines: devices, layout and options.

    For `student` and `every`, see `read_devices`.
    """
    devices = read_devices(worker, student, every)
    config = read_strategy(worker, "rollout", strict)
    if config is None:
        return {}
    diag = worker.diag.below(OPTIONS)
    diag.unused(*IGNORED_VLLM & config.keys())
    given = {key: value for key, value in config.items() if key not in IGNORED_VLLM and value is not None}
    tp, length = given.pop("tensor_parallel_size", 1), given.pop("max_model_len", None)
    level = given.pop("sleep_level", 2)
    if level not in SLEEP_LEVELS or isinstance(level, bool):
        diag.error("sleep_level", f"should be 1 (move weights to the host) or 2 (discard them), got {level!r}")
        return {}
    for key, size in (("tensor_parallel_size", tp), ("max_model_len", length)):
        if size is not None and not _is_positive(key, size, diag):
            return {}
    for key in ("pipeline_parallel_size", "data_parallel_size"):
        if given.pop(key, 1) != 1:
            diag.error(key, "only 1 is possible here; set tensor_parallel_size to spread an engine over devices")
    if devices is not None and len(devices) % tp:
        worker.diag.error(
            "device_mapping",
            f"{len(devices)} devices are no multiple of tensor_parallel_size {tp}; give a multiple of {tp}",
        )
        devices = None
    args = {key: value for key, value in given.items() if _counts("vLLM", key, value, diag)}
    layout = Layout(tp=tp, dp=len(devices or ()) // tp)
    sizes = {"devices": devices, "layout": layout, "max_model_len": length, "sleep_level": level}
    return {**sizes, "engine_args": args}
