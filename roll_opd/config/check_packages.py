"""Checks of what is installed and implemented: what can be planned and not be run yet, a sentence each."""

import shutil
import subprocess

from roll_opd.algorithms.registry import ADVANTAGES
from roll_opd.algorithms.table import KL_PENALTIES, loss_facts
from roll_opd.config.plan import RunPlan
from roll_opd.megatron.supported import not_yet
from roll_opd.rewards.registry import REWARDS
from roll_opd.tracking.registry import lacking

DRIVER_SECONDS = 20.0  # the first question after a start may wake the driver


def unavailable(plan: RunPlan) -> list[str]:
    """Return a sentence for each part of the plan that cannot be run yet."""
    sentences = [*_objective(plan), *_rewards(plan), *lacking(plan.trackers)]
    if plan.agentic is not None:
        sentences.append(
            "custom_envs: the agentic pipeline is not available yet; use prompts and rewards"
            " (start_rlvr_pipeline.py, or pure_opd_pipeline_type rlvr)"
        )
    if plan.async_generation_ratio:
        sentences.append(
            f"async_generation_ratio: {plan.async_generation_ratio:g} (generation ahead of training) is not available"
            " yet; use 0"
        )
    return sentences + [sentence for role in plan.megatron_roles().values() for sentence in not_yet(role)]


def _objective(plan: RunPlan) -> list[str]:
    objective = plan.objective
    sentences = []
    if plan.rollout and objective.adv_estimator in ADVANTAGES.elsewhere:
        known = " or ".join(name for name in ADVANTAGES.builtin if name != "on_policy_distill")
        sentences.append(f"adv_estimator: {objective.adv_estimator!r} is not available yet; use {known}")
    needs = loss_facts(objective.policy_loss).needs
    if needs == "pairs" and not objective.paired:
        sentences.append(
            f"policy_loss: {objective.policy_loss!r} reads {needs}, which no rollout gives; run it with"
            " start_dpo_pipeline.py, or use another loss"
        )
    if plan.reference is not None and objective.kl_penalty not in KL_PENALTIES.values():
        known = ", ".join(dict.fromkeys(KL_PENALTIES.values()))
        sentences.append(f"kl_penalty: {objective.kl_penalty!r} is not available yet; use one of {known}")
    return sentences


def _rewards(plan: RunPlan) -> list[str]:
    known = ", ".join(REWARDS.builtin)
    return [
        f"rewards.{reward.domain}: the reward worker {term.worker!r} is not available yet; use {known}, or the dotted"
        " path of a class of your own"
        for reward in plan.rewards
        for term in reward.terms
        if term.worker.startswith("roll.")
    ]


def gpu_memory_gb() -> float | None:
    """Return the GiB of this machine's smallest NVIDIA GPU; None where the driver's tool is missing or sees none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]  # MiB, a line each
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DRIVER_SECONDS, check=True)
        return min(int(line) for line in done.stdout.split()) / 1024
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
