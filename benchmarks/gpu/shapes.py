"""Models of Qwen3's shapes with random weights, and the sequences and sizes with which each is measured."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCAB = 151_936


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

    def config(self) -> dict[str, Any]:
        """Return the transformers configuration of this shape."""
        return {
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


SHAPES = {
    "tiny": Shape(2, 64, 160, 4, 2, 16, True, vocab=307, sequences=4, length=48, pack=96),
    "small": Shape(2, 64, 160, 4, 2, 32, True, vocab=320),  # heads as vLLM's attention on CPUs takes them
    "0.6B": Shape(28, 1024, 3072, 16, 8, 128, True),
    "1.7B": Shape(28, 2048, 6144, 16, 8, 128, True),
    "4B": Shape(36, 2560, 9728, 32, 8, 128, True),
    "8B": Shape(36, 4096, 12_288, 32, 8, 128, False),
}


def make_model(directory: Path, shape: Shape, seed: int, device: str) -> Path:
    """Write a model directory in bf16, without a tokenizer; return the directory."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(seed)
    with torch.device(device):
        model = Qwen3ForCausalLM(Qwen3Config(**shape.config()))
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory
