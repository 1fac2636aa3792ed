"""The producer of batches and its gate: how far sampling runs ahead, and the producer's state in a checkpoint."""

import asyncio
import json
import random
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from sampling_assets import SAMPLING, Engine, rollout_of, scorers, written

from roll_opd.base.failures import RunError
from roll_opd.inference.vllm_requests import Completion
from roll_opd.rollout.producer import Gate, Rollouts
from roll_opd.rollout.saved_groups import read_groups, write_groups
from roll_opd.rollout.staleness import Pace
from roll_opd.rollout.workflow_protocol import Model, SingleTurn, Task, sample_of
from roll_opd.rollout.workflow_runs import Batch, FinishedGroup
from roll_opd.samples.sample import Sample
from tests.cover import repeats

BATCHES, GROUPS = 5, 3


@dataclass
class Learner:
    """Publishes versions and consumes batches, with random pauses."""

    rollouts: Rollouts
    engine: "VersionedEngine"
    rng: random.Random
    finished: list[FinishedGroup] = field(default_factory=list)  # after the last batch

    async def learn(self, batches: int, *, first: int = 0, is_behind: bool = False) -> list[Batch]:
        """Consume `batches` batches; with `is_behind`, stop when groups of a later one have runs that ended."""
        found: list[Batch] = []
        async with aclosing(self.rollouts.batches()) as produced:
            self.publish(first)
            async for batch in produced:
                found.append(batch)
                for _ in range(self.rng.choice((0, 5, 200))):
                    await asyncio.sleep(0)
                if len(found) == batches:
                    await self.rollouts.settle()
                    of_found = sum(len(batch.prompts) + len(batch.filtered) for batch in found)
                    while is_behind and self.engine.answered <= of_found * SAMPLING.n:
                        await asyncio.sleep(0)
                    self.finished = self.rollouts.finished_groups()
                    break
                await self.rollouts.settle()
                self.publish(batch.version + 1)
        return found

    def publish(self, version: int) -> None:
        self.engine.version = version
        self.rollouts.gate.publish(version)


class VersionedEngine(Engine):
    """Labels every token with the version that is published when its request ends."""

    version = -1

    def answer(self, seed: int) -> Completion:
        completion = written(seed)
        return replace(completion, versions=((self.version, len(completion.tokens)),))


def learner_of(
    source: Any,
    bound: int,
    seed: int = 0,
    first: int = 0,
    depth: int | None = None,
    groups: int = GROUPS,
    reserve: int = 0,
    **more: Any,
) -> Learner:
    engine = VersionedEngine(seed)
    context = rollout_of(engine, scorers([], slowness=seed % 4))
    versions = range(first, BATCHES)
    depth = bound if depth is None else depth
    pace = Pace.of(groups, bound, depth, is_strict=more.get("in_rounds", False), reserve=reserve)
    rollouts = Rollouts(context, source, Gate(first - 1), versions, pace, **more)
    return Learner(rollouts, engine, random.Random(seed))


def learned(learner: Learner, batches: int = BATCHES, **more: Any) -> list[Batch]:
    return asyncio.run(asyncio.wait_for(learner.learn(batches, **more), 30))


def contents(batches: list[Batch]) -> list[tuple]:
    return [
        (batch.version, [p.id for p in batch.prompts], [(s.id, tuple(s.tokens)) for s in batch.samples])
        for batch in batches
    ]


def differ(group: list[Sample]) -> bool:
    return 0 < sum(sample.reward for sample in group) < len(group)


@pytest.mark.parametrize("passes", [None, differ], ids=["all", "filtered"])
@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("seeds", repeats(12, 24))
def test_no_order_of_events_deadlocks_or_exceeds_the_bound(
    make_source: Any, bound: int, passes: Any, seeds: int
) -> None:
    expected = contents(learned(learner_of(make_source(), 0, passes=passes)))
    ages = set()
    for seed in range(seeds):
        batches = learned(learner_of(make_source(), bound, seed, passes=passes, reserve=seed % 3))
        assert contents(batches) == expected  # the same prompts, in the same order, in the same batches
        ages |= {batch.version - version for batch in batches for version in batch.versions}
    assert ages <= set(range(bound + 1)) and max(ages) == bound


