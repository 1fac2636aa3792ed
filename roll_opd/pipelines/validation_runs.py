"""Validate the student during a run, and each teacher before the run.

`ConcurrentValidation` validates on reserved engines, while training and the generation of training samples continue.
The reserved engines get weights only when a validation starts, so all answers of a validation are from one version. One
validation runs at a time. The rows of metrics from its step on are kept in memory and written when it ends. A later
validation and a checkpoint wait for it. So the logs are complete up to every checkpoint, and a resumed run repeats each
validation that they lack.
"""

import asyncio
import time
from collections.abc import Awaitable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from roll_opd.base.failures import RunError
from roll_opd.cluster.stall_watchdog import WAITS
from roll_opd.config.plan import SamplingPlan
from roll_opd.data.prompt_source import Prompt
from roll_opd.models.device_phases import Phase
from roll_opd.pipelines.run_context import Run
from roll_opd.pipelines.run_logger import STUDENT
from roll_opd.pipelines.run_workers import RunWorkers
from roll_opd.pipelines.start_roles import chunk_samples, start_workflow, teacher_as_student
from roll_opd.rollout.workflow_protocol import SingleTurn, Workflow
from roll_opd.rollout.workflow_runs import PendingRewards, RolloutContext, roll_out
from roll_opd.samples.sample import Sample
from roll_opd.samples.versions import sampling_versions
from roll_opd.teachers.scoring import Scorers
from roll_opd.tracking.console import Progress
from roll_opd.tracking.phase_clock import PhaseClock
from roll_opd.tracking.validation_metrics import validation_metrics
from roll_opd.workers.colocation import DeviceScheduler
from roll_opd.workers.reward_pool import RewardPool
from roll_opd.workers.sampler import Sampler
from roll_opd.workers.workflow_pool import WorkflowPool

VALIDATION_DRAW = 2**31  # first draw number of validation, above all draw numbers of training


async def validate(context: RolloutContext, prompts: Sequence[Prompt]) -> tuple[dict[str, float], list[Sample]]:
    """Return (metrics, answers): `validation_metrics` of `sampling.n` answers to each prompt, and the answers."""
    rewards = PendingRewards(context)
    async with aclosing(roll_out(context, prompts, rewards, VALIDATION_DRAW)) as samples:
        by_number = {number: made async for number, made in samples}
    answers = await rewards.added_to([answer for number in range(len(by_number)) for answer in by_number[number] or ()])
    metrics = validation_metrics([_by_main_reward(e, context.reward_pools) for e in answers], context.sampling.n)
    return metrics, answers


async def read_answers(
    models: Scorers, answers: Sequence[Sample], sampling: SamplingPlan, most_tokens: int
) -> list[Sample]:
    """Return the answers with log-probs of the teachers and of the reference policy.

    The log-probs are at the sampling temperature. An answer is returned unchanged if its response has more than
    `most_tokens` tokens, or if there are teachers but none of them accepts its tag. Teachers with a context are left
    out, because held-out rows may lack the columns of the context.

    Args:
        most_tokens: largest number of tokens in a batch of the models.
    """
    teachers = [teacher for teacher in models.teachers if teacher.plan.context is None]
    plain = replace(models, teachers=teachers, targets_for=None, student=None)
    if not (teachers or models.reference):
        return list(answers)

    def is_read(answer: Sample) -> bool:
        taught = not plain.teachers or any(teacher.plan.accepts(answer.tag) for teacher in plain.teachers)
        return taught and answer.response_length <= most_tokens

    chosen = [answer for answer in answers if is_read(answer)]
    if not chosen:
        return list(answers)
    read = {answer.id: answer for answer in await plain.compute_logprobs(chosen, sampling.temperature or 1.0)}
    return [read.get(answer.id, answer) for answer in answers]


