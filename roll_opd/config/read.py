"""Splits a composed configuration into its sections and validates each by itself.

A section with a wrong value is left out (None) and the others go on, so that later checks run as far as they
can. Keys nobody knows are reported with the nearest known key; ROLL's keys without a meaning are gathered.
"""

import difflib
import json
import types
from dataclasses import dataclass, field, fields
from itertools import takewhile
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from roll_opd.config.errors import Diagnostics
from roll_opd.config.legacy_roll import REFUSED, REWARD_KEYS_OF_ROLL, SAID
from roll_opd.config.schema import (
    Reward,
    Run,
    Section,
    Supervised,
    SupervisedWorker,
    Term,
    Top,
    Worker,
    keys_of,
    mark_written,
)

S = TypeVar("S", bound=Section)
PURE_ROLES = ("student_train", "student_infer")
MIXED_ROLES = ("actor_train", "actor_infer")
REFERENCE = "reference"
CRITIC = "critic"
LOCAL_JUDGE = "inference"  # `judge_model_type` of a judge that runs here
SHARED_JUDGE = "cluster"  # ... of one whose engine is the section `reward_model`
ENGINE_KEYS = (
    *("model_args", "strategy_args", "generating_args", "device_mapping", "system_envs", "training_args"),
    "num_gpus_per_worker",
)


@dataclass
class Sections:
    """A validated configuration; a part that could not be read is None, a part that is not written is absent."""

    top: Run | None = None
    workers: dict[str, Worker | None] = field(default_factory=dict)  # by the name the user wrote
    teachers: dict[str, Worker | None] = field(default_factory=dict)  # by teacher name
    teacher_paths: dict[str, str] = field(default_factory=dict)  # teacher name -> dotted path of its section
    rewards: dict[str, Reward | None] = field(default_factory=dict)
    judges: dict[str, Worker | None] = field(default_factory=dict)  # domain -> the engine that is its judge
    pretrain: str | None = None  # as written, so that a mistake elsewhere at the top does not take the models away


def read_sections(
    values: dict[str, Any], variables: frozenset[str], pipeline: type[Supervised] | None, diagnostics: Diagnostics
) -> Sections:
    """Validate `values`; problems and warnings go to `diagnostics`.

    `variables` are top-level keys that other values refer to (`${name}`): where they mean nothing by themselves, they
    are the user's own, whatever their names. `pipeline` are the keys of a supervised one; None: a run that rolls out.
    """
    pretrain = values.get("pretrain")
    sections = Sections(pretrain=pretrain if isinstance(pretrain, str) else None)
    roles: dict[str, type[Worker]] = dict.fromkeys((*PURE_ROLES, *MIXED_ROLES, REFERENCE, CRITIC), Worker)
    keys: type[Run] = Top
    if pipeline is not None:
        roles = {pipeline.role: SupervisedWorker} | ({REFERENCE: Worker} if pipeline.has_reference else {})
        keys = pipeline
    known = {*keys_of(keys), *roles, *(("teacher", "rewards", "reward_model") if pipeline is None else ())}
    rest = {key: value for key, value in values.items() if key in known or key not in variables}
    for role, worker in roles.items():
        if role in rest:
            sections.workers[role] = read_section(worker, rest.pop(role), role, diagnostics)
    if pipeline is None:
        _read_teachers(rest.pop("teacher", None), sections, diagnostics)
        _read_rewards(_with_shared_judge(rest, diagnostics), sections, diagnostics)
    sections.top = read_section(keys, rest, "", diagnostics, known)
    return sections


def _read_teachers(value: Any, sections: Sections, diagnostics: Diagnostics) -> None:
    for name, (path, data) in _teachers(value, diagnostics).items():
        sections.teachers[name] = read_section(Worker, data, path, diagnostics)
        sections.teacher_paths[name] = path


def _read_rewards(value: Any, sections: Sections, diagnostics: Diagnostics) -> None:
    for domain, data in _mapping(value, "rewards", diagnostics).items():
        path = f"rewards.{domain}"
        if isinstance(data, dict) and _judges_here(data):
            of_engine = {key: value for key, value in data.items() if key in ENGINE_KEYS}
            data = {key: value for key, value in data.items() if key not in ENGINE_KEYS}
            sections.judges[domain] = read_section(Worker, of_engine, path, diagnostics)
        sections.rewards[domain] = read_section(Reward, _with_free_keys(data, path, diagnostics), path, diagnostics)


