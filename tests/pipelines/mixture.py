"""Make models of other families from the example's student: a mixture of experts, a hybrid."""

import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3_5TextConfig, Qwen3MoeConfig

START = Path(__file__).resolve().parents[2] / "examples/demo/models/student"


def save(model: PreTrainedModel, path: Path) -> Path:
    """Save `model` with the tokenizer of the example's student."""
    model.save_pretrained(path)
    for file in START.iterdir():
        if file.name not in ("config.json", "model.safetensors", "README.md"):
            shutil.copy(file, path)
    return path


def save_mixture(path: Path) -> Path:
    """Save a model with four experts like the student's MLP, whose router logits differ only by rounding."""
    dense = AutoModelForCausalLM.from_pretrained(START, dtype=torch.float32)
    shared = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )
    sizes = {name: getattr(dense.config, name) for name in (*shared, "eos_token_id", "tie_word_embeddings")}
    width = dense.config.intermediate_size
    config = Qwen3MoeConfig(**sizes, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=width)
    config.norm_topk_prob = True
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    model.load_state_dict(dense.state_dict(), strict=False)
    with torch.no_grad():
        for layer, old in zip(model.model.layers, dense.model.layers, strict=True):
            for expert in range(4):
                for new, parts in (
                    (layer.mlp.experts.gate_up_proj, (old.mlp.gate_proj.weight, old.mlp.up_proj.weight)),
                    (layer.mlp.experts.down_proj, (old.mlp.down_proj.weight,)),
                ):
                    new[expert] = torch.cat(parts) * (1 + 0.1 * torch.randn_like(new[expert]))
            row = 0.02 * torch.randn(config.hidden_size)
            layer.mlp.gate.weight.copy_(row * (1 + 1e-7 * torch.randn(4, config.hidden_size)))
    return save(model, path)


def save_hybrid(path: Path) -> Path:
    """Save a Qwen3.5 in bf16 that computes the same as the student, except for rounding and a small linear
    attention."""
    dense = AutoModelForCausalLM.from_pretrained(START, dtype=torch.float32)
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
    return save(model.bfloat16(), path)
