"""The reward workers of one domain, as the driver sees them. A worker scores each sample when its sampling ends."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any
from zlib import crc32

import numpy as np
import ray

from roll_opd.base.failures import RunError
from roll_opd.base.frozen import FrozenDict
from roll_opd.config.plan import RewardPlan, RolloutPlan
from roll_opd.data.templates import load_plain_tokenizer, load_tokenizer, token_ids
from roll_opd.rewards.interface import Failure, RewardError, RewardSample, Score, Scored
from roll_opd.rewards.reward_caller import Caller, weighted
from roll_opd.rewards.reward_registry import resolve
from roll_opd.samples.sample import Sample, changed
from roll_opd.samples.transport import Compact
from roll_opd.tracking.reward_metrics import scoring_metrics
from roll_opd.workers.actor_group import ActorGroup
from roll_opd.workers.batched_calls import Answers, coalesced
from roll_opd.workers.job_pool import FailureLog, JobPool, WorkerLost
from roll_opd.workers.outage import Problem
from roll_opd.workers.ray_worker import RayWorker
from roll_opd.workers.sampler import Request, Sampler, SamplingSession

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

    def added_to(self, sample: Sample) -> Sample:
        """Return the sample with its reward."""
        return changed(
            sample,
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
            max_lost: see `JobPool`.
        """
        self.plan = plan
        self._spawn, self._model_path, self._sampler = spawn, model_path, sampler
        self._is_learned = is_learned
        self._key = f"rewards.{plan.domain}"
        self._pool: JobPool[Sample, RewardResult] = JobPool(
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

    def submit(self, sample: Sample) -> "asyncio.Future[RewardResult]":
        """Return a future of a sample's reward.

        The future raises RunError if scoring fails and `on_error` is `stop`. Cancel the future if the reward is not
        needed.
        """
        return self._pool.submit(sample)

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

    def _result(self, sample: Sample, scored: Scored | WorkerLost, seconds: float) -> RewardResult:
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
        self._failures.add_failure(scored.kind, f"{self._key}: sample {sample.id}: {scored.message}")
        reward = 0.0 if on_error == "zero" else None
        return RewardResult(domain, reward, reason=scored.kind, excluded=on_error in LEFT_OUT)

    def _judged(self, scored: Scored) -> Scored:
        """Return a failure for a reward of None, if such samples are left out of training."""
        if isinstance(scored, Score) and scored.value is None and self.plan.on_error in LEFT_OUT and self._is_learned:
            return Failure(NO_VALUE, "its reward returned None")
        return scored

    def _problem(self, scored: Scored) -> Problem | None:
        judged = self._judged(scored)
        if isinstance(judged, Failure):
            return Problem(judged.kind, judged.message, judged.of_a_service)
        return None


# The plan's `max_concurrency` limits calls. This limit is higher, because each hung call keeps its thread.
MAX_THREADS = 10_000
# While calls are quick, they run sequentially with growing sizes, because threads of one interpreter would only
# alternate. After a slower call, or after this time, the remaining calls run concurrently.
QUICK_CALL_S = 0.02
SEQUENTIAL_S = 0.1


# The plan limits the concurrency of calls. Ray's limit is higher, so that `alive` never waits.
@ray.remote(max_concurrency=MAX_THREADS)  # type: ignore[call-overload]  # Ray's types miss this option of actors
class RewardWorker:
    """Process that runs the rewards of one domain."""

    _plan: RewardPlan
    _callers: dict[str, Caller]
    _weights: dict[str, float]
    _tokenizer: Any

    async def setup(self, plan: RewardPlan, model_path: str, engines: Sequence[ray.actor.ActorHandle] = ()) -> None:
        """Resolve the rewards and load the tokenizer.

        Args:
            engines: engines of the judge model.
        """
        self._plan = plan
        threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix=plan.domain)
        judge = {plan.terms[0].name: (LocalModel(plan.engine, engines),)} if plan.engine else {}
        self._callers = {
            term.name: Caller(
                term.name,
                resolve(term.worker, term.args, *judge.get(term.name, ())),
                threads,
                term.timeout,
                plan.max_concurrency,
            )
            for term in plan.terms
        }
        self._weights = {term.name: term.weight for term in plan.terms}
        self._tokenizer = load_tokenizer(model_path)

    async def alive(self) -> None:
        """Return immediately, as a health check."""

    async def run(self, samples: Sequence[Sample]) -> AsyncIterator[Compact]:
        """Score samples; yield the scores as `Answers`.

        Each `Answers` contains the scores that arrived in a short interval.
        """
        async with aclosing(coalesced(self._calls(self._samples(samples)))) as answers:
            async for burst in answers:
                scores = [scored for call in burst for scored in call]
                yield Compact(Answers(scores, hung=any(caller.hung for caller in self._callers.values())))

    async def _calls(self, samples: Sequence[RewardSample]) -> AsyncGenerator[list[tuple[int, Scored]], None]:
        """Call the rewards for all samples; yield the scores of each call.

        A call gets as few samples as possible while all calls can still run at the same time. Calls of a fast reward
        get more samples, because the overhead of many small calls would take longer than the reward.
        """
        needed = -(-len(samples) // self._plan.max_concurrency)
        calls: set[asyncio.Task[list[tuple[int, Scored]]]] = set()
        start, wanted, is_quick, sequential_until = 0, needed, True, time.monotonic() + SEQUENTIAL_S
        try:
            while start < len(samples):
                size = min(wanted, self._plan.batch_size)
                calls.add(asyncio.create_task(self._call(start, samples[start : start + size])))
                start += size
                if is_quick and time.monotonic() < sequential_until:
                    done, calls = await asyncio.wait(calls, timeout=QUICK_CALL_S)
                    is_quick = bool(done)
                    wanted = 2 * size if is_quick else needed
                    for call in done:
                        yield call.result()
            for next_call in asyncio.as_completed(calls):
                yield await next_call
        finally:
            for task in calls:
                task.cancel()

    async def _call(self, first: int, samples: Sequence[RewardSample]) -> list[tuple[int, Scored]]:
        scores = await asyncio.gather(*[caller.score(samples) for caller in self._callers.values()])
        if self._plan.is_weighted:
            by_sample = [dict(zip(self._callers, each, strict=True)) for each in zip(*scores, strict=True)]
            scores = [[weighted(each, self._weights) for each in by_sample]]
        return list(enumerate(scores[0], first))

    def _samples(self, samples: Sequence[Sample]) -> list[RewardSample]:
        @cache  # samples of a group share their prompt
        def read_prompt(tokens: bytes) -> str:
            return self._tokenizer.decode(np.frombuffer(tokens, np.int64), skip_special_tokens=True)

        texts = self._tokenizer.batch_decode([sample.response_tokens for sample in samples], skip_special_tokens=True)
        return [
            RewardSample(
                sample.id,
                text,
                sample.ground_truth,
                sample.tag,
                sample.extra,
                sample,
                partial(read_prompt, sample.prompt_tokens.astype(np.int64).tobytes()),
            )
            for sample, text in zip(samples, texts, strict=True)
        ]


class LocalModel:
    """Client of a judge model's vLLM engines. A call returns the text of the model's answer."""

    def __init__(self, plan: RolloutPlan, engines: Sequence[ray.actor.ActorHandle]) -> None:
        """Send requests to `engines` in turn (round-robin), with the sampling settings of `plan`.

        `engines` are `RolloutWorker` actors.
        """
        self._plan = plan
        self._tokenizer: Any = load_plain_tokenizer(plan.model.path)
        if not self._tokenizer.chat_template:
            raise RewardError(
                f"{plan.name}: the tokenizer of {plan.model.path} has no chat template; use a chat model as judge"
            )
        self._session = SamplingSession(Sampler(ActorGroup(engines), survives_losses=True), alone=True)
        self._groups = itertools.count()

    async def __call__(self, messages: Sequence[Mapping[str, str]], errors: Counter[str]) -> str:
        """Return the model's response to `messages`.

        Errors of the engine are raised without Ray's wrapper: for example, ValueError if a prompt is too long.

        Raises:
            RewardError: if the request has lost several engines. This error ends the run.
        """
        text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        tokens = np.array(token_ids(self._tokenizer, [text], [None])[0])
        seed = crc32(text.encode()) & 0x7FFFFFFF  # equal prompts have equal responses
        try:
            completion = await self._session.ask(Request(next(self._groups), tokens, seed), self._plan.sampling)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.RayActorError as error:
            raise RewardError(f"{self._plan.name}: the judge's engines have died: {error}") from None
        return self._tokenizer.decode(completion.tokens, skip_special_tokens=True)
