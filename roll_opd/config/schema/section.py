"""Declaration of keys, and the base class of the sections that hold them."""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar, get_type_hints

from pydantic import ConfigDict

from roll_opd.config.diagnostics import Diagnostics

T = TypeVar("T")
S = TypeVar("S", bound="Section")
OURS, TRINITY = "ours", "Trinity-RFT"  # origins of a key that is not ROLL's


def key(default: T, meaning: str, origin: str = "ROLL") -> T:
    """Declare a key: its default, what it means, and where it comes from."""
    metadata = {"meaning": meaning, "origin": origin}
    if isinstance(default, dict | Section):  # each section has its own, as it knows where it stands
        return field(default_factory=lambda: copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the configuration. `ignored` names ROLL's keys that are accepted without a meaning."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    ignored: ClassVar[frozenset[str]] = frozenset()
    # of one that was read: where problems of its keys are told, and those that the user wrote, null included
    diag: ClassVar[Diagnostics] = Diagnostics()
    written: ClassVar[frozenset[str]] = frozenset()


def settle(section: Section, diag: Diagnostics, written: frozenset[str]) -> None:
    """Let `section` know where it stands and what of it was written."""
    vars(section).update(diag=diag, written=written)


def changed(section: S, values: Mapping[str, Any]) -> S:
    """Return `section` with other values, in the same place."""
    new = replace(section, **values)
    settle(new, section.diag, section.written)
    return new


def keys_of(section: type[Section]) -> dict[str, Any]:
    """Return the keys of a section that may be written, with their annotations."""
    if section not in _KEYS:
        hints = get_type_hints(section, include_extras=True)
        _KEYS[section] = {item.name: hints[item.name] for item in fields(section) if item.name not in section.ignored}
    return _KEYS[section]


_KEYS: dict[type[Section], dict[str, Any]] = {}


def shared(keys: type[Section], section: Section) -> dict[str, Any]:
    """Return the values of `section` for the keys of the class `keys`, from which a type of the plan inherits."""
    return {name: getattr(section, name) for name in keys_of(keys)}
