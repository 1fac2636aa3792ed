"""The reward workers of one domain as the driver sees them: samples go in as they are finished, results come out.

A worker holds no more samples than it can have under way; the others wait here, so that they go to the worker that is
free first and nothing is lost with a worker that dies.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from roll_opd.actors.reward_actor import Answer
from roll_opd.actors.sampler import Sampler
from roll_opd.base.frozen import FrozenDict
from roll_opd.base.run_errors import RunError
from roll_opd.base.terminal import warn
from roll_opd.config.plan import RewardPlan
from roll_opd.rewards.interface import TIMEOUT, Failure, Score, Scored
from roll_opd.samples.buffer_pickle import Compact
from roll_opd.samples.experience import Experience, changed
from roll_opd.tracking.reward_metrics import scoring_metrics

DIED = "worker_died"
NONE = "none"  # of a sample that its reward cannot judge, where others are learned from
HOPELESS = 32  # samples that fail before any has a reward: then it is not the samples
MOST_BARREN = 3  # steps in a row of which every sample fails
MOST_DEATHS = 3  # of workers that had a sample: then it is the sample that kills them
# a worker that has sent nothing for so long is asked whether it is alive, and has as long again to answer
ALIVE_SECONDS = 60.0


@dataclass(frozen=True)
class RewardResult:
    """One sample's reward, or why there is none."""

    domain: str
    reward: float | None  # None: the reward cannot judge the sample, or failed and the sample is excluded
    parts: Mapping[str, float] = field(default_factory=FrozenDict)
    reason: str = ""
    excluded: bool = False  # the reward failed, and the sample is left out of learning

    def added_to(self, experience: Experience) -> Experience:
        """Return the sample with its reward."""
        return changed(
            experience,
            reward=self.reward,
            domain=self.domain,
            reward_parts=dict(self.parts),
            reward_reason=self.reason,
            excluded=self.excluded,
        )


@dataclass(eq=False)
class _Job:
    experience: Experience
    result: asyncio.Future[RewardResult]
    submitted: float
    deaths: int = 0


@dataclass(eq=False)
class _Worker:
    actor: ray.actor.ActorHandle
    in_hand: int = 0
    retiring: bool = False  # it gets no more samples, and is replaced when it has none
    isolated: bool = False  # it has a sample that may kill it, and gets no other beside it


