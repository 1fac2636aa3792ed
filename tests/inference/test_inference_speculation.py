"""Speculation on CPUs: accepted, replaced and added tokens have the distribution of the engine's model."""

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from inference_models import Running, buckets_of, hf_logits, make_model, running, save_model, update_weights

from roll_opd.config.plan import SamplingPlan
from roll_opd.inference.cpu_kernels import expanded, expands_all_types

COPIES, VOCABULARY, DRAFTS = 40_000, 7, 2
PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6, 2 + number] for number in range(64)]
SEEDS = list(range(len(PROMPTS)))
SAMPLING, GREEDY = SamplingPlan(max_new_tokens=40), SamplingPlan(max_new_tokens=40, temperature=0.0)


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


@pytest.fixture(scope="module", params=["n-gram", "draft model"])
def speculating(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Running]]:
    """An engine of model 0, whose draft model is an earlier export of it."""
    place = Path(tmp_path_factory.mktemp("speculating"))
    path, earlier = (save_model(make_model(0), place / name) for name in ("model", "earlier"))
    config = {
        "n-gram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 2},
        "draft model": {"model": earlier},
    }
    options = {"speculative_config": {"num_speculative_tokens": 3, **config[request.param]}}
    for engine in running(path, engine_args=options, on_update="continue"):
        yield request.param, engine


def surprise(prompts: list[list[int]], completions: list[Any], models: list[Any]) -> float:
    """Check the log-prob of each token under the model of its version; return Σ (log p(x) − E[log p]) in deviations."""
    found, variance = 0.0, 0.0
    for prompt, completion in zip(prompts, completions, strict=True):
        whole, start = [*prompt, *completion.tokens.tolist()], len(prompt) - 1
        assert sum(length for _, length in completion.versions) == len(completion.tokens)
        for version, length in completion.versions:
            logprobs = torch.log_softmax(hf_logits(models[version % len(models)], whole)[start : start + length], -1)
            first = start - len(prompt) + 1
            own = logprobs.gather(1, torch.tensor(completion.tokens[first : first + length])[:, None])[:, 0]
            np.testing.assert_allclose(completion.logprobs[first : first + length], own.numpy(), atol=1e-4)
            mean = (logprobs.exp() * logprobs).sum(1)
            found += float((own - mean).sum())
            variance += float((logprobs.exp() * (logprobs - mean[:, None]) ** 2).sum())
            start += length
    return found / variance**0.5


@pytest.mark.slow
@pytest.mark.nightly
def test_samples_are_those_of_the_weights_of_their_versions(speculating: tuple[str, Running]) -> None:
    """Before, during and after weight updates."""
    _, engine = speculating
    models = [make_model(0), make_model(1)]
    assert abs(surprise(PROMPTS, engine.batch(PROMPTS, SAMPLING, SEEDS), models)) < 5
    proposed, accepted = engine.engine.take_drafts()
    assert proposed > 500 and 0 < accepted < proposed and engine.engine.take_drafts() == (0, 0)

    async def under_updates() -> list[Any]:
        found = {}

        async def answer() -> None:
            async for index, completion in engine.engine.generate_batch(PROMPTS, SAMPLING, SEEDS):
                found[index] = completion

        answering = asyncio.create_task(answer())
        for version in (1, 2, 3):
            await asyncio.sleep(0.1)
            await update_weights(engine.engine, buckets_of(models[version % 2]), version)
        await answering
        return [found[index] for index in sorted(found)]

    disturbed = engine.run(under_updates())
    assert any(len(completion.versions) > 1 for completion in disturbed)
    assert abs(surprise(PROMPTS, disturbed, models)) < 5
    assert abs(surprise(PROMPTS, engine.batch(PROMPTS, SAMPLING, SEEDS), models)) < 5


@pytest.mark.slow
@pytest.mark.nightly
def test_a_draft_model_keeps_its_weights(speculating: tuple[str, Running]) -> None:
    """It proposes what model 0 would draw: greedy answers of model 0 accept it, also after an update to model 1."""
    kind, engine = speculating
    if kind != "draft model":
        pytest.skip("an n-gram has no weights")
    shares = []
    for version, model in ((10, 0), (11, 1), (12, 0)):
        engine.run(update_weights(engine.engine, buckets_of(make_model(model)), version))
        engine.engine.take_drafts()
        engine.batch(PROMPTS, GREEDY, SEEDS)
        proposed, accepted = engine.engine.take_drafts()
        shares.append(accepted / proposed)
    assert shares[0] > 0.95 and shares[1] < 0.3 and shares[2] > 0.95
