"""Ray actor that runs workflows. It has a model client, a model endpoint, and one thread or coroutine per run."""

import asyncio
import contextvars
import inspect
import os
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray

from roll_opd.base.failures import of_a_service
from roll_opd.base.frozen import thaw
from roll_opd.config.plan import ContextPlan, RolloutPlan, SamplingPlan, WorkflowPlan
from roll_opd.data.dataset import Prompt
from roll_opd.data.templates import load_plain_tokenizer, load_tokenizer
from roll_opd.inference.tool_calls import find_parser
from roll_opd.models.model_info import read_model
from roll_opd.samples.sample import Sample
from roll_opd.samples.transport import Compact
from roll_opd.workers.actor_group import ActorGroup
from roll_opd.workers.batched_calls import Answers, coalesced
from roll_opd.workers.outage import Problem
from roll_opd.workers.sampler import Sampler, SamplerEngines

MAX_THREADS = 10_000  # a hung run keeps its thread
MEMORY_POLL_S = 0.25  # seconds between checks of the process's memory
OUT_OF_MEMORY_EXIT_CODE = 77  # exit code
# kinds of failures
RAISED, TIMEOUT, INVALID, API_ERROR = "raised", "timeout", "invalid", "api_error"


@dataclass(frozen=True)
class Job:
    """Runs of one prompt that share a single call of a workflow."""

    prompt: Prompt
    draw: int
    runs: tuple[int, ...]  # indices
    group: int
    seed: int
    sampling: SamplingPlan
    is_eval: bool
    jobs: int = 1  # number of jobs that share the runs of the prompt


@dataclass
class JobOutcome:
    """Result of a job: the experiences of each run, or a failure of the job."""

    made: dict[int, list[Sample]] = field(default_factory=dict)
    failure: Problem | None = None
    calls: int = 0  # model calls
    branches: int = 0  # conversations; a model call that continues none starts a new conversation
    requests: Counter[str] = field(default_factory=Counter)  # number of requests to the endpoint, by outcome
    hung: bool = False  # a run cannot be stopped, so this process should be replaced


class _TimeLimitError(Exception):
    """A run has exceeded its time limit."""


def _failure(error: BaseException, returned: bool) -> Problem:
    """Return the failure that a run's error causes.

    `returned` states whether the workflow had already returned a result when the error occurred.
    """
    from roll_opd.workflows.plugins import own_traceback
    from roll_opd.workflows.workflow_experience import RunFailure

    if isinstance(error, RunFailure):
        return Problem(error.kind, str(error), of_a_service(error))
    invalid = isinstance(error, TypeError | ValueError | AttributeError) and returned
    failed = of_a_service(error)
    # OpenAI's client raises after all of its retries have failed
    is_api_error = failed and type(error).__module__.partition(".")[0] == "openai"
    return Problem(INVALID if invalid else API_ERROR if is_api_error else RAISED, own_traceback(error), failed)


@contextmanager
def _no_exit() -> Iterator[None]:
    """Convert SystemExit and KeyboardInterrupt to RuntimeError inside the block.

    A workflow must not end the process, because other runs use the same process.
    """
    try:
        yield
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"the workflow tried to exit its process: {type(error).__name__}({error})") from error


async def _without_exit(coroutine: Awaitable[Any]) -> Any:
    with _no_exit():
        return await coroutine


def _task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    """Create a task. This is the task factory of the event loop.

    If a workflow's run creates the task, a SystemExit in the task does not end the event loop.
    """
    from roll_opd.workflows.run_state import RUN

    if RUN in (options.get("context") or contextvars.copy_context()):
        coroutine = _without_exit(coroutine)
    return asyncio.Task(coroutine, loop=loop, **options)


