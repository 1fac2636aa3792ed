"""Phi-3 and Phi-4: fused projections, and a window in some releases."""

from roll_opd.models.families.family import FUSED_GATE_UP, FUSED_QKV, LLAMA, Config, Family, Pieces, rotated_share


def _phi3(config: Config) -> Pieces:
    window, positions = config.get("sliding_window") or 0, config["max_position_embeddings"]
    every = (window,) * config["num_hidden_layers"] if 0 < window < positions else ()
    return Pieces(windows=every, rotated=rotated_share(config))


FAMILIES = (
    Family(
        "phi3",
        LLAMA | FUSED_QKV | FUSED_GATE_UP,
        _phi3,
        rope_types=("default",),  # longrope chooses its factors by the length of a sequence
        has_adapters=False,
    ),
)
