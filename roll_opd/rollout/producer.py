"""`Rollouts`, the producer of a run's batches: draws prompts, rolls them out, and selects groups.

A batch belongs to a version of the weights: the update with batch v makes version v + 1. A `Gate` admits its prompts
when version v - bound is published; with a bound of 0 sampling and training take turns.

Groups are selected in the order of their prompts, independent of the order in which they finish, so that short answers
are not preferred.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from roll_opd.base.failures import RunError
from roll_opd.data.prompt_source import MixedSource, Prompt, TaskSource
from roll_opd.objective.demonstrations import demonstration_samples
from roll_opd.objective.filters import GroupFilter
from roll_opd.roles.reward_pool import RewardPool
from roll_opd.roles.workflow_pool import WorkflowPool
from roll_opd.rollout.runs import PendingRewards, RolloutContext, roll_out
from roll_opd.samples.sample import Sample, changed
from roll_opd.samples.versions import of_mask, tokens_by_version

MAX_REJECTED = 20  # times the batch, and at least MIN_REJECTED: above it, the filters count as unsatisfiable
MIN_REJECTED = 1000


class Gate:
    """Bound on the versions by which sampling may be ahead of the published weights."""

    def __init__(self, version: int, bound: int = 0) -> None:
        """`version` is published already."""
        self.version, self.bound = version, bound
        self._published = asyncio.Event()

    def publish(self, version: int) -> None:
        """Announce that the engines have the weights of `version` and may sample for training."""
        if version < self.version:
            raise ValueError(f"version {version} was published after version {self.version}")
        self.version = version
        published, self._published = self._published, asyncio.Event()
        published.set()

    async def admit(self, version: int) -> None:
        """Wait until prompts of the batch for `version` may be sampled."""
        while self.version < version - self.bound:
            await self._published.wait()


@dataclass
class Batch:
    """Samples of one update step, and the state of the prompt source after them."""

    version: int  # of the weights before the batch's update
    rewards: PendingRewards
    prompts: list[Prompt] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)  # of each prompt, in the order of the prompts
    filtered: list[Prompt] = field(default_factory=list)  # prompts whose groups did not pass
    generated_tokens: int = 0  # of all groups
    demonstrations: list[Prompt] = field(default_factory=list)  # rows with answers
    demonstration_samples: list[Sample] = field(default_factory=list)
    source_state: dict[str, Any] = field(
        default_factory=dict
    )  # for a checkpoint: prompts of later batches are not yet drawn
    epochs: float = 0.0  # passes over the prompts

    @property
    def versions(self) -> Counter[int]:
        """Sampled tokens by version of the weights."""
        return tokens_by_version(sample.versions for sample in self.samples)

    async def with_rewards(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the batch's samples with their missing rewards."""
        return await self.rewards.added_to(samples)


