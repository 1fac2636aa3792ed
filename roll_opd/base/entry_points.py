"""Entry points: how a part outside the core gets a name, in a room of `roll_opd/extras` and in an installed package.

A package names its parts in groups, such as `roll_opd.losses`; an entry is `name = module:attribute`. pip stores the
entries of an installed package in its metadata, as `entry_points.txt`. A room of `roll_opd/extras` has a file with this
name and form, so that a checkout needs no installation.
"""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import Distribution, EntryPoint, entry_points
from pathlib import Path
from typing import Any

from roll_opd.base.failures import ConfigError

ROOMS = Path(__file__).parents[1] / "extras"


@cache
def entries(group: str) -> Mapping[str, EntryPoint]:
    """Return the entries of the group `roll_opd.<group>` by name.

    Raises:
        ConfigError: if a name stands for different parts.
    """
    found: dict[str, EntryPoint] = {}
    for entry in (*_of_rooms(), *_installed().select(group=f"roll_opd.{group}")):
        if entry.group != f"roll_opd.{group}":
            continue
        other = found.setdefault(entry.name, entry)
        if other.value != entry.value:
            both = f"{other.value} and {entry.value}"
            raise ConfigError([f"entry points {entry.group}: {entry.name} is {both}; uninstall one of these packages"])
    return found


@cache
def _of_rooms() -> tuple[EntryPoint, ...]:
    rooms = sorted(file.parent for file in ROOMS.glob("*/entry_points.txt"))
    return tuple(entry for room in rooms for entry in Distribution.at(room).entry_points)


@cache
def _installed() -> Any:  # the type differs between Python 3.11 and 3.12
    return entry_points()


@cache
def load_all(group: str) -> None:
    """Import the modules of all entries of a group, which register parts. Raises ConfigError if an import fails."""
    for entry in entries(group).values():
        try:
            load(entry)
        except ImportError as error:
            raise ConfigError([str(error)]) from error


def load(entry: EntryPoint) -> Any:
    """Return the object of an entry.

    Raises:
        ImportError: if its module cannot be imported, or has no such attribute. The message names the entry.
    """
    try:
        return entry.load()
    except (ImportError, AttributeError) as error:
        raise ImportError(f"entry point {entry.group}: {entry.name} = {entry.value}: {error}") from error
