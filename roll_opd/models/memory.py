"""Estimate the memory that each role needs per rank, from the sizes in config.json.

The estimates are within a few per cent of the allocated memory. They do not include fragmentation, communication
buffers, the overhead of the engines, or the savings by selective recomputation.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from roll_opd.config.plan import (
    CriticPlan,
    FollowingPlan,
    Layout,
    LoraPlan,
    MegatronPlan,
    MicroBatchLimits,
    RolloutPlan,
    RunPlan,
    TrainPlan,
)
from roll_opd.models.device_phases import Parts as Held
from roll_opd.models.device_phases import Phase, held_together, members_on_gpus
from roll_opd.models.model_info import ModelInfo

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
PADDED_TO = 32  # columns per tensor rank are a multiple of this number (`deterministic_ops.VECTOR`)
# bytes of f32 logits per chunk and rank. A GPU re-reads the output embedding for each chunk, so small chunks would be
# memory-bound; on a CPU small chunks fit the caches
CHUNK_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}
JUDGE_SEQUENCES = 64  # concurrent sequences in the estimate of a judge
VLLM_MAX_SEQUENCES = 256  # vLLM's default max_num_seqs
VLLM_BLOCK = 16  # vLLM's default block_size on GPUs, tokens
VLLM_IN_FLIGHT = 2  # tokens of a sequence in flight: vLLM schedules a decoding step before the previous step has ended
VLLM_UTILIZATION = 0.9  # vLLM's default gpu_memory_utilization
MLP = frozenset(("gate_proj", "up_proj", "down_proj"))
GRADIENT_BYTES = 4  # the engine accumulates gradients in fp32
MOMENT_BYTES = 8  # two fp32 Adam moments per parameter
MASTER_BYTES = 4  # fp32 master weights unless the model is fp32
COMPUTES = frozenset(Phase) - {Phase.START, Phase.RESTORE, Phase.WEIGHT_SYNC, Phase.CHECKPOINT}
PASSING = ("activations", "head")  # parts allocated only during computation
BESIDE_WEIGHTS = ("averages", "teacher_heads")  # parts that are offloaded with the weights

Parts = dict[str, int]  # name of a part -> bytes per rank


@dataclass(frozen=True)
class ModelShard:
    """Sizes of the part of a model that one rank holds in a layout."""

    info: ModelInfo
    layout: Layout
    has_head: bool = True  # False: a critic, which has a one-column head
    device: str = "cpu"  # or "cuda"

    @property
    def kv_heads(self) -> float:
        """Number of key/value heads per rank.

        If there are more ranks than heads, each rank has a copy of one head.
        """
        return max(1.0, self.info.kv_heads / self.layout.tp)

    def parameters(self, stage: int) -> tuple[int, int]:
        """Return (dense, expert) numbers of parameters on a rank of pipeline stage `stage`.

        The first stage also has the embedding. The last stage also has the head. If a tied head is on another stage
        than the embedding, it is a copy of the embedding. Every tensor rank has all routers and all down-projections of
        latent attention.
        """
        info, layout = self.info, self.layout
        each = info.experts * 3 * info.hidden * info.expert_intermediate
        experts = min(info.expert_layers * each, info.parameters)
        embedding = info.vocab * info.hidden
        number = 1 if info.tied else 2
        ends = min(embedding * number, info.parameters - experts)
        copied = info.layers * 2 * info.hidden * info.head_dim * (self.kv_heads * layout.tp - info.kv_heads)
        plain, routing = self.layers_of(stage)
        dense = (info.parameters - experts - ends + copied) / layout.pp
        # correction for stages with more or fewer expert layers than average
        more = routing - info.expert_layers / layout.pp
        dense += more * info.hidden * (info.experts + 3 * info.shared_intermediate - 3 * info.intermediate)
        whole = routing * info.experts * info.hidden
        whole += (plain + routing) * info.hidden * info.latent.narrow if info.latent else 0
        whole = max(0, min(whole, dense))
        dense -= whole
        ends += -info.vocab % (PADDED_TO * layout.tp) * info.hidden * number
        if layout.pp == 1:
            dense += ends
        elif stage == 0 or stage == layout.pp - 1:
            dense += ends if info.tied else ends // 2
        if not self.has_head and not info.tied and stage == layout.pp - 1:
            dense -= ends // 2
        share = routing / info.expert_layers if info.expert_layers else 0
        return int(dense / layout.tp + whole), int(experts * share / (layout.ep * layout.expert_tp))

    def layers_of(self, stage: int) -> tuple[float, float]:
        """Return (number of dense layers, number of expert layers) in a stage.

        If the layers cannot be divided equally over the stages, these are means over the stages.
        """
        info, pp = self.info, self.layout.pp
        chunks = pp * (self.layout.vpp or 1)
        if info.layers % chunks:
            return (info.layers - info.expert_layers) / pp, info.expert_layers / pp
        each = info.layers // chunks
        mine = [has for number, has in enumerate(info.has_experts) if number // each % pp == stage]
        return mine.count(False), sum(mine)

    def adapter_parameters(self, lora: LoraPlan) -> tuple[int, int]:
        """Return the number of adapter parameters per rank: (outside of experts, of experts).

        An adapter has two matrices per layer. One matrix is sharded like the layer, and every tensor rank has a copy of
        the other matrix. Those of an expert are not sharded.
        """
        info, tp = self.info, self.layout.tp
        queries, keys = info.heads * info.head_dim, info.kv_heads * info.head_dim
        outputs = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        columns = sum(info.hidden + outputs[name] // tp for name in lora.targets if name in outputs)
        rows = queries // tp + info.hidden if "o_proj" in lora.targets else 0
        of_mlp = len(MLP.intersection(lora.targets))
        dense = of_mlp * (info.hidden + info.intermediate // tp) * (info.layers - info.expert_layers)
        experts = of_mlp * (info.hidden + info.expert_intermediate) * info.experts * info.expert_layers
        others = lora.rank * ((columns + rows) * info.layers + dense)
        return int(others / self.layout.pp), int(lora.rank * experts / self.layout.pp / self.layout.ep)

    def layer_elements(self) -> float:
        """Return how many elements per token a layer stores for backward on a rank.

        The result is a mean over the layers. With flash attention and a fused SwiGLU, a layer stores these elements per
        token:

        - the inputs of the norms: 2 times the hidden size, or 4 times in Gemma and GLM-4; twice as much for norms that
          copy their input to f32
        - the inputs of attention and MLP: 2 times the hidden size
        - queries and keys before and after rotation, values, and the attention output: 3 times the query width and 3
          times the key width
        - the two MLP projections and their product: 3 times the MLP width

        In a mixture of experts, each of the `experts_per_token` experts stores a copy of the token's hidden state.

        The calculation follows Korthikanti et al. 2022, section 4. It is generalised to query, key and MLP widths that
        are not multiples of the hidden size.
        """
        info, layout = self.info, self.layout
        sequence = layout.tp if layout.sequence_parallel else 1
        heads = 3 * info.head_dim * (info.heads / layout.tp + self.kv_heads)
        dense = 3 * info.intermediate / layout.tp
        routed = info.experts_per_token * layout.expert_tp / layout.tp
        experts = routed * (info.hidden + 3 * info.expert_intermediate / layout.expert_tp)
        experts += 3 * info.shared_intermediate / layout.tp
        if latent := info.latent:  # queries and keys twice, compressed keys and values, values, output
            heads = (4 * info.head_dim + latent.plain + 3 * latent.value) * info.heads / layout.tp
            heads += 2 * latent.narrow / sequence
        if delta := info.delta:  # projections, convolution input and output, output and norm in f32
            mixed = (delta.projected + 2 * sum(delta.channels) + 6 * delta.values) / layout.tp
            heads += info.head_dim * info.heads / layout.tp * 2  # output gates
            heads = (info.attention_layers * heads + sum(info.is_delta) * mixed) / info.layers
        mlp = (info.expert_layers * experts + (info.layers - info.expert_layers) * dense) / info.layers
        norms = info.norms * (2 if info.has_f32_norms else 1)
        return (2 + norms) * info.hidden / sequence + heads + mlp

    def kept_elements(self, stage: int, args: Mapping[str, object], micro_batches: int) -> float:
        """Return the peak number of elements that a stage stores per token.

        The number includes all layers of the stage and all its micro-batches in flight. In the 1F1B schedule, a stage
        has `pp - stage` micro-batches in flight. Interleaved stages have more micro-batches in flight (Narayanan et al.
        2021). With full recomputation, each layer stores only its input, and one layer at a time is recomputed.

        `args`: Megatron's recompute options.
        """
        info, layout = self.info, self.layout
        layers, chunks = info.layers / layout.pp, layout.vpp or 1
        warm = layout.pp - stage if chunks == 1 else 2 * (layout.pp - stage - 1) + (chunks - 1) * layout.pp + 1
        in_flight = min(warm / chunks, micro_batches)
        layer = self.layer_elements()
        if args.get("recompute_granularity") != "full":
            return in_flight * layers * layer
        several = args.get("recompute_num_layers")
        number = min(several if isinstance(several, int) else 1, layers)
        kept = info.hidden / (layout.tp if layout.sequence_parallel else 1)
        if args.get("recompute_method") == "block":
            return in_flight * (number * kept + (layers - number) * layer) + layer
        return in_flight * layers / number * kept + number * layer


def shard_of(info: ModelInfo, role: MegatronPlan, device: str = "cpu") -> ModelShard:
    """Return the shard that a rank of `role` holds."""
    return ModelShard(info, role.layout, not isinstance(role, CriticPlan), device)


def estimate_memory(plan: RunPlan, models: Mapping[str, ModelInfo], longest: int) -> dict[str, tuple[Parts, ...]]:
    """Return {role: memory of each pipeline stage}. The memory of a stage is {part: bytes per rank}.

    Inference roles have one stage. `longest`: number of tokens of the longest sequence.
    """
    found: dict[str, tuple[Parts, ...]] = {}
    response = plan.rollout.sampling.max_new_tokens if plan.rollout else 0
    longer = {t.source.name: t.context.prompt_length + response for t in plan.teachers if t.context}
    for name, role in plan.megatron_roles().items():
        if plan.is_base(role):
            continue  # served by the student's processes and weights
        shard = shard_of(models[name], role, "cuda" if plan.device_memory_gb else "cpu")
        found[name] = tuple(
            train_memory(shard, role, longest, stage)
            if isinstance(role, TrainPlan)
            else logprob_memory(shard, role, longer.get(name, longest), stage)
            for stage in range(role.layout.pp)
        )
    for name, engines in plan.inference_roles().items():
        sequences = -(-plan.sequences_per_step // plan.training_engines) if engines is plan.rollout else JUDGE_SEQUENCES
        found[name] = (rollout_memory(models[name], engines, sequences),)
    if plan.objective.opd_objective == "full":
        vocabulary = models[plan.student.name].vocab // plan.student.layout.tp
        found[plan.student.name][-1]["teacher_heads"] = sum(
            models[role.name].hidden * vocabulary * BYTES[role.model.dtype]
            for role in (teacher.role for teacher in plan.teachers)
            if role
        )
    return found


def train_memory(shard: ModelShard, plan: TrainPlan, longest: int, stage: int) -> Parts:
    """Return the memory of a training role, per rank of a pipeline stage.

    With p parameters per rank:

    - weights: p * bytes of the dtype
    - gradients: 4p
    - optimizer: 8p for fp32 models, 12p for others
    - activations and head: computed from the sizes in `ModelShard`

    The distributed optimizer divides the optimizer state by these numbers:

    - dense parameters: dp * cp
    - experts: dp * cp * tp / (expert_tp * ep)

    With LoRA, only the adapters have gradients and optimizer state.
    """
    layout, size = plan.layout, BYTES[plan.model.dtype]
    dense, experts = shard.parameters(stage)
    state = MOMENT_BYTES + (0 if plan.model.dtype == "fp32" else MASTER_BYTES)
    copies, expert_copies = layout.dp * layout.cp, layout.dp * layout.cp * layout.tp / (layout.expert_tp * layout.ep)
    if not plan.optimizer.use_distributed_optimizer:
        copies, expert_copies = 1, 1
    micro_batches = max(1, plan.mini_batch_sequences // layout.dp)
    tokens = _tokens(plan.train_limits, longest, layout)
    weights = dense + experts
    if plan.lora:
        dense, experts = shard.adapter_parameters(plan.lora)
        weights += dense + experts
    return {
        "weights": weights * size,
        "gradients": (dense + experts) * GRADIENT_BYTES,
        "optimizer": int(state * (dense / copies + experts / expert_copies)),
        "activations": int(tokens * shard.kept_elements(stage, plan.megatron_args, micro_batches) * size),
        **_head(shard, tokens, size, stage),
    }


def logprob_memory(shard: ModelShard, role: MegatronPlan, longest: int, stage: int) -> Parts:
    """Return the memory of a frozen model per rank: its weights, the activations of one layer, and the output head.

    A follower may average the student's weights. Such a follower also stores the averages in fp32, unless its model is
    fp32.
    """
    size = BYTES[role.model.dtype]
    tokens = _tokens(role.forward_limits, longest, role.layout)
    averages = isinstance(role, FollowingPlan) and role.ema_decay and role.model.dtype != "fp32"
    return {
        "weights": sum(shard.parameters(stage)) * size,
        **({"averages": sum(shard.parameters(stage)) * MASTER_BYTES} if averages else {}),
        "activations": int(tokens * shard.layer_elements() * size),
        **_head(shard, tokens, size, stage),
    }


def _tokens(limits: MicroBatchLimits, longest: int, layout: Layout) -> int:
    return (limits.tokens or (limits.sequences or 1) * longest) // layout.cp


def _head(shard: ModelShard, tokens: int, size: int, stage: int) -> Parts:
    """Return the memory of the output head. It is empty for all stages but the last.

    The head stores the hidden states before and after the final norm, and the logits of one chunk of tokens.
    """
    if stage != shard.layout.pp - 1:
        return {}
    logits = min(CHUNK_BYTES[shard.device], 4 * tokens * shard.info.vocab // shard.layout.tp) if shard.has_head else 0
    return {"head": 2 * tokens * shard.info.hidden * size + logits}


def rollout_memory(info: ModelInfo, engines: RolloutPlan, sequences: int) -> Parts:
    """Return the memory of an inference rank: its weights, and a KV cache.

    The KV cache has room for all sequences at full length, but at most for the number of sequences that vLLM runs by
    default.

        kv_cache = 2 * layers * (kv_heads of the rank) * head_dim * bytes * tokens
        kv_cache = layers * (kv_lora_rank + qk_rope_head_dim) * bytes * tokens        (latent attention)

    A layer with a window stores only `window_tokens` tokens per sequence. The states of Gated DeltaNet layers are part
    of the KV cache. The memory for the prefill of prompts is not included.

    vLLM instead allocates the fraction `gpu_memory_utilization` of a device, and queues sequences that do not fit.
    """
    size, shard, length = BYTES[engines.model.dtype], ModelShard(info, Layout(tp=engines.tp)), engines.max_model_len
    block = engines.engine_args.get("block_size") or VLLM_BLOCK
    freed = sum(length - window_tokens(window, length, block) for window in info.windows if window)
    tokens = (length - freed / info.layers) * min(sequences, VLLM_MAX_SEQUENCES)  # mean over layers
    cache = info.cached_elements(engines.tp) * size * tokens
    cache += info.state_elements(engines.tp) * size * min(sequences, VLLM_MAX_SEQUENCES)
    return {"weights": sum(shard.parameters(0)) * size, "kv_cache": round(cache)}


def window_tokens(window: int, length: int, block: int, in_flight: int = VLLM_IN_FLIGHT) -> int:
    """Return how many tokens of a sequence vLLM stores in a layer with a window.

    vLLM stores the last `window` - 1 tokens, and the tokens whose steps are scheduled. These tokens are stored in
    blocks. One more block is needed, because a window may start in the middle of a block (see vLLM's
    `SlidingWindowSpec`).

    Args:
        length: number of tokens of the sequence.
        block: number of tokens of a block.
        in_flight: number of tokens whose steps are scheduled.
    """
    return (-(-min(window - 1 + in_flight, length) // block) + 1) * block


def fullest(stages: tuple[Mapping[str, int], ...]) -> Mapping[str, int]:
    """Return the memory of the pipeline stage that needs the most."""
    return max(stages, key=lambda parts: sum(parts.values()), default={})


def device_memory(plan: RunPlan, device_bytes: int | None = None, *, computing: bool = True) -> dict[int, int]:
    """Return {device: total bytes of the roles on the device}.

    The total includes the weights, optimizer state and caches of all roles, including judges and auxiliary models.
    Roles that take turns on shared devices hold different parts in each phase (see `held_together`). For these roles,
    the phase with the largest total counts.

    Args:
        device_bytes: size of a device. If it is known, the memory of an engine is `gpu_memory_utilization` times this
            size.
        computing: include activations. Only the role with the most activations counts.
    """
    stays: dict[int, int] = {}
    turns = {member.name: member for member in members_on_gpus(plan)}
    in_turn: dict[int, dict[str, dict[str, int]]] = {}  # device -> member -> its parts
    passes: dict[int, int] = {}
    for name, role in plan.roles().items():
        if isinstance(role, MegatronPlan) and plan.serving(role).name != name:
            continue  # served by another role's processes
        for device, parts in _of_devices(role, plan.memory[name]):
            passing = sum(parts.get(part, 0) for part in PASSING)
            staying = sum(parts.values()) - passing
            if name in turns:
                own = dict(parts)
                if device_bytes and isinstance(role, RolloutPlan):
                    whole = role.engine_args.get("gpu_memory_utilization", VLLM_UTILIZATION) * device_bytes
                    own["kv_cache"] = max(0, int(whole) - own["weights"])
                in_turn.setdefault(device, {})[name] = own
                continue
            if device_bytes and isinstance(role, RolloutPlan):
                staying = int(role.engine_args.get("gpu_memory_utilization", VLLM_UTILIZATION) * device_bytes)
            stays[device] = stays.get(device, 0) + staying
            passes[device] = max(passes.get(device, 0), passing)
    needs = {device: stays[device] + computing * passes[device] for device in stays}
    for device, members in in_turn.items():
        here = [turns[name] for name in members]
        most = max(
            sum(_held(members[name], held, computing and phase in COMPUTES) for name, held in by_name.items())
            for phase, by_name in held_together(here)
        )
        needs[device] = needs.get(device, 0) + most
    return {device: needs[device] for device in sorted(needs)}


def _held(parts: Mapping[str, int], held: Held, computes: bool) -> int:
    """Return the bytes of the parts that a member holds.

    If `computes` is True, the member's temporary parts are included.
    """
    names = {str(part) for part in held} | set(BESIDE_WEIGHTS) | (set(PASSING) if computes else set())
    return sum(size for name, size in parts.items() if name in names)


def _of_devices(
    role: MegatronPlan | RolloutPlan, stages: tuple[Mapping[str, int], ...]
) -> Iterator[tuple[int, Mapping[str, int]]]:
    """Yield (device, parts) for each rank of a role. `parts` is the memory of the rank.

    The ranks of a stage are consecutive.
    """
    for rank, device in enumerate(role.devices):
        yield device, stages[rank * len(stages) // len(role.devices)]


def readable_bytes(size: float) -> str:
    """Format a number of bytes with a unit."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
