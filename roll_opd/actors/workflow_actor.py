"""Ray actor that runs workflows: each run in a thread or a coroutine of its own, the model a call away."""

import asyncio
import contextvars
import inspect
import os
import sys
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

import numpy as np
import ray

from roll_opd.actors.sampler import Request, Sampler, Session
from roll_opd.base.frozen import thaw
from roll_opd.cluster.batched_calls import Answers, coalesced
from roll_opd.cluster.group import ActorGroup
from roll_opd.config.plan import ContextPlan, RolloutPlan, SamplingPlan, WorkflowPlan
from roll_opd.data.dataset import Prompt
from roll_opd.data.templates import load_tokenizer
from roll_opd.inference.completion import Completion
from roll_opd.inference.tool_calls import find_parser
from roll_opd.models.model_info import read_model
from roll_opd.samples.buffer_pickle import Compact
from roll_opd.samples.experience import Experience

MOST_THREADS = 10_000  # a run that cannot be ended keeps its thread
MEMORY_SECONDS = 0.25  # between looks at the process's memory
OUT_OF_MEMORY = 77  # exit code
# kinds of failures
RAISED, TIMEOUT, INVALID, API_ERROR = "raised", "timeout", "invalid", "api_error"


@dataclass(frozen=True)
class Job:
    """Runs at one prompt that one call of a workflow makes."""

    prompt: Prompt
    draw: int
    runs: tuple[int, ...]  # their numbers
    group: int
    seed: int
    sampling: SamplingPlan
    is_eval: bool
    jobs: int = 1  # that make all runs at the prompt


@dataclass
class Outcome:
    """What became of a job's runs: experiences by run, or why there are none."""

    made: dict[int, list[Experience]] = field(default_factory=dict)
    failure: tuple[str, str] | None = None  # kind, and what happened
    calls: int = 0  # of the model
    branches: int = 0  # conversations that they made: more than one where a call's messages did not continue another's
    requests: Counter[str] = field(default_factory=Counter)  # to the endpoint of this process, by what became of them
    hung: bool = False  # a run that cannot be ended is still under way here: this process should be replaced


