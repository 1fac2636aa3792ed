"""Supported Megatron-core options, checked before start without torch or Megatron.

Only tested options are accepted. Others need missing components or would be silently ignored (`fp8`,
`mtp_num_layers`), so they are rejected.
"""

from collections.abc import Mapping
from typing import Any

from roll_opd.models.supported import ROUTERS

_TESTED = """
    recompute_granularity recompute_method recompute_num_layers recompute_modules moe_layer_recompute
    num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage pipeline_model_parallel_layout
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
    moe_aux_loss_coeff moe_z_loss_coeff moe_router_dtype moe_router_bias_update_rate moe_token_dispatcher_type
    moe_shared_expert_overlap
"""
RUN = frozenset(_TESTED.split()) | ROUTERS.keys()  # `supported.not_yet` checks their values
# kernels of Transformer Engine or compiled for GPUs, without effect on results
_KERNELS = """
    attention_backend bias_activation_fusion bias_dropout_fusion apply_rope_fusion moe_permute_fusion
"""
FOR_GPUS = frozenset(_KERNELS.split())
_NO_MODULE = "no layer here reads it"
WITHOUT_EFFECT = {
    "cross_entropy_loss_fusion": "logits are never materialized, so there is no such kernel",
    "cross_entropy_fusion_impl": "logits are never materialized, so there is no such kernel",
    "moe_grouped_gemm": "experts of a rank are computed sequentially",
    "persist_layer_norm": _NO_MODULE,
    "masked_softmax_fusion": _NO_MODULE,
    "attention_softmax_in_fp32": _NO_MODULE,
}
RECOMPUTED = ("core_attn", "mlp", "moe", "shared_experts", "layernorm")  # modules
RECOMPUTED_ON_GPUS = "layernorm"  # megatron-core needs Transformer Engine for it
DISPATCHER = "alltoall"


def refusal(name: str, value: Any) -> str | None:
    """Return why the engine rejects an option; None if it accepts it.

    A disabled option (false, 0) is always accepted.
    """
    if name == "recompute_modules" and isinstance(value, list | tuple):
        others = [module for module in value if module not in RECOMPUTED]
        return (
            f"{', '.join(map(str, others))} cannot be recomputed here; {', '.join(RECOMPUTED)} can" if others else None
        )
    if name == "moe_token_dispatcher_type" and value != DISPATCHER:
        return f"{value!r} is not available: packs differ in length; use {DISPATCHER}, or remove it"
    if not value or name in RUN or name in FOR_GPUS or name in WITHOUT_EFFECT:
        return None
    return "is not available: this Megatron option has no effect here or is untested; remove it"


def remark(name: str, *, has_gpus: bool) -> str | None:
    """Return why an accepted option has no effect; None if it has one."""
    if name in WITHOUT_EFFECT:
        return f"has no effect: {WITHOUT_EFFECT[name]}"
    return "has no effect without a GPU" if name in FOR_GPUS and not has_gpus else None


def usable(args: Mapping[str, Any], *, has_kernels: bool) -> dict[str, Any]:
    """Return the options without those that need Transformer Engine, unless it is installed (`has_kernels`)."""
    if has_kernels:
        return dict(args)
    found = {name: value for name, value in args.items() if name not in FOR_GPUS or not value}
    if modules := found.get("recompute_modules"):
        found["recompute_modules"] = [module for module in modules if module != RECOMPUTED_ON_GPUS]
    return found
