"""Speculation on CPUs: accepted, replaced and added tokens have the distribution of the engine's model."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from roll_opd.inference.cpu_kernels import expanded, expands_all_types

COPIES, VOCABULARY, DRAFTS = 40_000, 7, 2


def test_the_value_of_a_sequence_is_written_to_its_tokens() -> None:
    """For all types that vLLM expands: temperatures, top-p and top-k; against a loop."""
    ends = [0, 2, 2, 5, 6]
    for dtype, values in (
        (torch.float32, [0.5, 9.0, 0.0, 1.5]),
        (torch.int32, [3, 1, 0, 2]),
        (torch.int64, [4, 0, 0, 1]),
    ):
        read = torch.tensor(values, dtype=dtype)
        output = torch.full((ends[-1],), 77, dtype=dtype)
        expanded(output, read, torch.tensor(ends[1:], dtype=torch.int32), 0, 1, 128)
        wanted = [
            value or 1 for value, (start, end) in zip(values, pairwise(ends), strict=True) for _ in range(start, end)
        ]
        assert output.tolist() == wanted


@pytest.mark.slow
@pytest.mark.parametrize("is_model", [False, True], ids=["n-gram", "draft model"])
def test_tokens_after_drafts_have_the_distribution_of_the_model(is_model: bool) -> None:
    """vLLM's rejection sampler with the kernels of an engine, against p = softmax(logits / temperature) of the top-k.

    Each sequence has its own temperature and top-k. A draft of an n-gram is one token, without probabilities.
    """
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    expands_all_types()
    current_platform.register_triton_kernel_overrides()
    torch.manual_seed(0)
    kinds = [(0.6, 3), (1.7, VOCABULARY), (1.0, 5)]
    logits = 2 * torch.randn(len(kinds), DRAFTS, VOCABULARY)
    proposed = torch.randn(len(kinds), DRAFTS, VOCABULARY).softmax(-1)
    if is_model:
        drafts = torch.stack([torch.multinomial(each, COPIES, replacement=True).T for each in proposed])
    else:
        drafts = torch.randint(VOCABULARY, (len(kinds), COPIES, DRAFTS))
    each = len(kinds) * COPIES

    def of_sequences(values: list[Any], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).repeat_interleave(COPIES)

    def of_tokens(rows: torch.Tensor) -> torch.Tensor:
        return rows[:, None].expand(-1, COPIES, -1, -1).reshape(each * DRAFTS, VOCABULARY).contiguous()

    metadata: Any = SimpleNamespace(
        temperature=of_sequences([temperature for temperature, _ in kinds], torch.float32),
        top_k=of_sequences([top_k for _, top_k in kinds], torch.int32),
        top_p=None,
        all_greedy=False,
        all_random=True,
        generators={},
    )
    ends = torch.arange(1, each + 1, dtype=torch.int32) * DRAFTS
    bonus = torch.full((each, 1), VOCABULARY, dtype=torch.int32)
    targets = rejection_sampler.apply_sampling_constraints(of_tokens(logits), ends, metadata)
    found = rejection_sampler.rejection_sample(
        *(drafts.reshape(-1).int(), [DRAFTS] * each, DRAFTS, ends),
        *(of_tokens(proposed) if is_model else None, targets, bonus, metadata),
    ).view(len(kinds), COPIES, DRAFTS + 1)

    for kind, (temperature, top_k) in enumerate(kinds):
        for place in range(DRAFTS):
            lowest = logits[kind, place].topk(top_k).values[-1]
            kept = logits[kind, place].masked_fill(logits[kind, place] < lowest, -torch.inf)
            wanted = (kept / temperature).softmax(-1).double()
            drawn = found[kind, :, place]
            drawn = drawn[drawn >= 0].long()
            counts = torch.bincount(drawn, minlength=VOCABULARY).double()
            expected = len(drawn) * wanted
            assert not counts[wanted == 0].any()
            square = ((counts - expected) ** 2 / expected)[wanted > 0].sum()
            assert len(drawn) > 5000 and square < 40  # chi-square with up to 6 degrees of freedom: 40 has p = 5e-7
        accepted_all = found[kind, :, DRAFTS] >= 0
        assert (found[kind, accepted_all, DRAFTS] == VOCABULARY).all() and accepted_all.any()
