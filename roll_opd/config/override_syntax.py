"""Translate command-line overrides to Hydra's syntax.

In Hydra, `key=value` is valid only if a file has the key, and `+key=value` only if no file has it. In the same way,
`group=option` is valid only if a defaults list has the group, and `+group=option` only if no defaults list has it.
Here, `key=value` and `group=option` are always valid, because the schema checks the keys.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, ListConfig, OmegaConf

from roll_opd.base.failures import ConfigError
from roll_opd.base.paths import REPOSITORY

GROUPS = REPOSITORY / "configs"
# has our versions of the files that ROLL's configurations include by name, such as "../config/traj_envs@_here_"
FRAGMENTS = REPOSITORY / "examples" / "config"
SEARCH_PATH = "hydra.searchpath"
LEARNERS = ("student_train", "actor_train", "sft_train")
SAMPLERS = ("student_infer", "actor_infer")
# group of `configs/` that configures a part of a role -> (that part, the roles that have it)
PLACES = {
    "models": ("model_args", LEARNERS),
    "parallel": ("strategy_args.strategy_config", LEARNERS),
    "rollout": ("strategy_args.strategy_config", SAMPLERS),
}


@dataclass(frozen=True)
class SearchPath:
    """The directories in which Hydra looks for the files of a defaults list.

    `argument` is the Hydra override that sets these directories.
    """

    directories: tuple[Path, ...]
    argument: str | None  # None if the written value is not a list; Hydra then rejects it

    @property
    def missing(self) -> list[str]:
        """The directories that do not exist."""
        return [str(place) for place in self.directories if not place.is_dir()]


def search_path(overrides: Sequence[Override], file: Path) -> SearchPath:
    """Return the search path of a configuration file.

    It has three parts: the directory of `file`, the directories in the user's `hydra.searchpath`, and this package's
    directories. A `hydra.searchpath` on the command line replaces the value in the file, as in Hydra.
    """
    is_named = SEARCH_PATH.rpartition(".")[2] in file.read_text(encoding="utf-8")  # faster than reading YAML
    written: Any = OmegaConf.select(_primary(file), SEARCH_PATH) if is_named else None
    for override in overrides:
        if override.get_key_element() == SEARCH_PATH:
            written = override.value()
    if written is not None and not isinstance(written, list | ListConfig):
        return SearchPath((file.parent, GROUPS, FRAGMENTS), None)
    theirs, ours = [str(place) for place in written or ()], [place for place in (GROUPS, FRAGMENTS) if place.is_dir()]
    files = [place.removeprefix("file://") for place in theirs if "://" not in place.removeprefix("file://")]
    places = [json.dumps(place) for place in (*theirs, *(f"file://{place}" for place in ours))]
    argument = f"{SEARCH_PATH}=[{','.join(places)}]"
    return SearchPath((file.parent, *(Path(place).absolute() for place in files), *ours), argument)


def is_group(override: Override, places: SearchPath) -> bool:
    """Return whether an override selects a file of a group. Otherwise it sets a key."""
    if override.package is not None:
        return True
    return any(next((place / override.key_or_group).glob("*.yaml"), None) for place in places.directories)


def hydra_arguments(
    overrides: Sequence[Override], file: Path, places: SearchPath, chosen: Collection[str]
) -> list[str]:
    """Return the overrides in Hydra's syntax.

    Raises ConfigError for a group that does not exist. Also raises ConfigError for a group of a role's keys if the
    override does not name the role, because the keys would have no effect.

    Args:
        overrides: the parsed overrides.
        file: the configuration file.
        places: the search path.
        chosen: the groups in the defaults lists, each as `group` or `group@package`.
    """
    arguments = [places.argument] if places.argument else []
    problems = []
    for override in overrides:
        text, key = str(override.input_line), override.key_or_group
        bare = text.lstrip("+")
        if override.get_key_element() == SEARCH_PATH and places.argument:
            continue
        if text.startswith("~") or key.startswith(("hydra.", "hydra/")):
            arguments.append(text)
        elif is_group(override, places):
            placed = key if override.package is None else f"{key}@{override.package}"
            problems += _misplaced(override, file, places, chosen) if placed not in chosen else []
            arguments.append(bare if placed in chosen else f"+{bare}")
        elif "/" in key:
            problems.append(f"override {text!r}: {key} is not a group; groups are directories below {_named(places)}")
        else:
            arguments.append(text if text.startswith("+") else f"++{text}")
    if problems:
        raise ConfigError(problems)
    return arguments


def _misplaced(override: Override, file: Path, places: SearchPath, chosen: Collection[str]) -> list[str]:
    """Return a problem if an override selects a group for a part of a role, but does not name the role."""
    group, option = override.key_or_group, override.value()
    found = next((place for place in places.directories if (place / group / f"{option}.yaml").is_file()), None)
    if override.package is not None or group not in PLACES or found != GROUPS:
        return []
    part, roles = PLACES[group]
    role = next((role for role in roles if role in _primary(file)), roles[0])
    named = sorted(key for key in chosen if key.startswith(f"{group}@")) or [f"{group}@{role}.{part}"]
    forms = " or ".join(f"{key}={option}" for key in named)
    return [
        f"override {override.input_line!r}: {group} configures a part of a role, but the override names no role; use"
        f" {forms}"
    ]


def _primary(file: Path) -> DictConfig:
    """Return the content of a file, without the files of its defaults list.

    If the content is not a mapping, return an empty configuration, because Hydra then rejects the file.
    """
    loaded = OmegaConf.load(file)
    return loaded if isinstance(loaded, DictConfig) else OmegaConf.create({})


def _named(places: SearchPath) -> str:
    return ", ".join(str(place) for place in places.directories)
