"""Qwen3-Next and the text models of Qwen3.5: Gated DeltaNet layers, and gated attention in every fourth layer."""

from functools import partial
from typing import Any

from roll_opd.models.delta_sizes import LINEAR, delta_layers
from roll_opd.models.families.family import DELTA, EXPERTS, LLAMA, Config, Family, Pieces, layer, rotated_share
from roll_opd.models.families.qwen import SHARED_EXPERT, single_expert

_OWN = {
    "self_attention.linear_qkv.weight": layer("gated_qkv", *(f"self_attn.{x}_proj.weight" for x in "qkv")),
    "self_attention.convolution": layer("delta_channels", "linear_attn.conv1d.weight"),
    "self_attention.log_rates": layer("rows", "linear_attn.A_log"),
    "self_attention.time_bias": layer("rows", "linear_attn.dt_bias"),
    "self_attention.gated_norm.weight": layer("replicated", "linear_attn.norm.weight"),
    "self_attention.linear_out.weight": layer("columns", "linear_attn.out_proj.weight"),
}
_NEXT = {
    "self_attention.linear_in.weight": layer(
        "delta_key_heads", "linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight"
    )
}
_QWEN35 = {
    "self_attention.linear_in.weight": layer(
        "delta_parts", *(f"linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a"))
    )
}


def _pieces(config: Config) -> Pieces:
    is_delta = delta_layers(config, config["num_hidden_layers"])
    return Pieces(
        query_key_norm="head",
        zero_centred_norms=True,
        rotated=rotated_share(config, 0.25),
        mixers=tuple(DELTA if each else "" for each in is_delta),
        output_gate=True,
    )


_hybrid = partial(Family, pieces=_pieces, layer_types=(LINEAR,), rope_types=("default",), has_adapters=False)
_SHARED_GATE: Any = {
    "settings": {"moe_shared_expert_gate": True},
    "problems": lambda config: single_expert(config, normalised=True),
}

FAMILIES = (
    _hybrid(
        "qwen3_next",
        LLAMA | _OWN | _NEXT | EXPERTS | SHARED_EXPERT,
        **_SHARED_GATE,
    ),
    _hybrid(
        "qwen3_5_text",
        LLAMA | _OWN | _QWEN35,
    ),
    _hybrid(
        "qwen3_5_moe_text",
        LLAMA | _OWN | _QWEN35 | EXPERTS | SHARED_EXPERT,
        **_SHARED_GATE,
    ),
)
