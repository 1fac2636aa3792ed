"""`Rollouts`, the producer of a run's batches: it draws prompts, rolls them out, and selects groups.

Each batch belongs to a version of the weights: the update on batch v makes version v + 1. A `Gate` publishes versions.
`rollout.staleness` defines the order of groups and the bound on their ages. The number of a group is its draw: the
position of its prompt in the source. Groups that are admitted together form a wave, which is rolled out together. A
rejected group is replaced as soon as it has ended.

Groups are selected in the order of their prompts. If they were selected in the order in which they finish, short
answers would be preferred. Finished groups may overtake unfinished groups only within a window.

Sampling and training take turns with the pace A = 0, W = 1, and there is no other code for this case.

With `in_rounds`, no sample depends on timing. The order of groups is strict, and waves do not overlap. Teachers score
complete chunks of a wave only. The weights change only after all groups that were admitted at the old version have
ended (`Rollouts.settle`).

If too many groups fail or are rejected, the run ends before it draws further prompts.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from roll_opd.base.failures import RunError
from roll_opd.cluster.stall_watchdog import WAITS
from roll_opd.data.prompt_source import PASSED, MixedSource, Prompt, TaskSource
from roll_opd.objective.demonstrations import demonstration_samples
from roll_opd.objective.filters import GroupFilter
from roll_opd.rollout.saved_groups import within_bound
from roll_opd.rollout.staleness import GroupWindow, Pace
from roll_opd.rollout.workflow_runs import (
    Batch,
    FinishedGroup,
    PendingRewards,
    RolloutContext,
    check_failed_rate,
    roll_out,
)
from roll_opd.samples.sample import Sample
from roll_opd.workers.reward_pool import RewardPool
from roll_opd.workers.workflow_pool import WorkflowPool

# the run ends if the groups rejected for one batch are more than MAX_REJECTED times the groups of a batch, and more
# than MIN_REJECTED
MAX_REJECTED = 20
MIN_REJECTED = 1000


class Gate:
    """The published version of the weights, and a signal for changes of the producer's state."""

    def __init__(self, version: int) -> None:
        """Create a gate whose published version is `version`."""
        self.version = version
        self._changed = asyncio.Event()

    def publish(self, version: int) -> None:
        """Announce that the engines have the weights of `version`, so that sampling for training may use them."""
        if version < self.version:
            raise ValueError(f"version {version} was published after version {self.version}")
        self.version = version
        self.notify()

    def notify(self) -> None:
        """Wake all tasks that wait in `change`."""
        changed_now, self._changed = self._changed, asyncio.Event()
        changed_now.set()

    async def change(self) -> None:
        """Wait until a new version is published or `notify` is called."""
        await self._changed.wait()


@dataclass
class Rollouts:
    """The producer of batches. If the order of groups is strict, the prompts of a batch do not depend on timing."""

    context: RolloutContext
    source: TaskSource
    gate: Gate
    versions: range  # versions of the batches to produce
    pace: Pace  # a strict one with `in_rounds`
    passes: GroupFilter | None = None
    min_fraction: float = 0.0  # of a step's runs that must not fail
    demonstrations: int = 0  # rows with answers per batch
    in_rounds: bool = False  # no sample depends on timing
    restored: Sequence[FinishedGroup] = ()  # from the resumed checkpoint; groups that are too old are sampled again
    _production: "_Production | None" = field(default=None, init=False)

    async def batches(self) -> AsyncGenerator[Batch, None]:
        """Yield the batch of each version, in order.

        A background task produces the batches, as far ahead as the gate allows. Use this iterator in `aclosing`, so
        that running requests are aborted if the iteration ends early.
        """
        self._production = production = _Production(self)
        producing = production.producing
        try:
            for version in self.versions:
                yield await production.batch(version)
            await producing
        finally:
            producing.cancel()
            await asyncio.gather(producing, return_exceptions=True)

    async def settle(self) -> None:
        """With `in_rounds`, wait until all groups of the published version have ended.

        Raises the errors of the producer.
        """
        if self.in_rounds and self._production:
            await self._production.settle()

    def finished_groups(self) -> list[FinishedGroup]:
        """Return the groups that are completely sampled but in no batch, in the order of their draws."""
        return self._production.finished_groups() if self._production else []

    def drain_metrics(self) -> dict[str, float]:
        """Return the metrics of reward pools and of the workflow pool since the last call, including validation."""
        pools: list[RewardPool | WorkflowPool] = list(self.context.reward_pools)
        if isinstance(self.context.workflow, WorkflowPool):
            pools.append(self.context.workflow)
        return {name: value for pool in pools for name, value in pool.drain_metrics().items()}