class RewardPool:
    """The reward workers of `plan`. All methods belong to one event loop."""

    def __init__(
        self,
        plan: RewardPlan,
        spawn: Callable[[], ray.actor.ActorHandle],
        model_path: str,
        sampler: Sampler | None = None,
        *,
        is_learned: bool = True,
    ) -> None:
        """`spawn` starts a worker's process; `model_path` is where the tokenizer is; `sampler` is of `plan.engine`.

        Without `is_learned` rewards are looked at alone, and a run does without them.
        """
        self.plan = plan
        self._spawn, self._model_path, self._sampler = spawn, model_path, sampler
        self._workers: list[_Worker] = []
        self._waiting: deque[_Job] = deque()
        self._tasks: set[asyncio.Task] = set()
        self._dispatch_is_due = False
        self._broken: BaseException | None = None
        self._is_learned = is_learned
        self._told: set[str] = set()
        self._barren = 0  # calls of `drain_metrics` in a row between which every sample failed
        self._first_failures: int | None = 0  # samples that failed before the first that did not; None: there was one
        self._reset()

    async def start(self) -> None:
        """Start the workers and wait until they are ready."""
        await asyncio.gather(*[self._add_worker() for _ in range(self.plan.world_size)])

    def submit(self, experience: Experience) -> "asyncio.Future[RewardResult]":
        """Have a sample scored. The future holds RunError where that fails and `on_error` is `stop`; cancel it where
        the result is not needed any more.
        """
        job = _Job(experience, asyncio.get_running_loop().create_future(), time.monotonic())
        if self._broken:
            _fail(job, self._broken)
        self._waiting.append(job)
        if not self._dispatch_is_due:  # samples that come together go together
            self._dispatch_is_due = True
            asyncio.get_running_loop().call_soon(self._dispatch)
        return job.result

    def drain_metrics(self) -> dict[str, float]:
        """Return `scoring_metrics` of what was scored since the last call, in validation too, and start anew.

        RunError where every sample has failed since the call before the last two.
        """
        if scored := len(self._latencies):
            self._barren = self._barren + 1 if self._failed == scored else 0
        if self._barren == MOST_BARREN and self._is_learned:
            raise RunError(
                f"rewards.{self.plan.domain} had none for any sample of {MOST_BARREN} steps; see the warnings above, "
                f"and reward/{self.plan.domain}/errors in metrics.jsonl"
            )
        metrics = scoring_metrics(self.plan.domain, self._errors, self._latencies, self._queued, self._restarts)
        self._reset()
        return metrics

    async def end(self) -> None:
        """End the workers at once, and the judge's engines."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for worker in self._workers:
            ray.kill(worker.actor)
        if self._sampler:
            await self._sampler.end()

    def _reset(self) -> None:
        self._errors: Counter[str] = Counter()
        self._latencies: list[float] = []  # s from the sample's end to its result
        self._queued: list[int] = []  # samples that still wait when every worker has as many as it can take
        self._restarts = self._failed = 0

    def _dispatch(self) -> None:
        """Give the waiting samples to the workers that have room, in equal shares."""
        self._dispatch_is_due = False
        free = [worker for worker in self._workers if not worker.retiring and not worker.isolated]
        free.sort(key=lambda worker: worker.in_hand)
        for number, worker in enumerate(free):
            head = self._head()
            if head is None:
                break
            if head.deaths > 1:  # alone, so that it takes no other sample along
                worker.isolated = not worker.in_hand
                self._give(worker, int(worker.isolated))
            else:
                share = -(-len(self._waiting) // (len(free) - number))
                self._give(worker, min(share, self._room(worker)))
        self._queued.append(len(self._waiting))

    def _head(self) -> _Job | None:
        """Return the first job whose result is still needed."""
        while self._waiting and self._waiting[0].result.done():
            self._waiting.popleft()
        return self._waiting[0] if self._waiting else None

    def _room(self, worker: _Worker) -> int:
        return self.plan.max_concurrency * self.plan.batch_size - worker.in_hand

    def _give(self, worker: _Worker, count: int) -> None:
        jobs: list[_Job] = []
        while len(jobs) < count and (job := self._head()) and not (jobs and job.deaths > 1):
            jobs.append(self._waiting.popleft())
        if jobs:
            worker.in_hand += len(jobs)
            self._run(self._score(worker, jobs))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if task.cancelled() or not (error := task.exception()):
            return
        self._broken = error  # what waits cannot be scored any more
        for job in self._waiting:
            _fail(job, error)

    async def _score(self, worker: _Worker, jobs: list[_Job]) -> None:
        """Have `worker` score `jobs`; what it leaves undone when it dies goes to another."""
        left = dict(enumerate(jobs))
        # a worker that is alive keeps the time limits itself; a call may hold it up for as long as its limit
        patience = max(ALIVE_SECONDS, *(term.timeout or 0.0 for term in self.plan.terms))
        try:
            batch = Compact([job.experience for job in jobs])
            score: Any = worker.actor.score
            stream = score.options(num_returns="streaming").remote(batch)
            while left:
                answer = await _next(stream, worker.actor, patience)
                worker.retiring |= answer.hung
                for number, scored in answer.scores:
                    worker.in_hand -= 1
                    self._settle(left.pop(number), scored)
        except (ray.exceptions.RayActorError, TimeoutError) as error:
            kind, problem = (TIMEOUT, "is stuck") if isinstance(error, TimeoutError) else (DIED, "died")
            self._retire(worker, f"{problem} with {len(left)} samples, which are scored again")
            self._put_back(list(left.values()), kind)
        except Exception as error:
            worker.in_hand -= len(left)
            cause = RunError(f"rewards.{self.plan.domain}: {getattr(error, 'cause', error)}")
            for job in left.values():
                _fail(job, cause)
        if not worker.in_hand:
            worker.isolated = False
            if worker.retiring:
                self._retire(worker, "has calls that ran out of time")
        self._dispatch()

    def _retire(self, worker: _Worker, problem: str) -> None:
        if worker not in self._workers:
            return  # another of its batches has been here before
        self._workers.remove(worker)
        ray.kill(worker.actor)
        self._restarts += 1
        warn(f"a reward worker of {self.plan.domain} {problem}; it is started again")
        self._run(self._replace())

    def _put_back(self, jobs: Sequence[_Job], kind: str) -> None:
        for job in reversed(jobs):
            job.deaths += 1
            if self._broken:
                _fail(job, self._broken)
            elif job.deaths < MOST_DEATHS:
                self._waiting.appendleft(job)
            else:
                message = f"{job.deaths} workers ended ({kind}) while they scored it, the last one with nothing else"
                self._settle(job, Failure(kind, message))

    async def _replace(self) -> None:
        await self._add_worker()
        self._dispatch()

    async def _add_worker(self) -> None:
        engines = self._sampler.engines.actors if self._sampler else ()
        for _ in range(MOST_DEATHS):
            actor = self._spawn()
            try:
                await actor.setup.remote(self.plan, self._model_path, engines)
            except ray.exceptions.RayTaskError as error:
                raise RunError(f"rewards.{self.plan.domain}: a worker does not start: {error.cause}") from error
            except ray.exceptions.RayActorError as error:
                problem = error
            else:
                self._workers.append(_Worker(actor))
                return
        raise RunError(
            f"rewards.{self.plan.domain}: a worker does not start, its process ended {MOST_DEATHS} times: {problem}"
        )

    def _settle(self, job: _Job, scored: Scored) -> None:
        self._errors.update(scored.errors)
        self._latencies.append(time.monotonic() - job.submitted)
        domain, on_error = self.plan.domain, self.plan.on_error
        if isinstance(scored, Score) and scored.value is None and on_error == "drop" and self._is_learned:
            scored = Failure(NONE, "its reward returned None")
        if isinstance(scored, Score):
            self._first_failures = None
            result = RewardResult(domain, scored.value, scored.parts, scored.reason)
        else:
            self._errors[scored.kind] += 1
            self._failed += 1
            if error := self._ends_the_run(scored, job.experience.id):
                _fail(job, error)
                return
            reward = 0.0 if on_error == "zero" else None
            result = RewardResult(domain, reward, reason=scored.kind, excluded=on_error == "drop")
        if not job.result.done():
            job.result.set_result(result)

    def _ends_the_run(self, failure: Failure, sample: str) -> RunError | None:
        """Return what ends the run where a sample fails; None where nothing does, and the first of a kind is told."""
        key, on_error = f"rewards.{self.plan.domain}", self.plan.on_error
        text = f"{key}: sample {sample}: {failure.message}"
        if on_error == "stop":
            return RunError(f"{text}; correct it, or let {key}.on_error be zero or drop")
        if self._first_failures is not None:
            self._first_failures += 1
            if self._first_failures == HOPELESS and self._is_learned:
                return RunError(f"the first {HOPELESS} samples have all failed; the last one: {text}")
        if failure.kind not in self._told:  # the others are counted
            self._told.add(failure.kind)
            then = "have the reward 0" if on_error == "zero" else "are left out"
            counted = f"reward/{self.plan.domain}/errors/{failure.kind}"
            warn(f"{text}\nSuch samples {then}, and are counted as {counted}")
        return None


async def _next(stream: ray.ObjectRefGenerator, actor: ray.actor.ActorHandle, patience: float) -> Answer:
    """Return the next answer of `stream`; TimeoutError where `actor`, asked every `patience` s, is not alive."""
    answer = asyncio.ensure_future(_received(stream))
    alive: asyncio.Future | None = None
    try:
        while not (await asyncio.wait([answer], timeout=patience))[0]:
            if alive and not alive.done():
                raise TimeoutError
            alive = asyncio.wrap_future(actor.alive.remote().future())
        return answer.result()
    finally:
        answer.cancel()


async def _received(stream: ray.ObjectRefGenerator) -> Answer:
    return await (await anext(stream))


def _fail(job: _Job, error: BaseException) -> None:
    if not job.result.done():
        job.result.set_exception(error)
        job.result.exception()  # marks it as read: asyncio would complain of one that is never awaited
