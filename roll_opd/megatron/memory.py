"""Estimates the memory a rank of each role needs, from the sizes in config.json.

Good for "does this fit" within some ten per cent, not for the last gigabyte: fragmentation, communication
buffers and the engines' own overhead are left out.
"""

from collections.abc import Mapping

from roll_opd.config.plan import Layout, MicroBatchLimits, RunPlan, TrainPlan
from roll_opd.hf.model_info import ModelInfo

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
JUDGE_SEQUENCES = 64  # that a judge's memory is estimated for
VLLM_MAX_SEQUENCES = 256  # vLLM's default max_num_seqs
GRADIENT_BYTES = 4  # the engine accumulates gradients in fp32
MOMENT_BYTES = 8  # two fp32 Adam moments a parameter
MASTER_BYTES = 4  # fp32 master weights where the model itself is not fp32


def parameters_per_rank(info: ModelInfo, layout: Layout) -> int:
    """Parameters on one rank: dense ones / (tp * pp), experts / (tp * pp * ep); stages taken as equal."""
    experts = min(info.layers * info.experts * 3 * info.hidden * info.expert_intermediate, info.parameters)
    return int(((info.parameters - experts) + experts / layout.ep) / (layout.tp * layout.pp))


def _tokens(limits: MicroBatchLimits, longest: int) -> int:
    return limits.tokens or (limits.sequences or 1) * longest


def estimate_memory(plan: RunPlan, models: Mapping[str, ModelInfo], longest: int) -> dict[str, dict[str, int]]:
    """Return role name -> {part: bytes a rank}; `longest` are the tokens of the longest sequence."""
    found: dict[str, dict[str, int]] = {}
    for name, role in plan.megatron_roles().items():
        if isinstance(role, TrainPlan):
            found[name] = train_memory(models[name], role, longest)
        else:
            found[name] = logprob_memory(models[name], role.layout, role.model.dtype, role.forward_limits, longest)
    for name, engines in plan.inference_roles().items():
        sequences = -(-plan.sequences_per_step // engines.engines) if engines is plan.rollout else JUDGE_SEQUENCES
        dtype, length = engines.model.dtype, engines.max_model_len
        found[name] = rollout_memory(models[name], engines.tp, dtype, length, sequences)
    if plan.objective.opd_objective == "full":
        vocabulary = models[plan.student.name].vocab // plan.student.layout.tp
        found[plan.student.name]["teacher_heads"] = sum(
            models[teacher.worker.name].hidden * vocabulary * BYTES[teacher.worker.model.dtype]
            for teacher in plan.teachers
        )
    return found


def train_memory(info: ModelInfo, plan: TrainPlan, longest: int) -> dict[str, int]:
    """Bytes a training rank needs.

    weights = p * bytes; gradients = 4p; optimizer = (8 + 4 if not fp32) * p, divided by dp * cp with the
    distributed optimizer; activations = tokens * hidden * layers of one stage * pp in flight * (17 elements,
    34 bytes in bf16; Korthikanti et al. 2022, flash attention), divided by tp with sequence parallelism
    and by 10 + 24 / tp over 34 without; 2 elements a layer with full recomputation.
    """
    layout, size = plan.layout, BYTES[plan.model.dtype]
    count = parameters_per_rank(info, layout)
    master = 0 if plan.model.dtype == "fp32" else MASTER_BYTES
    shards = layout.dp * layout.cp if plan.optimizer.use_distributed_optimizer else 1
    tokens = _tokens(plan.train_limits, longest) // layout.cp
    if plan.megatron_args.get("recompute_granularity") == "full":
        elements = 2.0
    elif layout.sequence_parallel:
        elements = 17.0 / layout.tp
    else:
        elements = 5.0 + 12.0 / layout.tp
    return {
        "weights": count * size,
        "gradients": count * GRADIENT_BYTES,
        "optimizer": count * (MOMENT_BYTES + master) // shards,
        "activations": int(tokens * info.hidden * info.layers * elements * size),
    }


def logprob_memory(
    info: ModelInfo, layout: Layout, dtype: str, limits: MicroBatchLimits, longest: int
) -> dict[str, int]:
    """Bytes that a rank of a frozen model needs: weights, and one layer's activations (17 elements a token)."""
    size = BYTES[dtype]
    tokens = _tokens(limits, longest) // layout.cp
    return {
        "weights": parameters_per_rank(info, layout) * size,
        "activations": int(tokens * info.hidden * 17 / layout.tp * size),
    }


def rollout_memory(info: ModelInfo, tp: int, dtype: str, max_model_len: int, sequences: int) -> dict[str, int]:
    """Bytes an inference rank needs: weights / tp, and keys and values of `sequences` full-length sequences.

    kv_cache = 2 * layers * kv_heads * head_dim * bytes * tokens / tp. vLLM takes what gpu_memory_utilization
    allows and queues what does not fit; this is what it would need to run all of them at once.
    """
    size = BYTES[dtype]
    tokens = max_model_len * min(sequences, VLLM_MAX_SEQUENCES)
    cache = 2 * info.layers * info.kv_heads * info.head_dim * size * tokens
    return {"weights": info.parameters * size // tp, "kv_cache": cache // tp}


def readable_bytes(size: float) -> str:
    """Write a number of bytes with a unit."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
