"""Make models of other families for the demo's task: Qwen3.5, Gemma 3, gpt-oss.

    python examples/demo/make_families.py [NAME ...] [--output DIR] [--threads N] [--steps N]

| name | model |
|---|---|
| `qwen3_5_student` | the demo's student as a Qwen3.5 in bf16: a layer of Gated DeltaNet, then the student's layers |
| `gemma3_teacher` | Gemma 3 with windows in every second layer, pre-trained on correct work |
| `gemma3_student` | a smaller one, pre-trained on careless work |
| `gpt_oss_student` | gpt-oss with four experts, windows and sinks, pre-trained on careless work |

The pre-training is that of make_assets.py: the same task, tokenizer, batches and learning rates. The seeds determine
the result, up to rounding. docs/models.md describes a run.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from make_assets import (
    FORGET,
    HERE,
    MAX_POSITIONS,
    VOCAB_SIZE,
    build_tokenizer,
    draw_splits,
    pretrain,
    save,
)
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5TextConfig,
)

WINDOW = 16  # tokens; a question with its answer has about 40
LOCAL = ("sliding_attention", "full_attention")  # of two layers
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512}
LARGE = {"num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL = {"num_hidden_layers": 4, "hidden_size": 96, "num_attention_heads": 2, "num_key_value_heads": 2}
STEPS = 600
RATE = {"lr": 2e-3, "batch": 128}


def new_gemma3(tokenizer: PreTrainedTokenizerFast, shape: dict[str, Any]) -> PreTrainedModel:
    """Return a random Gemma 3 whose layers alternate, beginning with a window."""
    return Gemma3ForCausalLM(Gemma3TextConfig(query_pre_attn_scalar=shape["head_dim"], **_common(tokenizer, shape)))


def new_gpt_oss(tokenizer: PreTrainedTokenizerFast, shape: dict[str, Any]) -> PreTrainedModel:
    """Return a random gpt-oss with four experts, two of them for each token."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    rope = YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    return GptOssForCausalLM(GptOssConfig(**experts, rope_parameters=rope, **_common(tokenizer, shape)))


def _common(tokenizer: PreTrainedTokenizerFast, shape: dict[str, Any]) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_POSITIONS,
        "sliding_window": WINDOW,
        "layer_types": list(LOCAL) * (shape["num_hidden_layers"] // 2),
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **shape,
    }


# fmt: off
PRETRAINED: dict[str, tuple[Any, dict[str, Any]]] = {  # how to build it, and the settings of make_assets.py
    "gemma3_teacher": (new_gemma3, dict(shape=LARGE | {"intermediate_size": 512}, forget=0.0, seed=3, **RATE)),
    "gemma3_student": (new_gemma3, dict(shape=SMALL | {"intermediate_size": 256}, forget=FORGET, seed=4, **RATE)),
    "gpt_oss_student": (new_gpt_oss, dict(shape=SMALL | {"intermediate_size": 128}, forget=FORGET, seed=5, **RATE)),
}
# fmt: on


def hybrid_of(dense: PreTrainedModel) -> PreTrainedModel:
    """Return a Qwen3.5 in bf16 that computes the same as the Qwen3 `dense`, except for rounding and a small linear
    attention."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    sizes = {name: getattr(dense.config, name) for name in (*names, "eos_token_id", "tie_word_embeddings")}
    layers, width = dense.config.num_hidden_layers, dense.config.head_dim
    config = Qwen3_5TextConfig(
        **sizes,
        num_hidden_layers=layers + 1,
        layer_types=["linear_attention"] + ["full_attention"] * layers,
        rope_parameters=dict(dense.config.rope_parameters) | {"partial_rotary_factor": 1.0},
        rms_norm_eps=dense.config.rms_norm_eps,
        max_position_embeddings=dense.config.max_position_embeddings,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,  # what vLLM's kernel for CPUs computes
        linear_value_head_dim=128,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    state = model.state_dict()
    for name, tensor in dense.state_dict().items():
        if name.startswith("model.layers."):
            number, _, rest = name.removeprefix("model.layers.").partition(".")
            name = f"model.layers.{int(number) + 1}.{rest}"
        if name.endswith("norm.weight"):  # norms multiply by 1 + weight
            tensor = tensor - 1
        if name.endswith("q_proj.weight"):  # a query and a gate for each head; the sigmoid of a small gate is a half
            queries = tensor.unflatten(0, (-1, 1, width))
            tensor = torch.cat([queries, 1e-3 * torch.randn_like(queries)], 1).flatten(0, 2)
        if name.endswith("o_proj.weight"):
            tensor = 2 * tensor
        state[name].copy_(tensor)
    for name, tensor in state.items():
        if name.startswith("model.layers.0."):
            if name.endswith(("out_proj.weight", "down_proj.weight")):
                tensor.mul_(1e-2)
            elif name.endswith("layernorm.weight"):
                tensor.copy_(0.1 * torch.randn_like(tensor))
    return model.bfloat16()


def make(name: str, folder: Path, steps: int = STEPS) -> None:
    """Write a model and its tokenizer to `folder`."""
    if name == "qwen3_5_student":
        dense = AutoModelForCausalLM.from_pretrained(HERE / "models/student", dtype=torch.float32)
        save(hybrid_of(dense), AutoTokenizer.from_pretrained(HERE / "models/student"), folder)
        return
    build, spec = PRETRAINED[name]
    tokenizer, (_, val_pairs) = build_tokenizer(), draw_splits()
    save(pretrain(name, {**spec, "steps": steps}, tokenizer, val_pairs, build), tokenizer, folder)


def main() -> None:
    names = ("qwen3_5_student", *PRETRAINED)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(names)}")
    parser.add_argument("--output", type=Path, default=Path("output/families"), help="default: output/families")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps of pre-training (default {STEPS})")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for name in args.names or names:
        if name not in names:
            parser.error(f"unknown model {name}; the models are {', '.join(names)}")
        make(name, args.output / name, args.steps)


if __name__ == "__main__":
    main()
