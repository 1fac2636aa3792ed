"""The processes that run workflows, as the driver sees them. A rollout calls the pool instead of a workflow.

Each process executes several runs. If a process is lost, its unfinished runs are repeated with the same seeds.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from roll_opd.base.failures import RunError
from roll_opd.base.terminal import warn
from roll_opd.config.plan import RolloutPlan, TeacherPlan, WorkflowPlan
from roll_opd.samples.sample import Sample, logprobs_column
from roll_opd.workers.job_pool import FailureLog, JobPool, WorkerLost
from roll_opd.workers.outage import Problem
from roll_opd.workers.ray_worker import RayWorker
from roll_opd.workers.sampler import Sampler
from roll_opd.workers.workflow_actor import Job, JobOutcome

MAX_AHEAD = 8  # the process for an engine may have this many more runs than the least loaded process
TIMEOUT_GRACE_S = 60.0  # a process without an answer counts as stuck this many seconds after workflow_timeout


@dataclass(eq=False)
class SharedCall:
    """One workflow call that makes all runs of a prompt."""

    outcome: asyncio.Task[JobOutcome]
    waiting: int = 0


class WorkflowPool:
    """A pool of processes that run one workflow. All methods must be called from one event loop."""

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
        max_lost: int | None = None,
    ) -> None:
        """Create the pool without starting its processes.

        A process collects experiences for a short time and then sends them together.

        Args:
            spawn: starts a process.
            repeats: whether a single call of the workflow makes all runs of a prompt.
            chunk: a process that has collected this many experiences sends them immediately.
            max_lost: see `JobPool`.
        """
        self._chunk, self._deterministic = chunk, deterministic
        self.plan = plan
        self._spawn, self._rollout, self._teachers, self._seed, self._repeats = spawn, rollout, teachers, seed, repeats
        self._name = f"workflow {plan.workflow}"
        self._pool: JobPool[Job, JobOutcome] = JobPool(
            self._name,
            self._start_worker,
            _outcome,
            plan.workflow_workers,
            plan.workflow_concurrency,
            self._near_engines,
            independent=True,
            max_lost=max_lost,
            failure=lambda outcome: outcome.failure,
        )
        self._shared: dict[int, SharedCall] = {}  # draw -> call
        remedy = "correct it, or set on_workflow_error to drop or replace" if plan.on_workflow_error == "stop" else None
        self._failure_log = FailureLog("runs", "are left out", "workflow/failed", remedy)
        self._has_warned_of_missing = False
        self._reset()

    async def start(self, sampler: Sampler, auxiliaries: Sequence[Sampler | None] = ()) -> None:
        """Start the processes.

        The engines of auxiliary models end when the pool ends.

        Args:
            sampler: the policy's engines.
            auxiliaries: the engines of each auxiliary model; None for an auxiliary model on a remote server.
        """
        self._sampler, self._auxiliaries = sampler, auxiliaries
        await self._pool.start()

    async def run(self, task: Any, model: Any) -> Sequence[Sample] | None:
        """Return the samples of one run on a prompt, or None if the run failed.

        This is the interface of `roll_opd.rollout.workflow_protocol.Workflow`.

        Raises RunError if the run fails and `on_workflow_error` is `stop`.
        """
        if not self._repeats:
            return self._made(await self._run_job(self._job(task, model, (task.run,))), task)
        if task.draw not in self._shared:
            job = self._job(task, model, tuple(range(task.runs)))
            self._shared[task.draw] = SharedCall(asyncio.create_task(self._run_job(job)))
        call = self._shared[task.draw]
        call.waiting += 1
        try:
            outcome = await asyncio.shield(call.outcome)
        finally:
            call.waiting -= 1
            if not call.waiting:
                del self._shared[task.draw]
                call.outcome.cancel()
        return self._made(outcome, task)

    def drain_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call.

        The metrics are the number of runs, the number of failures of each kind, and means over the runs.
        """
        runs = self._failures.total() + self._succeeded
        _, restarts = self._pool.drain_counts()
        metrics = {f"workflow/failed/{kind}": float(count) for kind, count in sorted(self._failures.items())}
        metrics |= {"workflow/runs": float(runs), "workflow/restarts": float(restarts)}
        if seconds := self._pool.drain_outage_seconds():
            metrics["workflow/outage_seconds"] = seconds
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
        """Kill the processes, and end the engines of auxiliary models."""
        await self._pool.end()
        await asyncio.gather(*[model.end() for model in self._auxiliaries if model])

    def _reset(self) -> None:
        self._failures: Counter[str] = Counter()
        self._succeeded = self._calls_made = self._branches = self._missing_runs = 0
        self._requests: Counter[str] = Counter()
        self._own: dict[str, list[float]] = {}  # numbers from workflows, by name
        self._seconds: list[float] = []

    def _job(self, task: Any, model: Any, runs: tuple[int, ...]) -> Job:
        sampling = replace(model.sampling, n=1)  # each run requests one response per call
        calls = task.runs // len(runs)
        return Job(task.prompt, task.draw, runs, model.group, self._seed, sampling, task.is_eval, calls)

    def _made(self, outcome: JobOutcome, task: Any) -> list[Sample] | None:
        if outcome.failure is None:
            self._succeeded += 1
            self._failure_log.add_success()
            made = [self._with_teacher(one) for one in outcome.made.get(task.run, [])]
            for one in made:
                for name, value in one.metrics.items():
                    own = name if "/" in name else f"workflow/own/{name}"
                    self._own.setdefault(f"val/{own}" if task.is_eval else own, []).append(value)
            return [replace(one, ground_truth=task.prompt.ground_truth, extra=task.prompt.extra) for one in made]
        kind = outcome.failure.kind
        self._failures[kind] += 1
        self._failure_log.add_failure(kind, f"{self._name}: a run failed ({kind}): {outcome.failure.message}")
        return None

    def _note_missing(self, job: Job, outcome: JobOutcome) -> None:
        """Count the runs without experiences in a call with experiences of other runs; warn once."""
        missing = [run for run in job.runs if not outcome.made.get(run)]
        if not missing or len(missing) == len(job.runs):
            return  # a call without any experience skips its row
        self._missing_runs += len(missing)
        if not self._has_warned_of_missing:
            self._has_warned_of_missing = True
            warn(
                f"{self._name}: a call should make {len(job.runs)} runs but made {len(job.runs) - len(missing)} runs."
                " If a call makes a single run, set can_repeat = False; otherwise return experiences of every run, each"
                " with its eid.run. Missing runs are counted as workflow/missing_runs"
            )

    def _with_teacher(self, made: Sample) -> Sample:
        """Return the sample with the teacher log-probs of its workflow under a teacher's name.

        The name is that of the first teacher that accepts the sample's tag.
        """
        if not made.teacher_logprobs:
            return made
        name = next((teacher.name for teacher in self._teachers if teacher.accepts(made.tag)), None)
        if name is None:
            raise RunError(f"a workflow set teacher_logprobs for tag {made.tag}, which no teacher of the run accepts")
        ((brought, logprobs),) = made.teacher_logprobs.items()
        return made.with_columns(**{logprobs_column(brought): None, logprobs_column(name): logprobs})

    async def _run_job(self, job: Job) -> JobOutcome:
        begun = time.monotonic()
        try:
            outcome = await self._pool.submit(job)
        except WorkerLost as lost:
            return JobOutcome(failure=Problem(lost.kind, str(lost)))
        self._seconds.append(time.monotonic() - begun)
        self._calls_made += outcome.calls
        self._branches += outcome.branches
        self._note_missing(job, outcome)
        self._requests += outcome.requests
        return outcome

    def _near_engines(self, jobs: Sequence[Job], loads: Mapping[int, int], capacity: int) -> Iterator[int]:
        return near_engines(jobs, loads, capacity, len(self._sampler.engines.actors), self.plan.workflow_workers)

    def _start_worker(self, number: int) -> RayWorker:
        others = [model.engines.actors if model else () for model in self._auxiliaries]
        contexts = [teacher.context for teacher in self._teachers if teacher.context]
        engines = self._sampler.engines.actors
        settings = self.plan, self._rollout, engines, others, contexts, self._chunk, self._deterministic, number
        return RayWorker(self._name, self._spawn(), settings, limit=self.plan.workflow_timeout + TIMEOUT_GRACE_S)


def near_engines(
    jobs: Sequence[Job], loads: Mapping[int, int], capacity: int, engines: int, processes: int
) -> Iterator[int]:
    """Yield the process for each job. Stop when all processes are full.

    A job goes to the least loaded process, or to its engine's process if that process has only a few more jobs. This
    way, most requests to an engine come from one process, in few batches.
    """
    loads = dict(loads)
    for job in jobs:
        free = [number for number, load in loads.items() if load < capacity]
        if not free:
            return
        preferred = job.group % max(1, engines) % processes
        ahead = min(job.jobs, MAX_AHEAD)
        chosen = min(free, key=lambda number: loads[number] - (ahead if number == preferred else 0))
        loads[chosen] += 1
        yield chosen


def _outcome(_job: Job, answer: JobOutcome | WorkerLost, _seconds: float) -> JobOutcome:
    if isinstance(answer, WorkerLost):
        raise answer
    return answer
