"""Hints for unknown keys: misspelt, or in the wrong section."""

from collections.abc import Set
from typing import Any

from roll_opd.config.schema import (
    DataArgs,
    GeneratingArgs,
    ModelArgs,
    Section,
    TeacherWorker,
    Top,
    TrainingArgs,
    Worker,
    keys_of,
)
from roll_opd.diagnostics import Diagnostics
from roll_opd.hints import nearest

# sections of keys that are sometimes written at the top level
HOMES: dict[str, type[Section]] = {
    "a role": Worker,
    "model_args of a role": ModelArgs,
    "training_args of a role": TrainingArgs,
    "data_args of a role": DataArgs,
    "a teacher": TeacherWorker,
    "generating_args of a role": GeneratingArgs,
}
# section of a role -> its keys; of strategy_config, only common ones
ROLE_KEYS: dict[str, Set[str]] = {
    "": keys_of(Worker).keys(),
    "training_args": keys_of(TrainingArgs).keys(),
    "model_args": keys_of(ModelArgs).keys(),
    "generating_args": keys_of(GeneratingArgs).keys(),
    "data_args": keys_of(DataArgs).keys(),
    "strategy_args.strategy_config": {
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
        *("expert_model_parallel_size", "expert_tensor_parallel_size", "virtual_pipeline_model_parallel_size"),
        *("sequence_parallel", "use_distributed_optimizer", "recompute_granularity"),
        *("tensor_parallel_size", "pipeline_parallel_size", "gpu_memory_utilization", "max_model_len", "max_num_seqs"),
        *("enforce_eager", "block_size", "load_format", "sleep_level", "max_num_batched_tokens"),
    },
}
ROLE_SECTIONS = {part for section in ROLE_KEYS for part in section.split(".")}


def typing_error(path: str, key: str, value: Any, known: set[str], written: Set[str] = frozenset()) -> str | None:
    """Return the error for an unknown key; None for a key without resemblance, possibly a variable's name."""
    home = next((name for name, section in HOMES.items() if key in keys_of(section)), None)
    if home and not path:
        return f"unknown key at the top; it is one of {home}, write it there{_example(home, key, written)}"
    if path and (place := _place_in_role(path, key)):
        return f"unknown key here; write it at {place}"
    if near := nearest(key, known):
        return f"unknown key; did you mean {near!r}?"
    if not path and is_worker(value, {*keys_of(Worker)}):
        return "unknown role; rename it to an existing role (docs/modes.md), or remove it"
    return None


def _example(home: str, key: str, written: Set[str]) -> str:
    """Return ": role.section.key" for a role of the configuration that takes the key, else ""."""
    section = home.removesuffix(" of a role") if home.endswith(" of a role") else ""
    ending = "_infer" if section == "generating_args" else "_train"
    roles = ["teacher"] if home == "a teacher" else sorted(role for role in written if role.endswith(ending))
    return "".join(f": {'.'.join(filter(None, (role, section, key)))}" for role in roles[:1] if role in written)


def top_level(tell: Diagnostics) -> Set[str]:
    """Return the top-level keys of the configuration."""
    return {key.partition(".")[0] for key in tell.origins}


def _place_in_role(path: str, key: str) -> str | None:
    """Return the full path of a key that is in the wrong section of its role; None for an unknown key."""
    role = path.split(".")
    while role and role[-1] in ROLE_SECTIONS:
        role.pop()
    if not role or not (role[0] in ("teacher", "reference", "critic") or role[0].endswith(("_train", "_infer"))):
        return None
    for section, keys in ROLE_KEYS.items():
        if key in keys:
            return ".".join(filter(None, (*role, section, key)))
    return f"the top: {key}" if key in keys_of(Top) else None


def is_worker(data: Any, keys: set[str]) -> bool:
    """Whether a value is a mapping with keys of a role."""
    return isinstance(data, dict) and not keys.isdisjoint(data)
