"""On-policy distillation and RL: sampling, teacher log-probs, rewards, and updates of the student."""

import asyncio
import gc
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from functools import partial

from roll_opd.config.plan import RunPlan
from roll_opd.data.prompt_source import MixedSource
from roll_opd.models.device_phases import Phase
from roll_opd.objective.algorithms import loss_facts
from roll_opd.objective.columns import with_total_advantages
from roll_opd.objective.corrections import corrected, train_infer_metrics
from roll_opd.objective.demonstrations import demonstration_samples, mixed
from roll_opd.objective.external_advantages import external_advantages
from roll_opd.objective.filters import GroupFilter, group_filter, mask_metrics, masked, without_rejected
from roll_opd.objective.reference_kl import first_kl_coef, kl_coefs
from roll_opd.pipelines import validation_runs
from roll_opd.pipelines.engine_check import EngineCheck
from roll_opd.pipelines.run_context import Run
from roll_opd.pipelines.run_workers import RunWorkers
from roll_opd.pipelines.start_roles import chunk_samples, reads_beside_generation, start_workflow
from roll_opd.pipelines.validation_runs import ConcurrentValidation
from roll_opd.rollout.producer import Gate, Rollouts
from roll_opd.rollout.staleness import Pace
from roll_opd.rollout.workflow_protocol import SingleTurn, Workflow
from roll_opd.rollout.workflow_runs import Batch, FinishedGroup, RolloutContext, check_failed_rate
from roll_opd.samples.sample import Sample
from roll_opd.teachers.scoring import Scorers
from roll_opd.teachers.teacher_preflight import PREFLIGHT_SAMPLES, TeacherPreflight
from roll_opd.tracking.phase_clock import PhaseClock
from roll_opd.tracking.reward_metrics import reward_metrics
from roll_opd.tracking.sample_metrics import advantage_metrics, alignment_metrics, opd_metrics
from roll_opd.tracking.summary import FAILED_PROMPTS, FAILED_RATE, LEARNED_TOKENS
from roll_opd.workers.target_refs import release

Stage = Callable[[list[Sample]], list[Sample]]  # returns the same samples with other columns or metrics


async def train(run: Run, workers: RunWorkers, select: Stage = list) -> None:
    """Train from the first step, or from the step after the resumed checkpoint, to `plan.max_steps`.

    `select` is called with the samples of each step. The samples have rewards if the update reads rewards. `select`
    returns all samples in the same order. It empties the `loss_mask` of samples that the update must leave out.
    """
    plan, clock = run.plan, run.clock
    in_turns = not plan.async_generation_ratio  # else generation continues during an update and after it
    await run.restore(workers.load)
    await workers.send_weights(version=run.steps_done, updated=False)
    workflow_pool = await start_workflow(plan, workers.sampler, run.placement)
    workflow = workflow_pool or SingleTurn()
    rollouts = rollouts_of(run, workers, workflow)
    validate = partial(_validate, run, workers, workflow)
    concurrent = ConcurrentValidation(run, workers) if workers.validation_sampler else None
    if concurrent:
        await concurrent.start()

    async def validate_first() -> dict[str, float]:
        assert workers.teachers_measured is not None
        of_student, _ = await asyncio.gather(validate(0), workers.teachers_measured)
        return of_student | rollouts.drain_metrics()

    async def publish(version: int) -> None:
        with clock.phase("weight_sync"):
            await workers.begin_generation(version)
        rollouts.gate.publish(version)

    await run.log_start(validate_first)
    adapted = run.resumed.kl_coef if run.resumed and "init_kl_coef" not in run.history.changes else None
    kl_coef = first_kl_coef(plan.objective, adapted)
    preflight = _preflight(run, workers)
    engine_check = EngineCheck(plan, workers.student, run.logger.engine_preflight, ends_run=plan.engine_check is True)
    await publish(run.steps_done)
    async with AsyncExitStack() as ends:
        if workflow_pool:
            ends.push_async_callback(workflow_pool.end)
        if concurrent:
            await ends.enter_async_context(aclosing(concurrent))
        produced = await ends.enter_async_context(aclosing(rollouts.batches()))
        async for batch in workers.attending(produced, lambda: rollouts.gate.version):
            step = batch.version + 1
            samples = await _with_model_values(
                batch.samples, plan, workers, clock, preflight, engine_check, batch.version
            )
            if plan.update_reads_rewards:
                with clock.phase("reward"):
                    samples = await batch.with_rewards(samples)
            failed = _failed_metrics(batch, samples, plan)
            samples = select(samples)
            samples, kl_coef = with_advantages(samples, plan, kl_coef, rewarded=not plan.rewards_are_monitored)
            if plan.demonstrations:
                samples = mixed(samples, batch.demonstration_samples, plan.demonstrations.updates)
            metrics = {LEARNED_TOKENS: 0.0}
            with clock.phase("train"), run.progress.showing(*workers.updates):
                if any(sample.is_learned_from for sample in samples):  # otherwise the update is skipped, as in ROLL
                    samples, metrics = await workers.learn(plan, samples, step)
                release(samples)
            samples = with_total_advantages(samples, plan.teachers, plan.objective)
            engine_check.after(metrics, step)
            await workers.sampler.served(rollouts.settle())
            finished = rollouts.finished_groups()
            with clock.phase("weight_sync"):
                metrics |= await workers.send_weights(version=step)
                if not in_turns:
                    metrics |= await engine_check.after_update(samples, workers.sampler, step)
            if not in_turns:
                rollouts.gate.publish(step)
            with clock.phase("reward"):  # rewards that are only monitored
                samples = await batch.with_rewards(samples)
            metrics |= sample_metrics(samples, plan) | ({} if in_turns else batch.ahead_metrics()) | failed
            metrics |= workers.scorers.step_metrics([s for s in samples if not s.demonstration])
            metrics |= await (concurrent.after(step) if concurrent else run.validation(step, partial(validate, step)))
            metrics |= rollouts.drain_metrics()
            if plan.rollout and plan.rollout.speculates:
                metrics |= await workers.sampler.draft_metrics()
            async with run.checkpoint(step, workers.save, kl_coef, batch.source_state, finished):
                run.logger.step(step, batch, samples, metrics)
                if concurrent and run.ending.is_asked_for:  # a checkpoint needs complete logs
                    await concurrent.end()
            del batch, samples, finished
            gc.collect()  # between two steps, after the samples of the earlier step have been released
            if in_turns and step < plan.max_steps:
                await publish(step)


