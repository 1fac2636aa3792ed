"""The on-policy loop: the student writes, the teachers score every token, the student learns, and writes again."""

from dataclasses import replace

from roll_opd.cluster.placement import Placement
from roll_opd.config.plan import RunPlan
from roll_opd.data.source import MixedSource, Prompt, PromptSource
from roll_opd.pipelines.checkpoints import Checkpoint, Checkpoints
from roll_opd.pipelines.run_logger import RunLogger
from roll_opd.pipelines.start import Cast, assemble, start_reward_pools, teacher_as_sampler
from roll_opd.rollout.advantages import advantage_metrics, external_advantages, next_kl_coef
from roll_opd.rollout.batch import fill_batch
from roll_opd.rollout.demonstrations import demonstration_experiences, mixed
from roll_opd.rollout.mismatch import corrected, train_infer_metrics
from roll_opd.rollout.pending_rewards import PendingRewards
from roll_opd.rollout.selection import by_reward
from roll_opd.rollout.validation import validate
from roll_opd.tracking.metrics import opd_metrics
from roll_opd.tracking.rewards import reward_metrics


async def run_rlvr(
    plan: RunPlan,
    source: PromptSource | MixedSource,
    held_out: list[Prompt],
    record: RunLogger,
    checkpoints: Checkpoints,
    resume: Checkpoint | None,
) -> None:
    """Train from the first step, or from the one after `resume`, to `plan.max_steps`."""
    placement = Placement(plan.num_nodes, plan.devices_per_node)
    clock, temperature = record.clock, plan.rollout.sampling.temperature
    reward_pools = await start_reward_pools(plan, placement)
    done = resume.step if resume else 0
    kl_coef = plan.objective.init_kl_coef
    if resume and plan.objective.target_kl:
        kl_coef = resume.kl_coef or kl_coef  # none of a run without it

    if not resume and held_out and plan.validation.measure_teacher:
        record.note("Measuring the teacher on the validation prompts ...")
        for teacher in plan.teachers:
            async with teacher_as_sampler(plan, teacher, placement) as sampler:
                record.teacher_accuracy(teacher.name, await _validate(plan, held_out, sampler, reward_pools, clock))

    record.note("Starting student, teacher and inference engines ...")
    cast = await assemble(plan, placement)
    if resume:
        await cast.load(resume.path)
    await _send_weights(cast, version=done)
    if resume:
        clock.lap()  # start-up belongs to no step
    else:
        record.start(await _validate(plan, held_out, cast.sampler, reward_pools, clock) if held_out else {})

    for step in range(done + 1, plan.max_steps + 1):
        pending_rewards = PendingRewards(reward_pools)
        batch = await fill_batch(
            source,
            plan.rollout_batch_size,
            pending_rewards=pending_rewards,
            extra=plan.extra_prompts,
            keeps=by_reward(plan.rewards),
            sampler=cast.sampler,
            sampling=plan.rollout.sampling,
            frozen_models=cast.frozen_models,
            seed=plan.seed,
            chunk_samples=plan.chunk_samples,
            clock=clock,
        )
        experiences = batch.experiences
        if plan.objective.recompute_old_logprobs:
            with clock.phase("old_logprobs"):
                experiences = await cast.student.logprobs(experiences, temperature)
        if cast.critic:
            with clock.phase("values"):
                experiences = await cast.critic.values(experiences)
        if plan.mode != "pure":
            with clock.phase("reward"):
                experiences = await pending_rewards.answered(experiences)
            experiences = external_advantages(experiences, plan.objective, kl_coef)
        if plan.objective.correction:
            experiences = corrected(experiences, plan.advantage_teachers, plan.objective)
        if plan.demonstrations:
            draw = source.demonstrations.position
            batch = replace(batch, demonstrations=source.demonstrations.take(plan.demonstrations.rows_per_step))
            demonstrations = demonstration_experiences(batch.demonstrations, draw)
            experiences = mixed(experiences, demonstrations, plan.demonstrations.updates)
        with clock.phase("train"):
            experiences, metrics = await cast.learn(plan, experiences, step)
        with clock.phase("weight_sync"):
            await _send_weights(cast, version=step)
        if plan.mode == "pure":  # rewards only look on: nothing has waited for them
            with clock.phase("reward"):
                experiences = [replace(e, excluded=False) for e in await pending_rewards.answered(experiences)]
        pending_rewards.forget()

        own = [experience for experience in experiences if not experience.demonstration]
        metrics |= (
            train_infer_metrics(own)
            | opd_metrics(own)
            | reward_metrics(own)
            | advantage_metrics(own, plan.advantage_teachers, plan.objective)
        )
        kl_coef = next_kl_coef(kl_coef, metrics, plan.objective, samples=len(own))
        if held_out and plan.eval_steps and (step % plan.eval_steps == 0 or step == plan.max_steps):
            metrics |= await _validate(plan, held_out, cast.sampler, reward_pools, clock)
        if checkpoints.due(step):
            with clock.phase("checkpoint"):
                await checkpoints.write(step, cast.save, source.state_dict(), kl_coef)
        for pool in reward_pools:
            metrics |= pool.lap()
        record.step(step, batch, experiences, metrics)
        if checkpoints.due(step):
            checkpoints.commit(step)  # after the record: a checkpoint's run has all its steps on record
    await cast.end()
    for pool in reward_pools:
        await pool.end()


async def _send_weights(cast: Cast, version: int) -> None:
    await cast.sampler.update_weights(await cast.student.weights(), version)


async def _validate(plan: RunPlan, prompts: list[Prompt], sampler, reward_pools, clock) -> dict[str, float]:
    return await validate(
        prompts,
        sampler,
        plan.validation.sampling,
        reward_pools,
        seed=plan.seed,
        chunk_samples=plan.chunk_samples,
        clock=clock,
    )
