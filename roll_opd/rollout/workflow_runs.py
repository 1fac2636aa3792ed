"""Run a workflow on several prompts concurrently, and collect samples with rewards and log-probs.

Samples are scored while others are still being sampled. The rewards of a run are requested when the run ends. The
rollout waits for these rewards only if a filter needs them. Teachers and reference score samples in chunks, in the
order in which the runs of an engine end. If an engine is deterministic, this order does not depend on timing, so the
same samples are always packed together. If groups run ahead and the learner waits, incomplete chunks are scored too.

A `FinishedGroup` holds the samples of one prompt, and a `Batch` holds those of one training step.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from roll_opd.base.failures import RunError
from roll_opd.base.terminal import warn
from roll_opd.cluster.stall_watchdog import WAITS
from roll_opd.config.plan import SamplingPlan
from roll_opd.data.prompt_source import Prompt
from roll_opd.objective.filters import GroupFilter
from roll_opd.rollout.workflow_protocol import Model, SingleTurn, Task, Workflow
from roll_opd.samples.sample import Sample, changed
from roll_opd.samples.versions import of_mask, sampling_versions, tokens_by_version
from roll_opd.teachers.scoring import Scorers
from roll_opd.tracking.console import Count, Progress
from roll_opd.tracking.phase_clock import PhaseClock
from roll_opd.workers.reward_pool import RewardPool, RewardResult
from roll_opd.workers.sampler import Sampler


@dataclass(frozen=True)
class RolloutContext:
    """The models, reward pools and settings that all rollouts of a training run share."""

    sampler: Sampler
    sampling: SamplingPlan
    reward_pools: Sequence[RewardPool]
    seed: int
    chunk_samples: int  # number of samples that teachers and reference score at a time
    clock: PhaseClock
    scorers: Scorers = field(default_factory=Scorers)
    workflow: Workflow = field(default_factory=SingleTurn)
    is_eval: bool = False
    exclude_failed: bool = True  # leave out samples whose reward failed
    progress: Progress = field(default_factory=Progress)


class PendingRewards:
    """Reward requests in progress. The key of a request is the id of its sample."""

    def __init__(self, context: RolloutContext) -> None:
        self._pools, self._exclude_failed = context.reward_pools, context.exclude_failed
        self._requests: dict[str, asyncio.Future[RewardResult]] = {}
        self._progress, self.scored = context.progress, Count("scored")
        self.domains = tuple(pool.plan.domain for pool in self._pools)

    def request(self, sample: Sample) -> None:
        """Request the reward of a sample from the reward pool that accepts its tag.

        Nothing is requested if the run has already set the sample's reward.
        """
        if sample.reward is not None:
            return
        for pool in self._pools:
            if pool.plan.accepts(sample.tag):
                self.scored.total += 1
                self._requests[sample.id] = answer = pool.submit(sample)
                answer.add_done_callback(self.scored.one)

    async def added_to(self, samples: Sequence[Sample]) -> list[Sample]:
        """Wait for the requested rewards of samples, and return the samples with these rewards.

        Samples without a pending request are returned unchanged. Raises the errors of `RewardPool.submit`.
        """
        names = [sample.id for sample in samples if sample.id in self._requests]
        of = WAITS.of("a selection or the learner", f"the rewards of {len(names)} samples") if names else nullcontext()
        with self._progress.showing(self.scored), of:
            answers = await asyncio.gather(*[self._requests.pop(name) for name in names])
        results = dict(zip(names, answers, strict=True))
        return [self._with(results[e.id], e) if e.id in results else e for e in samples]

    def cancel(self) -> None:
        """Cancel the requests in progress."""
        for request in self._requests.values():
            request.cancel()
        self._requests.clear()

    def _with(self, result: RewardResult, sample: Sample) -> Sample:
        added = result.added_to(sample)
        return added if self._exclude_failed else changed(added, excluded=False)


async def roll_out(
    context: RolloutContext,
    prompts: Sequence[Prompt],
    rewards: PendingRewards,
    first_draw: int,
    wait_for_rewards: bool = False,
    urgent: asyncio.Event | None = None,
) -> AsyncGenerator[tuple[int, list[Sample] | None], None]:
    """Run the workflow `sampling.n` times on each prompt, and yield the result of each run when it ends.

    A result is a pair (number, samples). Run k of prompt p has the number p · n + k. The samples have the log-probs of
    teachers and reference. They are None if the run failed. Use this iterator in `aclosing`, so that running requests
    are aborted if the iteration ends early.

    Args:
        first_draw: draw number of the first prompt. Group ids, sample seeds and the engine of a group depend on the
            draw number, so they are the same in a resumed run.
        wait_for_rewards: whether a run is yielded only when its samples have their rewards. If False, rewards may still
            be pending.
        urgent: while it is set, samples are scored without waiting for complete chunks.
    """
    n, sampler, temperature = context.sampling.n, context.sampler, context.sampling.temperature
    engines = [sampler.engine_of(first_draw + number // n) for number in range(len(prompts) * n)]
    logprobs = ChunkedLogprobs(context.scorers, temperature, context.chunk_samples, engines, urgent)
    models = context.scorers
    generated, read = Count("generated", len(engines)), Count("log-probs", len(engines))
    counts = [generated, *([read] if models.teachers or models.reference else []), rewards.scored]

    async with sampler.session(context.chunk_samples) as session:

        async def run(number: int) -> tuple[int, list[Sample] | None]:
            """Return (number, samples) of one run; samples is None if the run failed.

            The samples have the log-probs of teachers and reference. Their rewards may be pending.
            """
            position, attempt = divmod(number, n)
            task = Task(prompts[position], first_draw + position, attempt, n, context.is_eval)
            model = Model(session, task, context.seed, context.sampling)
            made = await context.workflow.run(task, model)
            WAITS.moved()
            generated.one()
            if generated.done == generated.total:
                generating.close()
            for sample in made or ():
                rewards.request(sample)
            looked_at = await logprobs.added_to(made or (), engines[number])
            read.one()
            if made is None:
                return number, None
            return number, await rewards.added_to(looked_at) if wait_for_rewards else looked_at

        with _timed(context) as generating, context.progress.showing(*counts):
            runs = [asyncio.create_task(run(number)) for number in range(len(engines))]
            try:
                for finished in asyncio.as_completed(runs):
                    yield await finished
            finally:
                for unfinished in runs:
                    unfinished.cancel()
                await asyncio.gather(*runs, return_exceptions=True)


class ChunkedLogprobs:
    """Computes log-probs of teachers and reference for chunks of samples.

    The samples of an engine are put into chunks in the order in which its runs end.
    """

    def __init__(
        self,
        models: Scorers,
        temperature: float,
        chunk: int,
        engines: Sequence[int],
        urgent: asyncio.Event | None = None,
    ) -> None:
        """Create the queues of waiting samples.

        Args:
            chunk: number of samples that the models score at a time.
            engines: the engine of each run.
            urgent: while it is set, incomplete chunks are scored too, one at a time.
        """
        self._models, self._temperature, self._chunk = models, temperature, chunk
        self._running, self._urgent, self._early = Counter(engines), urgent, asyncio.Lock()
        self._waiting: dict[int, list[tuple[Sample, asyncio.Future[Sample]]]] = defaultdict(list)

    async def added_to(self, samples: Sequence[Sample], engine: int) -> list[Sample]:
        """Return the samples of a run with their log-probs. This method must be called once for each run.

        The samples of an engine wait until a chunk is complete, until the last run of the engine has ended, or until
        scoring is urgent. One of the calls then computes the log-probs of all waiting samples.
        """
        loop = asyncio.get_running_loop()
        results: list[asyncio.Future[Sample]] = [loop.create_future() for _ in samples]
        self._waiting[engine] += zip(samples, results, strict=True)
        self._running[engine] -= 1
        if len(self._waiting[engine]) >= self._chunk or not self._running[engine]:
            await self._score([engine])
        elif results and self._urgent:
            await self._score_if_urgent(results[-1], self._urgent)
        return [await result for result in results]

    async def _score_if_urgent(self, result: asyncio.Future[Sample], urgent: asyncio.Event) -> None:
        """Wait for a result. If scoring becomes urgent before, score the waiting samples of all engines."""
        waiting = asyncio.create_task(urgent.wait())
        either: list[asyncio.Future[Any]] = [result, waiting]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        async with self._early:  # samples that end meanwhile form the next chunk
            if not result.done():
                await self._score(list(self._waiting))

    async def _score(self, engines: Sequence[int]) -> None:
        """Compute the log-probs of the waiting samples of some engines."""
        if not (chunk := [one for engine in engines for one in self._waiting.pop(engine, ())]):
            return
        with WAITS.of("the scorer", f"teachers and reference, {len(chunk)} samples"):
            read = await self._models.compute_logprobs([waiting for waiting, _ in chunk], self._temperature)
        for (_, future), one in zip(chunk, read, strict=True):
            future.set_result(one)


@contextmanager
def _timed(context: RolloutContext) -> Iterator[ExitStack]:
    """Count time as the phase `generate` until the yielded stack is closed.

    After that, time counts as the phase `teacher`, or as the phase `reward` if there are no scorers.
    """
    models = context.scorers
    with ExitStack() as generating:  # while both phases are open, the time counts for the first
        generating.enter_context(context.clock.phase("generate"))
        with context.clock.phase("teacher" if models.teachers or models.reference else "reward"):
            yield generating


@dataclass(frozen=True)
class FinishedGroup:
    """All samples of one draw, whether the group passed the filters, and how many of its runs failed."""

    draw: int
    passed: bool
    samples: Sequence[Sample]
    failed_runs: int = 0

    @classmethod
    def of(
        cls, draw: int, runs: Sequence[Sequence[Sample] | None], version: int, passes: GroupFilter | None
    ) -> "FinishedGroup":
        """Return a group with the samples of its runs. A group without a sample does not pass.

        Args:
            draw: number of the draw of the group's prompt.
            runs: the samples of each run; None for a failed run.
            version: version of the weights at the start of the runs. It becomes the version of all sampled tokens of a
                sample without versions, as no token can be older.
            passes: filter of groups, or None.
        """
        failed = sum(samples is None or any(sample.excluded for sample in samples) for samples in runs)
        samples = [
            sample if sample.versions else changed(sample, versions=of_mask(sample.action_mask, version))
            for of_run in runs
            for sample in of_run or ()
        ]
        return cls(draw, bool(samples) and (passes is None or passes(samples)), samples, failed)


@dataclass
class Batch:
    """The samples of one step, and the state of the prompt source after the prompts of these samples."""

    version: int  # version of the weights before the update on this batch
    # reward requests of each rollout that made samples of the batch
    rewards: list[PendingRewards] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)  # samples of each prompt, in the order of the prompts
    group_sizes: list[int] = field(default_factory=list)  # number of samples of each prompt
    filtered: list[Prompt] = field(default_factory=list)  # prompts whose groups did not pass
    draws: list[int] = field(default_factory=list)  # draw number of each prompt
    filtered_draws: list[int] = field(default_factory=list)
    failed: list[Prompt] = field(default_factory=list)  # prompts whose groups did not pass, and had failed runs
    failed_draws: list[int] = field(default_factory=list)
    failed_runs: int = 0  # failed runs of the prompts in `failed`
    # oldest and newest version of each draw
    sampled_by: list[list[int]] = field(default_factory=list)
    generated_tokens: int = 0  # sampled tokens of all groups, including groups that did not pass
    demonstrations: list[Prompt] = field(default_factory=list)  # rows with answers
    demonstration_samples: list[Sample] = field(default_factory=list)
    # for a checkpoint: the state in which prompts of later batches are not drawn yet
    source_state: dict[str, Any] = field(default_factory=dict)
    epochs: float = 0.0  # passes over the prompts
    schedule: dict[str, float] = field(default_factory=dict)  # metrics of the producer since the last batch

    def add(self, prompt: Prompt, group: FinishedGroup, rewards: PendingRewards) -> None:
        """Add the next group to the batch.

        The prompt of a group that has not passed is listed as failed or filtered.
        """
        self.generated_tokens += sum(sample.action_tokens for sample in group.samples)
        if not group.passed and group.failed_runs:
            self.failed.append(prompt)
            self.failed_draws.append(group.draw)
            self.failed_runs += group.failed_runs
        elif not group.passed:
            self.filtered.append(prompt)
            self.filtered_draws.append(group.draw)
        else:
            self.prompts.append(prompt)
            self.draws.append(group.draw)
            sampled_by = set[int]().union(*(sampling_versions(sample.versions) for sample in group.samples))
            pair = min(sampled_by, default=self.version), max(sampled_by, default=self.version)
            self.sampled_by.append(list(pair))
            self.samples += group.samples
            self.group_sizes.append(len(group.samples))
            if rewards not in self.rewards:
                self.rewards.append(rewards)

    @property
    def versions(self) -> Counter[int]:
        """Number of sampled tokens for each version of the weights."""
        return tokens_by_version(sample.versions for sample in self.samples)

    def ahead_metrics(self) -> dict[str, float]:
        """Return the metrics `rollout/async/*`: waiting times, counts of groups, and ages of the sampled tokens.

        The ages are in versions.
        """
        tokens = self.versions
        ages = sorted((self.version - version, count) for version, count in tokens.items())
        total, below, p95 = sum(tokens.values()), 0, 0
        for age, count in ages:
            if below < 0.95 * total:
                p95 = age
            below += count
        kinds = [len(sampling_versions(sample.versions)) for sample in self.samples]
        return {
            **self.schedule,
            "rollout/async/age_mean": sum(age * count for age, count in ages) / max(total, 1),
            "rollout/async/age_p95": float(p95),
            "rollout/async/age_max": float(max((age for age, _ in ages), default=0)),
            "rollout/async/versions_per_sample": sum(kinds) / max(len(kinds), 1),
        }

    def failed_rate(self, samples: Sequence[Sample], runs: int) -> float:
        """Return the fraction of the step's runs that failed. A failed run has no sample or an excluded one.

        The runs of the step are those of the batch and those of the prompts in `failed`.

        Args:
            samples: the samples of the batch with rewards, in the order of the batch.
            runs: number of runs per prompt.
        """
        left, begin = 0, 0
        for size in self.group_sizes:
            group = samples[begin : begin + size]
            left += len({sample.run for sample in group} - {sample.run for sample in group if sample.excluded})
            begin += size
        of_batch, of_failed = runs * len(self.group_sizes), runs * len(self.failed)
        return (of_batch - left + self.failed_runs) / (of_batch + of_failed)

    def set_failed_apart(self, samples: Sequence[Sample]) -> None:
        """Move the prompts whose samples are all excluded from the trained ones to `failed`.

        Args:
            samples: the samples of the batch with rewards, in the order of the batch.
        """
        begin, kept = 0, []
        for place, size in enumerate(self.group_sizes):
            if all(sample.excluded for sample in samples[begin : begin + size]):
                self.failed.append(self.prompts[place])
                self.failed_draws.append(self.draws[place])
            else:
                kept.append(place)
            begin += size
        self.prompts, self.draws = [self.prompts[n] for n in kept], [self.draws[n] for n in kept]
        self.sampled_by = [self.sampled_by[n] for n in kept]

    async def with_rewards(self, samples: Sequence[Sample]) -> list[Sample]:
        """Wait for the missing rewards of the batch's samples, and return the samples with these rewards."""
        found = list(samples)
        for rewards in self.rewards:
            found = await rewards.added_to(found)
        if self.rewards and samples and not any(rewards.scored.total for rewards in self.rewards):
            _warn_uncalled(self.rewards[0].domains)
        return found


@cache  # once in a run
def _warn_uncalled(domains: tuple[str, ...]) -> None:
    """Warn if a workflow has set the rewards of all samples of the first batch, so that no reward was called."""
    names = ", ".join(f"rewards.{domain}" for domain in domains)
    if domains:
        warn(f"{names}: never called, because the workflow sets the reward of every sample; remove {names}")


def check_failed_rate(failed_rate: float, min_fraction: float) -> None:
    """Raise RunError if less than `min_fraction` of a step's runs are left after failures."""
    if 1 - failed_rate < min_fraction:
        raise RunError(
            f"at most {1 - failed_rate:.0%} of the runs of a step are left after failures, less than min_batch_fraction"
            f" {min_fraction:g}; see the warnings above, correct the workflow or the reward, and resume"
        )
