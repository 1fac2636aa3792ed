"""Prefixes longer than a cache block: after an update, no answer depends on keys and values of older weights."""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inference_models import (
    Running,
    buckets_of,
    hf_logprobs,
    keeping_pause,
    make_model,
    running,
    save_model,
    update_weights,
)

from roll_opd.config.plan import SamplingPlan
from roll_opd.inference import vllm_engine
from roll_opd.inference.engine_arguments import CPU_BLOCK
from roll_opd.inference.vllm_requests import Completion, completion_of

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

LENGTH = 640  # tokens of a sequence: five cache blocks
ARGUMENTS: dict[str, Any] = {
    "max_model_len": LENGTH,
    "engine_args": {"hf_overrides": {"max_position_embeddings": LENGTH}},
}
GREEDY = SamplingPlan(max_new_tokens=24, temperature=0.0)
A_TURN = SamplingPlan(max_new_tokens=CPU_BLOCK + 12, temperature=0.0)  # its tokens fill a block
RUNNING = SamplingPlan(max_new_tokens=80)

RNG = np.random.default_rng(0)
PREFIX = RNG.integers(2, 99, 2 * CPU_BLOCK + 30).tolist()  # two whole blocks, and a part of a third
ENDS = [RNG.integers(2, 99, 5).tolist() for _ in range(4)]
OBSERVATIONS = [RNG.integers(2, 99, 11).tolist() for _ in range(2)]


@dataclass
class Asked:
    """Requests one after another, with the tokens of each prompt that the engine read from its cache."""

    engine: Running
    cached: list[int]

    def one(self, prompt: list[int], sampling: SamplingPlan = GREEDY) -> Completion:
        return self.engine.run(self.engine.engine.generate(prompt, sampling, 0))

    def all(self, turns: list[list[int]]) -> list[Completion]:
        """Return the answers to prompts with a common prefix, and to each turn of a conversation."""
        self.cached.clear()
        return [self.one(prompt) for prompt in [*(PREFIX + end for end in ENDS), *turns]]


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []

    def counted(output: Any) -> Completion:
        found.append(output.num_cached_tokens)
        return completion_of(output)

    monkeypatch.setattr(vllm_engine, "completion_of", counted)
    return found


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [save_model(make_model(seed), Path(tmp_path_factory.mktemp(f"weights-{seed}"))) for seed in range(3)]


# on_weight_update, tensor parallel size
LAYOUTS = [("wait", 1), ("continue", 1), ("continue", 2)]


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> tuple[str, int]:
    return request.param


@pytest.fixture(scope="module")
def engine(layout: tuple[str, int], paths: list[str], warm: None) -> Iterator[Running]:
    yield from running(paths[0], on_update=layout[0], tensor_parallel_size=layout[1], **ARGUMENTS)


def conversation(asked: Asked) -> list[list[int]]:
    """Return the prompts of the second and the third turn; each contains the answers of the turns before it."""
    prompt, turns = PREFIX[:60], []
    for observation in OBSERVATIONS:
        prompt = [*prompt, *asked.one(prompt, A_TURN).tokens.tolist(), *observation]
        turns.append(prompt)
    return turns


def difference(found: list[Completion], wanted: list[Completion]) -> float:
    """Return the largest difference of log-probs; infinity if tokens differ."""
    same = all(one.tokens.tolist() == other.tokens.tolist() for one, other in zip(found, wanted, strict=True))
    pairs = zip(found, wanted, strict=True)
    return max(float(np.abs(one.logprobs - other.logprobs).max()) for one, other in pairs) if same else float("inf")


def update(engine: Running, seed: int) -> None:
    version = engine.engine.updates.version + 1
    engine.run(update_weights(engine.engine, buckets_of(make_model(seed)), version))


async def load(engine: Any, turns: list[list[int]], updates: int, seed: int) -> list[Completion]:
    """Answers to 32 prompts with the prefix, while weights change at random moments. The last ones are those of 1."""
    rng = random.Random(seed)

    async def answers() -> list[Completion]:
        prompts = [PREFIX[: len(PREFIX) - number % 40] for number in range(28)] + turns * 2
        return [c async for _, c in engine.generate_batch(prompts, RUNNING, list(range(len(prompts))))]

    answering = asyncio.create_task(answers())
    buckets = [buckets_of(make_model(number)) for number in (2, 1)]
    for number in range(updates):
        await asyncio.sleep(0.3 * rng.random())
        await update_weights(engine, buckets[number % 2], engine.updates.version + 1)
    return await answering


def test_answers_after_an_update_are_those_of_a_fresh_engine(
    engine: Running, layout: tuple[str, int], paths: list[str], cached: list[int]
) -> None:
    """Bit for bit, for prompts that the engine has answered before: common prefixes, and turns of a conversation.

    The second half of the test repeats them after updates under load, where the running requests have filled the
    cache with the new weights in other batches, whose rounding differs.
    """
    update(engine, 0)
    asked = Asked(engine, cached)
    turns = conversation(asked)
    asked.all(turns)
    before = asked.all(turns)
    assert all(tokens >= CPU_BLOCK for tokens in cached)  # all of them read the cache
    update(engine, 1)
    after, read = asked.all(turns), list(cached)
    engine.run(load(engine.engine, turns, updates=4, seed=1))
    cached.clear()
    loaded = asked.all(turns)
    assert any(cached)

    fresh = Running(paths[1], tensor_parallel_size=layout[1], **ARGUMENTS)
    wanted = Asked(fresh, cached).all(turns)
    fresh.close()
    assert read == cached and read[:4] == [0, 256, 256, 256]  # only the new weights' blocks
    print(f"log-probs after an update under load differ by {difference(loaded, wanted):.1e}, cached tokens {sum(read)}")
    assert difference(after, wanted) == 0.0
    assert difference(loaded, wanted) < 1e-4
    assert difference(before, wanted) > 0.1
    tokens = [*turns[-1], *wanted[-1].tokens.tolist()]
    expected = hf_logprobs(make_model(1), tokens)[len(turns[-1]) - 1 :]
    np.testing.assert_allclose(wanted[-1].logprobs, expected, atol=1e-4, rtol=0)


def test_an_engine_that_keeps_its_cache_fails_the_comparison(
    engine: Running, cached: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: without the reset, the answers are not those of the new weights."""
    update(engine, 1)
    asked = Asked(engine, cached)
    turns = conversation(asked)
    wanted = asked.all(turns)
    update(engine, 0)
    asked.all(turns)
    monkeypatch.setattr(engine.engine.updates, "pause", keeping_pause(engine.engine))
    update(engine, 1)
    stale = asked.all(turns)
    assert cached[0] == 2 * CPU_BLOCK
    print(f"with the old cache: {difference(stale, wanted)}")
    assert difference(stale, wanted) > 1e-2
    monkeypatch.undo()
    update(engine, 1)  # the next update removes them
    assert difference(asked.all(turns), wanted) < 1e-4
