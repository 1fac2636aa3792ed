"""The order of samples in a batch: the engine finishes in any order, and teachers take any time.

Engines, teachers and reward workers themselves are tested elsewhere; here only their interface is needed.
"""

import asyncio
import pickle
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sampling_assets import SAMPLING, Engine, RewardPool, Watcher, rollout_of, scorers, written

from roll_opd.base.failures import RunError
from roll_opd.config.plan import (
    SamplingPlan,
    TeacherPlan,
)
from roll_opd.data.dataset import Prompt
from roll_opd.data.prompt_source import PromptSource
from roll_opd.inference.vllm_requests import Completion
from roll_opd.rollout.producer import Gate, Rollouts
from roll_opd.rollout.staleness import Pace
from roll_opd.rollout.workflow_protocol import Model, Task, sample_of, sample_seed
from roll_opd.rollout.workflow_runs import Batch, PendingRewards, RolloutContext, roll_out
from roll_opd.samples.sample import Sample
from roll_opd.samples.transport import Compact
from roll_opd.teachers.scoring import Scorers
from roll_opd.teachers.teacher_interface import TeacherAnswer, Wanted
from roll_opd.workers.actor_group import ActorGroup
from roll_opd.workers.reward_pool import RewardResult
from roll_opd.workers.sampler import Sampler


async def fill_batch(
    source: PromptSource, wanted: int, rollout: RolloutContext, *, extra: int = 0, passes: Any = None
) -> Batch:
    """The first batch of a run."""
    rollouts = Rollouts(rollout, source, Gate(0), range(1), Pace.of(wanted, 0, reserve=extra), passes)
    async with aclosing(rollouts.batches()) as batches:
        return await anext(batches)


def fill(source: PromptSource, engine_seed: int, wanted: int, extra: int, passes: Any) -> Batch:
    rollout = rollout_of(Engine(engine_seed), scorers([], slowness=engine_seed % 5))
    return asyncio.run(fill_batch(source, wanted, rollout, extra=extra, passes=passes))


def all_of(rollout: RolloutContext, prompts: Sequence[Prompt]) -> list[Sample]:
    """In the order of their numbers."""

    async def collect() -> dict[int, list[Sample]]:
        async with aclosing(roll_out(rollout, prompts, PendingRewards(rollout), first_draw=0)) as samples:
            return {number: made async for number, made in samples}

    found = asyncio.run(collect())
    return [experience for number in range(len(found)) for experience in found[number]]


def test_samples_are_scored_while_others_are_being_written(make_source) -> None:
    log: list[str] = []
    engine, prompts = Engine(1, log), make_source().take(8)
    assert len(all_of(rollout_of(engine, scorers(log)), prompts)) == 8 * SAMPLING.n
    assert sum("starts" in line for line in log[: log.index("engine done")]) >= 2


@pytest.mark.parametrize("is_urgent", [False, True])
def test_incomplete_chunks_are_scored_one_at_a_time_while_scoring_is_urgent(make_source, is_urgent: bool) -> None:
    """Otherwise all chunks except the last one are complete."""
    sizes: list[int] = []
    scoring = False

    class Sized(Watcher):
        async def score(self, experiences: Sequence[Sample], *wanted: Any) -> list[TeacherAnswer]:
            nonlocal scoring
            assert not (scoring and is_urgent and len(experiences) < 4)
            scoring = True
            sizes.append(len(experiences))
            answers = await super().score(experiences, *wanted)
            scoring = False
            return answers

    async def scored() -> list[Sample]:
        rollout, urgent = rollout_of(Engine(), Scorers([Sized(TeacherPlan("t", Watcher.worker, 1.0), [])])), None
        if is_urgent:
            urgent = asyncio.Event()
            urgent.set()
        rows = make_source().take(6)
        async with aclosing(roll_out(rollout, rows, PendingRewards(rollout), 0, urgent=urgent)) as found:
            return [sample async for _, samples in found for sample in samples]

    samples = asyncio.run(scored())
    assert len(samples) == sum(sizes) == 6 * SAMPLING.n
    for sample in samples:
        np.testing.assert_array_equal(sample.teacher_logprobs["t"], sample.response_tokens)
    assert sizes == [4, 4, 4, 4, 2] if not is_urgent else min(sizes[:-1]) < 4


def test_a_teacher_sees_the_samples_of_its_tags_and_no_others(make_source) -> None:
    """For any reward domain; all rows here belong to one domain."""
    prompts = [replace(prompt, tag=("odd", "even")[number % 2]) for number, prompt in enumerate(make_source().take(6))]
    teachers = [
        Watcher(TeacherPlan("all", Watcher.worker, 1.0), []),
        Watcher(TeacherPlan("odd", Watcher.worker, 1.0, tags=("odd",)), []),
    ]
    for experience in all_of(rollout_of(Engine(), Scorers(teachers)), prompts):
        assert set(experience.teacher_logprobs) == ({"all", "odd"} if experience.tag == "odd" else {"all"})
        for logprobs in experience.teacher_logprobs.values():
            np.testing.assert_array_equal(logprobs, experience.response_tokens)  # of this sample, not another

    with pytest.raises(RunError, match="no teacher scores samples with tag even"):
        all_of(rollout_of(Engine(), Scorers(teachers=teachers[1:])), prompts)