@pytest.mark.parametrize("passes", [None, differ], ids=["all", "filtered"])
@pytest.mark.parametrize(("bound", "depth"), [(2, 1), (3, 1), (3, 2)])
def test_a_window_trains_each_prompt_once_within_the_bound(
    make_source: Any, bound: int, depth: int, passes: Any
) -> None:
    """Finished groups pass unfinished ones; without a filter no prompt is missing before the oldest open one."""
    for seed in range(8):
        learner = learner_of(make_source(), bound, seed, depth=depth, passes=passes)
        batches = learned(learner)
        drawn = [p.id for batch in batches for p in (*batch.prompts, *batch.filtered)]
        assert len(drawn) == len(set(drawn))
        assert all(len(batch.prompts) == GROUPS for batch in batches)
        if passes is None:
            assert sorted(drawn) == sorted(p.id for p in make_source().take(BATCHES * GROUPS))
        assert {batch.version - v for batch in batches for v in batch.versions} <= set(range(bound + 1))


class OnlyTheFirstBatch(SingleTurn):
    async def run(self, task: Task, model: Model) -> list[Sample]:
        if task.draw >= GROUPS:
            await asyncio.Event().wait()
        return await super().run(task, model)


def test_a_waiting_learner_gets_its_batch_before_other_groups_end(make_source: Any) -> None:
    """The last samples of the batch do not fill a chunk, and the other groups of the wave never end."""
    learner = learner_of(make_source(), 1)
    context = learner.rollouts.context
    assert GROUPS * SAMPLING.n % context.chunk_samples
    learner.rollouts.context = replace(context, workflow=OnlyTheFirstBatch())
    (batch,) = learned(learner, 1)
    assert len(batch.samples) == GROUPS * SAMPLING.n and all(sample.teacher_logprobs for sample in batch.samples)


@pytest.mark.parametrize("seeds", repeats(24, 60))
def test_a_resume_inside_a_window_draws_each_prompt_once(make_source: Any, seeds: int) -> None:
    """The state has the prompts that have passed an unfinished one."""
    passed_some = False
    for seed in range(seeds):
        stopped = 1 + seed % (BATCHES - 1)
        source = make_source()
        before = learned(learner_of(source, 3, seed, depth=1), stopped, is_behind=True)
        state = json.loads(json.dumps(before[-1].source_state))
        passed_some |= bool(state.get("passed"))
        resumed = make_source()
        resumed.load_state_dict(state)
        bound = (0, 1, 3)[seed % 3]  # a resumed run may have another one
        continued = learner_of(resumed, bound, seed + 1, first=stopped, depth=min(bound, 1))
        after = learned(continued, BATCHES - stopped, first=stopped)
        drawn = sorted(p.id for batch in (*before, *after) for p in batch.prompts)
        assert drawn == sorted(p.id for p in make_source().take(BATCHES * GROUPS))
    assert passed_some


@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("stopped", range(1, BATCHES))
def test_a_resume_draws_the_prompts_of_later_batches_again(make_source: Any, bound: int, stopped: int) -> None:
    """A producer that has drawn ahead of its last consumed batch loses no prompt, and repeats none."""
    whole = contents(learned(learner_of(make_source(), 0)))
    source = make_source()
    before = learned(learner_of(source, bound), stopped, is_behind=bound > 0)
    checkpoint = json.loads(json.dumps(before[-1].source_state))
    resumed = make_source()
    resumed.load_state_dict(checkpoint)
    assert resumed.position == stopped * GROUPS
    after = learned(learner_of(resumed, bound, first=stopped), BATCHES - stopped, first=stopped)
    assert contents(before) + contents(after) == whole


def drawn_by(batches: list[Batch]) -> list[str]:
    return [prompt.id for batch in batches for prompt in (*batch.prompts, *batch.filtered)]