def rollouts_of(run: Run, workers: RunWorkers, workflow: Workflow) -> Rollouts:
    """Return the object that produces the batches of the run."""
    plan = run.plan
    assert plan.rollout is not None
    context = RolloutContext(
        workers.sampler,
        plan.rollout.sampling,
        workers.reward_pools,
        plan.seed,
        chunk_samples(plan),
        run.clock,
        workers.scorers if reads_beside_generation(plan, workers.turns) else Scorers(),
        workflow,
        exclude_failed=not plan.rewards_are_monitored,
        progress=run.progress,
    )
    passes = _group_filter(plan)
    return Rollouts(
        context,
        run.source,
        Gate(run.steps_done),
        range(run.steps_done, plan.max_steps),
        Pace.of(
            plan.rollout_batch_size,
            plan.async_generation_ratio,
            plan.async_depth,
            is_strict=plan.deterministic,
            reserve=plan.extra_prompts if passes else 0,
        ),
        passes,
        plan.min_batch_fraction,
        plan.demonstrations.rows_per_step if plan.demonstrations else 0,
        in_rounds=plan.deterministic,
        restored=_restored(run),
    )


def _group_filter(plan: RunPlan) -> GroupFilter | None:
    """Return the filter of groups.

    If the update uses no reward, the filter rejects a group only if runs of the group have failed.
    """
    replaces = plan.workflow is not None and plan.workflow.on_workflow_error == "replace"
    return group_filter(
        () if plan.rewards_are_monitored else plan.rewards,
        compared=loss_facts(plan.objective.policy_loss).reads_advantages,
        runs=plan.answers_per_prompt if replaces else 0,
    )


def _failed_metrics(batch: Batch, samples: Sequence[Sample], plan: RunPlan) -> dict[str, float]:
    """Return the fraction of a step's runs that have failed, and the number of prompts that are left out therefore.

    Raises RunError if too few runs remain.
    """
    failed = batch.failed_rate(samples, plan.answers_per_prompt)
    check_failed_rate(failed, plan.min_batch_fraction)
    batch.set_failed_apart(samples)
    return {FAILED_RATE: failed, FAILED_PROMPTS: float(len(batch.failed))} if failed else {}