def test_what_is_learned_from_depends_on_neither_timing_nor_prompts_in_reserve(make_source) -> None:
    def differ(group: Sequence[Sample]) -> bool:
        return 0 < sum(e.reward for e in group) < len(group)

    def run(engine_seed: int, extra: int) -> tuple[list, list, int]:
        source, ids, filtered = make_source(), [], []
        for step in range(6):
            batch = fill(source, engine_seed + step, wanted=4, extra=extra, passes=differ)
            assert [e.group_id.partition("#")[0] for e in batch.samples[:: SAMPLING.n]] == [p.id for p in batch.prompts]
            ids += [(e.id, tuple(e.tokens), e.reward) for e in batch.samples]
            filtered += [p.id for p in batch.filtered]
        return ids, filtered, source.position

    expected = run(0, extra=0)
    assert len(set(expected[0])) == 6 * 4 * SAMPLING.n  # none twice
    assert expected[1] and expected[2] == 6 * 4 + len(expected[1])  # none lost
    for engine_seed in range(1, 6):
        assert run(10 * engine_seed, extra=engine_seed) == expected


def test_what_is_not_needed_any_more_is_not_waited_for(make_source) -> None:
    answered = []
    for seed in range(8):
        source, engine = make_source(), Engine(seed)
        rollout = rollout_of(engine, scorers([]))
        first = source.peek(1)
        batch = asyncio.run(fill_batch(source, 1, rollout, extra=19, passes=lambda group: True))
        assert [p.id for p in batch.prompts] == [p.id for p in first] and source.position == 1
        answered.append(engine.answered)
    assert min(answered) < 20 * SAMPLING.n  # unless the first prompt happened to be the last one finished


def test_a_reward_is_not_asked_for_what_turned_out_not_to_be_needed(make_source) -> None:
    """The step continues without waiting for the answers that are not needed."""
    asked: dict[str, asyncio.Task[RewardResult]] = {}

    class Slow(RewardPool):
        def submit(self, experience: Sample) -> asyncio.Task[RewardResult]:
            asked[experience.id] = super().submit(experience)
            return asked[experience.id]

        async def _score(self, experience: Sample, slowness: int) -> RewardResult:
            if "#0/" not in experience.id:
                await asyncio.Event().wait()
            return await super()._score(experience, slowness)

    async def first_group() -> list[Sample]:
        rollout = rollout_of(Engine(), scorers([]), Slow())
        found = await fill_batch(make_source(), 1, rollout, extra=19, passes=lambda group: True)
        await asyncio.sleep(0)
        assert {name for name, one in asked.items() if one.cancelled()} == {n for n in asked if "#0/" not in n}
        return found.samples

    assert all(experience.reward is not None for experience in asyncio.run(asyncio.wait_for(first_group(), 20)))
    assert len(asked) > SAMPLING.n


class Engines(ActorGroup):
    """Two engines that finish each its own requests in a random order and hand over some at a time."""

    def __init__(self, loses: int = 0) -> None:
        super().__init__(("first", "second"))  # type: ignore[arg-type]
        self._rng, self._loses = random.Random(4), loses
        self.finished: dict[int, list[int]] = {0: [], 1: []}
        self.cancelled: list[int] = []

    async def stream(
        self, actor: int, method: str, requests: Compact, sampling: SamplingPlan, chunk: int
    ) -> AsyncGenerator[list[tuple[int, Completion]], None]:
        asked = pickle.loads(pickle.dumps(requests))  # as it arrives
        order = self._rng.sample(range(len(asked)), len(asked) - self._loses)
        ended = False
        try:
            while order:
                some = [order.pop(0) for _ in range(min(len(order), self._rng.randint(1, 3)))]
                await asyncio.sleep(0.001 * self._rng.random())
                self.finished[actor] += [asked[position].seed for position in some]
                yield [(position, written(asked[position].seed)) for position in some]
            ended = True
        finally:
            self.cancelled += [] if ended else [actor]


class Chunks(Watcher):
    """Records the samples of each call."""

    def __init__(self) -> None:
        super().__init__(TeacherPlan("t", Watcher.worker, 1.0), [])
        self.seen: list[list[str]] = []

    async def score(self, experiences: Sequence[Sample], temperature: float, wanted: Wanted) -> list[TeacherAnswer]:
        self.seen.append([e.id for e in experiences])
        return await super().score(experiences, temperature, wanted)


