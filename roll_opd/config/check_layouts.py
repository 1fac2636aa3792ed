"""Checks of values: layouts against models, and devices against each other.

Every function takes what it needs and writes sentences into `Diagnostics`; none raises, none touches the disk.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations

from roll_opd.config.device_mapping import short_devices
from roll_opd.config.errors import Diagnostics
from roll_opd.config.plan import Layout
from roll_opd.config.roles import Role
from roll_opd.config.schema import Run
from roll_opd.hf.model_info import ModelInfo

# settings of Megatron-core that give stages different numbers of layers; the engine checks these itself
UNEVEN_STAGES = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout",
)
# settings that count the embedding or the loss as one more layer when the stages are cut
COUNTED_AS_LAYERS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


def check_roles(roles: Sequence[Role], diagnostics: Diagnostics) -> None:
    """Check that every role's model can be cut as its layout or its engines say."""
    for role in roles:
        check_layout(role, diagnostics)
        if role.vllm is not None and role.info is not None:
            key = f"{role.path}.strategy_args.strategy_config.tensor_parallel_size"
            check_tensor_parallel(role.info, role.vllm.tp, key, diagnostics, copies_kv_heads=True)


def check_layout(role: Role, diagnostics: Diagnostics) -> None:
    """Check that a Megatron role's model can be cut as its layout says."""
    if role.info is None or role.megatron is None or role.megatron.layout is None:
        return
    info, layout = role.info, role.megatron.layout
    prefix = f"{role.path}.strategy_args.strategy_config"
    check_tensor_parallel(info, layout.tp, f"{prefix}.tensor_model_parallel_size", diagnostics)
    _check_pipeline(info, layout, prefix, role.megatron.args, diagnostics)
    _check_experts(info, layout, f"{prefix}.expert_model_parallel_size", role.megatron.args, diagnostics)


def check_tensor_parallel(
    info: ModelInfo, tp: int, key: str, diagnostics: Diagnostics, copies_kv_heads: bool = False
) -> None:
    """Check that heads and MLP can be cut into `tp` equal parts.

    The vocabulary need not be: both engines pad it. With `copies_kv_heads` (vLLM) several ranks may share one
    key/value head.
    """
    if tp == 1:
        return
    name = info.path.name
    if info.heads % tp:
        diagnostics.problem(
            key, f"{info.heads} attention heads of {name} are not divisible by {tp}; use a common divisor"
        )
    if copies_kv_heads and tp % info.kv_heads == 0:
        pass
    elif info.kv_heads < tp:
        diagnostics.problem(key, f"{tp} is more than the {info.kv_heads} key/value heads of {name}; use at most that")
    elif info.kv_heads % tp:
        diagnostics.problem(
            key, f"{info.kv_heads} key/value heads of {name} are not divisible by {tp}; use a common divisor"
        )
    if info.intermediate % tp:
        diagnostics.problem(
            key, f"the MLP width of {name} ({info.intermediate}) is not divisible by {tp}; use a divisor of it"
        )


def _check_pipeline(
    info: ModelInfo, layout: Layout, prefix: str, args: Mapping[str, object], diagnostics: Diagnostics
) -> None:
    key = f"{prefix}.pipeline_model_parallel_size"
    vpp = layout.vpp or 1
    uneven = any(name in args for name in UNEVEN_STAGES)
    more = sum(bool(args.get(name)) for name in COUNTED_AS_LAYERS)
    if layout.vpp and layout.pp == 1:
        diagnostics.problem(
            f"{prefix}.virtual_pipeline_model_parallel_size",
            f"{layout.vpp} needs pipeline_model_parallel_size of at least 2; raise that or remove this key",
        )
    elif info.layers < layout.pp * vpp:
        stages = f"{layout.pp} pipeline stages" + (f" x {vpp} virtual ones" if vpp > 1 else "")
        diagnostics.problem(key, f"the {info.layers} layers of {info.path.name} are fewer than {stages}; use fewer")
    elif (info.layers + more) % (layout.pp * vpp) and not uneven:
        diagnostics.problem(
            key,
            f"the {info.layers} layers of {info.path.name}"
            + (f" and {more} for embedding and loss" if more else "")
            + f" are not divisible by {layout.pp * vpp} stages; use a divisor",
        )


def _check_experts(
    info: ModelInfo, layout: Layout, key: str, args: Mapping[str, object], diagnostics: Diagnostics
) -> None:
    if layout.ep == 1:
        return
    if not info.experts:
        diagnostics.problem(key, f"{info.path.name} is a dense model without experts; use 1")
        return
    if info.experts % layout.ep:
        diagnostics.problem(
            key, f"the {info.experts} experts of {info.path.name} are not divisible by {layout.ep}; use a divisor"
        )
    etp = args.get("expert_tensor_parallel_size", layout.tp)
    ranks = layout.tp * layout.cp * layout.dp
    if not isinstance(etp, int) or ranks % (etp * layout.ep):
        diagnostics.problem(key, f"{ranks} ranks a pipeline stage are no multiple of ep {layout.ep} x etp {etp}")
    if layout.tp > 1 and not layout.sequence_parallel:
        diagnostics.problem(key, "experts with tensor parallelism need sequence_parallel: true")


def nodes(roles: list[Role], top: Run) -> int:
    """Return num_nodes, or the nodes that the device mappings reach over where those are more, as ROLL does."""
    last = max((max(role.devices) for role in roles if role.devices), default=0)
    return max(top.num_nodes or 1, last // top.num_gpus_per_node + 1)


def check_devices(roles: list[Role], top: Run, diagnostics: Diagnostics) -> None:
    """Check that devices exist, and that two roles share all, none, or one's all inside the other's."""
    total = (top.num_nodes or nodes(roles, top)) * top.num_gpus_per_node
    known = [(role, set(role.devices)) for role in roles if role.devices]
    for role, devices in known:
        if max(devices) >= total:
            diagnostics.block(  # ROLL's own YAML reach beyond their num_nodes; ROLL overwrites it
                f"{role.path}.device_mapping",
                f"device {max(devices)} does not exist: num_nodes {top.num_nodes} x num_gpus_per_node"
                f" {top.num_gpus_per_node} gives devices 0 to {total - 1}; raise num_nodes, leave it out"
                " or change the mapping",
            )
        if role.vllm is not None and role.vllm.tp > top.num_gpus_per_node:
            diagnostics.problem(
                f"{role.path}.strategy_args.strategy_config.tensor_parallel_size",
                f"an engine of {role.vllm.tp} devices does not fit into one node of {top.num_gpus_per_node};"
                " use a smaller one",
            )
    for (one, mine), (other, theirs) in combinations(known, 2):
        shared = mine & theirs
        if shared and shared != mine and shared != theirs:
            here, there, both = (short_devices(sorted(devices)) for devices in (theirs, mine, shared))
            diagnostics.problem(
                f"{other.path}.device_mapping",
                f"devices {here} and {one.path}'s {there} share only {both}; two roles can take turns on the same"
                " devices, lie one inside the other or keep apart, but not overlap in part",
            )
