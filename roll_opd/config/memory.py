"""Estimates the memory a rank of each role needs, from the sizes in config.json.

Good for "does this fit" within some ten per cent, not for the last gigabyte: fragmentation, communication
buffers and the engines' own overhead are left out.
"""

from roll_opd.config.models import ModelFacts
from roll_opd.config.plan import Layout, MicroBatchLimits, TrainPlan

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
VLLM_MAX_SEQUENCES = 256  # vLLM's default max_num_seqs
GRADIENT_BYTES = 4  # the engine accumulates gradients in fp32
MOMENT_BYTES = 8  # two fp32 Adam moments a parameter
MASTER_BYTES = 4  # fp32 master weights where the model itself is not fp32


def parameters_per_rank(facts: ModelFacts, layout: Layout) -> int:
    """Parameters on one rank: dense ones / (tp * pp), experts / (tp * pp * ep); stages taken as equal."""
    experts = min(facts.layers * facts.experts * 3 * facts.hidden * facts.expert_intermediate, facts.parameters)
    return int(((facts.parameters - experts) + experts / layout.ep) / (layout.tp * layout.pp))


def _tokens(limits: MicroBatchLimits, longest: int) -> int:
    return limits.tokens or (limits.sequences or 1) * longest


def train_memory(facts: ModelFacts, plan: TrainPlan, longest: int) -> dict[str, int]:
    """Bytes a training rank needs.

    weights = p * bytes; gradients = 4p; optimizer = (8 + 4 if not fp32) * p, divided by dp * cp with the
    distributed optimizer; activations = tokens * hidden * layers of one stage * pp in flight * (17 elements,
    34 bytes in bf16; Korthikanti et al. 2022, flash attention), divided by tp with sequence parallelism
    and by 10 + 24 / tp over 34 without; 2 elements a layer with full recomputation.
    """
    layout, size = plan.layout, BYTES[plan.model.dtype]
    count = parameters_per_rank(facts, layout)
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
        "activations": int(tokens * facts.hidden * facts.layers * elements * size),
    }


def score_memory(
    facts: ModelFacts, layout: Layout, dtype: str, limits: MicroBatchLimits, longest: int
) -> dict[str, int]:
    """Bytes a scoring rank needs: weights, and one layer's activations (17 elements a token)."""
    size = BYTES[dtype]
    tokens = _tokens(limits, longest) // layout.cp
    return {
        "weights": parameters_per_rank(facts, layout) * size,
        "activations": int(tokens * facts.hidden * 17 / layout.tp * size),
    }


def rollout_memory(facts: ModelFacts, tp: int, dtype: str, max_model_len: int, sequences: int) -> dict[str, int]:
    """Bytes an inference rank needs: weights / tp, and keys and values of `sequences` full-length sequences.

    kv_cache = 2 * layers * kv_heads * head_dim * bytes * tokens / tp. vLLM takes what gpu_memory_utilization
    allows and queues what does not fit; this is what it would need to run all of them at once.
    """
    size = BYTES[dtype]
    tokens = max_model_len * min(sequences, VLLM_MAX_SEQUENCES)
    cache = 2 * facts.layers * facts.kv_heads * facts.head_dim * size * tokens
    return {"weights": facts.parameters * size // tp, "kv_cache": cache // tp}
