"""The pipeline behind `roll_opd.open`: executes the calls of a client process, one after another.

The client (`roll_opd.api`) starts the run and passes its socket in the environment. The run ends when the client closes
the connection, or when a process of the run dies. Any other error ends only the call: `session_arguments` checks the
arguments before a role is called, and a call that fails later leaves a defined state (`SessionCalls.execute`).
"""

import asyncio
import os
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import numpy as np
import ray

from roll_opd.base.command_line import SESSION_INTERRUPT, SESSION_SOCKET
from roll_opd.base.failures import RunError, SkippedUpdates, os_sentence, place_of, shortened
from roll_opd.cluster.lost_processes import ClusterError
from roll_opd.config.schema.key_types import NotNegative
from roll_opd.data.dataset import Prompt
from roll_opd.data.row_formats import BadRow, DataError
from roll_opd.data.usable_rows import encode, render_row
from roll_opd.models.device_phases import Phase
from roll_opd.objective.corrections import check_staleness
from roll_opd.objective.reference_kl import first_kl_coef
from roll_opd.objective.registry import AlgorithmError
from roll_opd.pipelines import session_arguments as arguments
from roll_opd.pipelines.distill import rollouts_of, sample_metrics, with_advantages
from roll_opd.pipelines.engine_check import EngineCheck
from roll_opd.pipelines.run_context import Run
from roll_opd.pipelines.run_workers import RunWorkers
from roll_opd.pipelines.session_arguments import PURE
from roll_opd.pipelines.start_roles import start_workflow
from roll_opd.rollout.workflow_protocol import SingleTurn
from roll_opd.rollout.workflow_runs import Batch, PendingRewards, roll_out
from roll_opd.samples.call_settings import call_row, with_call_settings
from roll_opd.samples.sample import Sample, TargetRef, changed
from roll_opd.teachers.scoring import Scorers
from roll_opd.workers.target_refs import release

CANCELLED = frozenset({"sample", "reward"})  # calls that an interrupt ends early; other calls change the student
END_THE_RUN = (ClusterError, ray.exceptions.RayActorError)  # a process has died
MISTAKES = (DataError, BadRow, AlgorithmError)  # mistakes in a prompt or in a name; the client gets a ValueError
STATED = (RunError, *MISTAKES, ValueError, TypeError)  # errors whose message is a sentence
# types of other errors that the client gets unchanged; all others become a RuntimeError
_KEPT = (FileNotFoundError, FileExistsError, NotADirectoryError, PermissionError, OSError, TypeError, ValueError)


async def train(run: Run, workers: RunWorkers) -> None:
    """Execute the client's calls until it closes the connection."""
    await run.restore(workers.load)
    await workers.send_weights(version=run.steps_done, updated=False)
    workflow = await start_workflow(run.plan, workers.sampler, run.placement)
    assert workers.teachers_measured is not None
    await workers.teachers_measured
    await run.log_start(_no_validation)
    calls = SessionCalls(run, workers, workflow or SingleTurn(), run.steps_done)
    with Client(os.environ[SESSION_SOCKET]) as connection:
        await _serve(connection, calls)
    if workflow:
        await workflow.end()


async def _no_validation() -> dict[str, float]:
    return {}


async def _serve(connection: Connection, calls: "SessionCalls") -> None:
    """Execute calls until the client disconnects. A running call is then cancelled."""
    received: asyncio.Queue[Any] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    loop.add_reader(connection.fileno(), _receive, connection, received)
    try:
        connection.send(None)  # ready
        await _execute(connection, received, calls)
    finally:
        loop.remove_reader(connection.fileno())


async def _execute(connection: Connection, received: "asyncio.Queue[Any]", calls: "SessionCalls") -> None:
    while (message := await received.get()) is not None:
        if message == SESSION_INTERRUPT:  # it arrived after its call had ended
            continue
        if isinstance(message, Exception):
            connection.send(TypeError(f"an argument of the call cannot be sent to the run: {message}"))
            continue
        call = asyncio.create_task(calls.execute(*message))
        following = asyncio.create_task(received.get())
        await asyncio.wait([call, following], return_when=asyncio.FIRST_COMPLETED)
        left = following.done() and following.result() is None
        if left or (following.done() and message[0] in CANCELLED):
            call.cancel()
        try:
            answer: Any = await call
        except asyncio.CancelledError:
            answer = None
        except END_THE_RUN:
            raise
        except Exception as error:
            answer = _answer_to(error)
        if left:
            break
        following.cancel()
        with suppress(BrokenPipeError):  # the client has disconnected during the call
            connection.send(answer)


