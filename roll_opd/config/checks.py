"""Checks a configuration against itself: layouts against models, devices, lengths, batches.

Every function takes what it needs and writes sentences into `Findings`; none raises, none touches the disk.
"""

from collections.abc import Mapping
from itertools import combinations

from roll_opd.config.demonstrations import check_share, expert_rows
from roll_opd.config.errors import Findings
from roll_opd.config.models import ModelFacts
from roll_opd.config.plan import Layout, MicroBatchLimits
from roll_opd.config.ranges import short_devices
from roll_opd.config.roles import Role
from roll_opd.config.schema import GeneratingArgs, Run, Top, Worker


def check_layout(role: Role, findings: Findings) -> None:
    """Check that a Megatron role's model can be cut as its layout says."""
    if role.facts is None or role.megatron is None or role.megatron.layout is None:
        return
    facts, layout = role.facts, role.megatron.layout
    prefix = f"{role.path}.strategy_args.strategy_config"
    check_tensor_parallel(facts, layout.tp, f"{prefix}.tensor_model_parallel_size", findings)
    _check_pipeline(facts, layout, prefix, role.megatron.args, findings)
    _check_experts(facts, layout, f"{prefix}.expert_model_parallel_size", role.megatron.args, findings)


def check_tensor_parallel(
    facts: ModelFacts, tp: int, key: str, findings: Findings, copies_kv_heads: bool = False
) -> None:
    """Check that heads and MLP can be cut into `tp` equal parts.

    The vocabulary need not be: both engines pad it. With `copies_kv_heads` (vLLM) several ranks may share one
    key/value head.
    """
    if tp == 1:
        return
    name = facts.path.name
    if facts.heads % tp:
        findings.problem(
            key, f"{facts.heads} attention heads of {name} are not divisible by {tp}; use a common divisor"
        )
    if copies_kv_heads and tp % facts.kv_heads == 0:
        pass
    elif facts.kv_heads < tp:
        findings.problem(key, f"{tp} is more than the {facts.kv_heads} key/value heads of {name}; use at most that")
    elif facts.kv_heads % tp:
        findings.problem(
            key, f"{facts.kv_heads} key/value heads of {name} are not divisible by {tp}; use a common divisor"
        )
    if facts.intermediate % tp:
        findings.problem(
            key, f"the MLP width of {name} ({facts.intermediate}) is not divisible by {tp}; use a divisor of it"
        )


# settings of Megatron-core that give stages different numbers of layers; the engine checks these itself
UNEVEN_STAGES = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout",
)
# settings that count the embedding or the loss as one more layer when the stages are cut
COUNTED_AS_LAYERS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


def _check_pipeline(
    facts: ModelFacts, layout: Layout, prefix: str, args: Mapping[str, object], findings: Findings
) -> None:
    key = f"{prefix}.pipeline_model_parallel_size"
    vpp = layout.vpp or 1
    uneven = any(name in args for name in UNEVEN_STAGES)
    more = sum(bool(args.get(name)) for name in COUNTED_AS_LAYERS)
    if layout.vpp and layout.pp == 1:
        findings.problem(
            f"{prefix}.virtual_pipeline_model_parallel_size",
            f"{layout.vpp} needs pipeline_model_parallel_size of at least 2; raise that or remove this key",
        )
    elif facts.layers < layout.pp * vpp:
        stages = f"{layout.pp} pipeline stages" + (f" x {vpp} virtual ones" if vpp > 1 else "")
        findings.problem(key, f"the {facts.layers} layers of {facts.path.name} are fewer than {stages}; use fewer")
    elif (facts.layers + more) % (layout.pp * vpp) and not uneven:
        findings.problem(
            key,
            f"the {facts.layers} layers of {facts.path.name}"
            + (f" and {more} for embedding and loss" if more else "")
            + f" are not divisible by {layout.pp * vpp} stages; use a divisor",
        )


def _check_experts(facts: ModelFacts, layout: Layout, key: str, args: dict[str, object], findings: Findings) -> None:
    if layout.ep == 1:
        return
    if not facts.experts:
        findings.problem(key, f"{facts.path.name} is a dense model without experts; use 1")
        return
    if facts.experts % layout.ep:
        findings.problem(
            key, f"the {facts.experts} experts of {facts.path.name} are not divisible by {layout.ep}; use a divisor"
        )
    etp = args.get("expert_tensor_parallel_size", layout.tp)
    ranks = layout.tp * layout.cp * layout.dp
    if not isinstance(etp, int) or ranks % (etp * layout.ep):
        findings.problem(key, f"{ranks} ranks a pipeline stage are no multiple of ep {layout.ep} x etp {etp}")
    if layout.tp > 1 and not layout.sequence_parallel:
        findings.problem(key, "experts with tensor parallelism need sequence_parallel: true")


