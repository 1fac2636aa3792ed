"""gpt-oss: attention sinks, windows in every second layer, clipped SwiGLU, and biases in routers and experts.

The released checkpoints store the experts of a layer in stacked tensors, in MXFP4.
"""

from roll_opd.models.families.family_definition import WINDOWED, Config, Family, Pieces, windows
from roll_opd.models.families.parameter_names import EACH_EXPERT, LLAMA, layer

_EXPERT = "mlp.experts.{expert}"
TENSORS = {place: entry for place, entry in LLAMA.items() if not place.startswith("mlp.linear")} | {
    "self_attention.core_attention.sinks": layer("rows", "self_attn.sinks"),
    "mlp.router.weight": layer("replicated", "mlp.router.weight"),
    "mlp.router.bias": layer("replicated", "mlp.router.bias"),
    f"{EACH_EXPERT}.linear_fc1.weight": layer("interleaved_gate_up", f"{_EXPERT}.gate_up_proj"),
    f"{EACH_EXPERT}.linear_fc1.bias": layer("interleaved_gate_up", f"{_EXPERT}.gate_up_proj_bias"),
    f"{EACH_EXPERT}.linear_fc2.weight": layer("transposed_columns", f"{_EXPERT}.down_proj"),
    f"{EACH_EXPERT}.linear_fc2.bias": layer("replicated", f"{_EXPERT}.down_proj_bias"),
}


def _gpt_oss(config: Config) -> Pieces:
    layers, has_bias = config["num_hidden_layers"], bool(config.get("attention_bias", True))
    kinds = config.get("layer_types") or [(WINDOWED, "full_attention")[number % 2] for number in range(layers)]
    return Pieces(
        qkv_bias=has_bias,
        out_bias=has_bias,
        windows=windows({**config, "layer_types": kinds}),
        sinks=True,
        expert_bias=True,
        clipped_swiglu=(config.get("swiglu_limit") or 7.0, config.get("swiglu_alpha") or 1.702),
    )


def _problems(config: Config) -> tuple[str, ...]:
    kinds = config.get("layer_types") or ()
    if all((kind == WINDOWED) == (number % 2 == 0) for number, kind in enumerate(kinds)):
        return ()
    return ("layer_types in config.json should alternate and begin with a window; vLLM ignores any other order",)


FAMILIES = (
    Family(
        "gpt_oss",
        TENSORS,
        _gpt_oss,
        reads=("attention_bias", "layer_types"),
        rope_types=("yarn",),  # vLLM treats all other types as yarn
        has_adapters=False,
        stacks_experts=True,
        reads_mxfp4=True,
        problems=_problems,
    ),
)
