"""Runs and rewards that fail: groups are replaced or trained without them, and no batch has a placeholder."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sampling_assets import SAMPLING, RewardPool
from test_gate import BATCHES, GROUPS, learned, learner_of

from roll_opd.base.failures import RunError
from roll_opd.config.plan import RewardPlan
from roll_opd.objective.filters import group_filter
from roll_opd.rollout.workflow_protocol import Model, SingleTurn, Task
from roll_opd.rollout.workflow_runs import Batch
from roll_opd.samples.sample import Sample, as_columns, changed
from roll_opd.workers.reward_pool import RewardResult

PLAN = RewardPlan("math", (), on_error="replace")


def fails(name: str) -> bool:
    """Return whether a run fails, a seventh of all, by its name."""
    return random.Random(name).random() < 1 / 7


class FailingRewards(RewardPool):
    async def _score(self, experience: Sample, slowness: int) -> RewardResult:
        scored = await super()._score(experience, slowness)
        return RewardResult("math", None, reason="raised", excluded=True) if fails(experience.id) else scored


class FailingRuns(SingleTurn):
    async def run(self, task: Task, model: Model) -> Sequence[Sample] | None:
        await asyncio.sleep(0)
        return None if fails(f"{task.prompt.id}#{task.draw}/{task.run}") else await super().run(task, model)


@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("what", ["rewards", "runs"])
def test_groups_with_a_failure_are_replaced(make_source: Any, what: str, bound: int) -> None:
    """Batches are full, each run has a sample, and the ledger's draws are the prompts in order."""
    for seed in range(3):
        passes = group_filter([PLAN]) if what == "rewards" else group_filter([], runs=SAMPLING.n)
        learner = learner_of(make_source(), bound, seed, passes=passes)
        context = learner.rollouts.context
        failing = {"reward_pools": [FailingRewards(seed)]} if what == "rewards" else {"workflow": FailingRuns()}
        learner.rollouts = replace(learner.rollouts, context=replace(context, **failing))
        batches = learned(learner)
        for batch in batches:
            assert batch.group_sizes == [SAMPLING.n] * GROUPS and batch.failed_rate(batch.samples, SAMPLING.n) == (
                batch.failed_runs / (SAMPLING.n * (GROUPS + len(batch.failed)))
            )
            assert not any(sample.excluded or fails(sample.id) for sample in batch.samples)
        draws = [draw for batch in batches for draw in (*batch.draws, *batch.failed_draws)]
        assert sorted(draws) == list(range(len(draws)))
        assert any(batch.failed_draws for batch in batches) and len(batches) == BATCHES
        assert not any(batch.filtered_draws for batch in batches)


class BrokenRows(SingleTurn):
    """All runs on prompts with an odd draw fail. With `skips`, every tenth prompt has no sample on purpose."""

    drawn, skips = -1, True

    async def run(self, task: Task, model: Model) -> Sequence[Sample] | None:
        self.drawn = max(self.drawn, task.draw)
        await asyncio.sleep(0)
        if task.draw % 2:
            return None
        return [] if self.skips and task.draw % 10 == 0 else await super().run(task, model)


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_prompts_without_a_run_are_failed_and_those_without_a_sample_are_filtered(make_source: Any, bound: int) -> None:
    for seed in range(3):
        learner = learner_of(make_source(), bound, seed)
        learner.rollouts.context = replace(learner.rollouts.context, workflow=BrokenRows())
        for batch in learned(learner):
            assert all(draw % 2 for draw in batch.failed_draws) and batch.failed_draws
            assert all(draw % 10 == 0 for draw in batch.filtered_draws)
            assert all(draw % 2 == 0 and draw % 10 for draw in batch.draws)
            assert batch.failed_runs == SAMPLING.n * len(batch.failed)
            share = len(batch.failed) / (len(batch.failed) + GROUPS)
            assert batch.failed_rate(batch.samples, SAMPLING.n) == pytest.approx(share)


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_below_the_floor_no_further_prompts_are_drawn(make_source: Any, bound: int) -> None:
    for seed in range(3):
        learner, workflow = learner_of(make_source(), bound, seed, min_fraction=0.9), BrokenRows()
        workflow.skips = False
        learner.rollouts.context = replace(learner.rollouts.context, workflow=workflow)
        with pytest.raises(RunError, match="min_batch_fraction"):
            learned(learner)
        assert workflow.drawn < GROUPS * (1 + bound)  # the first prompts that may be drawn before a batch is trained


def test_a_prompt_whose_rewards_all_failed_is_failed() -> None:
    batch = Batch(3, draws=[4, 5, 7], prompts=["a", "b", "c"], sampled_by=[[1, 2], [2, 2], [2, 3]])
    batch.samples = [sample(str(n), n % 2, excluded=n in (1, 2, 3)) for n in range(6)]
    batch.group_sizes = [2, 2, 2]
    assert batch.failed_rate(batch.samples, 2) == 0.5
    batch.set_failed_apart(batch.samples)
    assert (batch.draws, batch.failed_draws, batch.prompts, batch.failed) == ([4, 7], [5], ["a", "c"], ["b"])
    assert batch.sampled_by == [[1, 2], [2, 3]]


@pytest.mark.parametrize("seed", range(5))
def test_the_failed_rate_counts_missing_and_excluded_runs(seed: int) -> None:
    rng, runs = random.Random(seed), 4
    batch, failed = Batch(0), 0
    for group in range(6):
        made = []
        for run in range(runs):
            parts = rng.choice([0, 1, 1, 3])  # samples of the run
            bad = rng.choice([None, *range(parts)]) if parts else None
            failed += parts == 0 or bad is not None
            made += [sample(f"{group}/{run}.{part}", run, part == bad) for part in range(parts)]
        batch.group_sizes.append(len(made))
        batch.samples += made
    assert batch.failed_rate(batch.samples, runs) == pytest.approx(failed / (6 * runs))


def sample(name: str, run: int, excluded: bool) -> Sample:
    columns = as_columns(action_mask=np.ones(1, bool), rollout_logprobs=np.zeros(1, np.float32))
    made = Sample(id=name, group_id=name, run=run, tokens=np.arange(3), prompt_length=2, columns=columns)
    return changed(made, excluded=excluded)