class SamplerEngines:
    """The engines of a sampler, from another process; see `roll_opd.workflows.model_wrapper.Engines`."""

    def __init__(self, sampler: Sampler, chunk: int | None, deterministic: bool) -> None:
        self._sampler, self._session = sampler, Session(sampler, chunk, alone=deterministic)

    async def generate(
        self, group: int, prompts: Sequence[np.ndarray], seeds: Sequence[int], sampling: SamplingPlan
    ) -> list[Completion]:
        """Return one completion a prompt, in order."""
        requests = [Request(group, prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
        return await asyncio.gather(*[self._session.ask(request, sampling) for request in requests])

    async def prompt_logprobs(self, group: int, tokens: Sequence[int]) -> np.ndarray:
        """Return log-probs of tokens 1 to T-1, f32."""
        return await self._of(group).prompt_logprobs.remote(list(tokens))

    async def weights_version(self) -> int:
        """Return which weights the engines have."""
        return await self._of(0).weights_version.remote()

    def _of(self, group: int) -> Any:
        return self._sampler.engines.actors[self._sampler.engine_of(group)]


class _OutOfTime(Exception):
    """A run has had its time."""


def _is_of_api(error: BaseException) -> bool:
    """Whether a model behind an address has failed, after OpenAI's client has tried again."""
    openai = sys.modules.get("openai")  # who has not imported it has no such error
    return openai is not None and isinstance(
        error, openai.APIConnectionError | openai.RateLimitError | openai.InternalServerError
    )


def _failure(error: BaseException, returned: bool) -> tuple[str, str]:
    """Return what an error of a run is counted as, and what is said of it."""
    from roll_opd.workflows.plugins import own_traceback
    from roll_opd.workflows.workflow_experience import RunFailure

    if isinstance(error, RunFailure):
        return error.kind, str(error)
    invalid = isinstance(error, TypeError | ValueError | AttributeError) and returned
    return INVALID if invalid else API_ERROR if _is_of_api(error) else RAISED, own_traceback(error)


@contextmanager
def _staying() -> Iterator[None]:
    """Make an error of what would end the process: it is not the run's alone."""
    try:
        yield
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"it called for the end of its process, {type(error).__name__}({error})") from error


async def _ended(coroutine: Awaitable[Any]) -> Any:
    with _staying():
        return await coroutine


def _task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    """Make a task; one that a run starts cannot end the loop, and with it all other runs."""
    from roll_opd.workflows.run_state import RUN

    if RUN in (options.get("context") or contextvars.copy_context()):
        coroutine = _ended(coroutine)
    return asyncio.Task(coroutine, loop=loop, **options)


@ray.remote(max_concurrency=MOST_THREADS)  # type: ignore[call-overload]  # Ray's types miss this option of actors
class WorkflowWorker:
    """One process of workflows."""

    _plan: WorkflowPlan
    _limits: Any
    _class: Any
    _model: Any
    _reward: Any  # the class of a reward function, or None

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
        """Find the workflow, and load the tokenizer.

        `engines` are `RolloutWorker`s of `rollout`, `auxiliary_engines` those of each auxiliary model, none for one
        elsewhere. `contexts` are those of the run's teachers. `number` tells this process from the others that run now.
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
        self._threads = ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="run")
        self._ready: list[Any] = []  # instances that can be reset
        self._hung = 0
        self._endpoints: list[Any] = []

        def served(kind: Callable[..., Any], plan: RolloutPlan, engines: Sequence, **address: Any) -> Any:
            """Return a model in engines, with an address of its own."""
            sampler = SamplerEngines(Sampler(ActorGroup(engines)), chunk, deterministic)
            tokenizer, loop = load_tokenizer(plan.model.path), asyncio.get_running_loop()
            model = kind(sampler, tokenizer, model_path=plan.model.path, max_model_len=plan.max_model_len, loop=loop)
            model.endpoint = PolicyServer(model, loop, find_parser(self._plan.tool_call_parser, tokenizer), **address)
            self._endpoints.append(model.endpoint)
            return model

        port = plan.endpoint_port + number if plan.endpoint_port else 0
        address = {"host": plan.endpoint_host, "port": port, "key": plan.endpoint_api_key}
        self._model = served(ModelWrapper, rollout, engines, **address)
        self._auxiliaries = [
            served(partial(AuxiliaryModel, place, model.engine.sampling, name=model.name), model.engine, of_model)
            if model.engine
            # three tries have room in the time of a run
            else RemoteModel(model.model_name, model.base_url, model.api_key, model.name, plan.workflow_timeout / 4)
            for place, (model, of_model) in enumerate(zip(plan.auxiliary_models, auxiliary_engines, strict=True))
        ]
        if port:
            _ = self._model.api_address  # whoever knows the port need not wait for a run
        threading.Thread(target=self._watch_memory, daemon=True).start()

    async def run(self, jobs: Sequence[Job]) -> AsyncIterator[Compact]:
        """Have all jobs done side by side; yield `Answers` of `Outcome`s as they finish."""
        runs = max(len(job.runs) for job in jobs)
        chunk = self._chunk and max(1, self._chunk // runs)
        async with aclosing(coalesced(self._outcomes(jobs), chunk=chunk)) as outcomes:
            async for done in outcomes:
                yield Compact(Answers(done, hung=any(outcome.hung for _, outcome in done)))

    async def _outcomes(self, jobs: Sequence[Job]) -> AsyncGenerator[tuple[int, Outcome], None]:
        async def one(place: int, job: Job) -> tuple[int, Outcome]:
            return place, await self._outcome(job)

        under_way = [asyncio.create_task(one(place, job)) for place, job in enumerate(jobs)]
        try:
            for done in asyncio.as_completed(under_way):
                yield await done
        finally:
            for task in under_way:
                task.cancel()

    async def _outcome(self, job: Job) -> Outcome:
        """Do one job. What its code raises is an outcome, too."""
        from roll_opd.workflows.run_state import RUN, RunState
        from roll_opd.workflows.workflow_experience import by_run, trained

        outcome = Outcome()
        state = RunState(job.group, (job.seed, job.draw), job.runs, job.sampling)
        context = contextvars.copy_context()
        context.run(RUN.set, state)
        try:
            found = await asyncio.create_task(self._call(job, context), context=context)
            made: dict[int, list[Experience]] = {}
            for run, of_run in by_run(found, job.runs).items():
                made[run] = []
                for place, (step, one) in enumerate(of_run):
                    learned = trained(one, self._limits, job.prompt, job.draw, run, place, step)
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
            outcome.failure = _failure(error, state.returned)  # of something that the run itself has cancelled
        except GeneratorExit:
            raise
        except _OutOfTime:
            outcome.failure = (TIMEOUT, f"not done after workflow_timeout, {self._plan.workflow_timeout:g} s")
        except BaseException as error:  # a panic of a library in Rust is no Exception
            outcome.failure = _failure(error, state.returned)
        finally:
            for endpoint in self._endpoints:
                endpoint.close(state)
        outcome.requests, self._model.endpoint.counts = self._model.endpoint.counts, Counter()
        outcome.calls, outcome.hung = state.calls, state.stuck or self._hung > 0
        outcome.branches = len(state.turns.leaves()) if state.turns else 0
        return outcome

    async def _call(self, job: Job, context: contextvars.Context) -> list[Any]:
        """Call the workflow, as long as it may take; keep the instance where it can serve again."""
        from roll_opd.workflows.run_state import RUN
        from roll_opd.workflows.workflow_interface import flag

        loop = asyncio.get_running_loop()
        until = loop.time() + self._plan.workflow_timeout
        if self._ready and flag(self._ready[-1], "is_async"):  # its code has said that it does not block
            workflow, found = self._begun(job)
        else:  # a thread: to make an instance, or to run one, may take its time
            under_way = loop.run_in_executor(self._threads, context.copy().run, self._begun, job)
            done, _ = await asyncio.wait([under_way], timeout=self._plan.workflow_timeout)
            if not done:
                self._hung += 1
                under_way.add_done_callback(self._ended_after_all)
                raise _OutOfTime
            workflow, found = under_way.result()
        if inspect.isawaitable(found):
            try:
                async with asyncio.timeout_at(until) as limit:
                    found = await _ended(found)
            except TimeoutError:
                if limit.expired():
                    raise _OutOfTime from None
                raise  # the workflow's own
        if flag(workflow, "resettable"):
            self._ready.append(workflow)
        RUN.get().returned = True
        if experiences_of := getattr(workflow, "experiences_of", None):
            found = experiences_of(found)
        if isinstance(found, Sequence) and not isinstance(found, str):
            return list(found)
        raise TypeError(f"a run returned {type(found).__name__} where a list of Experience was expected")

    def _begun(self, job: Job) -> tuple[Any, Any]:
        """Return an instance and what it returned, or a coroutine that will."""
        from roll_opd.workflows.workflow_interface import flag

        with _staying():
            workflow = self._instance(job)
            return workflow, workflow.run_async() if flag(workflow, "is_async") else workflow.run()

    def _ended_after_all(self, under_way: asyncio.Future) -> None:
        self._hung -= 1
        under_way.exception()

    def _instance(self, job: Job) -> Any:
        """Return an instance that is ready for the job: a new one, or one that was reset."""
        from roll_opd.workflows.workflow_interface import FormatConfig, GenerationConfig, Task, flag

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
            workflow.task = task  # older classes read it and do not pass it on
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
        """End this process where it needs more memory than it may have: nothing else stops a leak."""
        most = self._plan.workflow_memory_gb * 2**30 / os.sysconf("SC_PAGE_SIZE")
        with open("/proc/self/statm", "rb", buffering=0) as sizes:
            while int(os.pread(sizes.fileno(), 100, 0).split()[1]) <= most:
                time.sleep(MEMORY_SECONDS)
        os._exit(OUT_OF_MEMORY)