def _restored(run: Run) -> list[FinishedGroup]:
    """Return the finished groups of the resumed checkpoint.

    If a setting that affects these groups has changed, the list is empty.
    """
    groups = run.resumed.finished_groups() if run.resumed else []
    if groups and (changed := run.history.resampled):
        run.logger.note(
            f"The {len(groups)} finished groups of the checkpoint are sampled again, as {changed} has changed"
        )
        return []
    return groups


async def _validate(run: Run, workers: RunWorkers, workflow: Workflow, step: int) -> dict[str, float]:
    """Return the validation metrics of the student after `step`."""
    await workers.begin_generation(step)
    measuring = validation_runs.measure(
        run,
        workers.reward_pools,
        workers.sampler,
        step,
        readers=workers.scorers,
        workflow=workflow,
        turns=workers.turns,
    )
    return await workers.attended(measuring, step)


def _preflight(run: Run, workers: RunWorkers) -> TeacherPreflight:
    answered = run.source.demonstrations.peek(PREFLIGHT_SAMPLES) if isinstance(run.source, MixedSource) else []
    return TeacherPreflight(
        run.plan.teacher_preflight,
        workers.student.group,
        workers.scorers.teachers,
        run.logger.preflight,
        demonstration_samples(answered, 0),
        may_be_student=run.plan.allow_self_teacher
        or run.resumed is not None,  # a trained student may equal its teacher
        plain_prompts=run.plan.plain_prompts,
    )


async def _with_model_values(
    samples: list[Sample],
    plan: RunPlan,
    workers: RunWorkers,
    clock: PhaseClock,
    preflight: TeacherPreflight,
    engine_check: EngineCheck,
    version: int,
) -> list[Sample]:
    """Return the samples with the log-probs and values that the objective needs.

    These are the log-probs of teachers and reference, the old log-probs of the student, and the values of the critic.
    """
    assert plan.rollout is not None
    temperature, turns = plan.rollout.sampling.temperature, workers.turns
    await turns.enter(Phase.READ)
    with clock.phase("teacher"):
        if not reads_beside_generation(plan, turns):
            samples = await workers.scorers.compute_logprobs(samples, temperature)
        await engine_check.preflight(samples, temperature, version)
        await preflight.check(samples, temperature)
    if plan.objective.recompute_old_logprobs or len(samples) > plan.student.mini_batch_sequences:
        with clock.phase("old_logprobs"):
            await turns.enter(Phase.OLD_LOGPROBS)
            samples = await workers.student.compute_old_logprobs(samples, temperature)
    if workers.critic:
        with clock.phase("values"):
            await turns.enter(Phase.VALUES)
            samples = await workers.critic.compute_values(samples)
    return samples


def with_advantages(
    samples: list[Sample], plan: RunPlan, kl_coef: float, *, rewarded: bool
) -> tuple[list[Sample], float]:
    """Return (samples, kl_coef): the samples with advantages, and the KL coefficient of the next step.

    The samples also get masks and importance weights. If `rewarded` is True, the advantages include the rewards and the
    token-level KL to the reference policy.
    """
    assert plan.rollout is not None
    objective, sampling = plan.objective, plan.rollout.sampling
    samples = masked(samples, objective, sampling)
    if rewarded:
        samples = external_advantages(
            samples,
            objective,
            kl_coef,
            taught=bool(plan.teachers),
            workflow=plan.workflow.workflow if plan.workflow else None,
            runs=sampling.n,
        )
        *_, kl_coef = kl_coefs(samples, objective, kl_coef)
        if not loss_facts(objective.policy_loss).reads_advantages:
            samples = without_rejected(samples, plan.rewards)
    if objective.correction:
        samples = corrected(samples, plan.teachers, objective)
    return samples, kl_coef


def sample_metrics(samples: Sequence[Sample], plan: RunPlan) -> dict[str, float]:
    """Return metrics of a step's samples, without its demonstrations."""
    sampled = [sample for sample in samples if not sample.demonstration]
    return {
        **train_infer_metrics(sampled, plan.objective.correction),
        **opd_metrics(sampled),
        **(alignment_metrics(sampled) if any(sample.alignments for sample in sampled) else {}),
        **reward_metrics(sampled),
        **mask_metrics(sampled),
        **advantage_metrics(sampled, plan.objective),
    }
