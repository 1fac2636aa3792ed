"""Read the sizes of Gated DeltaNet layers (arXiv 2412.06464) from config.json, without torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LINEAR = "linear_attention"  # value in `layer_types` of config.json
# keys of config.json, in the order of the fields of `DeltaSizes`
KEYS = (
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
        """Number of value heads per key head."""
        return self.value_heads // self.key_heads

    @property
    def of_key_head(self) -> tuple[int, ...]:
        """Numbers of rows of the input projection per key head.

        The order is: query, key, values, output gates, betas, decays.
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
    if not config.get(KEYS[0]):
        return None
    return DeltaSizes(*(config[key] for key in KEYS))


def delta_layers(config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Return, for each layer, whether it is a Gated DeltaNet layer. All other layers have attention."""
    if delta_sizes(config) is None:
        return (False,) * layers
    period = config.get("full_attention_interval") or PERIOD
    kinds = config.get("layer_types") or [LINEAR if (number + 1) % period else "" for number in range(layers)]
    return tuple(kind == LINEAR for kind in kinds)
