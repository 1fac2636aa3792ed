"""The function `key`, which declares a key, and the base class of sections.

A section is a dataclass that pydantic validates. `Section` also accepts ROLL keys without effect, and
null for a key with a default. Each parsed section stores its place in the configuration, for error messages.
"""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, fields, replace
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, GetCoreSchemaHandler, ModelWrapValidatorHandler, ValidationInfo, model_validator
from pydantic_core import CoreSchema

from roll_opd.config.diagnostics import Diagnostics
from roll_opd.config.roll_keys import report_ignored

V = TypeVar("V")
S = TypeVar("S", bound="Section")


def key(default: V, meaning: str, origin: str = "ROLL") -> V:
    """Declare a key. `ours` and `trinity` declare a key that ROLL does not have.

    Args:
        default: default value.
        meaning, origin: texts for the documentation.
    """
    return _field(default, {"meaning": meaning, "origin": origin})


def ours(default: V, meaning: str) -> V:
    """Declare a key of this package, see `key`."""
    return key(default, meaning, "ours")


def trinity(default: V, meaning: str) -> V:
    """Declare a key of Trinity-RFT, see `key`."""
    return key(default, meaning, "Trinity-RFT")


def derived(default: V) -> V:
    """Declare a value that the planner fills in. A user cannot set it."""
    return _field(default, {"derived": True})


