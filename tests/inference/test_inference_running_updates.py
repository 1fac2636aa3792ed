"""Weight updates during requests: versions of tokens, interrupted answers, and no stale cache."""

import asyncio
import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inference_models import Running, buckets_of, make_model, running, save_model, update_weights

from roll_opd.config.plan import SamplingPlan

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

SAMPLING = SamplingPlan(max_new_tokens=60)
GREEDY = SamplingPlan(max_new_tokens=12, temperature=0.0)
PROMPTS = [[5, 6, 7, 8 + number % 3] for number in range(64)]
VERSIONS = count(1)


@pytest.fixture(scope="module", params=["wait", "continue"])
def updated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Running]]:
    path = save_model(make_model(0), Path(tmp_path_factory.mktemp("updated")))
    for engine in running(path, on_update=request.param):
        yield request.param, engine


async def under_updates(engine: Any, models: list[Any], updates: int, seed: int) -> list[Any]:
    """Answers to 64 prompts, interrupted by updates at random moments."""
    rng, found = random.Random(seed), {}

    async def answer() -> None:
        async for index, completion in engine.generate_batch(PROMPTS, SAMPLING, list(range(len(PROMPTS)))):
            found[index] = completion

    answering = asyncio.create_task(answer())
    for number in range(updates):
        await asyncio.sleep(0.02 * rng.random())
        await update_weights(engine, buckets_of(models[number % len(models)]), next(VERSIONS))
    await answering
    return [found[index] for index in sorted(found)]


def test_interrupted_answers_are_those_of_uninterrupted_ones(updated: tuple[str, Running]) -> None:
    """With unchanged weights and the same seeds: no token lost or doubled, the same budget and end."""
    mode, engine = updated
    model = make_model(0)
    engine.run(update_weights(engine.engine, buckets_of(model), next(VERSIONS)))
    expected = engine.batch(PROMPTS, SAMPLING, list(range(len(PROMPTS))))
    several = 0
    for seed in range(4):
        found = engine.run(under_updates(engine.engine, [model], 5, seed))
        for completion, undisturbed in zip(found, expected, strict=True):
            assert completion.tokens.tolist() == undisturbed.tokens.tolist()
            assert completion.finish_reason == undisturbed.finish_reason
            np.testing.assert_allclose(completion.logprobs, undisturbed.logprobs, atol=1e-4)
            assert sum(length for _, length in completion.versions) == len(completion.tokens)
            several += len(completion.versions) > 1
    assert bool(several) == (mode == "continue")


def test_no_cache_is_left_of_older_weights(updated: tuple[str, Running]) -> None:
    """After an update under load, answers to earlier prompts equal the answers of an engine without earlier prompts."""
    _, engine = updated
    models = [make_model(1), make_model(2)]
    engine.run(under_updates(engine.engine, models, 6, 1))  # the last one is of models[1]
    found = engine.batch(PROMPTS[:6], GREEDY, [0] * 6)
    fresh = engine.run(fresh_answers(engine.engine, models[1]))
    for completion, wanted in zip(found, fresh, strict=True):
        assert completion.tokens.tolist() == wanted.tokens.tolist()
        np.testing.assert_array_equal(completion.logprobs, wanted.logprobs)


async def fresh_answers(engine: Any, model: Any) -> list[Any]:
    """Answers after an update in which nothing ran."""
    await update_weights(engine, buckets_of(model), next(VERSIONS))
    found = {i: c async for i, c in engine.generate_batch(PROMPTS[:6], GREEDY, [0] * 6)}
    return [found[index] for index in sorted(found)]
