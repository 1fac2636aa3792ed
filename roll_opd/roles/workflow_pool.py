"""The processes in which workflows run, as the driver sees them. It is itself a workflow: that of a rollout.

A process holds several runs at once. Where one dies, its runs begin again elsewhere, with the same seeds, and a run
that was there at several deaths goes on alone, so that what kills processes takes no other run along.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import ray

from roll_opd.actors.sampler import Sampler
from roll_opd.actors.workflow_actor import TIMEOUT, Job, Outcome
from roll_opd.base.run_errors import RunError
from roll_opd.base.terminal import warn
from roll_opd.cluster.batched_calls import BatchedCalls
from roll_opd.cluster.group import ActorGroup
from roll_opd.config.plan import RolloutPlan, TeacherPlan, WorkflowPlan
from roll_opd.samples.buffer_pickle import Compact
from roll_opd.samples.experience import Experience

DIED = "worker_died"
MISSING = "missing"  # what has been told: runs that a call has left out
MOST_DEATHS = 3  # of processes that had a run: then it is the run that kills them
HOPELESS = 32  # runs that fail before any succeeds: then it is not the rows
MOST_AHEAD = 8  # runs that the process for an engine may have more than the others
LATE_SECONDS = 60.0  # beyond workflow_timeout, after which a process that does not answer is taken for stuck


@dataclass(eq=False)
class _Worker:
    actor: Any
    number: int  # of the place that it has among the processes
    under_way: int = 0
    retiring: bool = False  # it gets no more runs, and is ended when it has none
    isolated: bool = False  # it has a run that may kill it, and gets no other beside it


@dataclass(eq=False)
class _Together:
    """All runs at a prompt, of a workflow that makes them in one call."""

    outcome: asyncio.Task[Outcome]
    waiting: int = 0


class WorkflowPool:
    """The workflow of `plan`, in processes of its own. All methods belong to one event loop."""

    def __init__(
        self,
        plan: WorkflowPlan,
        spawn: Callable[[], Any],
        rollout: RolloutPlan,
        teachers: Sequence[TeacherPlan],
        seed: int,
        *,
        repeats: bool,
        chunk: int | None = None,
        deterministic: bool = False,
    ) -> None:
        """`spawn` starts a process; `repeats`: one call makes all runs at a prompt.

        Experiences are handed over soon after they are made, and at once with the last of each `chunk`.
        """
        self._chunk, self._deterministic = chunk, deterministic
        self.plan = plan
        self._spawn, self._rollout, self._teachers, self._seed, self._repeats = spawn, rollout, teachers, seed, repeats
        self._workers: list[_Worker] = []
        self._replacing: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self._calls: BatchedCalls[_Worker, Job] = BatchedCalls(_outcomes)
        self._together: dict[int, _Together] = {}  # by draw
        self._told: set[str] = set()
        self._first_failures: int | None = 0  # runs that failed before the first that did not; None: there was one
        self._broken: BaseException | None = None
        self._reset()

    async def start(self, sampler: Sampler, auxiliaries: Sequence[Sampler | None] = ()) -> None:
        """Start the processes, whose model is in the engines of `sampler`, and auxiliary models in others.

        Those end with the pool; None is a model elsewhere.
        """
        self._sampler, self._auxiliaries = sampler, auxiliaries
        await asyncio.gather(*[self._add_worker(number) for number in range(self.plan.workflow_workers)])

    async def run(self, task: Any, model: Any) -> Sequence[Experience]:
        """Return what one run at a prompt makes; see `roll_opd.rollout.workflow.Workflow`.

        RunError where it fails and `on_workflow_error` is `stop`.
        """
        if not self._repeats:
            outcome = await self._done(self._job(task, model, (task.run,)), task.runs)
            return self._made(outcome, task)
        if task.draw not in self._together:
            job = self._job(task, model, tuple(range(task.runs)))
            self._together[task.draw] = _Together(asyncio.create_task(self._done(job, 1)))
        together = self._together[task.draw]
        together.waiting += 1
        try:
            outcome = await asyncio.shield(together.outcome)
        finally:
            together.waiting -= 1
            if not together.waiting:
                del self._together[task.draw]
                together.outcome.cancel()
        return self._made(outcome, task)

    def drain_metrics(self) -> dict[str, float]:
        """Return counts of runs and failures by kind since the last call, and means over what was done; start anew."""
        runs = self._failures.total() + self._succeeded
        metrics = {f"workflow/failed/{kind}": float(count) for kind, count in sorted(self._failures.items())}
        metrics |= {"workflow/runs": float(runs), "workflow/restarts": float(self._restarts)}
        if self._repeats:
            metrics["workflow/missing_runs"] = float(self._missing_runs)
        metrics |= {f"workflow/endpoint/{what}": float(n) for what, n in sorted(self._requests.items())}
        metrics |= {name: sum(values) / len(values) for name, values in self._own.items()}
        if self._seconds:
            metrics |= {
                "workflow/seconds_mean": sum(self._seconds) / len(self._seconds),
                "workflow/seconds_max": max(self._seconds),
                "workflow/calls_mean": self._calls_made / max(runs, 1),
                "workflow/branches_mean": self._branches / max(runs, 1),
            }
        self._reset()
        return metrics

    async def end(self) -> None:
        """End the processes at once."""
        await self._calls.end()
        tasks = [*self._replacing]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for worker in self._workers:
            ray.kill(worker.actor)
        await asyncio.gather(*[model.end() for model in self._auxiliaries if model])

    def _reset(self) -> None:
        self._failures: Counter[str] = Counter()
        self._succeeded = self._restarts = self._calls_made = self._branches = self._missing_runs = 0
        self._requests: Counter[str] = Counter()
        self._own: dict[str, list[float]] = {}  # numbers that workflows gave, by name
        self._seconds: list[float] = []

    def _job(self, task: Any, model: Any, runs: tuple[int, ...]) -> Job:
        sampling = replace(model.sampling, n=1)  # the runs are the responses; a call asks for one
        return Job(task.prompt, task.draw, runs, model.group, self._seed, sampling, task.is_eval)

    def _made(self, outcome: Outcome, task: Any) -> list[Experience]:
        if outcome.failure is None:
            self._succeeded += 1
            self._first_failures = None
            made = [self._with_teacher(one) for one in outcome.made.get(task.run, [])]
            for one in made:
                for name, value in one.metrics.items():
                    own = name if "/" in name else f"workflow/own/{name}"
                    self._own.setdefault(f"val/{own}" if task.is_eval else own, []).append(value)
            return [replace(one, ground_truth=task.prompt.ground_truth, extra=task.prompt.extra) for one in made]
        kind, message = outcome.failure
        self._failures[kind] += 1
        text = f"workflow {self.plan.workflow}: a run failed ({kind}): {message}"
        if self.plan.on_workflow_error == "stop":
            raise RunError(f"{text}\ncorrect it, or let on_workflow_error be drop")
        if self._first_failures is not None:
            self._first_failures += 1
            if self._first_failures == HOPELESS:
                raise RunError(f"the first {HOPELESS} runs have all failed; the last one: {text}")
        if kind not in self._told:  # the others are counted
            self._told.add(kind)
            warn(f"{text}\nSuch runs are left out, and counted as workflow/failed/{kind}")
        return []

    def _note_missing(self, job: Job, outcome: Outcome) -> None:
        """Count runs that a call has made nothing of while it made others; tell of the first."""
        missing = [run for run in job.runs if not outcome.made.get(run)]
        if not missing or len(missing) == len(job.runs):
            return  # a call that makes nothing at all says that the row is not to be learned from
        self._missing_runs += len(missing)
        if MISSING not in self._told:
            self._told.add(MISSING)
            warn(
                f"workflow {self.plan.workflow}: a call that was to make {len(job.runs)} runs made"
                f" {len(job.runs) - len(missing)}: write can_repeat = False where one call makes one run, or return"
                " experiences of every run, with eid.run. Missing runs are counted as workflow/missing_runs"
            )

    def _with_teacher(self, made: Experience) -> Experience:
        """Give log-probs that the workflow brought the name of the teacher that they stand in for."""
        if not made.teacher_logprobs:
            return made
        name = next((teacher.name for teacher in self._teachers if teacher.accepts(made.tag)), None)
        if name is None:
            raise RunError(
                f"a workflow brought teacher_logprobs for tag {made.tag}, which no teacher of the run accepts"
            )
        return replace(made, teacher_logprobs=dict.fromkeys([name], *made.teacher_logprobs.values()))

    async def _done(self, job: Job, jobs: int) -> Outcome:
        """Have a job done, one of `jobs` at its prompt, again where its process dies."""
        begun, deaths, kind = time.monotonic(), 0, DIED
        while deaths < MOST_DEATHS:
            worker = await self._free_worker(job.group, jobs, alone=deaths > 1)
            try:
                late = self.plan.workflow_timeout + LATE_SECONDS
                # not wait_for, which in Python 3.11 swallows a cancellation that comes with the answer
                async with asyncio.timeout(late):
                    outcome: Outcome = await self._calls.ask(worker, job)
            except (ray.exceptions.RayActorError, TimeoutError) as error:
                kind, problem = (TIMEOUT, "is stuck") if isinstance(error, TimeoutError) else (DIED, "died")
                deaths += 1
                await self._retire(worker, f"{problem} with {worker.under_way} runs, which begin again")
            except ray.exceptions.RayTaskError as error:
                raise RunError(f"workflow {self.plan.workflow}: {error.cause}") from error
            else:
                worker.retiring |= outcome.hung
                self._seconds.append(time.monotonic() - begun)
                self._calls_made += outcome.calls
                self._branches += outcome.branches
                self._note_missing(job, outcome)
                self._requests += outcome.requests
                return outcome
            finally:
                await self._give_back(worker)
        return Outcome(failure=(kind, f"{deaths} processes ended while they had it, the last one with nothing else"))

    async def _free_worker(self, group: int, jobs: int, alone: bool) -> _Worker:
        """Return the process that has least to do, or the one for the engine of `group` where that has hardly more.

        What goes to an engine comes mostly from one process then, and is one batch there.
        """
        place = group % max(1, len(self._sampler.engines.actors)) % self.plan.workflow_workers
        most_ahead = min(jobs, MOST_AHEAD)
        async with self._changed:
            while True:
                if self._broken:
                    raise self._broken
                most = 0 if alone else self.plan.workflow_concurrency - 1
                free = [worker for worker in self._workers if worker.under_way <= most]
                worker = min(
                    [worker for worker in free if not worker.retiring and not worker.isolated],
                    key=lambda worker: worker.under_way - (most_ahead if worker.number == place else 0),
                    default=None,
                )
                if worker:
                    worker.under_way += 1
                    worker.isolated = alone
                    return worker
                await self._changed.wait()

    async def _give_back(self, worker: _Worker) -> None:
        worker.under_way -= 1
        worker.isolated &= worker.under_way > 0
        if worker.retiring and not worker.under_way:
            await self._retire(worker, "has a run that cannot be ended")
        async with self._changed:
            self._changed.notify_all()

    async def _retire(self, worker: _Worker, problem: str) -> None:
        if worker not in self._workers:
            return  # another of its runs has been here before
        self._workers.remove(worker)
        ray.kill(worker.actor)
        self._restarts += 1
        warn(f"a process of workflow {self.plan.workflow} {problem}; it is started again")
        replacing = asyncio.create_task(self._replace(worker.number))
        self._replacing.add(replacing)
        replacing.add_done_callback(self._replacing.discard)

    async def _replace(self, number: int) -> None:
        try:
            await self._add_worker(number)
        except RunError as error:
            self._broken = error
        async with self._changed:
            self._changed.notify_all()

    async def _add_worker(self, number: int) -> None:
        actor = self._spawn()
        engines = self._sampler.engines.actors
        try:
            others = [model.engines.actors if model else () for model in self._auxiliaries]
            contexts = [teacher.context for teacher in self._teachers if teacher.context]
            settings = contexts, self._chunk, self._deterministic, number
            await actor.setup.remote(self.plan, self._rollout, engines, others, *settings)
        except ray.exceptions.RayError as error:
            raise RunError(f"workflow {self.plan.workflow}: a process does not start: {error}") from error
        self._workers.append(_Worker(actor, number))


async def _outcomes(worker: _Worker, jobs: list[Job]) -> AsyncGenerator[list[tuple[int, Outcome]], None]:
    async with aclosing(ActorGroup([worker.actor]).stream(0, "run", Compact(jobs))) as stream:
        async for done in stream:
            yield done