@dataclass(frozen=True)
class _Group:
    """A finished group that is not in a batch yet."""

    prompt: Prompt
    result: FinishedGroup
    rewards: PendingRewards


class _Production:
    """The state of the producer: all groups that are drawn but not yet in a batch."""

    def __init__(self, rollouts: Rollouts) -> None:
        self._of, self._gate = rollouts, rollouts.gate
        self._source = rollouts.source  # at the oldest prompt that is neither in a batch nor left out
        self._ahead = self._source.copy()  # at the prompt of the next group
        self._done = set(self._source.passed)  # later draws that are in a batch or left out, also before a resume
        versions, start = rollouts.versions, self._source.position
        self._window = GroupWindow(rollouts.pace, versions.start, versions.stop, self._gate.version, start)
        kept = within_bound(rollouts.restored, start, self._done, versions.start, rollouts.pace)
        self._restored = {group.draw: group for group in kept}  # not admitted yet
        self._groups: dict[int, _Group] = {}  # by draw
        self._waves: dict[asyncio.Task[None], range] = {}  # wave -> its groups
        self._learner_waits = asyncio.Event()
        self._idle, self._idle_since = 0.0, time.perf_counter()  # seconds without a running wave
        self.producing = asyncio.create_task(self._run())
        self.producing.add_done_callback(lambda _: self._gate.notify())

    async def _run(self) -> None:
        """Admit groups until the last batch is complete. Raises the errors of the source and of the rollouts."""
        try:
            with self._of.context.clock.track("rollout"):
                while not self._window.is_complete:
                    for wave in [wave for wave in self._waves if wave.done()]:
                        del self._waves[wave]
                        if not wave.cancelled():
                            wave.result()
                    self._admit()
                    whom = "the learner to publish new weights" if self._is_idle else "running groups"
                    with WAITS.of("the producer", whom):
                        await self._gate.change()
        finally:
            for wave in self._waves:
                wave.cancel()
            await asyncio.gather(*self._waves, return_exceptions=True)

    async def settle(self) -> None:
        """Wait until no group runs and no further group may start at the published version.

        Raises the errors of the producer.
        """
        with WAITS.of("the weight sync", "the end of running groups (deterministic)"):
            while not self.producing.done():
                self._window.publish(self._gate.version)
                if self._is_idle and not self._window.room:
                    return
                await self._gate.change()
        self.producing.result()

    async def batch(self, version: int) -> Batch:
        """Wait for the groups of one version's batch, and return the batch. Raises the errors of the producer."""
        began = time.perf_counter()
        with WAITS.of("the learner", f"the producer, batch {version}"):
            while (draws := self._window.take()) is None:
                if self.producing.done():
                    self.producing.result()
                self._learner_waits.set()
                await self._gate.change()
        waited = time.perf_counter() - began
        self._learner_waits.clear()
        await self._end_unneeded()
        self._gate.notify()
        return self._assembled(version, draws, waited)

    async def _end_unneeded(self) -> None:
        """Discard the groups that the window has withdrawn, and wait for the ends of waves without a running group."""
        first = self._window.next
        if self._ahead.position > first:
            self._ahead = self._source.copy()
            self._ahead.skip(first - self._source.position)
            self._groups = {draw: group for draw, group in self._groups.items() if draw < first}
            for wave, draws in self._waves.items():
                if draws.stop > first:
                    wave.cancel()
            self._admit_known()
        ending = [wave for wave, draws in self._waves.items() if not self._window.runs(draws)]
        await asyncio.gather(*ending, return_exceptions=True)

    @property
    def _is_idle(self) -> bool:
        return all(wave.done() for wave in self._waves)

    def _admit(self) -> None:
        """Start waves until the window is full."""
        self._window.publish(self._gate.version)
        while True:
            self._admit_known()
            if not (room := self._window.room) or (self._of.in_rounds and self._waves):
                return
            first = self._window.next
            until_known = [draw - first for draw in (*self._done, *self._restored) if draw > first]
            prompts = self._ahead.take(min([room, *until_known]))
            draws = self._window.admit(len(prompts))
            self._start(draws, self._roll_out(draws, prompts))

    def _admit_known(self) -> None:
        """Assign group numbers to the next draws, as long as these draws need no sampling.

        A draw needs no sampling in two cases. Either the draw was trained on or filtered out before a resume. Or its
        group was restored from a checkpoint, and the window has room for the group.
        """
        while (draw := self._window.next) in self._done or (draw in self._restored and self._window.room):
            if draw in self._done:
                self._window.pass_over()
                self._ahead.skip(1)
            else:
                (prompt,) = self._ahead.take(1)
                self._start(self._window.admit(1), self._restore(prompt, self._restored.pop(draw)))

    def _start(self, draws: range, wave: Coroutine[Any, Any, None]) -> None:
        if not self._waves:
            self._idle += time.perf_counter() - self._idle_since
        task = asyncio.create_task(wave)
        self._waves[task] = draws
        task.add_done_callback(self._wave_ends)

    def _wave_ends(self, _: "asyncio.Task[None]") -> None:
        if self._is_idle:
            self._idle_since = time.perf_counter()
        self._gate.notify()

    async def _roll_out(self, draws: range, prompts: Sequence[Prompt]) -> None:
        """Roll out a wave, and decide for each of its groups whether the group passes."""
        of, n, version = self._of, self._of.context.sampling.n, self._gate.version
        rewards, urgent = PendingRewards(of.context), None if of.in_rounds else self._learner_waits
        ended: defaultdict[int, dict[int, Sequence[Sample] | None]] = defaultdict(dict)  # group -> run -> samples
        try:
            async with aclosing(roll_out(of.context, prompts, rewards, draws.start, bool(of.passes), urgent)) as runs:
                async for number, samples in runs:
                    place, run = divmod(number, n)
                    ended[place][run] = samples
                    if len(ended[place]) == n:
                        of_group = [samples for _, samples in sorted(ended.pop(place).items())]
                        result = FinishedGroup.of(draws[place], of_group, version, of.passes)
                        self._decide(prompts[place], result, rewards)
        finally:
            if of.passes:  # finished groups have their rewards
                rewards.cancel()
        _check_rejected([group.result for group in self._groups.values()], of.pace.groups, bool(of.passes))

    async def _restore(self, prompt: Prompt, group: FinishedGroup) -> None:
        """Restore a group from a checkpoint, so that a batch can use it.

        If the group passed the filters, its missing log-probs are computed. Then its missing rewards are requested.
        """
        context = self._of.context
        rewards, samples = PendingRewards(context), list(group.samples)
        if group.passed:
            if any(map(context.scorers.lacks, samples)):
                samples = await context.scorers.compute_logprobs(samples, context.sampling.temperature)
            for sample in samples:
                if not sample.excluded:
                    rewards.request(sample)
        self._decide(prompt, replace(group, samples=samples), rewards)

    def _decide(self, prompt: Prompt, group: FinishedGroup, rewards: PendingRewards) -> None:
        """Record a finished group."""
        self._groups[group.draw] = _Group(prompt, group, rewards)
        if group.failed_runs:
            of = self._of
            _check_failed(self.finished(), of.pace.groups, of.context.sampling.n, of.min_fraction)
        self._window.decide(group.draw, passed=group.passed)
        self._gate.notify()

    def finished(self) -> list[FinishedGroup]:
        """Return the groups that have ended but are in no batch, in the order of their draws."""
        return [self._groups[draw].result for draw in sorted(self._groups)]

    def finished_groups(self) -> list[FinishedGroup]:
        """Return the groups that are completely sampled but in no batch, in the order of their draws."""
        return sorted([*self.finished(), *self._restored.values()], key=lambda group: group.draw)

    def _assembled(self, version: int, draws: Sequence[int], waited: float) -> Batch:
        """Return the batch of one version.

        The batch also lists the rejected groups that come before the last group of the batch.

        Args:
            version: version of the weights before the update on the batch.
            draws: the groups of the batch.
            waited: seconds that the learner has waited for the batch.
        """
        batch = Batch(version)
        for draw in sorted(draw for draw in self._groups if draw <= draws[-1]):
            if self._groups[draw].result.passed and draw not in draws:
                continue
            group = self._groups.pop(draw)
            self._done.add(draw)
            batch.add(group.prompt, group.result, group.rewards)
        while self._source.position in self._done:
            self._done.remove(self._source.position)
            self._source.skip(1)
        self._add_demonstrations(batch)
        batch.epochs = self._source.epochs
        batch.source_state = self._source.state_dict() | ({PASSED: sorted(self._done)} if self._done else {})
        batch.schedule = self._schedule(waited)
        return batch

    def _add_demonstrations(self, batch: Batch) -> None:
        if self._of.demonstrations:
            assert isinstance(self._source, MixedSource)
            first_draw = self._source.demonstrations.position
            batch.demonstrations = self._source.demonstrations.take(self._of.demonstrations)
            batch.demonstration_samples = demonstration_samples(batch.demonstrations, first_draw)

    def _schedule(self, waited: float) -> dict[str, float]:
        """Return metrics of the producer since the last batch.

        Args:
            waited: seconds that the learner has waited for this batch.
        """
        idle, self._idle = self._idle, 0.0
        return {
            "rollout/async/learner_idle": waited,
            "rollout/async/engines_idle": idle,
            "rollout/async/running_groups": float(self._window.running),
            "rollout/async/finished_groups": float(self._window.finished),
            "rollout/async/admitted_groups": float(self._window.admitted),
            "rollout/async/trained_groups": float(self._window.batches * self._of.pace.groups),
        }