def first_answers(answers: Sequence[Sample], samples: int, most: int) -> list[Sample]:
    """Return the first answer to each of at most `most` prompts.

    The prompts are evenly spread over the data and are the same in every call.

    Args:
        answers: the answers to all prompts; the answers to one prompt are consecutive.
        samples: number of answers to each prompt.
    """
    firsts = answers[::samples]
    most = min(most, len(firsts))
    return [firsts[place * len(firsts) // most] for place in range(most)]


def _by_main_reward(answer: Sample, reward_pools: Sequence[RewardPool]) -> Sample:
    """Return an answer whose reward is the main reward of its domain.

    The other reward terms and the weights of all terms are used only in training.
    """
    plan = next((pool.plan for pool in reward_pools if pool.plan.domain == answer.domain), None)
    if plan is None or not plan.is_weighted or plan.terms[0].name not in answer.reward_parts:
        return answer
    return replace(answer, reward=answer.reward_parts[plan.terms[0].name])


async def measure(
    run: Run,
    pools: Sequence[RewardPool],
    sampler: Sampler,
    step: int = 0,
    by: str = STUDENT,
    readers: Scorers | None = None,
    workflow: Workflow | None = None,
    turns: DeviceScheduler | None = None,
) -> dict[str, float]:
    """Return the validation metrics of the model that `sampler` runs.

    Some of the answers are logged. `readers` compute log-probs of these answers.
    """
    metrics, answers = await validate(context_of(run, pools, sampler, workflow), run.held_out)
    await log_answers(run, answers, step, by, readers, turns)
    return metrics


def context_of(
    run: Run, pools: Sequence[RewardPool], sampler: Sampler, workflow: Workflow | None, *, is_concurrent: bool = False
) -> RolloutContext:
    """Return the context of a validation.

    The time and the progress of a validation during training are not counted, because they are not those of a step.
    """
    plan = run.plan
    assert plan.validation is not None
    return RolloutContext(
        sampler,
        plan.validation.sampling,
        pools,
        plan.seed,
        chunk_samples(plan),
        PhaseClock() if is_concurrent else run.clock,
        workflow=workflow or SingleTurn(),
        is_eval=True,
        progress=Progress() if is_concurrent else run.progress,
    )


async def log_answers(
    run: Run,
    answers: Sequence[Sample],
    step: int,
    by: str = STUDENT,
    readers: Scorers | None = None,
    turns: DeviceScheduler | None = None,
) -> None:
    """Log some of the answers. `readers` compute log-probs of these answers."""
    plan = run.plan
    assert plan.validation is not None and plan.rollout is not None
    sampling = plan.validation.sampling
    shown = first_answers(answers, sampling.n, plan.logged_samples_per_step)
    if turns:
        await turns.enter(Phase.READ)
    if readers:
        shown = await read_answers(readers, shown, sampling, plan.rollout.sampling.max_new_tokens)
    run.logger.answers(step, by, shown)


async def measure_teachers(run: Run, starting_rewards: Awaitable[Sequence[RewardPool]]) -> None:
    """In a new run with `evaluate_teacher`, validate each teacher and log its accuracy."""
    plan = run.plan
    validation = plan.validation if plan.validation and plan.validation.evaluate_teacher else None
    if run.resumed or not (validation and run.held_out and plan.teachers):
        return
    if any(reward.engine for reward in plan.rewards):
        await starting_rewards  # the engines of judges may share a device with the teachers
    run.logger.note("Validating the teacher ...")
    requests = len(run.held_out) * validation.sampling.n
    for teacher in plan.teachers:
        if teacher.model is None or teacher.tokenizer is not None:
            lacks = "has another tokenizer" if teacher.tokenizer else "has no model directory from which to sample"
            run.logger.note(f"Teacher {teacher.name} {lacks} and is not validated")
            continue
        async with teacher_as_student(plan, teacher, run.placement, requests) as (sampler, workflow):
            with run.clock.phase("validate"):
                by = f"teacher/{teacher.name}"
                measured = await measure(run, await starting_rewards, sampler, by=by, workflow=workflow)
            run.logger.teacher_accuracy(teacher.name, measured)


SECONDS = "val/seconds"  # duration of a validation during training

Measured = tuple[dict[str, float], list[Sample], float]  # metrics, answers, seconds


@dataclass(frozen=True)
class _Running:
    """A validation that has started."""

    step: int
    measuring: asyncio.Task[Measured]


class ConcurrentValidation:
    """Validates the weights of steps on the engines that are reserved for validation."""

    def __init__(self, run: Run, workers: RunWorkers) -> None:
        self._run, self._workers = run, workers
        self._workflow: WorkflowPool | None = None
        self._running: _Running | None = None

    async def start(self) -> None:
        """Start the processes of the run's workflow that call the reserved engines."""
        assert self._workers.validation_sampler
        self._workflow = await start_workflow(self._run.plan, self._workers.validation_sampler, self._run.placement)

    async def after(self, step: int) -> dict[str, float]:
        """Start the validation of the weights after `step`, if one is due. This must be called before `step` is logged.

        If a checkpoint is due too, wait for the validation and return its metrics. Otherwise the map is empty. An
        earlier validation that has ended is logged. Raises the errors of validations.
        """
        run, is_due = self._run, self._run.validates(step)
        if self._running and (is_due or run.saves(step) or self._running.measuring.done()):
            await self.end()
        if not is_due:
            return {}
        with run.clock.phase("weight_sync"):
            await self._workers.send_for_validation(step)
        self._running = _Running(step, asyncio.create_task(self._measure()))
        if run.saves(step):
            return await self._result(self._running)
        run.logger.hold()
        return {}

    async def end(self) -> None:
        """Wait for the running validation, and write its metrics and the rows that were kept."""
        if self._running:
            self._run.logger.release(self._running.step, await self._result(self._running))

    async def aclose(self) -> None:
        """Cancel the running validation, write the rows that were kept, and end the processes of the workflow."""
        if self._running:
            self._running.measuring.cancel()
            await asyncio.gather(self._running.measuring, return_exceptions=True)
            self._run.logger.release(self._running.step, {})
        if self._workflow:
            await self._workflow.end()

    async def _measure(self) -> Measured:
        run, workers, began = self._run, self._workers, time.perf_counter()
        assert workers.validation_sampler
        context = context_of(run, workers.reward_pools, workers.validation_sampler, self._workflow, is_concurrent=True)
        metrics, answers = await validate(context, run.held_out)
        return metrics, answers, time.perf_counter() - began

    async def _result(self, running: _Running) -> dict[str, float]:
        """Wait for a validation, log some of its answers, and return its metrics."""
        run, workers, step = self._run, self._workers, running.step
        with run.clock.phase("validate"):
            with WAITS.of("the learner", f"the validation after step {step}"):
                assert workers.validation_sampler
                metrics, answers, seconds = await workers.validation_sampler.served(running.measuring)
            check_versions(answers, step)
            await log_answers(run, answers, step, readers=workers.scorers, turns=workers.turns)
        self._running = None
        drained = self._workflow.drain_metrics() if self._workflow else {}
        of_runs = {name: value for name, value in drained.items() if name.startswith("val/")}
        return metrics | of_runs | {SECONDS: seconds}


def check_versions(answers: Sequence[Sample], version: int) -> None:
    """Raise RunError if an answer has a token that another version than `version` sampled."""
    for answer in answers:
        if others := sampling_versions(answer.versions) - {version}:
            raise RunError(
                f"validation answer {answer.id} has tokens of weights of version {', '.join(map(str, sorted(others)))},"
                f" but version {version} is validated. This is a bug of roll_opd, or of a workflow that sets versions"
                " itself"
            )
