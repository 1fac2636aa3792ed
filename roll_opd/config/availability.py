"""What can be planned but not run yet, in one place: remove a sentence when its pipeline or engine exists."""

from pathlib import Path

from roll_opd.config.models import read_json
from roll_opd.config.plan import RunPlan
from roll_opd.config.trackers import lacking

RUNNABLE_MODEL_TYPES = ("llama", "qwen2", "qwen3")
RUNNABLE_ROPE_TYPES = ("default", "linear", "llama3")
# a key of config.json -> the only value whose numerics are proven
_PROVEN = {"mlp_bias": False, "use_sliding_window": False, "hidden_act": "silu", "attention_bias": False}


def unavailable_model(path: Path) -> list[str]:
    """Return a sentence for each thing about the model in `path` that the Megatron engine cannot run yet."""
    config = read_json(path / "config.json")
    kind = config.get("model_type")
    if kind not in RUNNABLE_MODEL_TYPES:
        return [f"models of type {kind} are not available yet; use one of {', '.join(RUNNABLE_MODEL_TYPES)}"]
    sentences = [
        f"{path.name}: {key}={config[key]!r} in config.json is not available yet (expected {proven!r})"
        for key, proven in _PROVEN.items()
        if config.get(key) not in (None, proven)
    ]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type not in RUNNABLE_ROPE_TYPES:
        known = ", ".join(RUNNABLE_ROPE_TYPES)
        sentences.append(f"{path.name}: rope type {rope_type!r} in config.json is not available yet; {known} are")
    return sentences


def unavailable(plan: RunPlan) -> list[str]:
    """Return a sentence for each part of the plan that cannot be run yet."""
    sentences = lacking(plan.trackers)
    if plan.mode == "mixed":
        sentences.append("use_opd: distillation mixed with a reward is not available yet; pure distillation is")
    if plan.mode == "rl":
        sentences.append("reinforcement learning without a teacher is not available yet; pure distillation is")
    if plan.pipeline == "agentic":
        sentences.append("pure_opd_pipeline_type: the agentic pipeline is not available yet; use rlvr")
    if plan.student.model.dtype == "fp16":
        sentences.append(f"{plan.student.name}: training in fp16 is not available; use bf16 or fp32")
    for role in (plan.student, *(teacher.worker for teacher in plan.teachers)):
        sentences += [f"{role.name}: {sentence}" for sentence in unavailable_model(Path(role.model.path))]
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