def _check_failed(groups: Iterable[FinishedGroup], wanted: int, n: int, min_fraction: float) -> None:
    """Raise RunError if so many runs have failed that the next batch cannot reach `min_fraction`.

    The next batch will list all groups up to the last one that it needs. Its groups that have not ended yet count as if
    none of their runs fails.

    Args:
        groups: finished groups that are in no batch, in the order of their draws.
        wanted: number of groups in a batch.
        n: number of runs per group.
        min_fraction: smallest fraction of a batch's runs that must not fail.
    """
    kept = replaced = failed = 0
    for group in groups:
        if kept == wanted:
            break
        kept += group.passed
        replaced += not group.passed and group.failed_runs > 0
        failed += group.failed_runs
    check_failed_rate(failed / (n * (wanted + replaced)), min_fraction)


def _check_rejected(groups: Sequence[FinishedGroup], wanted: int, is_filtered: bool) -> None:
    """Raise RunError if too many groups were rejected for one batch.

    Args:
        groups: finished groups that are in no batch.
        wanted: number of groups in a batch.
        is_filtered: whether a filter may reject groups.
    """
    kept = sum(group.passed for group in groups)
    rejected = len(groups) - kept
    if kept >= wanted or rejected <= max(MAX_REJECTED * wanted, MIN_REJECTED):
        return
    if failed := sum(not group.passed and group.failed_runs > 0 for group in groups):
        raise RunError(
            f"runs or rewards of {failed} prompts failed, filters rejected {rejected - failed} prompts, and only"
            f" {kept} prompts were kept, but a step needs {wanted}; see the warnings above, correct the workflow or"
            " the reward, and resume"
        )
    if not is_filtered:
        raise RunError(
            f"the workflow returned no sample for {rejected} prompts in a step of {wanted} prompts; correct the"
            " workflow (an agent that never calls the model returns no sample), or use other prompts"
        )
    raise RunError(
        f"the filters rejected the samples of {rejected} prompts and kept the samples of {kept} prompts, but a"
        f" step needs {wanted} prompts; loosen query_filter_config or response_filter_config, use other prompts,"
        " or correct a workflow or a reward"
    )
