"""The reward workers of one domain, as the driver sees them. A worker scores each sample when its sampling ends."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import ray

from roll_opd.base.failures import RunError
from roll_opd.base.frozen import FrozenDict
from roll_opd.config.plan import RewardPlan
from roll_opd.rewards.interface import Failure, Score, Scored
from roll_opd.samples.sample import Sample, changed
from roll_opd.tracking.reward_metrics import scoring_metrics
from roll_opd.workers.ray_worker import RayWorker
from roll_opd.workers.resilient_pool import FailureLog, ResilientPool, WorkerLost
from roll_opd.workers.sampler import Sampler

NO_VALUE = "none"  # kind of failure: the reward returned None in a run that trains on rewards
LEFT_OUT = ("drop", "replace")  # values of on_error that leave a failed sample out of training
CONSEQUENCES = {"zero": "have the reward 0", "replace": "are left out, and other prompts replace their groups"}
MAX_FAILED_STEPS = 3  # after this many consecutive steps without any reward the run ends
ALIVE_SECONDS = 60.0  # after this time without an answer (or the reward's longer time limit), a worker is checked


@dataclass(frozen=True)
class RewardResult:
    """The reward of a sample, or the reason why the sample has no reward."""

    domain: str
    reward: float | None  # None: the reward does not apply to the sample, or it failed and the sample is excluded
    parts: Mapping[str, float] = field(default_factory=FrozenDict)
    reason: str = ""
    excluded: bool = False  # the reward failed, and the sample is left out of training

    def added_to(self, experience: Sample) -> Sample:
        """Return the sample with its reward."""
        return changed(
            experience,
            reward=self.reward,
            domain=self.domain,
            reward_parts=dict(self.parts),
            reward_reason=self.reason,
            excluded=self.excluded,
        )


class RewardPool:
    """The reward workers of one domain. All methods must be called from one event loop."""

    def __init__(
        self,
        plan: RewardPlan,
        spawn: Callable[[], ray.actor.ActorHandle],
        model_path: str,
        sampler: Sampler | None = None,
        *,
        is_learned: bool = True,
        max_lost: int | None = None,
    ) -> None:
        """Create the pool without starting its processes.

        Args:
            plan: settings of the domain's reward.
            spawn: starts a worker process.
            model_path: directory of the tokenizer.
            sampler: engines of the judge model, if the reward has one.
            is_learned: whether the run trains on the rewards. If False, the run continues even if all rewards fail.
            max_lost: see `ResilientPool`.
        """
        self.plan = plan
        self._spawn, self._model_path, self._sampler = spawn, model_path, sampler
        self._is_learned = is_learned
        self._key = f"rewards.{plan.domain}"
        self._pool: ResilientPool[Sample, RewardResult] = ResilientPool(
            self._key,
            self._start_worker,
            self._result,
            plan.world_size,
            plan.max_concurrency * plan.batch_size,
            max_lost=max_lost,
            # rewards that are only monitored need not be there at all, so nothing waits for them
            failure=self._problem if is_learned else None,
        )
        self._failures = FailureLog(
            "samples",
            CONSEQUENCES.get(plan.on_error, "are left out"),
            f"reward/{plan.domain}/errors",
            f"correct it, or set {self._key}.on_error to zero, drop or replace" if plan.on_error == "stop" else None,
            must_succeed=is_learned,
        )
        self._failed_steps = 0  # consecutive calls of `drain_metrics` in which every sample had failed
        self._reset()

    async def start(self) -> None:
        """Start the workers and wait until they are ready."""
        await self._pool.start()

    def submit(self, experience: Sample) -> "asyncio.Future[RewardResult]":
        """Return a future of a sample's reward.

        The future raises RunError if scoring fails and `on_error` is `stop`. Cancel the future if the reward is not
        needed.
        """
        return self._pool.submit(experience)

    def drain_metrics(self) -> dict[str, float]:
        """Return `scoring_metrics` of all samples scored since the last call, in training and in validation.

        Raises RunError if all samples have failed in `MAX_FAILED_STEPS` consecutive steps.
        """
        if scored := len(self._latencies):
            self._failed_steps = self._failed_steps + 1 if self._failed == scored else 0
        if self._failed_steps == MAX_FAILED_STEPS and self._is_learned:
            raise RunError(
                f"{self._key} gave no reward in {MAX_FAILED_STEPS} steps; see the warnings above, and "
                f"reward/{self.plan.domain}/errors in metrics.jsonl"
            )
        metrics = scoring_metrics(self.plan.domain, self._errors, self._latencies, *self._pool.drain_counts())
        if seconds := self._pool.drain_outage_seconds():
            metrics[f"reward/{self.plan.domain}/outage_seconds"] = seconds
        self._reset()
        return metrics

    async def end(self) -> None:
        """Kill the workers, and end the judge's engines."""
        await self._pool.end()
        if self._sampler:
            await self._sampler.end()

    def _reset(self) -> None:
        self._errors: Counter[str] = Counter()
        self._latencies: list[float] = []  # seconds from the request for a reward to its result
        self._failed = 0

    def _start_worker(self, number: int) -> RayWorker:
        engines = self._sampler.engines.actors if self._sampler else ()
        # a call may block the worker's event loop up to its time limit
        patience = max(ALIVE_SECONDS, *(term.timeout or 0.0 for term in self.plan.terms))
        return RayWorker(self._key, self._spawn(), (self.plan, self._model_path, engines), patience)

    def _result(self, experience: Sample, scored: Scored | WorkerLost, seconds: float) -> RewardResult:
        """Return the sample's reward, and count the score or the failure.

        Raises RunError if the failure ends the run.
        """
        if isinstance(scored, WorkerLost):
            scored = Failure(scored.kind, str(scored))
        self._errors.update(scored.errors)
        self._latencies.append(seconds)
        domain, on_error = self.plan.domain, self.plan.on_error
        scored = self._judged(scored)
        if isinstance(scored, Score):
            self._failures.add_success()
            return RewardResult(domain, scored.value, scored.parts, scored.reason)
        self._errors[scored.kind] += 1
        self._failed += 1
        self._failures.add_failure(scored.kind, f"{self._key}: sample {experience.id}: {scored.message}")
        reward = 0.0 if on_error == "zero" else None
        return RewardResult(domain, reward, reason=scored.kind, excluded=on_error in LEFT_OUT)

    def _judged(self, scored: Scored) -> Scored:
        """Return a failure for a reward of None, if such samples are left out of training."""
        if isinstance(scored, Score) and scored.value is None and self.plan.on_error in LEFT_OUT and self._is_learned:
            return Failure(NO_VALUE, "its reward returned None")
        return scored

    def _problem(self, scored: Scored) -> str | None:
        judged = self._judged(scored)
        return judged.message if isinstance(judged, Failure) else None
