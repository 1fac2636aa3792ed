"""Make models of other families from the example's student: a mixture of experts, a hybrid."""

import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

DEMO = Path(__file__).resolve().parents[2] / "examples/demo"
START = DEMO / "models/student"
sys.path.append(str(DEMO))

from make_families import hybrid_of  # noqa: E402


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
    return save(hybrid_of(AutoModelForCausalLM.from_pretrained(START, dtype=torch.float32)), path)
