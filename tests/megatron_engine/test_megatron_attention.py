"""Attention over packs in which sequences hold a prefix in common, against plain attention over each sequence."""

import json
import subprocess
import sys

SCRIPT = """
import itertools, json, math
import numpy as np
import torch
from megatron.core.transformer import TransformerConfig
from roll_opd.megatron.attention import PackedAttention, with_expanded_packs
from roll_opd.config.plan import MicroBatchLimits
from roll_opd.samples.sharding import relatives
from roll_opd.megatron.packing import pack
from roll_opd.samples.sample import Sample


class Plain(torch.nn.Module):
    def forward(self, query, key, value, attention_mask, packed_seq_params):
        outs = []
        for start, end in itertools.pairwise(packed_seq_params.cu_seqlens_q.tolist()):
            q, k, v = (t[start:end] for t in (query, key, value))
            k, v = (t.repeat_interleave(q.size(1) // t.size(1), 1) for t in (k, v))
            weights = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.size(-1))
            hidden = torch.ones(end - start, end - start).triu(1).bool()  # later keys, and those before the window
            if packed.window:
                hidden |= torch.ones_like(hidden).tril(-packed.window)
            weights = weights.masked_fill(hidden, -math.inf).softmax(-1)
            outs.append(torch.einsum("hqk,khd->qhd", weights, v).flatten(1))
        return torch.cat(outs)


config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, num_query_groups=2, attention_dropout=0)
packed, plain = PackedAttention(config, 1, None, "self"), with_expanded_packs(Plain)()
rng, found = np.random.default_rng(0), []
CASES = [(7, (3, 0, 90)), (40, (1, 2, 3, 70)), (1, (5,))], [(3, (4,)), (5, (6,))], [(64, (32, 32, 32))]
for packed.window, shapes in itertools.product((0, 3, 33), CASES):
    samples = []
    for prompt, responses in shapes:
        tokens = rng.integers(0, 9, prompt)
        samples += [Sample(np.concatenate([tokens, rng.integers(0, 9, r)]), prompt, {}) for r in responses]
    if len(shapes) == 1:  # a conversation goes on, and another one branches off
        whole = samples[1].tokens
        more = [np.concatenate([whole, rng.integers(0, 9, 9)]), np.concatenate([whole[:70], rng.integers(0, 9, 40)])]
        samples += [Sample(more[0], len(whole) + 4, {}), Sample(more[1], 90, {})]
    samples = [samples[n] for n in rng.permutation(len(samples))]
    units = relatives([(sample.tokens, sample.prompt_length) for sample in samples], 1, MicroBatchLimits())
    samples = [samples[n] for unit in units for n in unit.numbers]
    batch = pack(samples, torch.device("cpu"), 32, share_prefixes=True)
    apart = pack(samples, torch.device("cpu"), 32)
    for one in (batch, apart):  # the tokens at the places of every sequence, and those before, are its own
        at = one.targets_m.split(one.lengths)
        before = one.tokens_n[one.before_m].split(one.lengths)
        for sample, own, earlier in zip(samples, at, before):
            assert own.tolist() == sample.tokens[sample.prompt_length :].tolist()
            assert earlier.tolist() == sample.tokens[sample.prompt_length - 1 : -1].tolist()
    torch.manual_seed(0)
    parts = [torch.randn(len(batch.tokens_n), heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    other = [part.detach().clone().requires_grad_() for part in parts]
    mine = packed(*parts, None, packed_seq_params=batch.sequences)
    theirs = plain(*other, None, packed_seq_params=batch.sequences)
    places = batch.sequences.places_X
    places = torch.arange(len(batch.tokens_n)) if places is None else places
    real = places[: batch.sequences.bounds[len(samples)]].unique()
    gradient = torch.randn(len(real), 32)
    mine[real].backward(gradient)
    theirs[real].backward(gradient)
    found.append({
        "saved": len(apart.tokens_n) - len(batch.tokens_n),
        "difference": (mine[real] - theirs[real]).abs().max().item(),
        "of gradients": max((a.grad - b.grad).abs().max().item() for a, b in zip(parts, other)),
    })
print(json.dumps(found))
"""


def test_sequences_that_share_their_prompt_attend_as_if_each_were_alone() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert [case["saved"] for case in found] == [128, 0, 288] * 3  # without a window, and with two
    for case in found:
        assert case["difference"] < 1e-6 and case["of gradients"] < 1e-5
