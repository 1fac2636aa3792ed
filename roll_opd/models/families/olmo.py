"""OLMo 2 and OLMo 3: norms after attention and MLP, query and key norms over all heads, and windows in OLMo 3."""

from roll_opd.models.families.family import LLAMA, Config, Family, Pieces, layer_kinds, norms, windows, without_norms

TENSORS = without_norms(LLAMA) | norms("", "", "post_attention_layernorm", "post_feedforward_layernorm")


def _olmo2(config: Config) -> Pieces:
    return Pieces(norms="after", query_key_norm="heads")


def _olmo3(config: Config) -> Pieces:
    kinds = config.get("layer_types") or layer_kinds(config["num_hidden_layers"], 4)
    return Pieces(norms="after", query_key_norm="heads", windows=windows(config, period=4), rotary=tuple(kinds))


FAMILIES = (Family("olmo2", TENSORS, _olmo2), Family("olmo3", TENSORS, _olmo3, reads=("layer_types",)))