@dataclass(frozen=True)
class Rollouts:
    """Producer of batches. The samples of a batch depend on the order of the prompts, not on timing."""

    context: RolloutContext
    source: TaskSource
    gate: Gate
    versions: range  # of the batches to produce
    groups: int  # of a batch
    extra_groups: int = 0  # sampled in reserve with each batch, if groups may be filtered
    passes: GroupFilter | None = None
    demonstrations: int = 0  # rows with answers of a batch

    async def batches(self) -> AsyncGenerator[Batch, None]:
        """Yield the batch of each version, in order; a task produces them as far ahead as the gate admits.

        Leaving the iterator early (use `aclosing`) aborts running requests.
        """
        ready: asyncio.Queue[list[Batch]] = asyncio.Queue()  # one batch per entry, removed when read; empty: the end

        async def produce() -> None:
            with self.context.clock.track("rollout"):
                for version in self.versions:
                    ready.put_nowait([await self._produced(version)])

        producing = asyncio.create_task(produce())
        producing.add_done_callback(lambda _: ready.put_nowait([]))
        try:
            while batch := await ready.get():
                yield batch.pop()
            await producing
        finally:
            producing.cancel()
            await asyncio.gather(producing, return_exceptions=True)

    def drain_metrics(self) -> dict[str, float]:
        """Return the counts of rewards and workflows since the last call, including validation."""
        pools: list[RewardPool | WorkflowPool] = list(self.context.reward_pools)
        if isinstance(self.context.workflow, WorkflowPool):
            pools.append(self.context.workflow)
        return {name: value for pool in pools for name, value in pool.drain_metrics().items()}

    async def _produced(self, version: int) -> Batch:
        """Draw prompts and roll them out until enough groups pass; RunError if hardly any does."""
        batch = Batch(version, PendingRewards(self.context))
        while len(batch.prompts) < self.groups:
            await self.gate.admit(version)
            await self._extend(batch)
            self._check_rejected(batch)
        if self.demonstrations:
            assert isinstance(self.source, MixedSource)
            first_draw = self.source.demonstrations.position
            batch.demonstrations = self.source.demonstrations.take(self.demonstrations)
            batch.demonstration_samples = demonstration_samples(batch.demonstrations, first_draw)
        batch.source_state, batch.epochs = self.source.state_dict(), self.source.epochs
        return batch

    async def _extend(self, batch: Batch) -> None:
        """Roll out the missing groups, and with a filter some in reserve; prompts not needed stay in the source."""
        missing, first_draw = self.groups - len(batch.prompts), self.source.position
        drawn = self.source.peek(missing + (self.extra_groups if self.passes else 0))
        selection = Selection(len(drawn), self.context.sampling.n, missing, self.passes)
        sampled_by = self.gate.version
        async with aclosing(roll_out(self.context, drawn, batch.rewards, first_draw, bool(self.passes))) as runs:
            async for number, samples in runs:
                known = self.gate.version == sampled_by
                selection.add(number, [_with_version(sample, sampled_by) for sample in samples] if known else samples)
                if selection.enough:
                    break
        if self.passes:  # the chosen groups have their rewards; others need none
            batch.rewards.cancel()
        self.source.skip(selection.used)
        batch.samples += selection.samples()
        batch.generated_tokens += selection.generated_tokens
        chosen = set(selection.chosen)
        for group in range(selection.used):
            (batch.prompts if group in chosen else batch.filtered).append(drawn[group])

    def _check_rejected(self, batch: Batch) -> None:
        kept, rejected = len(batch.prompts), len(batch.filtered)
        if kept == self.groups or rejected <= max(MAX_REJECTED * self.groups, MIN_REJECTED):
            return
        if self.passes is None:
            raise RunError(
                f"the runs at {rejected} prompts made no sample, in one step of {self.groups}; correct the workflow"
                " (an agent without a model call makes none), or give other prompts"
            )
        raise RunError(
            f"the filters rejected the samples of {rejected} prompts and kept {kept}, in one step of"
            f" {self.groups}; loosen query_filter_config or response_filter_config, give other prompts, or correct a"
            " workflow whose runs make nothing"
        )


class Selection:
    """Selects the first `wanted` groups that pass, from runs in any order of completion."""

    def __init__(self, groups: int, n: int, wanted: int, group_filter: GroupFilter | None) -> None:
        self._runs: list[dict[int, Sequence[Sample]]] = [{} for _ in range(groups)]  # by number in the group
        self._passed: list[bool | None] = [None] * groups  # None: some runs have not ended
        self._n, self._wanted, self._filter = n, wanted, group_filter
        self._used = 0
        self._chosen: list[int] = []

    def add(self, number: int, samples: Sequence[Sample]) -> None:
        """Add the samples of run `number % n` of group `number // n`. A group without a sample does not pass."""
        group, run = divmod(number, self._n)
        self._runs[group][run] = samples
        if len(self._runs[group]) == self._n:
            of_group = self._in_order(group)
            self._passed[group] = bool(of_group) and (self._filter is None or self._filter(of_group))
            self._advance()

    def _advance(self) -> None:
        """Use decided groups, in order, while more are wanted."""
        while self._used < len(self._passed) and not self.enough and self._passed[self._used] is not None:
            if self._passed[self._used]:
                self._chosen.append(self._used)
            self._used += 1

    @property
    def used(self) -> int:
        """Number of groups, from the first on, that are decided and needed; later prompts stay undrawn."""
        return self._used

    @property
    def chosen(self) -> list[int]:
        """Numbers of the selected groups, at most `wanted`, ascending."""
        return self._chosen

    @property
    def enough(self) -> bool:
        """Whether no unfinished run can change the selection."""
        return len(self._chosen) == self._wanted

    @property
    def generated_tokens(self) -> int:
        """Action tokens of the `used` groups."""
        return sum(e.action_tokens for group in range(self.used) for e in self._in_order(group))

    def samples(self) -> list[Sample]:
        """Return the samples of the chosen groups, in order."""
        return [sample for group in self.chosen for sample in self._in_order(group)]

    def _in_order(self, group: int) -> list[Sample]:
        return [sample for run in range(self._n) for sample in self._runs[group][run]]


def _with_version(sample: Sample, version: int) -> Sample:
    """Return a workflow's sample without versions with `version`, the only one during its sampling."""
    return sample if sample.versions else changed(sample, versions=of_mask(sample.action_mask, version))
