"""Splits a composed configuration into its sections and validates each by itself.

A section with a wrong value is left out (None) and the others go on, so that later checks run as far as they
can. Keys nobody knows are reported with the nearest known key; ROLL's keys without a meaning are gathered.
"""

import difflib
import json
import types
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import ValidationError

from roll_opd.config.errors import Findings
from roll_opd.config.known_names import REWARD_KEYS_OF_ROLL
from roll_opd.config.schema import Reward, Section, Term, Top, Worker

S = TypeVar("S", bound=Section)
PURE_ROLES = ("student_train", "student_infer")
MIXED_ROLES = ("actor_train", "actor_infer")
REFERENCE = "reference"
CRITIC = "critic"
LOCAL_JUDGE = "inference"  # `judge_model_type` of a judge that runs here
ENGINE_KEYS = ("model_args", "strategy_args", "generating_args", "device_mapping", "system_envs", "training_args")


@dataclass
class Sections:
    """A validated configuration; a part that could not be read is None, a part nobody wrote is absent."""

    top: Top | None = None
    workers: dict[str, Worker | None] = field(default_factory=dict)  # by the name the user wrote
    teachers: dict[str, Worker | None] = field(default_factory=dict)  # by teacher name
    teacher_paths: dict[str, str] = field(default_factory=dict)  # teacher name -> dotted path of its section
    rewards: dict[str, Reward | None] = field(default_factory=dict)
    judges: dict[str, Worker | None] = field(default_factory=dict)  # domain -> the engine that is its judge
    pretrain: str | None = None  # as written, so that a mistake elsewhere at the top does not take the models away


def read_sections(values: dict[str, Any], variables: frozenset[str], findings: Findings) -> Sections:
    """Validate `values`; problems and warnings go to `findings`.

    `variables` are top-level keys that other values refer to (`${name}`): where they mean nothing by themselves, they
    are the user's own, whatever their names.
    """
    known = {*Top.model_fields, *PURE_ROLES, *MIXED_ROLES, REFERENCE, CRITIC, "teacher", "rewards"}
    rest = {key: value for key, value in values.items() if key in known or key not in variables}
    pretrain = values.get("pretrain")
    sections = Sections(pretrain=pretrain if isinstance(pretrain, str) else None)
    for role in (*PURE_ROLES, *MIXED_ROLES, REFERENCE, CRITIC):
        if role in rest:
            sections.workers[role] = read_section(Worker, rest.pop(role), role, findings)
    for name, (path, data) in _teachers(rest.pop("teacher", None), findings).items():
        sections.teachers[name] = read_section(Worker, data, path, findings)
        sections.teacher_paths[name] = path
    for domain, data in _mapping(rest.pop("rewards", None), "rewards", findings).items():
        path = f"rewards.{domain}"
        if isinstance(data, dict) and _judges_here(data):
            of_engine = {key: value for key, value in data.items() if key in ENGINE_KEYS}
            data = {key: value for key, value in data.items() if key not in ENGINE_KEYS}
            sections.judges[domain] = read_section(Worker, of_engine, path, findings)
        sections.rewards[domain] = read_section(Reward, _with_free_keys(data, path, findings), path, findings)
    sections.top = read_section(Top, rest, "", findings, known)
    return sections


def _judges_here(reward: dict[str, Any]) -> bool:
    args = reward.get("args")
    return {**(args if isinstance(args, dict) else {}), **reward}.get("judge_model_type") == LOCAL_JUDGE


def _teachers(value: Any, findings: Findings) -> dict[str, tuple[str, Any]]:
    """Return teacher name -> (path, data); a section with a worker's keys is the one teacher "teacher"."""
    if value is None:
        return {}
    mapping = _mapping(value, "teacher", findings)
    keys = {*Worker.model_fields, *Worker.ignored}
    # `model_arg:` is a misspelt key of the one teacher, not a teacher of that name
    misspelt = [key for key, data in mapping.items() if _near(str(key), keys) and not _is_worker(data, keys)]
    if keys.intersection(mapping) or misspelt:
        return {"teacher": ("teacher", mapping)}
    return {str(name): (f"teacher.{name}", data) for name, data in mapping.items()}


def _is_worker(data: Any, keys: set[str]) -> bool:
    return isinstance(data, dict) and not keys.isdisjoint(data)


