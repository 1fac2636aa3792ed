"""Validate the student during a run, and each teacher before the run."""

from collections.abc import Awaitable, Sequence

from roll_opd.models.device_phases import Phase
from roll_opd.pipelines.run_context import Run
from roll_opd.pipelines.run_logger import STUDENT
from roll_opd.pipelines.start_roles import chunk_samples, teacher_as_student
from roll_opd.rollout.runs import RolloutContext
from roll_opd.rollout.validation import first_answers, read_answers, validate
from roll_opd.rollout.workflow import SingleTurn, Workflow
from roll_opd.samples.sample import Sample
from roll_opd.teachers.scoring import Scorers
from roll_opd.tracking.clock import PhaseClock
from roll_opd.tracking.console import Progress
from roll_opd.workers.colocation import DeviceScheduler
from roll_opd.workers.reward_pool import RewardPool
from roll_opd.workers.sampler import Sampler


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
