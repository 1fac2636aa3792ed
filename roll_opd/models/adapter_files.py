"""LoRA adapters on disk, as `peft` saves them. JSON only, no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll_opd.models.json_files import ModelFilesError, is_pointer, pointer_sentence, read_json

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
# a key of adapter_config.json -> what it must be, where it is there at all: the others are other methods
PLAIN: Mapping[str, Any] = {
    "peft_type": "LORA",
    "use_rslora": False,
    "use_dora": False,
    "lora_bias": False,
    "fan_in_fan_out": False,
    "bias": "none",
}
# keys that must be empty
EMPTY = (
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "layers_to_transform",
    "exclude_modules",
    "target_parameters",
)


@dataclass(frozen=True)
class AdapterInfo:
    """What adapter_config.json says."""

    rank: int
    alpha: float
    targets: tuple[str, ...]


def read_adapter(path: Path) -> AdapterInfo:
    """Return what the adapter in directory `path` is. Raises ModelFilesError where it is none, or no plain LoRA."""
    if not (path / CONFIG).is_file():
        raise ModelFilesError(f"{path} has no {CONFIG}; give the directory of an adapter that peft saved")
    if not (path / WEIGHTS).is_file():
        raise ModelFilesError(f"{path} has no {WEIGHTS}; save the adapter again with safe_serialization=True")
    if is_pointer(path / WEIGHTS):
        raise ModelFilesError(pointer_sentence(path / WEIGHTS))
    config = read_json(path / CONFIG)
    other = {key: config[key] for key, wanted in PLAIN.items() if config.get(key) not in (None, wanted)}
    other |= {key: config[key] for key in EMPTY if config.get(key)}
    if other:
        said = ", ".join(f"{key}={value!r}" for key, value in other.items())
        raise ModelFilesError(f"{path / CONFIG} has {said}; only plain LoRA adapters can be trained on")
    rank, alpha, targets = config.get("r"), config.get("lora_alpha"), config.get("target_modules")
    is_right = type(rank) is int and rank > 0 and isinstance(alpha, int | float) and isinstance(targets, list | str)
    if not is_right:
        raise ModelFilesError(f"{path / CONFIG} lacks r, lora_alpha or target_modules; save the adapter again")
    assert isinstance(rank, int) and isinstance(alpha, int | float) and isinstance(targets, list | str)
    return AdapterInfo(rank, float(alpha), (targets,) if isinstance(targets, str) else tuple(map(str, targets)))


def adapter_config(base: str, rank: int, alpha: float, targets: Sequence[str]) -> dict[str, Any]:
    """Return an adapter_config.json."""
    return {
        **PLAIN,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "r": rank,
        "target_modules": sorted(targets),
        "task_type": "CAUSAL_LM",
    }


def tensor_name(module: str, matrix: str) -> str:
    """Return the name of matrix "A" or "B" of a module of Hugging Face's."""
    return f"base_model.model.{module}.lora_{matrix}.weight"
