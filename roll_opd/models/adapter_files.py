"""Read and write the configuration of LoRA adapters in peft's format, without torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll_opd.models.model_files import ModelFilesError, is_pointer, pointer_sentence, read_json

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
# key of adapter_config.json -> value of plain LoRA; other values are other methods
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
    """Contents of adapter_config.json."""

    rank: int
    alpha: float
    targets: tuple[str, ...]


def read_adapter(path: Path) -> AdapterInfo:
    """Return the properties of the adapter in a directory.

    Raises ModelFilesError if it is not a plain LoRA adapter.
    """
    if not (path / CONFIG).is_file():
        raise ModelFilesError(f"{path} has no {CONFIG}; use the directory of an adapter saved by peft")
    if not (path / WEIGHTS).is_file():
        raise ModelFilesError(f"{path} has no {WEIGHTS}; save the adapter again with safe_serialization=True")
    if is_pointer(path / WEIGHTS):
        raise ModelFilesError(pointer_sentence(path / WEIGHTS))
    config = read_json(path / CONFIG)
    other = {key: config[key] for key, wanted in PLAIN.items() if config.get(key) not in (None, wanted)}
    other |= {key: config[key] for key in EMPTY if config.get(key)}
    if other:
        values = ", ".join(f"{key}={value!r}" for key, value in other.items())
        raise ModelFilesError(f"{path / CONFIG} has {values}; only plain LoRA adapters can be trained")
    rank, alpha, targets = config.get("r"), config.get("lora_alpha"), config.get("target_modules")
    is_right = type(rank) is int and rank > 0 and isinstance(alpha, int | float) and isinstance(targets, list | str)
    if not is_right:
        raise ModelFilesError(f"{path / CONFIG} lacks r, lora_alpha or target_modules; save the adapter again")
    assert isinstance(rank, int) and isinstance(alpha, int | float) and isinstance(targets, list | str)
    return AdapterInfo(rank, float(alpha), (targets,) if isinstance(targets, str) else tuple(map(str, targets)))


def adapter_config(base: str, rank: int, alpha: float, targets: Sequence[str]) -> dict[str, Any]:
    """Return the contents of an adapter_config.json."""
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
    """Return the name of a LoRA matrix in the checkpoint of an adapter.

    `module`: name of the Hugging Face module. `matrix`: "A" or "B".
    """
    return f"base_model.model.{module}.lora_{matrix}.weight"
