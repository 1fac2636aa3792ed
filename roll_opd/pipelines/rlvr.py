"""The on-policy loop: the student writes, teachers read every token, rewards score, the student learns, and again."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from roll_opd.algorithms.table import loss_facts
from roll_opd.data.prompt_source import MixedSource
from roll_opd.models.device_phases import Phase
from roll_opd.objective.advantages import external_advantages
from roll_opd.objective.audit import advantage_metrics
from roll_opd.objective.demonstrations import demonstration_experiences, mixed
from roll_opd.objective.group_filters import group_filter, without_rejected
from roll_opd.objective.masks import mask_metrics, masked
from roll_opd.objective.mismatch import corrected, train_infer_metrics
from roll_opd.objective.reference_kl import first_kl_coef, kl_coefs
from roll_opd.pipelines import validation_runs
from roll_opd.pipelines.run_context import Run
from roll_opd.pipelines.run_workers import RunWorkers
from roll_opd.pipelines.start import chunk_samples, reads_beside_generation, start_workflow
from roll_opd.roles.reward_pool import RewardPool
from roll_opd.roles.workflow_pool import WorkflowPool
from roll_opd.rollout.batch import Rollout, fill_batch
from roll_opd.rollout.workflow import SingleTurn
from roll_opd.teachers.frozen_models import FrozenModels
from roll_opd.teachers.target_refs import release
from roll_opd.teachers.teacher_preflight import PREFLIGHT_SAMPLES, TeacherPreflight
from roll_opd.tracking.metrics import opd_metrics
from roll_opd.tracking.reward_metrics import reward_metrics
from roll_opd.tracking.summary import LEARNED_TOKENS


async def train(run: Run, workers: RunWorkers) -> None:
    """Train from the first step, or from the one after a checkpoint, to `plan.max_steps`."""
    plan, objective, source, clock = run.plan, run.plan.objective, run.source, run.clock
    teachers_measured = workers.teachers_measured
    assert plan.rollout is not None and teachers_measured is not None
    temperature = plan.rollout.sampling.temperature
    await run.restore(workers.load)
    await workers.send_weights(version=run.steps_done, updated=False)
    workflow_pool = await start_workflow(plan, workers.sampler, run.placement)
    workflow = workflow_pool or SingleTurn()
    frozen_models, turns, reward_pools = workers.frozen_models, workers.turns, workers.reward_pools
    pools: list[RewardPool | WorkflowPool] = [*reward_pools, *([workflow_pool] if workflow_pool else [])]

    async def measure(step: int) -> dict[str, float]:
        await workers.begin_generation(step)
        return await validation_runs.measure(
            run, reward_pools, workers.sampler, step, readers=frozen_models, workflow=workflow, turns=turns
        )

    async def measure_first() -> dict[str, float]:
        of_student, _ = await asyncio.gather(measure(0), teachers_measured)
        return of_student | _counted(pools)

    await run.log_start(measure_first)

    reads_beside = reads_beside_generation(plan, turns)
    rollout = Rollout(
        workers.sampler,
        plan.rollout.sampling,
        reward_pools,
        plan.seed,
        chunk_samples(plan),
        clock,
        frozen_models if reads_beside else FrozenModels(),
        workflow,
        exclude_failed=not plan.rewards_are_monitored,
        progress=run.progress,
    )
    compared = loss_facts(objective.policy_loss).reads_advantages
    passes = group_filter(plan.rewards, compared=compared)
    critic_warmup = plan.critic.critic_warmup if plan.critic else 0
    adapted = run.resumed.kl_coef if run.resumed and "init_kl_coef" not in run.history.changes else None
    kl_coef = first_kl_coef(objective, adapted)
    answered = source.demonstrations.peek(PREFLIGHT_SAMPLES) if isinstance(source, MixedSource) else []
    preflight = TeacherPreflight(
        plan.teacher_preflight,
        workers.student.group,
        frozen_models.teachers,
        run.logger.teacher_preflight,
        demonstration_experiences(answered, 0),
    )

    for step in run.steps:
        with clock.phase("weight_sync"):
            await workers.begin_generation(step - 1)
        batch = await fill_batch(source, plan.rollout_batch_size, rollout, extra=plan.extra_prompts, passes=passes)
        experiences = batch.experiences
        await turns.enter(Phase.READ)
        with clock.phase("teacher"):
            if not reads_beside:
                experiences = await frozen_models.compute_logprobs(experiences, temperature)
            await preflight.check(experiences, temperature)
        if objective.recompute_old_logprobs or len(experiences) > plan.student.mini_batch_sequences:
            with clock.phase("old_logprobs"):
                await turns.enter(Phase.OLD_LOGPROBS)
                experiences = await workers.student.compute_old_logprobs(experiences, temperature)
        if workers.critic:
            with clock.phase("values"):
                await turns.enter(Phase.VALUES)
                experiences = await workers.critic.compute_values(experiences)
        if plan.update_reads_rewards:
            with clock.phase("reward"):
                experiences = await batch.with_rewards(experiences)
        experiences = masked(experiences, objective, plan.rollout.sampling)
        if not plan.rewards_are_monitored:
            made_by = plan.workflow.workflow if plan.workflow else None
            experiences = external_advantages(
                experiences,
                objective,
                kl_coef,
                taught=bool(plan.teachers),
                workflow=made_by,
                runs=plan.rollout.sampling.n,
            )
            *_, kl_coef = kl_coefs(experiences, objective, kl_coef)
            if not compared:
                experiences = without_rejected(experiences, plan.rewards)
        if objective.correction:
            experiences = corrected(experiences, plan.advantage_teachers, objective)
        if plan.demonstrations:
            assert isinstance(source, MixedSource)
            first_draw = source.demonstrations.position
            batch = replace(batch, demonstrations=source.demonstrations.take(plan.demonstrations.rows_per_step))
            demonstrations = demonstration_experiences(batch.demonstrations, first_draw)
            experiences = mixed(experiences, demonstrations, plan.demonstrations.updates)
        with clock.phase("train"), run.progress.showing(*workers.updates):
            student_learns = step > critic_warmup
            metrics: dict[str, float] = {}
            learned = sum(e.learned_tokens for e in experiences) if student_learns else 0
            if any(e.is_learned_from for e in experiences):  # else the step is left out, as in ROLL
                experiences, metrics = await workers.learn(plan, experiences, step, student_learns=student_learns)
            release(experiences)
        with clock.phase("weight_sync"):
            await workers.send_weights(version=step)
        with clock.phase("reward"):  # those that nothing has waited for
            experiences = await batch.with_rewards(experiences)

        sampled = [experience for experience in experiences if not experience.demonstration]
        metrics |= (
            train_infer_metrics(sampled)
            | opd_metrics(sampled)
            | reward_metrics(sampled)
            | mask_metrics(sampled)
            | advantage_metrics(sampled, plan.advantage_teachers, objective)
            | {LEARNED_TOKENS: float(learned)}
        )
        metrics |= await run.validation(step, partial(measure, step))
        metrics |= _counted(pools)
        async with run.checkpoint(step, workers.save, kl_coef):
            run.logger.step(step, batch, experiences, metrics)
        del batch, experiences, sampled  # before the next ones come
    if workflow_pool:
        await workflow_pool.end()


def _counted(pools: Sequence[RewardPool | WorkflowPool]) -> dict[str, float]:
    """Return what rewards and workflows have counted since this was last asked for, in validation too."""
    return {name: value for pool in pools for name, value in pool.drain_metrics().items()}
