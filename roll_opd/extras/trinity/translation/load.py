"""Load a Trinity-RFT configuration, and translate it to this package's keys.

The line of each value in the file is kept for error messages.
"""

import warnings
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from roll_opd.base import hardware
from roll_opd.base.failures import ConfigError, os_sentence
from roll_opd.base.hub import hub_name
from roll_opd.base.paths import PathError, also_resolving_in, find_path
from roll_opd.config.compose import (
    COMMAND_LINE,
    LoadedConfig,
    key_lines,
    keys_below,
    one_line,
    override_texts,
    parse_overrides,
    resolve,
    texts_below,
)
from roll_opd.config.diagnostics import Diagnostics
from roll_opd.config.plan import DataPlan
from roll_opd.config.yaml_files import LOADER, yaml_message
from roll_opd.data.named_sets import DataPart, named_files
from roll_opd.data.row_files import count_rows, files_below
from roll_opd.data.row_formats import DataError
from roll_opd.extras.trinity.translation.reading import Machine
from roll_opd.extras.trinity.translation.translate import translated


def load_trinity(file: Path, overrides: list[str]) -> LoadedConfig:
    """Load and translate a Trinity-RFT configuration. Raises ConfigError.

    `overrides` use the keys of this package.
    """
    with also_resolving_in(file.parent):
        return _load(file, overrides)


def _load(file: Path, overrides: list[str]) -> LoadedConfig:
    lines = key_lines(file, file.name, "")
    values = _resolved(_loaded(file), lines)
    diag = Diagnostics(lines, texts=texts_below(yaml.compose(file.read_text(encoding="utf-8"), Loader=LOADER), ""))
    has_gpus = hardware.gpu_memory_gb() is not None
    read = translated(values, diag, Machine(hardware.devices(), has_gpus), _files_of, _count)
    if diag.problems:
        raise ConfigError(diag.problems)
    parsed = parse_overrides(overrides)
    ours, origins = _overridden(read.values, parsed)
    head = f"{file} is a Trinity-RFT configuration; it is translated to"
    report = "\n".join([head, *read.lines()])
    texts = read.texts | override_texts(parsed)
    return LoadedConfig(file.stem, file.parent, ours, read.origins | origins, translation=report, texts=texts)


def _loaded(file: Path) -> DictConfig:
    try:
        loaded = OmegaConf.load(file)
    except yaml.YAMLError as error:
        raise ConfigError([yaml_message(error, file)]) from None
    except (OmegaConfBaseException, OSError, ValueError) as error:
        raise ConfigError([f"{file}: {one_line(error)}"]) from None
    assert isinstance(loaded, DictConfig)  # it has sections
    return loaded


def _resolved(config: DictConfig, lines: dict[str, str]) -> dict[str, Any]:
    """Return the values with all references replaced. Raises ConfigError for a reference that is not valid."""
    diag = Diagnostics(lines)
    found = resolve(config, diag)
    if diag.problems:
        raise ConfigError(diag.problems)
    return found


def _overridden(values: dict[str, Any], overrides: list[Override]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return (values, origins): the values after the overrides, and a map from each overridden key to its origin.

    The overrides use the keys of this package.
    """
    config, problems = OmegaConf.create(values), []
    origins: dict[str, str] = {}
    for override in overrides:
        key, value = override.get_key_element().lstrip("+~"), override.value()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                if override.is_delete():
                    place, _, last = key.rpartition(".")
                    section = OmegaConf.select(config, place) if place else config
                    del section[last]
                else:
                    OmegaConf.update(config, key, value, merge=True, force_add=True)
            except (OmegaConfBaseException, KeyError, TypeError, AttributeError, ValueError) as error:
                problems.append(
                    f"override {override.input_line!r}: {one_line(error)}; write key=value with keys of this package"
                )
        origins |= dict.fromkeys(keys_below(key, value), COMMAND_LINE)
    if problems:
        raise ConfigError(problems)
    return _resolved(config, origins), origins


def _files_of(path: str, split: str, subset: str | None) -> list[str]:
    """Return the files of a dataset as Trinity-RFT finds them: one file, or the files of a split in a directory."""
    try:
        return _found(path, split, subset)
    except PathError as error:
        raise ValueError(str(error)) from None
    except OSError as error:
        raise ValueError(os_sentence(error)) from None


def _found(path: str, split: str, subset: str | None) -> list[str]:
    found = find_path(path)
    if found is None:
        name = hub_name(path, "dataset")
        if name is None:
            raise ValueError(f"{path!r} is neither a local path nor a name on the hub; correct the path")
        return list(named_files(name, DataPart((subset,) if subset else (), split, as_is=True)).files)
    if not found.is_dir():
        return [str(found)]
    files = files_below(found, "**/*")
    inside = [file for file in files if not subset or subset in file.relative_to(found).parts[:-1]] or files
    named = [file for file in inside if split in (file.stem, file.parent.name) or file.stem.startswith(f"{split}-")]
    known = [file for file in inside if file.stem.split("-")[0] in ("train", "test", "validation", "val", "dev")]
    chosen = named or (inside if split == "train" and not known else [])
    if not chosen:
        there = ", ".join(str(file.relative_to(found)) for file in files[:8]) or "none"
        raise ValueError(f"{found} has no file of split {split!r}; write the path of a file in this directory: {there}")
    return [str(file) for file in chosen]


def _count(files: list[str]) -> int:
    try:
        return count_rows(DataPlan(tuple(files), 1))
    except (DataError, OSError) as error:
        raise ValueError(os_sentence(error) if isinstance(error, OSError) else str(error)) from None
