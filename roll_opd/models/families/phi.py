"""Phi-3 and Phi-4: fused projections, and in some releases a window or longrope."""

from roll_opd.models.families.family import (
    FUSED_GATE_UP,
    FUSED_QKV,
    LLAMA,
    LONGROPE,
    Config,
    Family,
    Pieces,
    positions,
    rotated_share,
)


def _phi3(config: Config) -> Pieces:
    window = config.get("sliding_window") or 0
    every = (window,) * config["num_hidden_layers"] if 0 < window < positions(config)[0] else ()
    return Pieces(windows=every, rotated=rotated_share(config))


FAMILIES = (
    Family(
        "phi3",
        LLAMA | FUSED_QKV | FUSED_GATE_UP,
        _phi3,
        rope_types=("default", *LONGROPE),
        has_adapters=False,
    ),
)
