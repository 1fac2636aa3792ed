"""The gated delta rule on a GPU: the kernels of flash-linear-attention and torch's chunked form.

    python benchmarks/gpu/delta_kernels.py [--device cpu] [--tokens 16384] [--json OUT]

Both are compared with the recurrence in f64, outputs and gradients, over a pack of sequences of different lengths.
Then forward and backward passes are timed over sequences of 2,048 tokens. Without flash-linear-attention, only torch's
form is measured. If flash-linear-attention has no backward pass with the installed Triton, the engine trains with
torch's form, and the benchmark measures what the engine does.

Legend: X packed tokens, G key heads, R value heads per key head, K width of keys and values.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from roll_opd.megatron import gated_delta_net

LENGTHS = (200, 1, 64, 130, 65, 17)  # compared
ROW = 2048  # tokens of a timed sequence
NAMES = ("out", "query", "key", "value", "log_decay", "beta")
Rule = Callable[..., Tensor]


def main() -> int:
    """Print the differences and the times as one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--width", type=int, default=128, help="of a head's queries, keys and values")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    kernel = gated_delta_net._fla_kernel() if options.device == "cuda" else None
    rules: dict[str, Rule] = {"torch": torch_rule}
    if kernel is not None:
        rules["fla"] = gated_delta_net.gated_delta_rule
    found: dict[str, Any] = {"device": options.device, "differences": {}}
    for dtype in (torch.bfloat16, torch.float32):
        given = inputs(LENGTHS, options.heads, 1, options.width, dtype, options.device)
        wanted = gradients(recurrence, [each.double() for each in given], LENGTHS)
        for name, rule in rules.items():
            if name != "fla" or dtype is torch.bfloat16:  # in f32 the engine uses torch's form
                found["differences"][f"{name} {str(dtype)[6:]}"] = compared(rule, given, wanted)
    found["speed"] = {name: timed(rule, options) for name, rule in rules.items()}
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def inputs(lengths: Sequence[int], groups: int, each: int, width: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Return random queries, keys, values, log-decays and betas; the last two are f32."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(sum(lengths), *shape, generator=generator, device=device)

    query, key, value = random(groups, width), random(groups, width), random(groups, each, width)
    speeds = torch.tensor([0.02, 1.0], device=device).repeat(groups * each)[: groups * each]  # slow and fast decay
    decay = -random(groups, each).exp() * speeds.view(groups, each)
    return [*(part.to(dtype) for part in (query, key, value)), decay, random(groups, each).sigmoid()]


def rows(lengths: Sequence[int], device: torch.device) -> gated_delta_net.SequenceRows:
    return gated_delta_net.sequence_rows(list(itertools.accumulate(lengths, initial=0)), device)


def torch_rule(*given: Any) -> Tensor:
    """Return the outputs of torch's chunked form, as without flash-linear-attention."""
    kept, gated_delta_net._fla_kernel = gated_delta_net._fla_kernel, lambda: None  # type: ignore[assignment]
    try:
        return gated_delta_net.gated_delta_rule(*given)
    finally:
        gated_delta_net._fla_kernel = kept


def recurrence(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, sequences: Any) -> Tensor:
    """Return the outputs, one token after another, from the definition."""
    query, key = (x / (x.square().sum(-1, keepdim=True) + gated_delta_net.NORM_EPSILON).sqrt() for x in (query, key))
    out = []
    for start, end in itertools.pairwise(sequences.bounds.tolist()):
        state = value.new_zeros(*value.shape[1:3], query.size(-1), value.size(-1))
        for t in range(start, end):
            state = state * decay[t].exp()[..., None, None]
            k = key[t, :, None, :, None]
            state = state + k * (beta[t][..., None] * (value[t] - (k * state).sum(-2))).unsqueeze(-2)
            out.append((query[t, :, None, :, None] / query.size(-1) ** 0.5 * state).sum(-2))
    return torch.stack(out)


def gradients(rule: Rule, given: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
    """Return the outputs and the gradients of a weighted sum of the outputs, in f64."""
    leaves = [each.detach().clone().requires_grad_() for each in given]
    out = rule(*leaves, rows(lengths, leaves[0].device))
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    (out.double() * weights.double()).sum().backward()
    return [out.detach().double(), *(each.grad.double() for each in leaves if each.grad is not None)]


def compared(rule: Rule, given: Sequence[Tensor], wanted: Sequence[Tensor]) -> dict[str, Any]:
    """Return relative differences, and whether each sequence alone gives the bits that it has in the pack."""
    found = gradients(rule, given, LENGTHS)
    relative = {
        name: ((mine - exact).norm() / exact.norm()).item()
        for name, mine, exact in zip(NAMES, found, wanted, strict=True)
    }
    ends = list(itertools.accumulate(LENGTHS, initial=0))
    with torch.no_grad():
        alone = [
            rule(*(each[start:end] for each in given), rows([end - start], given[0].device))
            for start, end in itertools.pairwise(ends)
        ]
        packed = rule(*given, rows(LENGTHS, given[0].device)).double()
    away = (torch.cat(alone).double() - packed).abs().max().item()
    forward = ((packed - wanted[0]).norm() / wanted[0].norm()).item()
    return {**relative, "out without gradients": forward, "largest difference of a sequence alone": away}


def timed(rule: Rule, options: argparse.Namespace) -> dict[str, float | None]:
    """Return seconds of a forward pass, and of a forward and a backward pass, with the peak of added memory."""
    lengths = [ROW] * (options.tokens // ROW) or [options.tokens]
    given = inputs(lengths, options.heads, 1, options.width, torch.bfloat16, options.device)
    sequences = rows(lengths, given[0].device)
    leaves = [part.requires_grad_() for part in given]
    on_gpu = options.device == "cuda"

    def forward() -> None:
        with torch.no_grad():
            rule(*leaves, sequences)

    def both() -> None:
        rule(*leaves, sequences).sum().backward()

    def seconds(call: Callable[[], None]) -> float:
        taken = []
        for _ in range(4):
            if on_gpu:
                torch.cuda.synchronize()
            began = time.perf_counter()
            call()
            if on_gpu:
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - began)
        return median(taken[1:])

    found: dict[str, float | None] = {"tokens": sum(lengths), "forward": seconds(forward)}
    before = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    found["both"] = seconds(both)
    found["extra bytes"] = torch.cuda.max_memory_allocated() - before if on_gpu else None
    return found


if __name__ == "__main__":
    sys.exit(main())