def test_a_chunk_is_what_one_engine_finished_one_after_another(make_source) -> None:
    """A deterministic run's log-probs depend on it: they are computed in packs of a chunk."""
    engines, chunks, prompts = Engines(), Chunks(), make_source().take(7)
    rollout = rollout_of(Sampler(engines), Scorers([chunks]))
    all_of(rollout, prompts)
    seeds = {
        f"{prompt.id}#{draw}/{k}": sample_seed(7, draw, k) for draw, prompt in enumerate(prompts) for k in range(3)
    }
    for order in engines.finished.values():
        own = [chunk for chunk in chunks.seen if seeds[chunk[0]] in order]
        assert [seeds[name] for chunk in own for name in chunk] == order
        assert [len(chunk) for chunk in own[:-1]] == [4] * (len(own) - 1)
    assert not engines.cancelled


def test_leaving_early_cancels_what_is_still_being_written(make_source) -> None:
    engines = Engines()
    rollout = rollout_of(Sampler(engines), scorers([]))
    asyncio.run(fill_batch(make_source(), 1, rollout, extra=19, passes=lambda group: True))
    assert engines.cancelled and sum(map(len, engines.finished.values())) < 20 * SAMPLING.n


def test_an_engine_that_ends_too_early_is_reported(make_source) -> None:
    rollout = rollout_of(Sampler(Engines(loses=1)), scorers([]))
    with pytest.raises(RunError, match=r"ended with 1 of \d+ requests unanswered"):
        all_of(rollout, make_source().take(4))


def test_a_scorer_that_fails_ends_the_rollout_at_once(make_source) -> None:
    engine = Engine()
    with pytest.raises(RunError, match="no scores today"):
        all_of(rollout_of(engine, scorers([], fails=True)), make_source().take(20))
    assert engine.answered < 20 * SAMPLING.n


def test_a_filter_that_nothing_passes_is_reported(make_source) -> None:
    with pytest.raises(
        RunError, match=r"rejected the samples of \d+ prompts and kept the samples of 0.*query_filter_config"
    ):
        fill(make_source(), 1, wanted=2, extra=1, passes=lambda group: False)


class Talk:
    """Asks once more for each token of the first answer: a conversation of one to five turns, or none."""

    async def run(self, task: Task, model: Model) -> list[Sample]:
        first = await model.generate(task.prompt.tokens)
        made = [sample_of(task.prompt, task.draw, task.run, first)]
        for step, token in enumerate(first.tokens, 1):
            heard = replace(task.prompt, tokens=np.append(made[-1].tokens, token))
            turn = sample_of(heard, task.draw, task.run, await model.generate(heard.tokens))
            made.append(replace(turn, id=f"{turn.id}.{step}", step=step, reward=float(step)))
        return [] if first.tokens[0] % 3 == 0 else made


def test_a_run_may_make_none_or_many_and_may_bring_its_rewards(make_source) -> None:
    def batch(engine_seed: int) -> tuple[Batch, RewardPool]:
        pool = RewardPool(engine_seed)
        rollout = replace(rollout_of(Engine(engine_seed), scorers([]), pool), workflow=Talk())
        return asyncio.run(filled(rollout)), pool

    async def filled(rollout: RolloutContext) -> Batch:
        found = await fill_batch(make_source(), 5, rollout)
        return replace(found, samples=await found.with_rewards(found.samples))

    found, pool = batch(0)
    assert len(found.prompts) == 5
    steps = [(e.group_id, e.run, e.step) for e in found.samples]
    assert steps == sorted(steps, key=lambda step: (int(step[0].partition("#")[2]), *step[1:]))
    assert {step for _, _, step in steps} > {0, 1, 2} and len({run[:2] for run in steps}) < 5 * SAMPLING.n
    for experience in found.samples:
        np.testing.assert_array_equal(experience.teacher_logprobs["t"], experience.response_tokens)
        assert (experience.id in pool.asked) == (experience.step == 0)
        assert experience.step in (0, experience.reward)
    again = batch(5)[0]
    assert [(e.id, tuple(e.tokens), e.reward) for e in again.samples] == [
        (e.id, tuple(e.tokens), e.reward) for e in found.samples
    ]


def test_prompts_at_which_no_run_makes_anything_are_replaced(make_source) -> None:
    class Picky:
        async def run(self, task: Task, model: Model) -> list[Sample]:
            answer = await model.generate(task.prompt.tokens)
            return [sample_of(task.prompt, task.draw, task.run, answer)] if task.draw % 2 else []

    source = make_source()
    found = asyncio.run(fill_batch(source, 4, replace(rollout_of(Engine(), scorers([])), workflow=Picky())))
    assert [e.group_id.partition("#")[2] for e in found.samples[:: SAMPLING.n]] == ["1", "3", "5", "7"]
    assert len(found.filtered) == 4 and source.position == 8


def test_runs_of_which_none_makes_anything_are_reported(make_source) -> None:
    class Silent:
        async def run(self, task: Task, model: Model) -> list[Sample]:
            return []

    rollout = replace(rollout_of(Engine(), scorers([])), workflow=Silent())
    with pytest.raises(RunError, match=r"returned no sample for \d+ prompts in a step of 2 prompts; correct"):
        asyncio.run(fill_batch(make_source(), 2, rollout))
