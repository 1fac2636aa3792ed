"""`Rollouts`, the producer of a run's batches: it draws prompts, rolls them out, and selects groups.

Each batch belongs to a version of the weights: the update on batch v makes version v + 1. A `Gate` publishes versions.
`models.group_window` defines the order of groups and the bound on their ages. Groups that are admitted together form a
wave, which is rolled out together. If no groups run ahead of training, there is one wave at a time, and sampling and
training take turns.

Groups are selected in the order of their prompts. If they were selected in the order in which they finish, short
answers would be preferred. Finished groups may overtake unfinished groups only within a window.

With `in_rounds`, no sample depends on timing. The order of groups is strict, and waves do not overlap. The weights
change only after all groups that were admitted at the old version have ended (`Rollouts.settle`).
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from roll_opd.base.failures import RunError
from roll_opd.cluster.waits import WAITS
from roll_opd.data.prompt_source import PASSED, MixedSource, Prompt, TaskSource
from roll_opd.models.group_window import GroupWindow, Pace
from roll_opd.objective.demonstrations import demonstration_samples
from roll_opd.objective.filters import GroupFilter
from roll_opd.rollout.finished_groups import FinishedGroup, within_bound
from roll_opd.rollout.runs import Batch, PendingRewards, RolloutContext, Selection, roll_out
from roll_opd.samples.sample import Sample, changed
from roll_opd.samples.versions import of_mask, sampling_versions
from roll_opd.workers.reward_pool import RewardPool
from roll_opd.workers.workflow_pool import WorkflowPool

# the run ends if the groups rejected for one batch are more than MAX_REJECTED times the groups of a batch, and more
# than MIN_REJECTED
MAX_REJECTED = 20
MIN_REJECTED = 1000


class Gate:
    """The published version of the weights, and the limits on how far sampling may run ahead of it.

    `Pace.of` explains the limits `bound` and `depth`.
    """

    def __init__(self, version: int, bound: int = 0, depth: int | None = None) -> None:
        """Create a gate whose published version is `version`."""
        self.version, self.bound, self.depth = version, bound, depth
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
    groups: int  # per batch
    extra_groups: int = 0  # sampled in addition to each batch, as filters may reject groups; 0 if groups run ahead
    passes: GroupFilter | None = None
    min_fraction: float = 0.0  # of a step's runs that must not fail
    demonstrations: int = 0  # rows with answers per batch
    in_rounds: bool = False  # no sample depends on timing, even if groups run ahead
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
    """A decided group: it is known whether the group has passed the filters. The group is not in a batch yet."""

    prompt: Prompt
    draw: int
    passed: bool
    samples: list[Sample]
    failed_runs: int
    rewards: PendingRewards


@dataclass(frozen=True)
class _Position:
    """The position of the prompt source after one prompt."""

    state: dict[str, Any]
    epochs: float


@dataclass
class _Wave:
    """Groups of consecutive draws that are admitted and rolled out together."""

    numbers: range
    prompts: list[Prompt]
    first_draw: int
    wanted: int
    decided: set[int] = field(default_factory=set)  # indices in the wave


class _Production:
    """The state of the producer: all groups that are drawn but not yet in a batch."""

    def __init__(self, rollouts: Rollouts) -> None:
        self._of, self._gate, self._source = rollouts, rollouts.gate, rollouts.source
        self._pace = Pace.of(rollouts.groups, self._gate.bound, self._gate.depth)
        if rollouts.in_rounds:
            self._pace = replace(self._pace, window=1)
        self._one_wave = rollouts.in_rounds or self._pace.is_synchronous
        versions = rollouts.versions
        self._window = GroupWindow(self._pace, versions.start, versions.stop, self._gate.version)
        self._waves: set[asyncio.Task[None]] = set()
        self._learner_waits = asyncio.Event()
        self._groups: dict[int, _Group] = {}  # decided groups, by number
        self._positions: dict[int, _Position] = {}  # position after each group, kept until no older group is open
        self._position = self._here()  # position after all groups before `_oldest`
        self._oldest = 0  # number of the oldest group that is neither in a batch nor left out
        self._done: dict[int, int] = {}  # number -> draw, for later groups that are in a batch or left out
        self._passed = set(self._source.passed)  # later draws that were done before a resume
        kept = within_bound(rollouts.restored, self._source.position, self._passed, versions.start, self._pace)
        self._restored = {group.draw: group for group in kept}  # draw -> restored group without a number
        self._idle, self._idle_since = 0.0, time.perf_counter()  # seconds without a running wave
        self.producing = asyncio.create_task(self._run())
        self.producing.add_done_callback(lambda _: self._gate.notify())

    async def _run(self) -> None:
        """Admit groups until the last batch is complete. Raises the errors of the source and of the rollouts."""
        try:
            with self._of.context.clock.track("rollout"):
                while not self._window.is_complete:
                    for failed in [wave for wave in self._waves if wave.done()]:
                        self._waves.discard(failed)
                        failed.result()
                    self._window.publish(self._gate.version)
                    self._admit()
                    if self._of.in_rounds:
                        self._gate.notify()  # `settle` reads the new state
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
            while not (self.producing.done() or self._is_settled):
                await self._gate.change()
        if self.producing.done():
            self.producing.result()

    async def batch(self, version: int) -> Batch:
        """Wait for the groups of one version's batch, and return the batch. Raises the errors of the producer."""
        began = time.perf_counter()
        with WAITS.of("the learner", f"the producer, batch {version}"):
            while (numbers := self._window.take()) is None:
                if self.producing.done():
                    self.producing.result()
                self._learner_waits.set()
                await self._gate.change()
        self._learner_waits.clear()
        self._gate.notify()
        batch = self._assembled(version, numbers)
        if not self._pace.is_synchronous:
            batch.schedule = self._schedule(time.perf_counter() - began)
        return batch

    @property
    def _is_idle(self) -> bool:
        return all(wave.done() for wave in self._waves)

    @property
    def _is_settled(self) -> bool:
        return self._window.version == self._gate.version and not self._window.room and self._is_idle

    def _admit(self) -> None:
        """Start waves until the window is full."""
        while True:
            self._admit_known()
            if not (room := self._window.room) or (self._one_wave and self._waves):
                return
            wave = self._drawn(room)
            self._start(self._roll_out(wave))

    def _admit_known(self) -> None:
        """Assign group numbers to the next draws, as long as these draws need no sampling.

        A draw needs no sampling in two cases. Either the draw was trained on or filtered out before a resume. Or its
        group was restored from a checkpoint, and the window has room for the group.
        """
        while (draw := self._source.position) in self._passed or (draw in self._restored and self._window.room):
            if draw in self._passed:
                self._passed.remove(draw)
                number = self._window.pass_over()
                self._done[number] = draw
                self._advance(range(number, number + 1))
                continue
            (prompt,) = self._source.peek(1)
            numbers = self._window.admit(1)
            self._advance(numbers)
            self._start(self._restore(numbers[0], prompt, self._restored.pop(draw)))

    def _start(self, wave: Coroutine[Any, Any, None]) -> None:
        if not self._waves:
            self._idle += time.perf_counter() - self._idle_since
        task = asyncio.create_task(wave)
        self._waves.add(task)
        task.add_done_callback(self._wave_ends)

    def _wave_ends(self, _: "asyncio.Task[None]") -> None:
        if self._is_idle:
            self._idle_since = time.perf_counter()
        self._gate.notify()

    def _drawn(self, room: int) -> _Wave:
        """Return a wave of at most `room` consecutive prompts from the source.

        If no groups run ahead and groups are filtered, the wave also has the extra groups.
        """
        first, in_turns = self._source.position, self._pace.is_synchronous
        reserve = self._of.extra_groups if in_turns and self._of.passes else 0
        known = [draw - first for draw in (*self._passed, *self._restored) if draw > first]
        prompts = self._source.peek(min([room + reserve, *known]))
        numbers = self._window.admit(len(prompts))
        if not in_turns:  # prompts that are not needed now stay in the source
            self._advance(numbers)
        return _Wave(numbers, prompts, first, min(room, len(prompts)))

    def _advance(self, numbers: range) -> None:
        """Advance the source past the prompts of the given groups, and record the position after each prompt."""
        for number in numbers:
            self._source.skip(1)
            self._positions[number] = self._here()

    def _here(self) -> _Position:
        return _Position(self._source.state_dict(), self._source.epochs)

    async def _roll_out(self, wave: _Wave) -> None:
        """Roll out a wave and decide for each of its groups whether the group passes.

        If no groups run ahead, only as many groups are decided as the batch needs.
        """
        of, in_turns = self._of, self._pace.is_synchronous
        rewards = PendingRewards(of.context)
        selection = Selection(len(wave.prompts), of.context.sampling.n, wave.wanted, of.passes)
        # the draw chooses the engine, so that a group has the same engine in a resumed run
        sampled_by, first_group = self._gate.version, 0 if in_turns else wave.first_draw
        urgent = None if self._one_wave else self._learner_waits
        runs = roll_out(of.context, wave.prompts, rewards, wave.first_draw, bool(of.passes), first_group, urgent)
        async with aclosing(runs):
            async for number, samples in runs:
                # with groups ahead, this is the oldest version that a token can have
                if samples and (not in_turns or self._gate.version == sampled_by):
                    samples = [_with_version(sample, sampled_by) for sample in samples]
                selection.add(number, samples)
                if not in_turns:
                    self._decide(wave, selection, rewards, len(wave.prompts))
                if selection.enough:
                    break
        if of.passes:  # the chosen groups have their rewards; the others do not need them
            rewards.cancel()
        if in_turns:
            self._advance(wave.numbers[: selection.used])
            self._window.withdraw(len(wave.prompts) - selection.used)
        self._decide(wave, selection, rewards, selection.used)
        self._check_rejected()

    async def _restore(self, number: int, prompt: Prompt, group: FinishedGroup) -> None:
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
        self._groups[number] = _Group(prompt, group.draw, group.passed, samples, group.failed_runs, rewards)
        self._window.decide(number, passed=group.passed)

    def finished_groups(self) -> list[FinishedGroup]:
        """Return the groups that are completely sampled but in no batch, in the order of their draws."""
        decided = [FinishedGroup(g.draw, g.passed, g.samples, g.failed_runs) for g in self._groups.values()]
        return sorted([*decided, *self._restored.values()], key=lambda group: group.draw)

    def _decide(self, wave: _Wave, selection: Selection, rewards: PendingRewards, end: int) -> None:
        """Record which groups of a wave have passed.

        A group is recorded if all its runs have ended and its index in the wave is below `end`.
        """
        for place, passed in selection.decided.items():
            if place < end and place not in wave.decided:
                wave.decided.add(place)
                draw, samples, failed = (
                    wave.first_draw + place,
                    selection.samples_of(place),
                    selection.failed_runs(place),
                )
                self._groups[wave.numbers[place]] = _Group(wave.prompts[place], draw, passed, samples, failed, rewards)
                if failed:
                    self._check_failed()
                self._window.decide(wave.numbers[place], passed=passed)
                self._gate.notify()

    def _assembled(self, version: int, numbers: list[int]) -> Batch:
        """Return the batch of one version.

        The batch also lists the rejected groups that come before the last group of the batch.

        Args:
            version: version of the weights before the update on the batch.
            numbers: numbers of the groups in the batch.
        """
        batch, chosen = Batch(version), set(numbers)
        for number in sorted(n for n in self._groups if n <= numbers[-1]):
            if self._groups[number].passed and number not in chosen:
                continue
            group = self._groups.pop(number)
            self._done[number] = group.draw
            batch.generated_tokens += sum(sample.action_tokens for sample in group.samples)
            if not group.passed and group.failed_runs:
                batch.failed.append(group.prompt)
                batch.failed_draws.append(group.draw)
                batch.failed_runs += group.failed_runs
                continue
            if not group.passed:
                batch.filtered.append(group.prompt)
                batch.filtered_draws.append(group.draw)
                continue
            batch.prompts.append(group.prompt)
            batch.draws.append(group.draw)
            if not self._pace.is_synchronous:
                sampled_by = set[int]().union(*(sampling_versions(sample.versions) for sample in group.samples))
                batch.sampled_by.append([min(sampled_by, default=version), max(sampled_by, default=version)])
            batch.samples += group.samples
            batch.group_sizes.append(len(group.samples))
            if group.rewards not in batch.rewards:
                batch.rewards.append(group.rewards)
        while self._oldest in self._done:
            del self._done[self._oldest]
            self._position = self._positions.pop(self._oldest)
            self._oldest += 1
        self._add_demonstrations(batch)
        batch.epochs = self._position.epochs
        batch.source_state = self._state()
        return batch

    def _add_demonstrations(self, batch: Batch) -> None:
        if self._of.demonstrations:
            assert isinstance(self._source, MixedSource)
            first_draw = self._source.demonstrations.position
            batch.demonstrations = self._source.demonstrations.take(self._of.demonstrations)
            batch.demonstration_samples = demonstration_samples(batch.demonstrations, first_draw)

    def _state(self) -> dict[str, Any]:
        """Return the state of the source for a checkpoint.

        In this state, the prompts of later batches have not been drawn, so a resumed run draws them again.
        """
        state = dict(self._position.state)
        if isinstance(self._source, MixedSource):
            state["demonstrations"] = self._source.demonstrations.state_dict()
        passed = sorted({*self._done.values(), *self._passed})
        return state | ({PASSED: passed} if passed else {})

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
            "rollout/async/trained_groups": float(self._window.batches * self._of.groups),
        }

    def _check_failed(self) -> None:
        """Raise RunError if so many runs have failed that the next batch cannot reach `min_fraction`.

        The next batch will list all groups up to the last one that it needs. Its groups that are not decided yet count
        as if none of their runs fails.
        """
        groups, n = self._of.groups, self._of.context.sampling.n
        kept = replaced = failed = 0
        for number in sorted(self._groups):
            group = self._groups[number]
            if kept == groups:
                break
            kept += group.passed
            replaced += not group.passed and group.failed_runs > 0
            failed += group.failed_runs
        check_failed_rate(failed / (n * (groups + replaced)), self._of.min_fraction)

    def _check_rejected(self) -> None:
        groups, decided = self._of.groups, self._groups.values()
        kept = sum(group.passed for group in decided)
        rejected = len(decided) - kept
        if kept >= groups or rejected <= max(MAX_REJECTED * groups, MIN_REJECTED):
            return
        if failed := sum(not group.passed and group.failed_runs > 0 for group in decided):
            raise RunError(
                f"runs or rewards of {failed} prompts failed, filters rejected {rejected - failed} prompts, and only"
                f" {kept} prompts were kept, but a step needs {groups}; see the warnings above, correct the workflow or"
                " the reward, and resume"
            )
        if self._of.passes is None:
            raise RunError(
                f"the workflow returned no sample for {rejected} prompts in a step of {groups} prompts; correct the"
                " workflow (an agent that never calls the model returns no sample), or use other prompts"
            )
        raise RunError(
            f"the filters rejected the samples of {rejected} prompts and kept the samples of {kept} prompts, but a"
            f" step needs {groups} prompts; loosen query_filter_config or response_filter_config, use other prompts,"
            " or correct a workflow or a reward"
        )


def check_failed_rate(failed_rate: float, min_fraction: float) -> None:
    """Raise RunError if less than `min_fraction` of a step's runs are left after failures."""
    if 1 - failed_rate < min_fraction:
        raise RunError(
            f"at most {1 - failed_rate:.0%} of the runs of a step are left after failures, less than min_batch_fraction"
            f" {min_fraction:g}; see the warnings above, correct the workflow or the reward, and resume"
        )


def _with_version(sample: Sample, version: int) -> Sample:
    """Return a workflow's sample with versions.

    If the sample has no versions, `version` is set as the version of all its sampled tokens.
    """
    return sample if sample.versions else changed(sample, versions=of_mask(sample.action_mask, version))