def nodes(roles: list[Role], top: Run) -> int:
    """Return num_nodes, or the nodes that the device mappings reach over where those are more, as ROLL does."""
    last = max((max(role.devices) for role in roles if role.devices), default=0)
    return max(top.num_nodes or 1, last // top.num_gpus_per_node + 1)


def check_devices(roles: list[Role], top: Run, findings: Findings) -> None:
    """Check that devices exist, and that two roles share all, none, or one's all inside the other's."""
    total = (top.num_nodes or nodes(roles, top)) * top.num_gpus_per_node
    known = [(role, set(role.devices)) for role in roles if role.devices]
    for role, devices in known:
        if max(devices) >= total:
            findings.block(  # ROLL's own YAML reach beyond their num_nodes; ROLL overwrites it
                f"{role.path}.device_mapping",
                f"device {max(devices)} does not exist: num_nodes {top.num_nodes} x num_gpus_per_node"
                f" {top.num_gpus_per_node} gives devices 0 to {total - 1}; raise num_nodes, leave it out"
                " or change the mapping",
            )
        if role.vllm is not None and role.vllm.tp > top.num_gpus_per_node:
            findings.problem(
                f"{role.path}.strategy_args.strategy_config.tensor_parallel_size",
                f"an engine of {role.vllm.tp} devices does not fit into one node of {top.num_gpus_per_node};"
                " use a smaller one",
            )
    for (one, mine), (other, theirs) in combinations(known, 2):
        shared = mine & theirs
        if shared and shared != mine and shared != theirs:
            here, there, both = (short_devices(sorted(devices)) for devices in (theirs, mine, shared))
            findings.problem(
                f"{other.path}.device_mapping",
                f"devices {here} and {one.path}'s {there} share only {both}; two roles can take turns on the same"
                " devices, lie one inside the other or keep apart, but not overlap in part",
            )


def response_length(top: Top, infer: Worker | None, infer_path: str, findings: Findings) -> int | None:
    """Return the tokens a response may have: response_length, or sequence_length less the prompt."""
    asked = infer.generating_args.max_new_tokens if infer else None
    length = top.response_length
    if length is None and top.sequence_length is not None:
        length = top.sequence_length - top.prompt_length
        if length < 1:
            findings.problem(
                "sequence_length",
                f"{top.sequence_length} leaves no room after prompt_length {top.prompt_length}; raise it",
            )
            return None
    length = length or asked
    if length is None:
        findings.problem("response_length", "is missing; write response_length or sequence_length")
        return None
    if top.sequence_length is not None and top.prompt_length + length > top.sequence_length:
        findings.problem(
            "sequence_length",
            f"{top.sequence_length} is less than prompt_length {top.prompt_length} + response_length {length};"
            " raise it or leave it out",
        )
    if asked is not None and asked > length:
        findings.problem(
            f"{infer_path}.generating_args.max_new_tokens",
            f"{asked} is more than the response length {length}; use at most that",
        )
    return asked or length


def check_positions(roles: list[Role], tokens: int, what: str, key: str, findings: Findings) -> None:
    """Check that `tokens` fit into the positions of every model; `what` they are is for the sentence."""
    models = {role.facts.path: role.facts for role in roles if role.facts}
    short = [f"{facts.path.name} ({facts.max_positions})" for facts in models.values() if tokens > facts.max_positions]
    if short:
        findings.problem(
            key,
            f"{what} is more than the positions of {' and '.join(short)}; lower it"
            " (max_position_embeddings in the model's config.json says how many there are)",
        )


def check_model_length(infer: Role, needed: int, findings: Findings) -> None:
    """Check a max_model_len that the user wrote: enough for prompt + response, no more than the model has."""
    length = infer.vllm.max_model_len if infer.vllm else None
    if length is None:
        return
    key = f"{infer.path}.strategy_args.strategy_config.max_model_len"
    if length < needed:
        findings.problem(key, f"{length} would cut sequences of up to {needed} tokens; leave it out or raise it")
    if infer.facts is not None and length > infer.facts.max_positions:
        findings.problem(key, f"{length} is more than the model's {infer.facts.max_positions} positions; lower it")


def check_sampling(args: GeneratingArgs, key: str, findings: Findings) -> None:
    """Check the rollout's sampling: it must sample, and warn where it is not the model's own distribution."""
    if args.temperature == 0:
        findings.problem(f"{key}.temperature", "0 does not sample: the student would learn from one answer only; use 1")
    changed = {
        "top_p": args.top_p != 1,
        "top_k": args.top_k > 0,
        "repetition_penalty": args.repetition_penalty != 1,
    }
    names = [f"{name} {value}" for name, value in args.model_dump().items() if changed.get(name)]
    if names:
        findings.warn(
            f"{key}: {', '.join(names)}: rollout log-probs are those of a truncated distribution, the"
            f" teacher's and the"
            " training engine's are not; top_p 1, top_k -1, repetition_penalty 1 keep them comparable"
        )


def mini_batch(
    top: Top, train: Role, n: int, agentic: bool, findings: Findings, expert_share: float = 0.0
) -> int | None:
    """Return the sequences behind one optimizer update, over all data-parallel ranks.

    `expert_share` of them are demonstrations, and the step's samples fill the rest. Agentic runs do not know how
    many samples their trajectories give, so there a remainder is only a warning.
    """
    if train.megatron is None or train.megatron.layout is None:
        return None
    args, dp = train.worker.training_args, train.megatron.layout.dp
    mini = args.per_device_train_batch_size * args.gradient_accumulation_steps * dp
    sequences = top.rollout_batch_size * n
    arithmetic = (
        f"per_device_train_batch_size {args.per_device_train_batch_size} x gradient_accumulation_steps"
        f" {args.gradient_accumulation_steps} x data-parallel size {dp}"
    )
    if not check_share(mini, expert_share, arithmetic, findings):
        return None
    expert = expert_rows(mini, expert_share)
    if agentic and sequences % mini:
        findings.warn(
            f"rollout_batch_size: {sequences} trajectories a step are no multiple of the mini-batch of {mini}; the"
            " last update of a step is smaller"
        )
        return min(mini, sequences)
    if sequences % (mini - expert):
        left = f"the {mini - expert} that {expert} demonstrations leave in " if expert else ""
        advice = "change one of them" if expert else _fitting(sequences, args.per_device_train_batch_size * dp)
        findings.problem(
            "rollout_batch_size",
            f"{top.rollout_batch_size} prompts x {n} responses = {sequences} sequences a step are no multiple of"
            f" {left}{train.path}'s mini-batch of {mini} ({arithmetic}); {advice}",
        )
        return None
    return mini


def _fitting(sequences: int, share: int) -> str:
    """Say which gradient_accumulation_steps would fit, or what else to change."""
    if sequences % share:
        return f"make the sequences a step a multiple of {share}, or change device_mapping"
    steps = sequences // share
    divisors = [str(step) for step in range(1, steps + 1) if steps % step == 0]
    return f"gradient_accumulation_steps could be {', '.join(divisors[-6:])}"


def micro_batch(
    role: Role, training: bool, longest: int, findings: Findings, what: str = "one sequence of prompt + response"
) -> MicroBatchLimits:
    """Return how much goes through at once: tokens with dynamic batching or packing, else sequences.

    `longest` is the tokens of the largest thing that is not cut; `what` that is, is for the sentence.
    """
    worker, job = role.worker, "train" if training else "infer"
    packing = worker.sequence_packing_args
    dynamic = worker.use_dynamic_batching_in_train if training else worker.use_dynamic_batching_in_infer
    key = f"{role.path}.max_tokens_per_microbatch_in_{job}"
    tokens = None
    if dynamic:
        tokens = worker.max_tokens_per_microbatch_in_train if training else worker.max_tokens_per_microbatch_in_infer
        if not tokens:
            findings.problem(key, f"is missing; use_dynamic_batching_in_{job} needs it, write a number of tokens")
    elif worker.use_sequence_packing:
        tokens = packing.max_packed_sequence_length_train if training else packing.max_packed_sequence_length_forward
        name = "train" if training else "forward"
        key = f"{role.path}.sequence_packing_args.max_packed_sequence_length_{name}"
    if tokens and tokens < longest:
        findings.problem(key, f"{tokens} tokens cannot hold {what} ({longest} tokens); raise it")
    if tokens:
        return MicroBatchLimits(tokens=tokens)
    size = worker.training_args.per_device_train_batch_size if training else worker.infer_batch_size
    return MicroBatchLimits(sequences=size)
