"""ROLL's pipelines that do not exist here: each configuration for one of them gets a single error.

Without this refusal, later checks would report dozens of unknown keys.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from roll_opd.config.schema import PIPELINES, Top
from roll_opd.models.model_info import ModelFilesError, find_model, is_vision_config, read_json

# keys of ROLL's vision and diffusion configurations that no text configuration has
VISION_KEYS = {"image", "images", "image_flag_key", "image_folder", "max_pixels", "min_pixels", "vlm_filter"}
VISION_KEYS |= {"video", "videos", "video_folder", "audio", "audios", "audio_folder"}
DETECTION = "DetectionRewardWorker"  # marks ROLL's vision pipelines whose models also train on text
MODEL_KEYS = ("model_name_or_path", "pretrain", "student_pretrain", "teacher_pretrain")
VISION_MODEL = re.compile(r"[-_./](vl|omni|vision|wan2\.\d|flux)\b", re.IGNORECASE)
# keys that identify ROLL's off-policy distillation, in a file without roles of other pipelines
OFF_POLICY_KEYS = (
    "student_pretrain",
    "teacher_pretrain",
    "kd_objective",
    "distill_loss_weight",
    "logits_topk",
    "student",
)
LEARNERS = ("student_train", "actor_train", "sft_train")


def refusal(values: Mapping[str, Any]) -> str | None:
    """Return an error if a configuration is for a pipeline of ROLL that does not exist here, else None."""
    return _vision_problem(values) or _off_policy_problem(values) or _rollout_only_problem(values)


def _vision_problem(values: Mapping[str, Any]) -> str | None:
    """Return an error if a configuration is for vision, video or image generation, else None."""
    for key, value in _leaves(values, ""):
        last, text = key.rpartition(".")[2], value if isinstance(value, str) else ""
        reason = None
        if last in VISION_KEYS and value is not None:
            reason = f"{last} belongs to a vision, video or audio configuration"
        elif last == "pure_opd_pipeline_type" and text.endswith("_vlm"):
            reason = f"{text!r} is the pipeline of a vision-language model"
        elif last == "strategy_name" and text.startswith("diffusion"):
            reason = f"{text!r} trains an image or video generator"
        elif last == "worker_cls" and text.endswith(DETECTION):
            reason = f"{text!r} rewards boxes in images"
        # a reward's judge is checked by its worker
        elif last in MODEL_KEYS and text and not key.startswith("rewards."):
            reason = _vision_model(text)
        if reason:
            return f"{key}: {reason}; only text models can be trained here, use ROLL for vision and video"
    return None


def _vision_model(model: str) -> str | None:
    try:
        path = find_model(model)
    except ModelFilesError:
        return f"{model} is a vision-language or video model" if VISION_MODEL.search(model) else None
    try:
        config = read_json(path / "config.json") if (path / "config.json").is_file() else {}
    except ModelFilesError:
        return None  # the role with this model reports it
    return f"{path} is a vision-language model ({config.get('model_type')})" if is_vision_config(config) else None


def _leaves(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            # the sections of environments are skipped: their keys are free-form
            if key not in ("custom_env", "custom_envs"):
                yield from _leaves(item, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list):
        yield prefix, value
        for item in value:
            if isinstance(item, Mapping):
                yield from _leaves(item, prefix)
    else:
        yield prefix, value


def _off_policy_problem(values: Mapping[str, Any]) -> str | None:
    """Return an error if a configuration is for ROLL's distill_pipeline, else None."""
    found = next((key for key in OFF_POLICY_KEYS if key in values), None)
    if found is None or not values.keys().isdisjoint((*LEARNERS, "student_infer", "actor_infer")):
        return None
    return (
        f"{found}: is a key of ROLL's off-policy distillation (start_distill_pipeline.py), which trains on the"
        " teacher's logits of given answers; this pipeline does not exist here; write a configuration of on-policy"
        " distillation (student_train, student_infer, teacher), or train on the teacher's answers with"
        " start_sft_pipeline.py"
    )


def _rollout_only_problem(values: Mapping[str, Any]) -> str | None:
    """Return an error if a configuration is for a rollout-only pipeline, else None."""
    train = values.get("actor_train")
    pipelines = (keys for keys in PIPELINES.values() if issubclass(keys, Top) and keys.makes_tasks)
    if "student_train" in values or not any(keys.selected_by(values) for keys in pipelines):
        return None
    if train is not None and not (isinstance(train, Mapping) and train.keys() <= {"model_args"}):
        return None
    return (
        "actor_train: is missing, or has no training_args, strategy_args and device_mapping; ROLL's"
        " rollout-only pipelines (start_agentic_rollout_pipeline.py, start_rlvr_rollout_pipeline.py) do not exist here,"
        " so add the training keys"
    )
