"""Whether a plan fits this machine and the checkpoint it goes on from: asked before anything starts."""

from pathlib import Path

from roll_opd.config.plan import RunPlan, TrainPlan
from roll_opd.hf.model_info import read_model
from roll_opd.pipelines.checkpoints import CRITIC, Checkpoint

# head sizes that vLLM 0.32's CPU attention computes: CPUAttentionBackend.get_supported_head_sizes
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
# what a model's weights have their shapes from
SHAPES = ("model_type", "layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "experts")


def misfits_of_machine(plan: RunPlan, gpus: int) -> list[str]:
    """Return what this machine with `gpus` GPUs cannot do; for a run on a cluster of its own making."""
    if gpus:
        if plan.devices_per_node <= gpus:
            return []
        return [f"num_gpus_per_node: {plan.devices_per_node} is more than the {gpus} GPUs of this machine; lower it"]
    if plan.rollout is None:
        return []
    size = read_model(Path(plan.rollout.model.path)).head_dim
    if size in CPU_HEAD_SIZES:
        return []
    known = ", ".join(map(str, CPU_HEAD_SIZES))
    return [
        f"{plan.rollout.name}: vLLM's attention on CPUs cannot compute heads of size {size} (head_dim of"
        f" {plan.rollout.model.path}); use a model with one of {known}, or a machine with GPUs"
    ]


def misfits_of_checkpoint(plan: RunPlan, checkpoint: Checkpoint) -> list[str]:
    """Return how those who learn differ from the ones in `checkpoint`; layouts may differ, a checkpoint fits all."""
    misfits = _misfits(plan.student, checkpoint.path / "hf", checkpoint)
    if plan.critic and not (checkpoint.path / CRITIC).is_dir():
        misfits.append(
            f"resume_from_checkpoint: {checkpoint.path} holds no critic, and adv_estimator: gae goes on with one; give"
            " a checkpoint of a run that had it, or start afresh with resume_from_checkpoint: false"
        )
    elif plan.critic:
        misfits += _misfits(plan.critic, checkpoint.path / CRITIC / "hf", checkpoint)
    return misfits


def _misfits(learner: TrainPlan, found: Path, checkpoint: Checkpoint) -> list[str]:
    saved, now = (read_model(path) for path in (found, Path(learner.model.path)))
    different = [
        f"{name} {getattr(saved, name)} there, {getattr(now, name)} in the model"
        for name in SHAPES
        if getattr(saved, name) != getattr(now, name)
    ]
    if not different:
        return []
    return [
        f"resume_from_checkpoint: {checkpoint.path} was made from another model than {now.path}"
        f" ({'; '.join(different)}); give that model again, or start afresh with resume_from_checkpoint: false"
    ]
