"""Tiny random models of every architecture on disk."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from megatron_jobs.lora import LORA, LORA_MODELS, LORA_TARGETS
from megatron_layouts import VOCABULARY
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    GptOssConfig,
    LlamaConfig,
    MiniMaxM2Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
)

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.08,
}
DEEP = COMMON | {  # divides by four in every direction
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "tie_word_embeddings": True,
}
EXPERTS = COMMON | {
    "hidden_size": 32,
    "num_key_value_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "tie_word_embeddings": False,
}
LARGE = {  # enough to show in a process's memory
    "vocab_size": 8192,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
# every width is another one, and yarn's two factors differ
LATENT = EXPERTS | {
    "num_experts": None,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 12,
    "routed_scaling_factor": 1.7,
    "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
}
del LATENT["num_experts"]
WINDOW = 7  # shorter than most sequences
# without a padding token, whose embedding transformers does not train
FAMILY = COMMON | {"num_hidden_layers": 4, "tie_word_embeddings": False, "pad_token_id": None, "eos_token_id": 1}
LONGROPE = {  # of a head of 16, of which 12 are rotated
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
}
LOCAL = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
FAMILIES = {
    "smollm3": lambda: SmolLM3Config(**FAMILY, no_rope_layer_interval=3),
    "seed_oss": lambda: SeedOssConfig(**FAMILY, head_dim=24, attention_out_bias=True),
    "olmo2": lambda: Olmo2Config(**FAMILY),
    "olmo3": lambda: Olmo3Config(**FAMILY, **LOCAL, rope_parameters={"full_attention": dict(YARN)}),
    "phi3": lambda: Phi3Config(**FAMILY, sliding_window=WINDOW),
    "phi3_long": lambda: Phi3Config(**FAMILY, original_max_position_embeddings=128, rope_parameters=dict(LONGROPE)),
    "glm4": lambda: Glm4Config(**FAMILY, head_dim=24, attention_bias=True),
    "glm4_moe": lambda: Glm4MoeConfig(
        **FAMILY,
        head_dim=24,
        attention_bias=True,
        use_qk_norm=True,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        moe_intermediate_size=24,
        routed_scaling_factor=1.7,
        num_mtp_layers=0,
    ),
    "gemma2": lambda: Gemma2Config(
        **{**FAMILY, "tie_word_embeddings": True},
        **LOCAL,
        head_dim=24,
        query_pre_attn_scalar=20,
        attn_logit_softcapping=0.5,
        final_logit_softcapping=1.5,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **{**FAMILY, "tie_word_embeddings": True}, **LOCAL, head_dim=24, query_pre_attn_scalar=20
    ),
}
EXPERT_FAMILIES = {
    "gpt_oss": lambda: GptOssConfig(
        **FAMILY,
        **LOCAL,
        head_dim=24,
        num_local_experts=4,
        num_experts_per_tok=2,
        swiglu_limit=0.7,
        rope_parameters=YARN | {"truncate": False},
    ),
    "minimax_m2": lambda: MiniMaxM2Config(
        **FAMILY, head_dim=24, num_local_experts=4, num_experts_per_tok=2, rotary_dim=12
    ),
}
HYBRID = {  # every width is another one; three value heads per key head
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "num_key_value_heads": 2,
    "head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 14,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
SHARED = {"shared_expert_intermediate_size": 40}
CONFIGS = {
    "qwen3": lambda: Qwen3Config(**COMMON, head_dim=32, tie_word_embeddings=False),
    "qwen3_tied": lambda: Qwen3Config(**COMMON, head_dim=32, tie_word_embeddings=True),
    "qwen2_tied": lambda: Qwen2Config(**COMMON, tie_word_embeddings=True),
    "llama": lambda: LlamaConfig(**COMMON, head_dim=16, tie_word_embeddings=False),
    "wide": lambda: LlamaConfig(
        **{**COMMON, "vocab_size": VOCABULARY + 30, "hidden_size": 48}, head_dim=16, tie_word_embeddings=False
    ),
    "mistral": lambda: MistralConfig(**COMMON, head_dim=24, tie_word_embeddings=False, sliding_window=None),
    "llama3": lambda: LlamaConfig(**COMMON, head_dim=16, tie_word_embeddings=False, rope_parameters=LLAMA3),
    "qwen3_moe": lambda: Qwen3MoeConfig(**EXPERTS, head_dim=16, norm_topk_prob=True),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **{**EXPERTS, "num_hidden_layers": 4}, shared_expert_intermediate_size=40, mlp_only_layers=[1]
    ),
    "deepseek_v3": lambda: DeepseekV3Config(
        **{**LATENT, "num_hidden_layers": 4}, q_lora_rank=18, norm_topk_prob=True, num_nextn_predict_layers=0
    ),
    "deepseek_v2": lambda: DeepseekV2Config(
        **LATENT, q_lora_rank=None, topk_method="group_limited_greedy", norm_topk_prob=False
    ),
    "mixtral": lambda: MixtralConfig(**{**EXPERTS, "intermediate_size": 24}, sliding_window=None),
    "qwen3_next": lambda: Qwen3NextConfig(**EXPERTS | HYBRID | SHARED, mlp_only_layers=[2]),
    "qwen3_5": lambda: Qwen3_5TextConfig(**COMMON | HYBRID, linear_conv_kernel_dim=3, tie_word_embeddings=True),
    "qwen3_5_moe": lambda: Qwen3_5MoeTextConfig(**EXPERTS | HYBRID | SHARED),
    "deep": lambda: Qwen3Config(**DEEP),
    "deep_valued": lambda: Qwen3Config(**DEEP, num_labels=1),
    "valued": lambda: Qwen3Config(**COMMON, head_dim=32, tie_word_embeddings=True, num_labels=1),
    "large": lambda: Qwen3Config(**LARGE, head_dim=64, intermediate_size=1536),
    "large_moe": lambda: Qwen3MoeConfig(**LARGE, head_dim=64, num_experts=16, moe_intermediate_size=128),
    "yarn": lambda: Qwen3Config(**COMMON, head_dim=16, tie_word_embeddings=True, rope_parameters=YARN),
    **FAMILIES,
    **EXPERT_FAMILIES,
}


def save_models(directory: Path) -> None:
    """Write every model and the adapters."""
    for seed, (name, config) in enumerate(CONFIGS.items()):
        save_random(directory / name, config(), seed, valued=name.endswith("valued"))
    for name in ("qwen3_5", "qwen3_5_moe"):
        save_multimodal(directory / name, directory / f"{name}_multimodal")
    for name in ("deepseek_v3", "glm4_moe", "deep"):
        save_predicting(directory / name, directory / f"{name}_mtp")
    for kind, targets in LORA_TARGETS.items():
        save_adapter(directory / f"adapter-{len(targets)}", str(directory / LORA_MODELS[kind]), targets, **LORA)


def save_random(path: Path, config: PreTrainedConfig, seed: int, *, valued: bool = False) -> None:
    """Write a random model in f32, with norms and biases that differ from their initial ones and zeros."""
    torch.manual_seed(seed)
    kind = AutoModelForSequenceClassification if valued else AutoModelForCausalLM
    model = kind.from_config(config).float()
    with torch.no_grad():
        biases = [buffer for key, buffer in model.named_buffers() if key.endswith("e_score_correction_bias")]
        stacked = {id(each) for key, each in model.named_parameters() if key.endswith("_bias")}  # of experts
        for parameter in (*model.parameters(), *biases):
            if parameter.ndim == 1 or id(parameter) in stacked:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(path)


def save_multimodal(source: Path, path: Path) -> None:
    """Write a text model in the form of Qwen3.5 releases: other names, fused experts, a vision part, an MTP head."""
    config = json.loads((source / "config.json").read_text())
    path.mkdir()
    kind, tied = config["model_type"].removesuffix("_text"), config["tie_word_embeddings"]
    whole = {"model_type": kind, "text_config": config, "vision_config": {"depth": 1}, "tie_word_embeddings": tied}
    (path / "config.json").write_text(json.dumps(whole))
    torch.manual_seed(0)
    tensors = {
        name.replace("model.", "model.language_model.", 1) if ".language_model." not in name else name: tensor
        for name, tensor in load_file(source / "model.safetensors").items()
    }
    for block in {name.partition(".experts.")[0] for name in tensors if ".experts." in name}:
        each = [
            {part: tensors.pop(f"{block}.experts.{number}.{part}_proj.weight") for part in ("gate", "up", "down")}
            for number in range(config["num_experts"])
        ]
        gates = [torch.cat([expert["gate"], expert["up"]]) for expert in each]
        tensors[f"{block}.experts.gate_up_proj"] = torch.stack(gates)
        tensors[f"{block}.experts.down_proj"] = torch.stack([expert["down"] for expert in each])
    tensors["model.visual.blocks.0.norm1.weight"] = torch.randn(12)
    tensors["model.visual.patch_embed.proj.weight"] = torch.randn(4, 3, 2, 2, 2).bfloat16()
    tensors["mtp.layers.0.mlp.up_proj.weight"] = torch.randn(6, 4).bfloat16()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def save_predicting(source: Path, path: Path) -> None:
    """Write a model with some tensors of a layer of multi-token prediction after the last one, in several dtypes."""
    shutil.copytree(source, path)
    config = json.loads((source / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    torch.manual_seed(0)
    layer = f"model.layers.{config['num_hidden_layers']}"
    extra = {
        "eh_proj.weight": torch.randn(6, 12).bfloat16(),
        "enorm.weight": torch.randn(6),
        "embed_tokens.weight": torch.randn(10, 6).bfloat16(),
        "mlp.experts.0.gate_proj.weight": torch.randn(4, 6).half(),
        "shared_head.scale": torch.tensor(0.3),  # without dimensions
    }
    tensors = load_file(source / "model.safetensors") | {f"{layer}.{name}": tensor for name, tensor in extra.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def save_adapter(path: Path, base: str, targets: Sequence[str], rank: int, alpha: float) -> None:
    """Write an adapter without zero matrices, in peft's format."""
    torch.manual_seed(len(targets))
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets), task_type="CAUSAL_LM")
    weights = load_file(f"{base}/model.safetensors")
    if any(".experts." in name for name in weights) and "down_proj" in targets:  # peft fuses experts
        modules = {name.removesuffix(".weight"): tensor.shape for name, tensor in weights.items()}
        shapes = {name: shape for name, shape in modules.items() if name.rpartition(".")[2] in targets}
        of = {f"base_model.model.{name}.lora_A.weight": (rank, shape[1]) for name, shape in shapes.items()}
        of |= {f"base_model.model.{name}.lora_B.weight": (shape[0], rank) for name, shape in shapes.items()}
        path.mkdir()
        save_file({name: 0.1 * torch.randn(shape) for name, shape in of.items()}, path / "adapter_model.safetensors")
        config.save_pretrained(path)
        return
    model = get_peft_model(load(base), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(path)


def load_adapted(base: str, adapter: Path, *, learns: bool = False) -> PeftModel:
    return PeftModel.from_pretrained(load(base), adapter, is_trainable=learns)


def load(path: str | Path) -> PreTrainedModel:
    caps_scores = getattr(AutoConfig.from_pretrained(path), "attn_logit_softcapping", None) is not None
    kernel = {"attn_implementation": "eager"} if caps_scores else {}  # others ignore the cap
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **kernel)


def load_critic(path: str | Path) -> PreTrainedModel:
    return AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype=torch.float32)