def _with_shared_judge(values: dict[str, Any], diagnostics: Diagnostics) -> Any:
    """Take `rewards` and `reward_model` out of `values`; return the rewards, a judge's engine in its own section."""
    rewards, engine = values.pop("rewards", None), values.pop("reward_model", None)
    asking = (
        [name for name, reward in rewards.items() if _judge_type(reward) == SHARED_JUDGE]
        if isinstance(rewards, dict)
        else []
    )
    if not asking or not isinstance(engine, dict):
        if engine is not None:
            diagnostics.ignore("reward_model")
        return rewards
    for name in asking[1:]:  # its type is wrong, and told so
        diagnostics.warn(
            f"reward_model: is the engine of rewards.{asking[0]} alone; give rewards.{name} one of its own"
        )
    of_engine = {key: value for key, value in engine.items() if key in ENGINE_KEYS}
    kept = {key: value for key, value in rewards[asking[0]].items() if key not in ENGINE_KEYS}
    return {**rewards, asking[0]: {**kept, **of_engine, "judge_model_type": LOCAL_JUDGE}}


def _judge_type(reward: Any) -> Any:
    return reward.get("judge_model_type") if isinstance(reward, dict) else None


def _judges_here(reward: dict[str, Any]) -> bool:
    args = reward.get("args")
    return {**(args if isinstance(args, dict) else {}), **reward}.get("judge_model_type") == LOCAL_JUDGE


def _teachers(value: Any, diagnostics: Diagnostics) -> dict[str, tuple[str, Any]]:
    """Return teacher name -> (path, data); a section with a worker's keys is the one teacher "teacher"."""
    if value is None:
        return {}
    mapping = _mapping(value, "teacher", diagnostics)
    keys = {*keys_of(Worker), *Worker.ignored}
    # `model_arg:` is a misspelt key of the one teacher, not a teacher of that name
    misspelt = [key for key, data in mapping.items() if _near(str(key), keys) and not _is_worker(data, keys)]
    if keys.intersection(mapping) or misspelt:
        return {"teacher": ("teacher", mapping)}
    return {str(name): (f"teacher.{name}", data) for name, data in mapping.items()}


def _is_worker(data: Any, keys: set[str]) -> bool:
    return isinstance(data, dict) and not keys.isdisjoint(data)


def _with_free_keys(data: Any, path: str, diagnostics: Diagnostics, model: type[Term] = Reward) -> Any:
    """Move a reward's own keys into `args`, those of its terms too; a key close to a known one is a typing error."""
    if not isinstance(data, dict):
        return data
    known = {*keys_of(model), *model.ignored}
    kept = {key: value for key, value in data.items() if key in known}
    args = dict(kept.get("args") or {})
    for key, value in data.items():
        if key in known:
            continue
        near = _near(str(key), known | REWARD_KEYS_OF_ROLL) if key not in REWARD_KEYS_OF_ROLL else []
        if near:
            diagnostics.problem(f"{path}.{key}", f"unknown key; did you mean {near[0]!r}?")
        else:
            args[str(key)] = value
    if isinstance(kept.get("terms"), dict):
        kept["terms"] = {
            name: _with_free_keys(term or {}, f"{path}.terms.{name}", diagnostics, Term)
            for name, term in kept["terms"].items()
        }
    return {**kept, "args": args}


def _near(key: str, known: set[str]) -> list[str]:
    return difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.85)


def _mapping(value: Any, path: str, diagnostics: Diagnostics) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        diagnostics.problem(path, f"expected a mapping of names to sections, got {value!r}")
        return {}
    return value


def read_section(
    model: type[S], data: Any, path: str, diagnostics: Diagnostics, also_known: set[str] | None = None
) -> S | None:
    """Validate one section; `also_known` are keys that are read elsewhere, for the hints at misspelt ones."""
    if data is None:
        data = {}
    if not isinstance(data, dict):
        diagnostics.problem(path, f"expected a section with keys, got {data!r}")
        return None
    cleaned = _known_keys(model, data, path, diagnostics, also_known or set())
    try:
        # through JSON, because strict mode takes a list for a tuple only there
        section = _adapter(model).validate_json(json.dumps(cleaned, default=str))
    except ValidationError as error:
        _report(error, path, diagnostics)
        return None
    _mark(section, cleaned)
    return section


