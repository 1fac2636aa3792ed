"""The pipeline behind `roll_opd.open`: executes the calls of a client process, one after another.

The client (`roll_opd.api`) starts the run and passes its socket in the environment. The run ends when the client closes
the connection.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from roll_opd.algorithms.registry import AlgorithmError
from roll_opd.base.command_line import SESSION_SOCKET
from roll_opd.base.failures import RunError
from roll_opd.config.plan import ObjectivePlan
from roll_opd.data.dataset import Prompt
from roll_opd.data.indexing import encode, render_row
from roll_opd.data.rows import BadRow, DataError, parse_row
from roll_opd.models.device_phases import Phase
from roll_opd.objective.audit import audited
from roll_opd.objective.reference_kl import first_kl_coef
from roll_opd.pipelines.rlvr import rollouts_of, sample_metrics, with_advantages
from roll_opd.pipelines.run_context import Run
from roll_opd.pipelines.run_workers import RunWorkers
from roll_opd.pipelines.start_roles import start_workflow
from roll_opd.rollout.runs import Batch, PendingRewards, roll_out
from roll_opd.rollout.workflow import SingleTurn
from roll_opd.samples.sample import Sample, TargetRef, changed
from roll_opd.teachers.frozen_models import FrozenModels
from roll_opd.teachers.target_refs import release

PURE = "on_policy_distill"  # name of pure distillation as an advantage estimator
# errors after which the session can continue
CALL_ERRORS = (RunError, DataError, BadRow, AlgorithmError, ValueError, TypeError, OSError)


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
    connection.send(None)  # ready
    while True:
        try:
            name, arguments = await asyncio.to_thread(connection.recv)
        except EOFError:
            return
        try:
            answer: Any = await getattr(calls, name)(**arguments)
        except CALL_ERRORS as error:
            answer = error if isinstance(error, ValueError | TypeError | OSError) else RuntimeError(str(error))
        try:
            connection.send(answer)
        except BrokenPipeError:  # the client has disconnected during the call
            return


@dataclass
class SessionCalls:
    """Executes the calls of a client on the roles of a run. `step` is the number of optimizer steps so far."""

    run: Run
    workers: RunWorkers
    workflow: Any
    step: int
    _draws: int = 0  # number of prompts sampled so far; it numbers groups and seeds samples
    _updated: bool = False  # whether an update was made since the last weight sync
    # targets by sample id; they stay in this process
    _targets: dict[str, Mapping[str, TargetRef]] = field(default_factory=dict)
    _learned: list[Sample] = field(default_factory=list)  # samples trained on since the last optimizer step
    _metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.plan, self.rollout = self.run.plan, self.run.plan.rollout
        self._kl_coef = first_kl_coef(self.plan.objective, None)
        self._context = rollouts_of(self.run, self.workers, self.workflow).context

    async def prompts(self, n: int) -> list[Prompt]:
        """Return the next prompts from the configuration's files."""
        return self.run.source.take(n)

    async def sample(
        self, prompts: Sequence[Prompt | str | Sequence[Mapping[str, Any]]], n: int | None, sampling: Mapping[str, Any]
    ) -> tuple[list[Sample], list[str]]:
        """Return (samples, texts): `n` samples per prompt, and the texts of their responses.

        Samples and texts are in the order of the prompts.
        """
        settings = replace(self._context.sampling, **{**sampling, **({"n": n} if n else {})})
        context = replace(self._context, sampling=settings, frozen_models=FrozenModels(), reward_pools=())
        await self.workers.begin_generation(self.step)
        first, self._draws = self._draws, self._draws + len(prompts)
        rows = [self._prompt(prompt, first + number) for number, prompt in enumerate(prompts)]
        runs = {}
        async for number, samples in roll_out(context, rows, PendingRewards(context), first):
            runs[number] = samples
        made = [sample for number in sorted(runs) for sample in runs[number] or ()]
        texts = self.run.logger.tokenizer.batch_decode([s.response_tokens for s in made], skip_special_tokens=True)
        return made, texts

    def _prompt(self, prompt: Prompt | str | Sequence[Mapping[str, Any]], number: int) -> Prompt:
        """Return a prompt made from a text or a list of messages.

        It is rendered like a row of the configuration's files.
        """
        if isinstance(prompt, Prompt):
            return prompt
        value = {"prompt" if isinstance(prompt, str) else "messages": prompt}
        row = parse_row(value, f"session-{number}")
        tokenizer = self.run.logger.tokenizer
        tokens, *_ = next(encode(tokenizer, [render_row(tokenizer, row, self.plan.data)]))
        return Prompt(row.id, number, row.tag, tokens, row.ground_truth, row.extra)

    async def score(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples with log-probs from the teachers and the reference policy."""
        await self.workers.turns.enter(Phase.READ)
        assert self.rollout is not None
        with self.run.clock.phase("teacher"):
            scored = await self.workers.frozen_models.compute_logprobs(samples, self.rollout.sampling.temperature)
        self._targets |= {sample.id: sample.teacher_targets for sample in scored if sample.teacher_targets}
        return [changed(sample, teacher_targets={}) for sample in scored]

    async def reward(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples with the rewards that the configuration defines."""
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
        known = [each.name for each in fields(ObjectivePlan)]
        if unknown := sorted(objective.keys() - set(known)):
            raise ValueError(f"forward_backward: no key {', '.join(unknown)}; known are {', '.join(known)}")
        plan = replace(self.plan, objective=replace(self.plan.objective, **objective))
        if opd_kl_coef is not None:
            plan = replace(plan, teachers=tuple(replace(t, opd_kl_coef=opd_kl_coef) for t in plan.teachers))
        whole = [changed(sample, teacher_targets=self._targets.get(sample.id, {})) for sample in samples]
        rewarded = any(sample.reward is not None for sample in whole)
        if rewarded and plan.objective.adv_estimator == PURE:
            raise ValueError(
                f"forward_backward: the batch has rewards, but adv_estimator {PURE} ignores them; use"
                " adv_estimator='reinforce' or another estimator, start from a mixed configuration, or pass the batch"
                " without rewards"
            )
        prepared, _ = with_advantages(whole, plan, self._kl_coef, rewarded=rewarded)
        await self.workers.turns.enter(Phase.TRAIN)
        with self.run.clock.phase("train"):
            learned, metrics = await self.workers.student.forward_backward(
                prepared, plan.teachers, plan.objective, self.rollout.sampling.temperature, self.step + 1
            )
        self._learned += learned
        self._metrics |= metrics
        return metrics

    async def optim_step(self, learning_rate: float | None) -> dict[str, float]:
        """Apply the accumulated gradients with an optimizer step; log the step."""
        if not self._learned:
            raise ValueError("optim_step: no gradient has been accumulated; call forward_backward first")
        metrics = await self.workers.student.optim_step(self._learned, learning_rate)
        self.step, self._updated = self.step + 1, True
        learned, logged = self._learned, self._metrics | metrics
        self._learned, self._metrics = [], {}
        release(learned)
        for sample in learned:
            self._targets.pop(sample.id, None)
        generated = sum(sample.action_tokens for sample in learned)
        batch = Batch(self.step - 1, samples=learned, generated_tokens=generated)
        learned = audited(learned, self.plan.advantage_teachers, self.plan.objective)
        self.run.logger.step(self.step, batch, learned, logged | sample_metrics(learned, self.plan))
        return metrics

    async def sync(self) -> None:
        """Send the student's weights to the engines, and to teachers that follow the student."""
        with self.run.clock.phase("weight_sync"):
            await self.workers.send_weights(version=self.step, updated=self._updated)
        self._updated = False

    async def save(self, directory: str) -> str:
        """Write the training state and a Hugging Face model; return the model's directory."""
        await self.workers.turns.enter(Phase.CHECKPOINT)
        writing = await self.workers.save(Path(directory))
        await writing.files(wait=True)
        return str(Path(directory) / "hf")

    async def load(self, directory: str) -> None:
        """Restore the training state that `save` wrote, and send its weights to the engines."""
        await self.workers.load(Path(directory))
        await self.workers.send_weights(version=self.step, updated=False)
