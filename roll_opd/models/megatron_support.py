"""Check that the Megatron engine supports a model and its Megatron-core options.

Only tested options are accepted. Other options are rejected, because they need components that this project lacks, or
because they would be ignored without an error (`fp8`, `mtp_num_layers`). This module imports neither torch nor
Megatron.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from roll_opd.config.plan import MegatronPlan, TrainPlan
from roll_opd.models.families import FAMILIES
from roll_opd.models.families.family_definition import WINDOWED, Family
from roll_opd.models.model_files import decoder_config
from roll_opd.models.model_info import RUN, read_json

# key of config.json -> the only validated value, unless the family's pieces read the key
PROVEN_VALUES: dict[str, object] = {
    "mlp_bias": False,
    "use_sliding_window": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": False,
}
_DEPENDS = "a token's log-prob would depend on the other tokens of its batch"
# router option -> (allowed values, None if unset; reason)
ROUTERS: dict[str, tuple[tuple[object, ...], str]] = {
    "moe_router_load_balancing_type": ((None, "none", "aux_loss"), "a pack contains several sequences; use aux_loss"),
    "moe_expert_capacity_factor": ((None,), _DEPENDS),
    "moe_pad_expert_input_to_capacity": ((None, False), _DEPENDS),
    "moe_input_jitter_eps": ((None,), "log-probs would be random"),
    "moe_router_fusion": ((None, False), "the fused kernel selects experts without replay"),
    "moe_router_force_load_balancing": ((None, False), "it is for benchmarks"),
}


def not_yet(role: MegatronPlan) -> list[str]:
    """Return a message for each unsupported property of a role."""
    sentences = unsupported(Path(role.model.path))
    sentences += [
        f"{key} {value!r} is not available: {why}"
        for key, (allowed, why) in ROUTERS.items()
        if (value := role.megatron_args.get(key)) not in allowed
    ]
    config = decoder_config(read_json(Path(role.model.path) / "config.json"))
    model_type = config.get("model_type")
    family = FAMILIES.get(str(model_type))
    if isinstance(role, TrainPlan) and config.get("quantization_config") and not sentences:
        sentences.append(
            "training of weights in MXFP4 is not available, because inference engines would keep quantised experts but"
            " receive updates in bf16; save the model in bf16 first (from_pretrained, then save_pretrained of"
            " transformers)"
        )
    if isinstance(role, TrainPlan) and role.lora and family and not family.has_adapters:
        sentences.append(f"adapters (LoRA) of models of type {model_type} are not available; train all weights")
    biased = [name for name, each in FAMILIES.items() if each.router.startswith("biased")]
    if role.megatron_args.get("moe_router_bias_update_rate") and model_type not in biased:
        sentences.append(
            "moe_router_bias_update_rate updates router biases, which only models of these types have:"
            f" {', '.join(biased)}; remove it"
        )
    if isinstance(role, TrainPlan) and role.model.dtype == "fp16":
        sentences.append("training in fp16 is not available; use bf16 or fp32")
    return [f"{role.name}: {sentence}" for sentence in sentences]


def unsupported(path: Path) -> list[str]:
    """Return a message for each unsupported property of the model in `path`."""
    config = decoder_config(json.loads((path / "config.json").read_text(encoding="utf-8")))
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return [f"models of type {config.get('model_type')} are not available yet; use one of {', '.join(RUN)}"]
    proven = {key: value for key, value in PROVEN_VALUES.items() if key not in family.reads} | dict(family.expects)
    sentences = [
        f"{key}={config[key]!r} in config.json is not available yet (expected {value!r})"
        for key, value in proven.items()
        if config.get(key) not in (None, value)
    ]
    sentences += [*_of_layers(config, family), *_of_weights(config, family), *family.problems(config)]
    return [f"{path.name}: {sentence}" for sentence in (*sentences, *_of_rope(config, family))]


def _of_layers(config: Mapping[str, Any], family: Family) -> Iterator[str]:
    kinds = config.get("layer_types")
    known = {"full_attention", *family.layer_types, *([WINDOWED] if "layer_types" in family.reads else [])}
    other = sorted({str(kind) for kind in kinds} - known) if isinstance(kinds, list) else []
    if other:
        yield f"layers of the types {', '.join(other)} (layer_types in config.json) are not available yet"


def _of_weights(config: Mapping[str, Any], family: Family) -> Iterator[str]:
    if (quantised := config.get("quantization_config")) and not (family.reads_mxfp4 and _is_mxfp4(quantised)):
        yield (
            "quantised weights (quantization_config in config.json) are not available; use the release in bf16 or fp16"
        )


def _is_mxfp4(quantised: object) -> bool:
    return isinstance(quantised, dict) and quantised.get("quant_method") == "mxfp4"


def _of_rope(config: Mapping[str, Any], family: Family) -> Iterator[str]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        yield "rope_parameters in config.json should be a mapping; download the file again"
        return
    # one mapping per type of layer, or a single mapping for all layers
    of_layers = [value for value in rope.values() if isinstance(value, dict)] or [rope]
    known = ", ".join(family.rope_types)
    for rope_type in dict.fromkeys(each.get("rope_type") or each.get("type") or "default" for each in of_layers):
        if rope_type not in family.rope_types:
            yield f"rope type {rope_type!r} in config.json is not available yet; available types: {known}"


_TESTED = """
    recompute_granularity recompute_method recompute_num_layers recompute_modules moe_layer_recompute
    num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage pipeline_model_parallel_layout
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
    moe_aux_loss_coeff moe_z_loss_coeff moe_router_dtype moe_router_bias_update_rate moe_token_dispatcher_type
    moe_shared_expert_overlap