def _adapter(model: type[S]) -> TypeAdapter[S]:
    """Return pydantic's reader of a section; making one takes milliseconds."""
    if model not in _ADAPTERS:
        _ADAPTERS[model] = TypeAdapter(model)
    return _ADAPTERS[model]


_ADAPTERS: dict[type[Section], TypeAdapter[Any]] = {}


def _mark(section: Section, data: dict[str, Any]) -> None:
    """Note what was written, in the sections inside this one, too."""
    mark_written(section, frozenset(data))
    for key, value in data.items():
        inside = getattr(section, key)
        if isinstance(inside, Section):
            _mark(inside, value)
        elif isinstance(inside, tuple) and inside and isinstance(inside[0], Section):
            for item, written in zip(inside, value, strict=True):
                _mark(item, written)


def _known_keys(
    model: type[Section], data: dict[str, Any], path: str, diagnostics: Diagnostics, also: set[str]
) -> dict[str, Any]:
    """Return `data` without the keys that are unknown (reported) or have no meaning here (gathered)."""
    kept: dict[str, Any] = {}
    keys = keys_of(model)
    defaults = {item.name: item.default for item in fields(model)}
    for key, value in data.items():
        dotted = f"{path}.{key}" if path else str(key)
        if key in keys:
            section = _section_type(keys[key])
            if section is not None and isinstance(value, dict):
                value = _known_keys(section, value, dotted, diagnostics, set())
            elif section is not None and isinstance(value, list):
                value = [
                    _known_keys(section, item, f"{dotted}.{number}", diagnostics, set())
                    if isinstance(item, dict)
                    else item
                    for number, item in enumerate(value)
                ]
            if value == "None":
                value = None  # Python's null, as ROLL's own YAML write it
            # null asks for the default, as leaving the key out does; a null default still counts as written
            if value is not None or defaults[key] is None:
                kept[key] = value
        elif key in model.ignored:
            ignore(key, value, dotted, diagnostics)
        else:
            diagnostics.problem(dotted, _unknown_key(str(key), {*keys, *model.ignored, *also}))
    return kept


def ignore(key: str, value: Any, dotted: str, diagnostics: Diagnostics) -> None:
    """Say of a ROLL key without a meaning here what there is to say of its value; null says nothing."""
    if value in (None, "None"):
        return
    for said, sayings in ((diagnostics.say, SAID), (diagnostics.block, REFUSED)):
        if key in sayings:
            if value in sayings[key][0] or _setting(value) in sayings[key][0]:
                return
            text = str(value).lower() if isinstance(value, bool) else str(value)
            said(dotted, sayings[key][1] if isinstance(value, dict | list) else f"{text} {sayings[key][1]}")
            return
    diagnostics.ignore(dotted)


def _setting(value: Any) -> Any:
    """Return what a value says: of a section its `mode`, None where that is switched off."""
    if isinstance(value, dict):
        return value.get("mode") if value.get("enable", True) else None
    return value


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


def _report(error: ValidationError, path: str, diagnostics: Diagnostics) -> None:
    """Turn pydantic's errors into one sentence a key, with the user's own name for it."""
    expected: dict[str, list[str]] = {}
    inputs: dict[str, Any] = {}
    for item in error.errors(include_url=False):
        # a union adds the tried type ("bool", "tuple[...]") to the location; the user wrote no such key
        parts = takewhile(lambda part: part not in _TYPE_NAMES and "[" not in part, map(str, item["loc"]))
        key = ".".join(part for part in (path, *parts) if part)
        expected.setdefault(key, []).append(str(item["msg"]).removeprefix("Input should be "))
        inputs[key] = item["input"]
    for key, texts in expected.items():
        got = f", got {json.dumps(inputs[key], default=str)[:120]}" if inputs[key] is not None else ""
        diagnostics.problem(key, f"should be {' or '.join(dict.fromkeys(texts))}{got}")


_TYPE_NAMES = {"bool", "str", "int", "float", "constrained-int", "constrained-float"}
