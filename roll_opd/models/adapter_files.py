"""Read and write the configuration of LoRA adapters in peft's format, without torch."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll_opd.models.model_files import ModelFilesError, is_pointer, pointer_sentence, read_header, read_json
from roll_opd.models.model_info import ModelInfo

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
ENGINE_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # of the buffers that vLLM has for an adapter
# keys of adapter_config.json that do not change what an adapter computes. They include `target_modules` and the keys
# that restrict it, because the names of the tensors say which layers have an adapter
HARMLESS = frozenset(
    {"r", "lora_alpha", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "task_type"}
    | {"base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version", "megatron_core"}
    | {"lora_dropout", "runtime_config", "ensure_weight_tying", "eva_config", "loftq_config", "qalora_group_size"}
)
# keys that have one of these values in plain LoRA. Every other key must be empty or false: if it is set, it is another
# method. The initialisations PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA change the weights of the base model
PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
_MATRIX = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


@dataclass(frozen=True)
class AdapterInfo:
    """Properties of an adapter, and the names of the Hugging Face modules that have it."""

    rank: int
    alpha: float
    modules: frozenset[str]

    @property
    def targets(self) -> frozenset[str]:
        """Last parts of the names of the modules, such as q_proj."""
        return frozenset(name.rpartition(".")[2] for name in self.modules)


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
    other = {key: value for key, value in config.items() if key not in HARMLESS and not _is_plain(key, value)}
    if other:
        values = ", ".join(f"{key}={value!r}" for key, value in other.items())
        raise ModelFilesError(
            f"{path / CONFIG} has {values}; only plain LoRA adapters can be trained, so merge this adapter into its"
            " base model with peft (merge_and_unload)"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank <= 0 or isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise ModelFilesError(f"{path / CONFIG} lacks r or lora_alpha; save the adapter again")
    return AdapterInfo(rank, float(alpha), _modules(path / WEIGHTS, rank))


def _is_plain(key: str, value: Any) -> bool:
    return value is None or value is False or value in PLAIN.get(key, ("", [], {}))


def _modules(file: Path, rank: int) -> frozenset[str]:
    """Return the modules whose matrices a file has. Raises ModelFilesError for other tensors, or other ranks."""
    shapes = {name: tensor.shape for name, tensor in read_header(file).items()}
    modules = {name: module_of(name) for name in shapes}
    if other := sorted(name for name, module in modules.items() if module is None):
        raise ModelFilesError(
            f"{file} has {other[0]}, which is no tensor of a plain LoRA adapter; merge this adapter into its base model"
            " with peft (merge_and_unload)"
        )
    found = frozenset(filter(None, modules.values()))
    if not found:
        raise ModelFilesError(f"{file} has no tensors; save the adapter again")
    for module in sorted(found):
        for matrix, dim in (("A", 0), ("B", 1)):
            shape = shapes.get(name := tensor_name(module, matrix))
            if shape is None:
                raise ModelFilesError(f"{file} lacks {name}; use a complete adapter")
            if len(shape) != 2 or shape[dim] != rank:
                raise ModelFilesError(
                    f"{file}: {name} is {list(shape)}, but r is {rank} in {CONFIG}; use an adapter with one rank"
                )
    return found


def module_of(name: str) -> str | None:
    """Return the Hugging Face module of a LoRA matrix in the checkpoint of an adapter; None for other tensors."""
    found = _MATRIX.fullmatch(name)
    return found and found[1]


def adapted_modules(model: ModelInfo, targets: Collection[str]) -> set[str]:
    """Return the names of the modules of a model that get an adapter.

    `targets`: last parts of their names, such as q_proj.
    """
    names = {name.removesuffix(".weight") for name in model.tensors.keys() - set(model.kept)}
    return {name for name in names if name.rpartition(".")[2] in targets}


def adapter_config(base: str, rank: int, alpha: float, targets: Sequence[str]) -> dict[str, Any]:
    """Return the contents of an adapter_config.json."""
    return {
        "peft_type": "LORA",
        "use_rslora": False,
        "use_dora": False,
        "lora_bias": False,
        "fan_in_fan_out": False,
        "bias": "none",
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
