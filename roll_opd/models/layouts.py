"""Check that a model can be sharded as configured, in a Megatron layout and with tensor parallelism in vLLM.

Every function reports problems to `Diagnostics`, under the configuration key that causes the problem.
"""

from collections.abc import Mapping

from roll_opd.config.diagnostics import Diagnostics
from roll_opd.config.plan import Layout
from roll_opd.models.model_info import ModelInfo

# settings of Megatron-core that give stages different numbers of layers; the engine checks these itself
UNEVEN_STAGES = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout",
)
# settings that count the embedding or the loss as a layer of a stage
COUNTED_AS_LAYERS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


def check_layout(info: ModelInfo, layout: Layout, args: Mapping[str, object], diagnostics: Diagnostics) -> None:
    """Check that a model can be sharded in a layout.

    `args`: Megatron's options.
    """
    check_tensor_parallel(info, layout.tp, "tensor_model_parallel_size", diagnostics)
    _check_pipeline(info, layout, args, diagnostics)
    _check_experts(info, layout, diagnostics)


def check_tensor_parallel(
    info: ModelInfo, tp: int, key: str, diagnostics: Diagnostics, copies_kv_heads: bool = False
) -> None:
    """Check that attention heads and the MLP can be split into `tp` equal parts.

    The size of the vocabulary need not be divisible, because both engines pad it.

    `copies_kv_heads`: several ranks may have copies of the same key/value head, as in vLLM.
    """
    if tp == 1:
        return
    name = info.path.name
    _check_divisible(
        f"{info.heads} attention heads of {name} are", info.heads, tp, key, diagnostics, "a common divisor"
    )
    if copies_kv_heads and tp % info.kv_heads == 0:
        pass
    elif info.kv_heads < tp:
        diagnostics.error(key, f"{tp} exceeds the number of key/value heads of {name}; use at most {info.kv_heads}")
    else:
        what = f"{info.kv_heads} key/value heads of {name} are"
        _check_divisible(what, info.kv_heads, tp, key, diagnostics, "a common divisor")
    if info.delta:
        what = f"{info.delta.key_heads} key heads of the linear attention of {name} are"
        _check_divisible(what, info.delta.key_heads, tp, key, diagnostics)
    what = f"the MLP width of {name} ({info.intermediate}) is"
    _check_divisible(what, info.intermediate, tp, key, diagnostics, "a divisor of it")


def _check_divisible(
    what: str, size: int, parts: int, key: str, diagnostics: Diagnostics, remedy: str = "a divisor"
) -> None:
    if size % parts:
        diagnostics.error(key, f"{what} not divisible by {parts}; use {remedy}")


def _check_pipeline(info: ModelInfo, layout: Layout, args: Mapping[str, object], diagnostics: Diagnostics) -> None:
    key = "pipeline_model_parallel_size"
    vpp = layout.vpp or 1
    uneven = any(name in args for name in UNEVEN_STAGES)
    more = sum(bool(args.get(name)) for name in COUNTED_AS_LAYERS)
    if layout.vpp and layout.pp == 1:
        diagnostics.error(
            "virtual_pipeline_model_parallel_size",
            f"{layout.vpp} needs pipeline_model_parallel_size of at least 2; raise that or remove this key",
        )
    elif info.layers < layout.pp * vpp:
        stages = f"{layout.pp} pipeline stages" + (f" x {vpp} virtual ones" if vpp > 1 else "")
        diagnostics.error(key, f"{info.path.name} has only {info.layers} layers for {stages}; use fewer stages")
    elif (info.layers + more) % (layout.pp * vpp) and not uneven:
        diagnostics.error(
            key,
            f"the {info.layers} layers of {info.path.name}"
            + (f" and {more} for embedding and loss" if more else "")
            + f" are not divisible by {layout.pp * vpp} stages; use a divisor",
        )


def _check_experts(info: ModelInfo, layout: Layout, diagnostics: Diagnostics) -> None:
    key = "expert_model_parallel_size"
    if not info.experts:
        if layout.ep > 1:
            diagnostics.error(key, f"{info.path.name} is a dense model without experts; use 1")
        return
    what = f"the {info.experts} experts of {info.path.name} are"
    _check_divisible(what, info.experts, layout.ep, key, diagnostics)
    etp, ranks = layout.expert_tp, layout.tp * layout.cp * layout.dp
    if ranks % (etp * layout.ep):
        diagnostics.error(
            key,
            f"{ranks} ranks per pipeline stage are not a multiple of ep {layout.ep} x etp {etp}; use a smaller size, or"
            " expert_tensor_parallel_size: 1",
        )
    key = "expert_tensor_parallel_size"
    what = f"the width of an expert of {info.path.name} ({info.expert_intermediate}) is"
    _check_divisible(what, info.expert_intermediate, etp, key, diagnostics, "a divisor of it")
    if info.has_expert_bias and etp > 1:  # each of the ranks would add the bias
        diagnostics.error(
            key,
            f"the experts of {info.path.name} have biases, so an expert cannot be split over {etp} ranks; set"
            " expert_tensor_parallel_size: 1",
        )
