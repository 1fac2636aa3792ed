"""SmolLM3: some layers have no rotation."""

from roll_opd.models.families.family import Config, Family, Pieces, windows


def _smollm3(config: Config) -> Pieces:
    layers, interval = config["num_hidden_layers"], config.get("no_rope_layer_interval") or 4
    rotates = config.get("no_rope_layers") or [(number + 1) % interval for number in range(layers)]
    return Pieces(
        rotary=tuple("default" if rotates[number] else "" for number in range(layers)),
        windows=windows(config) if config.get("use_sliding_window") else (),
        qkv_bias=bool(config.get("attention_bias")),
        out_bias=bool(config.get("attention_bias")),
    )


FAMILIES = (
    Family("smollm3", pieces=_smollm3, reads=("attention_bias", "use_sliding_window", "layer_types"), is_tied=True),
)