"""
SUPPORTED_OPTIONS = frozenset(_TESTED.split()) | ROUTERS.keys()  # `not_yet` checks their values
# kernels of Transformer Engine or compiled for GPUs, without effect on results
_KERNELS = """
    attention_backend bias_activation_fusion bias_dropout_fusion apply_rope_fusion moe_permute_fusion
"""
FOR_GPUS = frozenset(_KERNELS.split())
_NO_MODULE = "no layer here reads it"
WITHOUT_EFFECT = {
    "cross_entropy_loss_fusion": "logits are never materialized, so a cross-entropy kernel is not used",
    "cross_entropy_fusion_impl": "logits are never materialized, so a cross-entropy kernel is not used",
    "moe_grouped_gemm": "experts of a rank are computed sequentially",
    "persist_layer_norm": _NO_MODULE,
    "masked_softmax_fusion": _NO_MODULE,
    "attention_softmax_in_fp32": _NO_MODULE,
}
RECOMPUTED = ("core_attn", "mlp", "moe", "shared_experts", "layernorm")  # modules
RECOMPUTED_ON_GPUS = "layernorm"  # megatron-core needs Transformer Engine to recompute this module
DISPATCHER = "alltoall"


def refusal(name: str, value: Any) -> str | None:
    """Return why the engine rejects an option, or None if the engine accepts it.

    An option that is off (false or 0) is accepted, except `moe_token_dispatcher_type`.
    """
    if name == "recompute_modules" and isinstance(value, list | tuple):
        others = [module for module in value if module not in RECOMPUTED]
        return f"cannot recompute {', '.join(map(str, others))}; use {', '.join(RECOMPUTED)}" if others else None
    if name == "moe_token_dispatcher_type" and value != DISPATCHER:
        return f"{value!r} is not available, because packs differ in length; use {DISPATCHER}, or remove this key"
    if not value or name in SUPPORTED_OPTIONS or name in FOR_GPUS or name in WITHOUT_EFFECT:
        return None
    return "is not available: this Megatron option has no effect or is not tested here; remove this key"


def remark(name: str, *, has_gpus: bool) -> str | None:
    """Return why an accepted option has no effect; None if it has an effect."""
    if name in WITHOUT_EFFECT:
        return f"has no effect: {WITHOUT_EFFECT[name]}"
    return "has no effect without a GPU" if name in FOR_GPUS and not has_gpus else None


def usable(args: Mapping[str, Any], *, has_kernels: bool) -> dict[str, Any]:
    """Return the options that the engine can use.

    If `has_kernels` is False, options that need Transformer Engine are left out.
    """
    if has_kernels:
        return dict(args)
    found = {name: value for name, value in args.items() if name not in FOR_GPUS or not value}
    if modules := found.get("recompute_modules"):
        found["recompute_modules"] = [module for module in modules if module != RECOMPUTED_ON_GPUS]
    return found
