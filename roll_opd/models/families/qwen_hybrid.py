"""Qwen3-Next and the text models of Qwen3.5: Gated DeltaNet layers, and gated attention in every fourth layer.

`DeltaSizes` has the sizes of Gated DeltaNet layers (arXiv 2412.06464), which are read from config.json.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from roll_opd.models.families.family_definition import DELTA, Config, Family, Pieces, rotated_share
from roll_opd.models.families.parameter_names import EXPERTS, LLAMA, layer
from roll_opd.models.families.qwen import SHARED_EXPERT, single_expert

LINEAR = "linear_attention"  # value in `layer_types` of config.json
# keys of config.json, in the order of the fields of `DeltaSizes`
DELTA_KEYS = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
PERIOD = 4  # default of transformers: every fourth layer has attention


@dataclass(frozen=True)
class DeltaSizes:
    """Heads and widths of the Gated DeltaNet layers of a model."""

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    taps: int  # taps of the convolution

    @property
    def each(self) -> int:
        """How many value heads share one key head."""
        return self.value_heads // self.key_heads

    @property
    def of_key_head(self) -> tuple[int, ...]:
        """How many rows of the input projection belong to one key head.

        The six counts are of the rows for: query, key, values, output gates, betas, decays.
        """
        values = self.each * self.value_width
        return self.key_width, self.key_width, values, values, self.each, self.each

    @property
    def channels(self) -> tuple[int, ...]:
        """Numbers of convolution channels for queries, for keys and for values."""
        return tuple(self.key_heads * rows for rows in self.of_key_head[:3])

    @property
    def projected(self) -> int:
        """Number of rows of the input projection."""
        return self.key_heads * sum(self.of_key_head)

    @property
    def values(self) -> int:
        """Width of the concatenated outputs of all heads."""
        return self.value_heads * self.value_width

    @property
    def state(self) -> int:
        """Number of elements in a layer's state for a sequence, including the state of the convolution."""
        return self.values * self.key_width + (self.taps - 1) * sum(self.channels)


def delta_sizes(config: Mapping[str, Any]) -> DeltaSizes | None:
    """Return the sizes of a model's Gated DeltaNet layers, or None for models without them."""
    if not config.get(DELTA_KEYS[0]):
        return None
    return DeltaSizes(*(config[key] for key in DELTA_KEYS))


def delta_layers(config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Return, for each layer, whether it is a Gated DeltaNet layer. All other layers have attention."""
    if delta_sizes(config) is None:
        return (False,) * layers
    period = config.get("full_attention_interval") or PERIOD
    kinds = config.get("layer_types") or [LINEAR if (number + 1) % period else "" for number in range(layers)]
    return tuple(kind == LINEAR for kind in kinds)


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