@pytest.mark.parametrize(("bound", "depth", "groups"), [(3, 1, 3), (1, 1, 3), (0, 0, 3), (2, 2, 2), (4, 2, 3)])
@pytest.mark.parametrize("passes", [None, differ], ids=["all", "filtered"])
@pytest.mark.parametrize("seeds", repeats(4, 12))
def test_a_resumed_run_trains_finished_groups_without_sampling_them_again(
    make_source: Any, tmp_path: Path, passes: Any, bound: int, depth: int, groups: int, seeds: int
) -> None:
    """Also with another bound, depth or batch size; older groups than its bound allows are sampled again."""
    kept = 0
    for seed in range(seeds):
        stopped = 1 + seed % (BATCHES - 1)
        before = learner_of(make_source(), 3, seed, depth=1, passes=passes)
        first = learned(before, stopped, is_behind=True)
        digest = write_groups(tmp_path / "groups", before.finished)
        restored = read_groups(tmp_path / "groups", digest)
        resumed = make_source()
        resumed.load_state_dict(json.loads(json.dumps(first[-1].source_state)))
        learner = learner_of(resumed, bound, seed + 1, stopped, depth, groups, restored=restored, passes=passes)
        after = learned(learner, BATCHES - stopped, first=stopped)
        drawn = drawn_by(first) + drawn_by(after)
        assert len(drawn) == len(set(drawn))
        if passes is None:
            assert sorted(drawn) == sorted(p.id for p in make_source().take(len(drawn)))
        trained = {s.id: s.versions for batch in after for s in batch.samples}
        again = [s for group in restored for s in group.samples if trained.get(s.id, s.versions) != s.versions]
        assert not again or bound < 3  # with the same bound none is sampled again
        kept += sum(s.id in trained for group in restored for s in group.samples) - len(again)
        ages = {batch.version - v for batch in after for v in batch.versions}
        assert ages <= set(range(bound + 1))
    assert kept or not bound


@pytest.mark.parametrize("passes", [None, differ], ids=["all", "filtered"])
@pytest.mark.parametrize(("bound", "depth"), [(1, 1), (3, 2)])
def test_in_rounds_no_sample_and_no_resume_depends_on_timing(
    make_source: Any, passes: Any, bound: int, depth: int
) -> None:
    """Every order of events, and a stop after any batch, gives the same groups, tokens and versions in each batch."""

    def found(batches: list[Batch]) -> list[tuple]:
        return [
            (
                b.version,
                b.draws,
                b.filtered_draws,
                b.sampled_by,
                [(s.id, tuple(s.tokens), s.versions) for s in b.samples],
            )
            for b in batches
        ]

    more: dict[str, Any] = {"depth": depth, "passes": passes, "in_rounds": True}
    whole = found(learned(learner_of(make_source(), bound, 0, **more)))
    for seed in range(1, 6):
        assert found(learned(learner_of(make_source(), bound, seed, **more))) == whole
    for stopped in range(1, BATCHES):
        before = learner_of(make_source(), bound, stopped, **more)
        first = learned(before, stopped)
        resumed = make_source()
        resumed.load_state_dict(first[-1].source_state)
        restored = before.finished
        after = learner_of(resumed, bound, stopped + 9, stopped, restored=restored, **more)
        assert found(first) + found(learned(after, BATCHES - stopped, first=stopped)) == whole


def test_rows_with_answers_are_part_of_a_batch_and_of_its_state(make_mixed_source: Any) -> None:
    """They are drawn with the batch, not when it is learned from."""
    batches = learned(learner_of(make_mixed_source(), 2, demonstrations=2))
    drawn = [row.id for batch in batches for row in batch.demonstrations]
    assert drawn == [row.id for row in make_mixed_source().demonstrations.take(2 * BATCHES)]
    assert [sample.id.partition("#")[0] for batch in batches for sample in batch.demonstration_samples] == drawn
    resumed = make_mixed_source()
    resumed.load_state_dict(batches[2].source_state)
    assert [row.id for row in resumed.demonstrations.take(4)] == drawn[6:]
    assert resumed.position == 3 * GROUPS


def test_a_failure_of_the_producer_reaches_the_consumer(make_source: Any) -> None:
    learner = learner_of(make_source(), 2)
    learner.rollouts.context.scorers.teachers[0]._fails = True
    with pytest.raises(RunError, match="no scores today"):
        learned(learner)


class Unlabelled:
    """A workflow that does not state the versions of its samples, and may see an update while it runs."""

    def __init__(self, learner: Learner, updates: bool) -> None:
        self._learner, self._updates = learner, updates

    async def run(self, task: Task, model: Model) -> list[Sample]:
        if self._updates:
            self._learner.publish(4)
        made = sample_of(task.prompt, task.draw, task.run, await model.generate(task.prompt.tokens))
        return [replace(made, versions=())]


@pytest.mark.parametrize("updates", [False, True])
def test_a_sample_without_versions_has_the_oldest_that_is_possible(make_source: Any, updates: bool) -> None:
    learner = learner_of(make_source(), 0)
    context = replace(learner.rollouts.context, workflow=Unlabelled(learner, updates))
    learner.rollouts = replace(learner.rollouts, context=context, versions=range(1))
    (batch,) = learned(learner, 1)
    for sample in batch.samples:
        assert sample.versions == ((0, len(sample.action_mask)),)
    assert len(batch.samples) == GROUPS * SAMPLING.n
