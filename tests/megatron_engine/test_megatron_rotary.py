"""Rotary embeddings of packs: megatron-core's bits, and its gradient's."""

import json
import os
import subprocess
import sys

SCRIPT = """
import json
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from megatron.core.transformer import TransformerConfig
from roll_opd.megatron import rotary

rotary.stock = None  # what is tested here never falls back
found = []
for heads, width, lengths, dtype in (
    (4, 32, (5, 64, 1, 26), torch.float32), (3, 8, (31, 33), torch.float32), (2, 64, (96,), torch.bfloat16)
):
    torch.manual_seed(0)
    config = TransformerConfig(num_layers=1, hidden_size=heads * width, num_attention_heads=heads)
    bounds = torch.tensor([0, sum(lengths)], dtype=torch.int32)
    half = torch.arange(101.0)[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
    freqs = torch.cat([half, half], -1)[:, None, None]
    t = torch.randn(sum(lengths), heads, width + 3, dtype=dtype)[..., :width]
    gradient = torch.randn(t.shape, dtype=dtype)
    freqs = torch.cat([freqs[:length] for length in lengths])
    mine, other = t.clone().requires_grad_(), t.clone().requires_grad_()
    turned = rotary.apply_rotary(mine, freqs, config, bounds)
    wanted = _apply_rotary_pos_emb_bshd(other.unsqueeze(1), freqs).squeeze(1)
    turned.backward(gradient)
    wanted.backward(gradient)
    again = rotary.apply_rotary(mine, freqs, config, bounds)
    other_freqs = rotary.apply_rotary(mine, freqs * 2, config, bounds)
    found.append([
        torch.equal(turned, wanted), torch.equal(mine.grad, other.grad), torch.equal(turned, again),
        not torch.equal(turned, other_freqs),
    ])
print(json.dumps(found))
"""


def test_bits_and_gradients_are_megatron_cores() -> None:
    # one thread, as ranks have: of two that wait for a busy machine, sines have other last bits now and then
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=alone)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [[True] * 4] * 3