def _with_free_keys(data: Any, path: str, findings: Findings, model: type[Term] = Reward) -> Any:
    """Move a reward's own keys into `args`, those of its terms too; a key close to a known one is a typing error."""
    if not isinstance(data, dict):
        return data
    known = {*model.model_fields, *model.ignored}
    kept = {key: value for key, value in data.items() if key in known}
    args = dict(kept.get("args") or {})
    for key, value in data.items():
        if key in known:
            continue
        near = _near(str(key), known | REWARD_KEYS_OF_ROLL) if key not in REWARD_KEYS_OF_ROLL else []
        if near:
            findings.problem(f"{path}.{key}", f"unknown key; did you mean {near[0]!r}?")
        else:
            args[str(key)] = value
    if isinstance(kept.get("terms"), dict):
        kept["terms"] = {
            name: _with_free_keys(term or {}, f"{path}.terms.{name}", findings, Term)
            for name, term in kept["terms"].items()
        }
    return {**kept, "args": args}


def _near(key: str, known: set[str]) -> list[str]:
    return difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.85)


def _mapping(value: Any, path: str, findings: Findings) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        findings.problem(path, f"expected a mapping of names to sections, got {value!r}")
        return {}
    return value


def read_section(
    model: type[S],
    data: Any,
    path: str,
    findings: Findings,
    also_known: set[str] | None = None,
) -> S | None:
    """Validate one section; `also_known` are keys that are read elsewhere, for the hints at misspelt ones."""
    if data is None:
        data = {}
    if not isinstance(data, dict):
        findings.problem(path, f"expected a section with keys, got {data!r}")
        return None
    cleaned = _sieve(model, data, path, findings, also_known or set())
    try:
        # through JSON, because strict mode takes a list for a tuple only there
        return model.model_validate_json(json.dumps(cleaned, default=str))
    except ValidationError as error:
        _report(error, path, findings)
        return None


def _sieve(
    model: type[Section],
    data: dict[str, Any],
    path: str,
    findings: Findings,
    also: set[str],
) -> dict[str, Any]:
    """Return `data` without the keys that are unknown (reported) or have no meaning here (gathered)."""
    kept: dict[str, Any] = {}
    for key, value in data.items():
        dotted = f"{path}.{key}" if path else str(key)
        if key in model.model_fields and key not in model.ignored:  # a section may ignore a key that it inherits
            section = _section_type(model.model_fields[key].annotation)
            if section is not None and isinstance(value, dict):
                value = _sieve(section, value, dotted, findings, set())
            elif section is not None and isinstance(value, list):
                value = [
                    _sieve(section, item, f"{dotted}.{number}", findings, set()) if isinstance(item, dict) else item
                    for number, item in enumerate(value)
                ]
            if value == "None":
                value = None  # Python's null, as ROLL's own YAML write it
            # null asks for the default, as leaving the key out does; a null default still counts as written
            if value is not None or model.model_fields[key].default is None:
                kept[key] = value
        elif key in model.ignored:
            if value is not None:
                findings.ignore(dotted)
        else:
            findings.problem(dotted, _unknown_key(str(key), {*model.model_fields, *model.ignored, *also}))
    return kept


def _unknown_key(key: str, known: set[str]) -> str:
    near = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.5)
    return f"unknown key; did you mean {near[0]!r}?" if near else "unknown key, and no known key is near it; remove it"


def _section_type(annotation: Any) -> type[Section] | None:
    """Return the section class in `X`, `X | None` or `tuple[X, ...]`."""
    options = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType, tuple) else (annotation,)
    for option in options:
        if isinstance(option, type) and issubclass(option, Section):
            return option
    return None


def _report(error: ValidationError, path: str, findings: Findings) -> None:
    """Turn pydantic's errors into one sentence a key, with the user's own name for it."""
    expected: dict[str, list[str]] = {}
    inputs: dict[str, Any] = {}
    for item in error.errors(include_url=False):
        # a union adds the tried type ("bool", "tuple[...]") to the location; the user wrote no such key
        parts = takewhile(lambda part: part not in _TYPE_NAMES and "[" not in part, map(str, item["loc"]))
        key = ".".join(part for part in (path, *parts) if part)
        missing = item["type"] == "missing"
        text = "written; it is missing" if missing else str(item["msg"]).removeprefix("Input should be ")
        expected.setdefault(key, []).append(text)
        inputs[key] = None if missing else item["input"]
    for key, texts in expected.items():
        got = f", got {json.dumps(inputs[key], default=str)[:120]}" if inputs[key] is not None else ""
        findings.problem(key, f"should be {' or '.join(dict.fromkeys(texts))}{got}")


_TYPE_NAMES = {"bool", "str", "int", "float", "constrained-int", "constrained-float"}