def _receive(connection: Connection, received: "asyncio.Queue[Any]") -> None:
    """Put the next message of the client into a queue, or None if the client has disconnected.

    If the message has an object of a class that this process cannot import, the error is put into the queue.
    """
    try:
        received.put_nowait(connection.recv())
    except (EOFError, OSError):
        asyncio.get_running_loop().remove_reader(connection.fileno())
        received.put_nowait(None)
    except Exception as error:
        received.put_nowait(error)


def _answer_to(error: Exception) -> Exception:
    """Return the error that the client raises for a failed call: a type of Python, with one sentence."""
    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
    kept = next((kind for kind in _KEPT if isinstance(cause, kind)), RuntimeError)
    kind = ValueError if isinstance(cause, MISTAKES) else kept
    text = str(cause)
    if isinstance(cause, OSError) and cause.errno:
        text = os_sentence(cause)
    elif not isinstance(cause, (*STATED, OSError)):
        where = place_of(cause)
        text = f"{type(cause).__name__}: {text}" + (f" ({where})" if where else "")
    return kind(shortened(" ".join(text.split())))


async def completed(work: Awaitable[None]) -> None:
    """Await `work` to its end, also if this is cancelled meanwhile."""
    working = asyncio.ensure_future(work)
    try:
        await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait({working})
        working.result()
        raise