def _field(default: V, metadata: dict[str, Any]) -> V:
    if isinstance(default, dict | Section):  # each section gets a copy, as a section stores its path
        return field(default_factory=lambda: copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Reading:
    """Context that pydantic passes to the validators."""

    diag: Diagnostics  # diagnostics of the outermost section
    paths: Mapping[int, str]  # id of a mapping -> its dotted path in that section
    # reports an unknown key, or returns True: the key belongs to the map `Section.free`
    is_free: Callable[[type["Section"], str, Any, Diagnostics], bool]


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the configuration. `ignored` lists the keys of ROLL that are accepted here without effect."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    ignored: ClassVar[frozenset[str]] = frozenset()
    free: ClassVar[str] = ""  # the key, a map, that gets the keys that the section does not declare
    # condition -> those of the class's own keys ("*": all) that a run reads only if the condition holds; see `unread`
    read_if: ClassVar[Mapping[str, str]] = {}
    # set on a parsed section: the diagnostics of its keys, and the keys that were written (also as null)
    diag: ClassVar[Diagnostics] = Diagnostics()
    written: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return pydantic's schema. Every key is strict, but the section itself may be given as a mapping."""
        schema = handler(source)
        inner: Any = handler.resolve_ref_schema(schema)
        while inner["type"] != "dataclass":
            inner = inner["schema"]
        inner["strict"] = False
        return schema

    @model_validator(mode="wrap")
    @classmethod
    def _from_mapping(cls, data: Any, read: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        """Validate the keys that have an effect. All other keys are reported to the section's diagnostics."""
        if not isinstance(data, dict) or not isinstance(info.context, Reading):
            return read(data)
        diag = info.context.diag.below(info.context.paths[id(data)])
        kept = _known_keys(cls, data, diag, info.context)
        section = read(kept)
        settle(section, diag, frozenset(kept))
        return section


def _known_keys(section: type[Section], data: dict[str, Any], diag: Diagnostics, reading: Reading) -> dict[str, Any]:
    """Return the known keys of `data`, and report all other keys.

    If a value is null but the key does not accept null, the key is left out and gets its default.
    """
    kept: dict[str, Any] = {}
    free: dict[str, Any] = {}
    keys = keys_of(section)
    for name, value in data.items():
        if name in keys:
            value = None if value == "None" else value  # Python's null, as in ROLL's YAML files
            if isinstance(value, bool | int | float) and _takes_text(keys[name]):
                value = diag.text_of(name, value) or value  # exp_name=1e3 is a text as written
            if value is not None or _takes_null(keys[name]):
                kept[name] = value
        elif name in section.ignored:
            report_ignored(name, value, diag)
        elif reading.is_free(section, name, value, diag):
            free[name] = value
    if free and isinstance(given := kept.get(section.free, {}), dict):
        kept[section.free] = {**given, **free}
    return kept


def _takes_null(annotation: Any) -> bool:
    return annotation is Any or (get_origin(annotation) in (Union, UnionType) and NoneType in get_args(annotation))


def _takes_text(annotation: Any) -> bool:
    """Return whether a key takes a text, or several texts, but no number."""
    if annotation is str:
        return True
    kind, members = get_origin(annotation), get_args(annotation)
    if kind is Annotated or kind is tuple:
        return _takes_text(members[0])
    if kind in (Union, UnionType):
        return all(_takes_text(member) for member in members if member is not NoneType)
    return False


def settle(section: Section, diag: Diagnostics, written: frozenset[str]) -> None:
    """Set `diag` and `written` of a section and of the sections in it.

    A section that was not in the file gets an empty set as `written`.
    """
    vars(section).update(diag=diag, written=written)
    for name, inside in list(vars(section).items()):
        if isinstance(inside, Section) and "diag" not in vars(inside):
            settle(inside, diag.below(name), frozenset())


def changed(section: S, values: Mapping[str, Any]) -> S:
    """Return a copy of a section with some values changed. The copy has the same place in the configuration."""
    new = replace(section, **values)
    settle(new, section.diag, section.written)
    return new


def keys_of(section: type[Section]) -> dict[str, Any]:
    """Return the keys that a user may set in a section, as a map: key -> type annotation."""
    if section not in _KEYS:
        hints = get_type_hints(section, include_extras=True)
        named = [item.name for item in fields(section) if "derived" not in item.metadata]
        _KEYS[section] = {name: hints[name] for name in named if name not in section.ignored}
    return _KEYS[section]


def unread(section: Section, facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys with a value that the run does not read, as a map: key -> the condition that does not hold.

    A condition `"name"` holds if this fact or key has a value other than null, false and 0. A condition `"name: a|b"`
    holds if the value is a or b or, for a fact with several values, if one of them is a or b.

    Args:
        facts: what is known about the run in addition to the keys of the section.
    """
    default = type(section)()
    given = [name for name in keys_of(type(section)) if _is_given(section, default, name)]
    return {name: why for name in given if (why := lacking(section, name, facts))}


def lacking(section: Section, name: str, facts: Mapping[str, Any]) -> str | None:
    """Return the first condition without which a run does not read a key; None if the run reads the key."""
    conditions = _conditions(type(section)).get(name, ())
    return next((condition for condition in conditions if not _holds(condition, section, facts)), None)


def _holds(condition: str, section: Section, facts: Mapping[str, Any]) -> bool:
    name, _, accepted = condition.partition(": ")
    value = facts[name] if name in facts else getattr(section, name)
    found = {value} if isinstance(value, str | None) else value
    return not found.isdisjoint(accepted.split("|")) if accepted else bool(value)


def _is_given(section: Section, default: Section, name: str) -> bool:
    """Return whether a key is written with a value other than null, or has a value other than its default."""
    value = getattr(section, name)
    if isinstance(value, Section):
        return bool(value.written) or value != getattr(default, name)
    return (name in section.written and value is not None) or value != getattr(default, name)


def _conditions(section: type[Section]) -> dict[str, list[str]]:
    """Return the conditions of a section's keys, as a map: key -> conditions."""
    if section not in _CONDITIONS:
        found: dict[str, list[str]] = {}
        for base in section.__mro__:
            for condition, names in vars(base).get("read_if", {}).items():
                for name in vars(base)["__annotations__"] if names == "*" else names.split():
                    found.setdefault(name, []).append(condition)
        _CONDITIONS[section] = found
    return _CONDITIONS[section]


_CONDITIONS: dict[type[Section], dict[str, list[str]]] = {}
_KEYS: dict[type[Section], dict[str, Any]] = {}


def shared(keys: type[Section], section: Section) -> dict[str, Any]:
    """Return the values in `section` of the keys that the class `keys` declares.

    A plan's class inherits from `keys`, so these values can be passed to the plan unchanged.
    """
    return {name: getattr(section, name) for name in keys_of(keys)}
