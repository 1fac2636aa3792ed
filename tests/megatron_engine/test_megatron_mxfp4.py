"""Experts in MXFP4, read in bf16, against a reader of single bits, and against transformers."""

import json
import math
from pathlib import Path

import torch
from megatron_layouts import VOCABULARY
from safetensors.torch import save_file
from torch import Tensor
from transformers import GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from roll_opd.megatron.weights.fused_experts import expert_source
from roll_opd.models.model_info import read_model

EXPERTS, HIDDEN, WIDTH = 3, 64, 96


def quantised(*rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Random bytes, with scales from the smallest normal bf16 to large ones."""
    torch.manual_seed(columns)
    blocks = torch.randint(0, 256, (*rows, columns // 32, 16), dtype=torch.uint8)
    return blocks, torch.randint(3, 200, (*rows, columns // 32), dtype=torch.uint8)


def naive(blocks: Tensor, scales: Tensor) -> Tensor:
    """Decode number by number: sign, two bits of exponent, one bit of mantissa; 0 has the exponent of 1."""
    found = []
    for block, scale in zip(blocks.flatten(0, -2).tolist(), scales.flatten().tolist(), strict=True):
        for code in (half for byte in block for half in (byte % 16, byte // 16)):
            exponent, mantissa = code // 2 % 4, code % 2
            size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1)
            found.append(math.copysign(size, -1 if code >= 8 else 1) * 2.0 ** (scale - 127))
    return torch.tensor(found, dtype=torch.float64).view(*blocks.shape[:-2], -1)


def test_quantised_experts_are_read_as_a_naive_reader_and_transformers_read_them(tmp_path: Path) -> None:
    config = GptOssConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        num_hidden_layers=1,
        num_local_experts=EXPERTS,
    ).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    stacks = {
        "gate_up_proj": quantised(EXPERTS, 2 * WIDTH, columns=HIDDEN),
        "down_proj": quantised(EXPERTS, HIDDEN, columns=WIDTH),
    }
    prefix = "model.layers.0.mlp.experts"
    tensors = {f"{prefix}.{name}_blocks": blocks for name, (blocks, _) in stacks.items()}
    tensors |= {f"{prefix}.{name}_scales": scales for name, (_, scales) in stacks.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert read_model(tmp_path).parameters == EXPERTS * 3 * HIDDEN * WIDTH
    with expert_source(tmp_path) as source:
        assert sorted(source.names) == sorted(f"{prefix}.{e}.{name}" for e in range(EXPERTS) for name in stacks)
        for name, (blocks, scales) in stacks.items():
            wanted = naive(blocks, scales).transpose(1, 2)
            assert torch.equal(convert_moe_packed_tensors(blocks, scales).double(), wanted)
            for expert in range(EXPERTS):
                rows, columns = source.shape(f"{prefix}.{expert}.{name}")
                assert (rows, columns) == tuple(wanted.shape[1:])
                whole = source.part(f"{prefix}.{expert}.{name}", 0, 0, rows)
                assert whole.dtype is torch.bfloat16 and torch.equal(whole.double(), wanted[expert])
                part = source.part(f"{prefix}.{expert}.{name}", 1, 5, 17)
                assert torch.equal(part.double(), wanted[expert, :, 5:17])