@ray.remote(max_concurrency=MAX_THREADS)  # type: ignore[call-overload]  # Ray's types miss this option of actors
class WorkflowWorker:
    """Process that runs workflows."""

    _plan: WorkflowPlan
    _limits: Any
    _class: Any
    _model: Any
    _reward: Any  # class of a reward function, or None

    async def setup(
        self,
        plan: WorkflowPlan,
        rollout: RolloutPlan,
        engines: Sequence[ray.actor.ActorHandle],
        auxiliary_engines: Sequence[Sequence[ray.actor.ActorHandle]],
        contexts: Sequence[ContextPlan],
        chunk: int | None,
        deterministic: bool,
        number: int,
    ) -> None:
        """Import the workflow and load the tokenizer.

        Args:
            rollout: plan of the student's engines.
            engines: `RolloutWorker` actors of the student's engines.
            auxiliary_engines: engines of each auxiliary model; an empty list for a remote model.
            contexts: plans of the teachers' contexts.
            number: index of this process.
        """
        from roll_opd.workflows.auxiliary import AuxiliaryModel, RemoteModel
        from roll_opd.workflows.endpoint.server import PolicyServer
        from roll_opd.workflows.model_wrapper import ModelWrapper
        from roll_opd.workflows.plugins import find_reward, find_workflow
        from roll_opd.workflows.run_state import TeacherContexts
        from roll_opd.workflows.workflow_experience import TokenLimits

        asyncio.get_running_loop().set_task_factory(_task)
        self._plan, self._chunk = plan, chunk
        self._contexts = TeacherContexts(contexts, load_tokenizer(rollout.model.path))
        self._limits = TokenLimits(rollout.max_model_len, read_model(Path(rollout.model.path)).vocab)
        self._class = find_workflow(plan.workflow or "", plan.plugin_dir)
        arguments = thaw(plan.workflow_reward_args)
        self._reward = plan.workflow_reward and find_reward(plan.workflow_reward, plan.plugin_dir, arguments)
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="run")
        self._ready: list[Any] = []  # reusable workflow instances
        self._hung = 0
        self._endpoints: list[Any] = []

        def client_of(kind: Callable[..., Any], plan: RolloutPlan, engines: Sequence, **address: Any) -> Any:
            """Return a model client with an endpoint. The client sends its requests to `engines`."""
            own = Sampler(ActorGroup(engines), survives_losses=True, repeats_batches=deterministic)
            sampler = SamplerEngines(own, chunk, deterministic)
            load = load_tokenizer if kind is ModelWrapper else load_plain_tokenizer
            tokenizer, loop = load(plan.model.path), asyncio.get_running_loop()
            model = kind(sampler, tokenizer, model_path=plan.model.path, max_model_len=plan.max_model_len, loop=loop)
            model.endpoint = PolicyServer(model, loop, find_parser(self._plan.tool_call_parser, tokenizer), **address)
            self._endpoints.append(model.endpoint)
            return model

        port = plan.endpoint_port + number if plan.endpoint_port else 0
        address = {"host": plan.endpoint_host, "port": port, "key": plan.endpoint_api_key}
        self._model = client_of(ModelWrapper, rollout, engines, **address)
        self._auxiliaries = [
            client_of(partial(AuxiliaryModel, place, model.engine.sampling, name=model.name), model.engine, own_engines)
            if model.engine
            # leaves time for three attempts in a run
            else RemoteModel(model.model_name, model.base_url, model.api_key, model.name, plan.workflow_timeout / 4)
            for place, (model, own_engines) in enumerate(zip(plan.auxiliary_models, auxiliary_engines, strict=True))
        ]
        if port:
            _ = self._model.api_address  # start the endpoint now, since its port is known
        threading.Thread(target=self._watch_memory, daemon=True).start()

    async def run(self, jobs: Sequence[Job]) -> AsyncIterator[Compact]:
        """Run all jobs concurrently; yield their `JobOutcome`s as they finish, wrapped in `Answers`."""
        runs = max(len(job.runs) for job in jobs)
        chunk = self._chunk and max(1, self._chunk // runs)
        async with aclosing(coalesced(self._outcomes(jobs), chunk=chunk)) as outcomes:
            async for done in outcomes:
                yield Compact(Answers(done, hung=any(outcome.hung for _, outcome in done)))

    async def _outcomes(self, jobs: Sequence[Job]) -> AsyncGenerator[tuple[int, JobOutcome], None]:
        async def one(place: int, job: Job) -> tuple[int, JobOutcome]:
            return place, await self._outcome(job)

        running = [asyncio.create_task(one(place, job)) for place, job in enumerate(jobs)]
        try:
            for done in asyncio.as_completed(running):
                yield await done
        finally:
            for task in running:
                task.cancel()

    async def _outcome(self, job: Job) -> JobOutcome:
        """Run one job and return its outcome.

        An error in the workflow's code is not raised: the outcome contains the failure.
        """
        from roll_opd.workflows.run_state import RUN, RunState
        from roll_opd.workflows.workflow_experience import by_run, trained

        outcome = JobOutcome()
        state = RunState(job.group, (job.seed, job.draw), job.runs, job.sampling)
        context = contextvars.copy_context()
        context.run(RUN.set, state)
        try:
            found = await asyncio.create_task(self._call(job, context), context=context)
            made: dict[int, list[Sample]] = {}
            for run, of_run in by_run(found, job.runs).items():
                made[run] = []
                for place, (step, one) in enumerate(of_run):
                    learned = trained(one, self._limits, job.prompt, job.draw, run, place, step, state.settings)
                    if state.reward is not None or state.metrics:
                        reward = state.reward if learned.reward is None else learned.reward
                        learned = replace(learned, reward=reward, metrics={**state.metrics, **learned.metrics})
                    if read := self._contexts.prompts(learned.prompt_tokens, state, job.prompt):
                        learned = replace(learned, teacher_prompts=read)
                    made[run].append(learned)
            outcome.made = made
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            outcome.failure = _failure(error, state.returned)  # cancelled by the run itself
        except GeneratorExit:
            raise
        except _TimeLimitError:
            message = f"the run did not finish within workflow_timeout, {self._plan.workflow_timeout:g} s"
            outcome.failure = Problem(TIMEOUT, message, is_final=True)  # the time is not granted again
        except BaseException as error:  # panics of Rust libraries are not Exceptions
            outcome.failure = _failure(error, state.returned)
        finally:
            for endpoint in self._endpoints:
                endpoint.close(state)
        outcome.requests, self._model.endpoint.counts = self._model.endpoint.counts, Counter()
        outcome.calls, outcome.hung = state.calls, state.stuck or self._hung > 0
        outcome.branches = len(state.turns.leaves()) if state.turns else 0
        return outcome

    async def _call(self, job: Job, context: contextvars.Context) -> list[Any]:
        """Call the workflow and return its experiences; raise `_TimeLimitError` if the call takes too long.

        If the workflow instance can be reset, it is kept for later jobs.
        """
        from roll_opd.workflows.run_state import RUN
        from roll_opd.workflows.workflow_checks import flag

        loop = asyncio.get_running_loop()
        until = loop.time() + self._plan.workflow_timeout
        if self._ready and flag(self._ready[-1], "is_async"):  # declared as non-blocking
            workflow, found = self._start_run(job)
        else:  # in a thread, because creating or running an instance may block
            running = loop.run_in_executor(self._threads, context.copy().run, self._start_run, job)
            done, _ = await asyncio.wait([running], timeout=self._plan.workflow_timeout)
            if not done:
                self._hung += 1
                running.add_done_callback(self._hung_run_ended)
                raise _TimeLimitError
            workflow, found = running.result()
        if inspect.isawaitable(found):
            try:
                async with asyncio.timeout_at(until) as limit:
                    found = await _without_exit(found)
            except TimeoutError:
                if limit.expired():
                    raise _TimeLimitError from None
                raise  # raised by the workflow
        if flag(workflow, "resettable"):
            self._ready.append(workflow)
        RUN.get().returned = True
        if experiences_of := getattr(workflow, "experiences_of", None):
            found = experiences_of(found)
        if isinstance(found, Sequence) and not isinstance(found, str):
            return list(found)
        raise TypeError(f"a run returned {type(found).__name__}; expected a list of Experience")

    def _start_run(self, job: Job) -> tuple[Any, Any]:
        """Start a run; return (workflow instance, result).

        If the workflow is asynchronous, the second item is a coroutine that returns the result.
        """
        from roll_opd.workflows.workflow_checks import flag

        with _no_exit():
            workflow = self._instance(job)
            return workflow, workflow.run_async() if flag(workflow, "is_async") else workflow.run()

    def _hung_run_ended(self, running: asyncio.Future) -> None:
        self._hung -= 1
        running.exception()

    def _instance(self, job: Job) -> Any:
        """Return a workflow instance for the job.

        If an earlier job has left an instance, that instance is reset and returned. Otherwise a new instance is
        created.
        """
        from roll_opd.workflows.workflow_checks import flag
        from roll_opd.workflows.workflow_interface import FormatConfig, GenerationConfig, Task

        sampling, plan = job.sampling, self._plan
        task = Task(
            raw_task=thaw(job.prompt.extra),
            format_args=FormatConfig(plan.prompt_key, plan.response_key, plan.system_prompt, plan.reply_prefix),
            rollout_args=GenerationConfig(
                n=len(job.runs),
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=sampling.max_new_tokens,
            ),
            workflow_args=thaw(plan.workflow_args),
            reward_fn=self._reward,
            reward_fn_args=thaw(plan.workflow_reward_args),
            repeat_times=len(job.runs),
            is_eval=job.is_eval,
            task_id=job.prompt.id,
            run_id=job.runs[0],
            is_scored=plan.is_scored,
        )
        try:
            workflow = self._ready.pop()
        except IndexError:
            workflow = self._class.__new__(self._class)
            workflow.task = task  # older classes read `task` in `__init__` without passing it to the base class
            taken = inspect.signature(self._class).parameters
            others = self._auxiliaries or None
            given = {"task": task, "model": self._model, "auxiliary_models": others}
            if "auxiliary_model_wrappers" in taken:
                given["auxiliary_model_wrappers"] = others
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
                given = {name: value for name, value in given.items() if name in taken}
            workflow.__init__(**given)
        else:
            workflow.task = task
            workflow.reset(task)
        if flag(workflow, "can_repeat"):
            workflow.set_repeat_times(len(job.runs), job.runs[0])
        elif hasattr(workflow, "set_single_run_context"):
            workflow.set_single_run_context(job.runs[0])
        return workflow

    def _watch_memory(self) -> None:
        """Exit this process as soon as its memory exceeds the limit."""
        limit = self._plan.workflow_memory_gb * 2**30 / os.sysconf("SC_PAGE_SIZE")
        with open("/proc/self/statm", "rb", buffering=0) as sizes:
            while int(os.pread(sizes.fileno(), 100, 0).split()[1]) <= limit:
                time.sleep(MEMORY_POLL_S)
        os._exit(OUT_OF_MEMORY_EXIT_CODE)
