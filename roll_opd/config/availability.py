"""What can be planned but not run yet, in one place: remove a sentence when its pipeline or engine exists."""

from pathlib import Path

from roll_opd.config.algorithms import ADVANTAGES, LOSSES, LossFacts
from roll_opd.config.known_names import REWARD_WORKERS
from roll_opd.config.plan import RunPlan
from roll_opd.config.trackers import lacking
from roll_opd.megatron.supported import unsupported

ESTIMATORS_LATER = ("skip_obs_gae", "gigpo", "step_reinforce", "agentic_reinforce")
RUNNABLE_ESTIMATORS = tuple(name for name in ADVANTAGES if name != "on_policy_distill" and name not in ESTIMATORS_LATER)
RUNNABLE_KL_PENALTIES = ("kl", "abs", "mse", "low_var_kl")


def _unavailable_objective(plan: RunPlan) -> list[str]:
    objective = plan.objective
    sentences = []
    if plan.rollout and objective.adv_estimator in ESTIMATORS_LATER:
        known = " or ".join(RUNNABLE_ESTIMATORS)
        sentences.append(f"adv_estimator: {objective.adv_estimator!r} is not available yet; use {known}")
    needs = LOSSES.get(objective.policy_loss, LossFacts()).needs
    if needs == "pairs" and not objective.paired:
        sentences.append(
            f"policy_loss: {objective.policy_loss!r} reads {needs}, which no rollout gives; run it with"
            " start_dpo_pipeline.py, or use another loss"
        )
    if plan.reference is not None and objective.kl_penalty not in RUNNABLE_KL_PENALTIES:
        known = ", ".join(RUNNABLE_KL_PENALTIES)
        sentences.append(f"kl_penalty: {objective.kl_penalty!r} is not available yet; use one of {known}")
    return sentences


def _unavailable_rewards(plan: RunPlan) -> list[str]:
    known = ", ".join(REWARD_WORKERS)
    return [
        f"rewards.{reward.domain}: the reward worker {term.worker!r} is not available yet; use {known}, or the dotted"
        " path of a class of your own"
        for reward in plan.rewards
        for term in reward.terms
        if term.worker.startswith("roll.")
    ]


def unavailable(plan: RunPlan) -> list[str]:
    """Return a sentence for each part of the plan that cannot be run yet."""
    sentences = [*_unavailable_objective(plan), *_unavailable_rewards(plan), *lacking(plan.trackers)]
    if plan.pipeline == "agentic":
        sentences.append(
            "custom_envs: the agentic pipeline is not available yet; use prompts and rewards"
            " (start_rlvr_pipeline.py, or pure_opd_pipeline_type rlvr)"
        )
    if plan.async_generation_ratio:
        sentences.append(
            f"async_generation_ratio: {plan.async_generation_ratio:g} (generation ahead of training) is not available"
            " yet; use 0"
        )
    learners = (plan.student, *([plan.critic] if plan.critic else []))
    for role in learners:
        if role.model.dtype == "fp16":
            sentences.append(f"{role.name}: training in fp16 is not available; use bf16 or fp32")
    scorers = [*(teacher.worker for teacher in plan.teachers), *([plan.reference] if plan.reference else [])]
    for role in (*learners, *scorers):
        sentences += [f"{role.name}: {sentence}" for sentence in unsupported(Path(role.model.path))]
        if role.layout.cp > 1:
            sentences.append(
                f"{role.name}: context parallelism is not available yet (context_parallel_size {role.layout.cp}); use 1"
            )
        if role.layout.ep > 1:
            sentences.append(
                f"{role.name}: expert parallelism is not available yet (expert_model_parallel_size"
                f" {role.layout.ep}); use 1"
            )
        if role.layout.vpp:
            sentences.append(f"{role.name}: virtual pipeline stages are not available yet; remove the key")
    return sentences
