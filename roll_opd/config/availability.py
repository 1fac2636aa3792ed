"""What can be planned but not run yet, in one place: remove a sentence when its pipeline or engine exists."""

from pathlib import Path

from roll_opd.config.models import read_model
from roll_opd.config.plan import RunPlan

RUNNABLE_MODEL_TYPES = ("llama", "qwen2", "qwen3")


def unavailable(plan: RunPlan) -> list[str]:
    """Return a sentence for each part of the plan that cannot be run yet."""
    sentences = []
    if plan.mode == "mixed":
        sentences.append("use_opd: distillation mixed with a reward is not available yet; pure distillation is")
    if plan.mode == "rl":
        sentences.append("reinforcement learning without a teacher is not available yet; pure distillation is")
    if plan.pipeline == "agentic":
        sentences.append("pure_opd_pipeline_type: the agentic pipeline is not available yet; use rlvr")
    for role in (plan.student, *(teacher.worker for teacher in plan.teachers)):
        model_type = read_model(Path(role.model.path)).model_type
        if model_type not in RUNNABLE_MODEL_TYPES:
            sentences.append(
                f"{role.name}: models of type {model_type} are not available yet; use one of"
                f" {', '.join(RUNNABLE_MODEL_TYPES)}"
            )
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
