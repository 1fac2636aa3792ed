"""Models with random weights and the sizes of their batches: Qwen3's shapes, and small models of other families."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCAB = 151_936
DEMO = Path(__file__).resolve().parents[2] / "examples/demo/models/student"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True)
class Shape:
    """Sizes in config.json, and the batches that are run with them."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    vocab: int = VOCAB
    sequences: int = 16  # of an update
    length: int = 4096  # tokens of each
    pack: int = 16_384  # tokens of a micro-batch
    family: str = "qwen3"  # model_type
    settings: Mapping[str, Any] = field(default_factory=dict)  # of config.json

    def config(self) -> dict[str, Any]:
        """Return the transformers configuration of this shape."""
        sizes = {
            "vocab_size": self.vocab,
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": 40_960,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        }
        return sizes | dict(self.settings)


def _small(family: str, *more: Mapping[str, Any], head_dim: int = 32, tied: bool = False) -> Shape:
    """Return a shape of four layers, whose weights are larger than Hugging Face's initial ones."""
    settings: dict[str, Any] = {"initializer_range": 0.08, "max_position_embeddings": 256}
    settings |= {"pad_token_id": None, "eos_token_id": 1}  # transformers does not train a padding token
    for each in more:
        settings |= each
    batch = {"vocab": 320, "sequences": 4, "length": 192, "pack": 384}
    return Shape(4, 64, 96, 4, 2, head_dim, tied, **batch, family=family, settings=settings)


WINDOWS = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
GEMMA = {"query_pre_attn_scalar": 40, "rope_parameters": None}  # the default ropes, by layer
GATED_DELTA = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}
FAMILIES = {
    "gemma2": _small(
        "gemma2", WINDOWS, GEMMA, {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 1.5}, tied=True
    ),
    "gemma3": _small("gemma3_text", WINDOWS, GEMMA, head_dim=48, tied=True),
    "gpt_oss": _small(
        "gpt_oss",
        WINDOWS,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 7.0, "intermediate_size": 64},
        {"rope_parameters": YARN | {"truncate": False}},
    ),
    "glm4_moe": _small("glm4_moe", ROUTED, {"n_routed_experts": 8, "n_group": 2, "use_qk_norm": True}),
    "qwen3_moe": _small("qwen3_moe", ROUTED, {"num_experts": 8, "norm_topk_prob": True}),
    "phi3": _small("phi3", {"sliding_window": 64}),
    "olmo3": _small("olmo3", WINDOWS, {"rope_parameters": {"full_attention": YARN}}),
    "qwen3_next": _small("qwen3_next", ROUTED, GATED_DELTA, {"num_experts": 4, "shared_expert_intermediate_size": 32}),
    "qwen3_5": _small("qwen3_5_text", GATED_DELTA, tied=True),
}
HYBRID_06B = {  # of 0.6 B parameters without the embedding: three Gated DeltaNet layers to each attention layer
    **GATED_DELTA,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 6,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}

SHAPES = {
    "tiny": Shape(2, 64, 160, 4, 2, 16, True, vocab=307, sequences=4, length=48, pack=96),
    "small": Shape(2, 64, 160, 4, 2, 32, True, vocab=320),  # heads as vLLM's attention on CPUs takes them
    "0.6B": Shape(28, 1024, 3072, 16, 8, 128, True),
    "1.7B": Shape(28, 2048, 6144, 16, 8, 128, True),
    "4B": Shape(36, 2560, 9728, 32, 8, 128, True),
    "8B": Shape(36, 4096, 12_288, 32, 8, 128, False),
    "hybrid": Shape(24, 1024, 3584, 8, 2, 256, True, family="qwen3_5_text", settings=HYBRID_06B),
    **FAMILIES,
}


def make_model(directory: Path, shape: Shape, seed: int, device: str) -> Path:
    """Write a model directory in bf16, without a tokenizer; return the directory.

    In other families than Qwen3, norms, biases and attention sinks differ from their initial ones and zeros.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(shape.family, **shape.config()))
    vectors = [each for each in model.parameters() if each.ndim == 1] if shape.family != "qwen3" else []
    with torch.no_grad():
        for each in vectors:
            each.add_(0.3 * torch.randn_like(each))
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


def make_served_model(directory: Path, shape: Shape, seed: int, device: str) -> Path:
    """Write a model that engines can load, with the demo's tokenizer padded to its vocabulary; return `directory`."""
    make_model(directory, shape, seed, device)
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    special = {one["content"]: one["id"] for one in tokenizer["added_tokens"]}
    taken = {*special.values(), *tokenizer["model"]["vocab"].values()}
    # words that occur in no text; with random weights, a model mostly generates these, and seldom the end token
    tokenizer["model"]["vocab"] |= {f"filler{number}": number for number in range(shape.vocab) if number not in taken}
    for file in TOKENIZER_FILES:
        shutil.copyfile(DEMO / file, directory / file)
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    ends = {"eos_token_id": special[settings["eos_token"]], "pad_token_id": special[settings["pad_token"]]}
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"bos_token_id": None} | ends, indent=1))
    (directory / "generation_config.json").write_text(json.dumps(ends))
    return directory
