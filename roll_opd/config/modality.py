"""Recognises vision, video and image-generation configurations, which no part of this system can run.

One sentence is more use to their owner than the forty unknown keys that the ordinary checks would find.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from roll_opd.config.models import ModelFilesError, find_model, read_json

# keys of ROLL's vision and diffusion configurations that no text configuration has
VISION_KEYS = frozenset(
    {"image", "images", "video", "videos", "image_flag_key", "max_pixels", "min_pixels", "vlm_filter"}
)
MODEL_KEYS = ("model_name_or_path", "pretrain")
VISION_NAME = re.compile(r"[-_./](vl|omni|vision|wan2\.\d|flux)\b", re.IGNORECASE)


def is_vision_config(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a vision-language or video model."""
    kind = str(config.get("model_type", ""))
    return "vision_config" in config or "text_config" in config or kind.endswith(("_vl", "_vl_moe", "_omni"))


def vision_problem(values: Mapping[str, Any]) -> str | None:
    """Return the sentence for a vision or video configuration, None for a text one."""
    for key, value in _leaves(values, ""):
        reason = _reason(key, value)
        if reason:
            return f"{key}: {reason}; only text models can be trained here, use ROLL itself for vision and video"
    return None


def _reason(key: str, value: Any) -> str | None:
    last = key.rpartition(".")[2]
    if last in VISION_KEYS and value is not None:
        return f"{last} belongs to a vision or video configuration"
    if not isinstance(value, str):
        return None
    if last == "pure_opd_pipeline_type" and value.endswith("_vlm"):
        return f"{value!r} is the pipeline of a vision-language model"
    if last == "strategy_name" and value.startswith("diffusion"):
        return f"{value!r} trains an image or video generator"
    # a reward's own judge is its worker's business
    if last in MODEL_KEYS and not key.startswith("rewards."):
        return _model_reason(value)
    return None


def _model_reason(model: str) -> str | None:
    try:
        path = find_model(model)
    except ModelFilesError:
        return f"{model} is a vision-language or video model" if VISION_NAME.search(model) else None
    file = Path(path) / "config.json"
    try:
        config = read_json(file) if file.is_file() else {}
    except ModelFilesError:
        return None  # told by the role that reads this model
    return f"{path} is a vision-language model ({config.get('model_type')})" if is_vision_config(config) else None


def _leaves(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            # null, as ROLL's shared fragments write it, says nothing; environments describe themselves
            if key not in ("custom_env", "custom_envs"):
                yield from _leaves(item, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list):
        yield prefix, value
        for item in value:
            if isinstance(item, Mapping):
                yield from _leaves(item, prefix)
    else:
        yield prefix, value