@dataclass
class SessionCalls:
    """Executes the calls of a client on the roles of a run. `step` is the number of optimizer steps so far."""

    run: Run
    workers: RunWorkers
    workflow: Any
    step: int
    version: int = field(init=False)  # number of changes of the student's weights so far, by steps and by `load`
    _draws: int = 0  # number of prompts sampled so far; it numbers groups and seeds samples
    _updated: bool = False  # whether an update was made since the last weight sync
    # targets by sample id; they stay in this process
    _targets: dict[str, Mapping[str, TargetRef]] = field(default_factory=dict)
    _learned: list[Sample] = field(default_factory=list)  # samples trained on since the last optimizer step
    _metrics: dict[str, float] = field(default_factory=dict)
    _undefined: str = ""  # why the student's state is not defined; "": it is defined
    _has_noted_texts: bool = False

    def __post_init__(self) -> None:
        student, report = self.workers.student, self.run.logger.engine_preflight
        self._engine_check = EngineCheck(self.run.plan, student, report, ends_run=False)
        self.version = self.step
        self.plan, self.rollout = self.run.plan, self.run.plan.rollout
        self._kl_coef = first_kl_coef(self.plan.objective, None)
        self._context = rollouts_of(self.run, self.workers, self.workflow).context

    async def execute(self, name: str, values: Mapping[str, Any]) -> Any:
        """Execute the call `name` and return its result.

        Raises ValueError if an earlier call has left the student without a defined state, and ClusterError if the call
        leaves engines without defined weights that cannot be replaced.
        """
        if self._undefined and name not in ("load", "prompts"):
            raise ValueError(f"{name}: {self._undefined}; call student.load with a complete state first")
        try:
            return await getattr(self, name)(**values)
        except END_THE_RUN:
            raise
        except Exception as error:
            sampler = self.workers.sampler
            if sampler.survives_losses or not (sampler.sync and sampler.sync.has_failed):
                raise
            raise ClusterError(
                f"{name}: a transfer of weights failed, and engines that share devices cannot be replaced; open a new"
                f" session: {_answer_to(error)}"
            ) from error

    async def prompts(self, n: int) -> list[Prompt]:
        """Return the next prompts from the configuration's files."""
        return self.run.source.take(arguments.count_of("prompts", "n", n))

    async def sample(
        self, prompts: Sequence[Prompt | str | Sequence[Mapping[str, Any]]], n: int | None, sampling: Mapping[str, Any]
    ) -> tuple[list[Sample], list[str]]:
        """Return (samples, texts): `n` samples per prompt, and the texts of their responses.

        Samples and texts are in the order of the prompts.
        """
        assert self.rollout is not None
        settings = arguments.sampling_of(self._context.sampling, n, sampling)
        first = self._draws
        rows = [self._prompt(prompt, first + number) for number, prompt in enumerate(arguments.prompts_of(prompts))]
        if self.plan.workflow is None:  # a workflow makes its own prompts
            arguments.check_lengths(rows, settings, self.rollout, self.plan.data.prompt_length)
        if self.workers.sampler.sync and self.workers.sampler.sync.has_failed:
            raise ValueError(
                "sample: the last transfer of weights to the engines failed, so their weights may be of two versions;"
                " call sampler.update first"
            )
        if self.workers.turns.lack_weights and self._updated:
            raise ValueError(
                "sample: the engines have discarded the weights of the last sampler.update, because they share devices"
                " with the student, and the student has changed since then; call sampler.update first"
            )
        context = replace(self._context, sampling=settings, scorers=Scorers(), reward_pools=())
        await completed(self.workers.begin_generation(self.version))  # an interrupt must not cut a transfer of weights
        self._draws += len(rows)

        async def rolled_out() -> dict[int, list[Sample] | None]:
            rewards = PendingRewards(context)
            return {number: samples async for number, samples in roll_out(context, rows, rewards, first)}

        runs = await self.workers.attended(rolled_out(), self.version)
        made = [sample for number in sorted(runs) for sample in runs[number] or ()]
        row = call_row(settings, self._context.sampling)
        if not np.isnan(row).all():
            made = [with_call_settings(sample, row) for sample in made]
        texts = self.run.logger.tokenizer.batch_decode([s.response_tokens for s in made], skip_special_tokens=True)
        return made, texts

    def _prompt(self, prompt: Prompt | str | Sequence[Mapping[str, Any]], number: int) -> Prompt:
        """Return a prompt made from a text or a list of messages.

        It is rendered like a row of the configuration's files: messages with the chat template, a text unchanged.
        Messages without a system message get the configuration's `system_prompt`.
        """
        if isinstance(prompt, Prompt):
            return prompt
        tokenizer = self.run.logger.tokenizer
        row = arguments.row_of(prompt, f"session-{number}", self.plan.data)
        if isinstance(prompt, str) and getattr(tokenizer, "chat_template", None) and not self._has_noted_texts:
            self._has_noted_texts = True
            self.run.logger.note(
                "Text prompts are tokenised without the model's chat template; to apply it, give messages:"
                ' [{"role": "user", "content": text}]'
            )
        tokens, *_ = next(encode(tokenizer, [render_row(tokenizer, row, self.plan.data)]))
        return Prompt(row.id, number, row.tag, tokens, row.ground_truth, row.extra)

    async def score(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples with log-probs from the teachers and the reference policy."""
        assert self.rollout is not None
        models = self.workers.scorers
        if not (models.teachers or models.reference):
            raise ValueError("score: the configuration has neither a teacher nor a reference policy; add a teacher")
        await self.workers.turns.enter(Phase.READ)
        with self.run.clock.phase("teacher"):
            scored = await models.compute_logprobs(samples, self.rollout.sampling.temperature)
        self._targets |= {sample.id: sample.teacher_targets for sample in scored if sample.teacher_targets}
        return [changed(sample, teacher_targets={}) for sample in scored]

    async def reward(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples with the rewards that the configuration defines."""
        pools = self._context.reward_pools
        unknown = {s.tag for s in samples if s.reward is None and not any(p.plan.accepts(s.tag) for p in pools)}
        if unknown:
            raise ValueError(
                f"reward: no reward of the configuration accepts the tag {', '.join(sorted(unknown))}; pass"
                " rewards={domain: function} to roll_opd.open, or use batch.with_rewards(numbers)"
            )
        rewards = PendingRewards(self._context)
        for sample in samples:
            rewards.request(sample)
        return await rewards.added_to(samples)

    async def logprobs(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples with `old_logprobs`, computed by the training engine."""
        await self.workers.turns.enter(Phase.OLD_LOGPROBS)
        assert self.rollout is not None
        return await self.workers.student.compute_old_logprobs(samples, self.rollout.sampling.temperature)

    async def forward_backward(
        self, samples: Sequence[Sample], objective: Mapping[str, Any], opd_kl_coef: float | None
    ) -> dict[str, float]:
        """Accumulate the gradient of a batch's loss; return its metrics."""
        assert self.rollout is not None
        if self._learned and self.plan.student.optimizer.overlap_grad_reduce:
            raise ValueError(
                "forward_backward: with overlap_grad_reduce, gradients of several calls cannot be accumulated; call"
                " optim_step first"
            )
        plan = replace(self.plan, objective=arguments.objective_of(self.plan, objective))
        if opd_kl_coef is not None:
            opd_kl_coef = arguments.value_of("forward_backward", "opd_kl_coef", opd_kl_coef, NotNegative)
            plan = replace(plan, teachers=tuple(replace(t, opd_kl_coef=opd_kl_coef) for t in plan.teachers))
        whole = [changed(sample, teacher_targets=self._targets.get(sample.id, {})) for sample in samples]
        rewarded = any(sample.reward is not None for sample in whole)
        if rewarded and plan.objective.adv_estimator == PURE:
            raise ValueError(
                f"forward_backward: the batch has rewards, but adv_estimator {PURE} ignores them; use"
                " adv_estimator='reinforce' or another estimator, start from a mixed configuration, or pass the batch"
                " without rewards"
            )
        arguments.check_learnable(whole, plan, self._targets, rewarded=rewarded)
        prepared, _ = with_advantages(whole, plan, self._kl_coef, rewarded=rewarded)
        check_staleness(prepared, self.version, 0, plan.objective.max_age)
        await self.workers.turns.enter(Phase.TRAIN)
        try:
            with self.run.clock.phase("train"):
                learned, metrics = await self.workers.student.forward_backward(
                    prepared, plan.teachers, plan.objective, self.rollout.sampling.temperature, self.version + 1
                )
            self._engine_check.after(metrics, self.step + 1)
        except END_THE_RUN:
            raise
        except Exception as error:
            await self._discard_gradient()
            raise RuntimeError(
                f"forward_backward: {_answer_to(error)}; the gradients accumulated since the last optim_step are lost"
            ) from error
        self._learned += learned
        self._metrics |= metrics
        return metrics

    async def _discard_gradient(self) -> None:
        self._learned, self._metrics = [], {}
        await self.workers.student.discard_gradient()

    async def optim_step(self, learning_rate: float | None) -> dict[str, float]:
        """Apply the accumulated gradients with an optimizer step; log the step."""
        rate = arguments.learning_rate_of(learning_rate)
        if not self._learned:
            raise ValueError("optim_step: no gradient has been accumulated; call forward_backward first")
        await self.workers.turns.enter(Phase.TRAIN)
        learned, logged, version = self._learned, self._metrics, self.version
        self._learned, self._metrics = [], {}
        self._undefined = "the last optim_step failed"
        try:
            metrics = await self.workers.student.optim_step(learned, rate)
        except SkippedUpdates:
            self._undefined = ""  # the weights have not changed
            raise
        self._undefined = ""
        self.step, self.version, self._updated = self.step + 1, self.version + 1, True
        release(learned)
        for sample in learned:
            self._targets.pop(sample.id, None)
        if self.rollout and self.rollout.speculates:
            logged |= await self.workers.sampler.draft_metrics()
        generated = sum(sample.action_tokens for sample in learned)
        batch = Batch(version, samples=learned, generated_tokens=generated)
        self.run.logger.step(self.step, batch, learned, logged | metrics | sample_metrics(learned, self.plan))
        return metrics

    async def sync(self) -> None:
        """Send the student's weights to the engines, and to teachers that follow the student."""
        with self.run.clock.phase("weight_sync"):
            await self.workers.send_weights(version=self.version, updated=self._updated)
        self._updated = False

    async def save(self, directory: str) -> str:
        """Write the training state and a Hugging Face model; return the model's directory."""
        await self.workers.turns.enter(Phase.CHECKPOINT)
        writing = await self.workers.save(Path(directory))
        await writing.files(wait=True)
        return str(Path(directory) / "hf")

    async def load(self, directory: str) -> None:
        """Restore the training state that `save` wrote, and send its weights to the engines.

        Accumulated gradients are discarded. Samples of earlier weights count as samples of another version.
        """
        state = arguments.state_directory(Path(directory), self.plan)
        await self._discard_gradient()
        self._undefined = f"load of {directory} failed, so that the student's weights may be of two states"
        await self.workers.load(state)
        self._undefined = ""
        self.version, self._updated = self.version + 1, False
        await self.workers.send_weights(version=self.version, updated=False)
