"""Splits a composed configuration into its sections and validates each by itself.

A section with a wrong value is left out (None) and the others go on, so that later checks run as far as they
can. Keys nobody knows are reported with the nearest known key; ROLL's keys without a meaning are gathered.
"""

import json
import types
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from roll_opd.base import hardware
from roll_opd.base.failures import nearest
from roll_opd.config.compose import COMMAND_LINE
from roll_opd.config.diagnostics import Diagnostics
from roll_opd.config.roll_keys import REFUSED, REWARD_KEYS_OF_ROLL, SAID
from roll_opd.config.schema import (
    MIXED_ROLES,
    PURE_ROLES,
    RemoteModelKeys,
    Reward,
    Run,
    Section,
    Supervised,
    SupervisedWorker,
    TeacherWorker,
    Term,
    Top,
    Worker,
    changed,
    keys_of,
    settle,
)
from roll_opd.planner.key_hints import is_worker, top_level, typing_error

S = TypeVar("S", bound=Section)
REFERENCE = "reference"
CRITIC = "critic"
AUXILIARY = "auxiliary_models"
LOCAL_JUDGE = "inference"  # `judge_model_type` of a judge that runs here
SHARED_JUDGE = "cluster"  # ... of one whose engine is the section `reward_model`
SAME_WORD = 0.85  # names that a user chooses may resemble a key by chance: it takes more to call them a typing error
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
    rewards: dict[str, Reward | None] = field(default_factory=dict)
    judges: dict[str, Worker | None] = field(default_factory=dict)  # domain -> the engine that is its judge
    auxiliaries: dict[str, Worker | RemoteModelKeys | None] = field(default_factory=dict)  # models that workflows ask
    pretrain: str | None = None  # as written, so that a mistake elsewhere at the top does not take the models away


def read_sections(
    values: dict[str, Any], variables: frozenset[str], pipeline: type[Supervised] | None, diag: Diagnostics
) -> Sections:
    """Validate `values`; problems and warnings go to `diag`.

    `variables` are top-level keys that other values refer to (`${name}`): where they mean nothing by themselves, they
    are the user's own, whatever their names. Others that nobody knows are dropped with a word (see `_variables`).
    `pipeline` are the keys of a supervised one; None: a run that rolls out.
    """
    pretrain = values.get("pretrain")
    sections = Sections(pretrain=pretrain if isinstance(pretrain, str) else None)
    roles: dict[str, type[Worker]] = dict.fromkeys((*PURE_ROLES, *MIXED_ROLES, REFERENCE, CRITIC), Worker)
    keys: type[Run] = Top
    if pipeline is not None:
        roles = {pipeline.role: SupervisedWorker} | ({REFERENCE: Worker} if pipeline.has_reference else {})
        keys = pipeline
    known = {*keys_of(keys), *roles, *(("teacher", "rewards", "reward_model", AUXILIARY) if pipeline is None else ())}
    left_out = _variables(values, known, keys.ignored, variables, diag)
    rest = {key: value for key, value in values.items() if key not in left_out}
    if pipeline is not None and pipeline.has_reference:
        rest.setdefault(REFERENCE, {})
    for role, worker in roles.items():
        if role in rest:
            sections.workers[role] = read_section(worker, rest.pop(role), diag.below(role))
    if pipeline is None:
        _read_teachers(rest.pop("teacher", None), sections, diag)
        _read_rewards(rest.pop("rewards", None), rest.pop("reward_model", None), sections, diag)
        _read_auxiliaries(rest.pop(AUXILIARY, None), sections, diag)
    sections.top = _with_devices(read_section(keys, rest, diag, known), sections)
    return sections


def _with_devices(top: Run | None, sections: Sections) -> Run | None:
    """Let a node have what this machine has, where neither its number nor any role's devices are written."""
    workers = (*sections.workers.values(), *sections.teachers.values(), *sections.judges.values())
    written = any(worker is not None and worker.device_mapping is not None for worker in workers)
    if top is None or written or "num_gpus_per_node" in top.written:
        return top
    return changed(top, {"num_gpus_per_node": hardware.devices()})


def _variables(
    values: Mapping[str, Any],
    known: set[str],
    ignored: frozenset[str],
    variables: frozenset[str],
    diag: Diagnostics,
) -> set[str]:
    """Return the top-level keys that are the file's own; those that no value refers to are noted as dropped.

    ROLL reads a configuration without its unknown keys, variables and typing errors alike. Here a key is a typing error
    where its name resembles a known one, belongs into a section, or holds what a role holds.
    """
    own = set()
    for key, value in values.items():
        if key in known:
            continue
        if key in variables:
            own.add(key)
        elif key in ignored or diag.origins.get(str(key)) == COMMAND_LINE:
            continue  # nobody writes a variable there that no file refers to
        elif not typing_error("", str(key), value, {*known, *ignored}, may_be_variable=True):
            own.add(key)
            diag.dropped.add(str(key))
    return own


def _read_teachers(value: Any, sections: Sections, diag: Diagnostics) -> None:
    """Read the teachers; a section with a worker's keys is the one teacher "teacher"."""
    mapping = _mapping(value, "teacher", diag)
    keys = {*keys_of(TeacherWorker), *Worker.ignored}
    # `model_arg:` is a misspelt key of the one teacher, not a teacher of that name
    misspelt = any(nearest(str(key), keys, SAME_WORD) for key, data in mapping.items() if not is_worker(data, keys))
    if keys.intersection(mapping) or misspelt:
        sections.teachers["teacher"] = read_section(TeacherWorker, mapping, diag.below("teacher"))
        return
    for name, data in mapping.items():
        sections.teachers[str(name)] = read_section(TeacherWorker, data, diag.below(f"teacher.{name}"))


def _read_rewards(value: Any, shared: Any, sections: Sections, diag: Diagnostics) -> None:
    """Read the rewards, and the engines of judges that run here.

    A judge has its engine in its own section; the first that asks for it has the one of `reward_model`, `shared`.
    """
    for domain, data in _mapping(value, "rewards", diag).items():
        place, judge = diag.below(f"rewards.{domain}"), _judge_type(data)
        if judge == SHARED_JUDGE and isinstance(shared, dict):
            sections.judges[domain] = read_section(Worker, shared, diag.below("reward_model"))
            data, shared = data | {"judge_model_type": LOCAL_JUDGE}, None
        elif judge == LOCAL_JUDGE:
            of_engine = {key: value for key, value in data.items() if key in ENGINE_KEYS}
            sections.judges[domain] = read_section(Worker, of_engine, place)
            data = {key: value for key, value in data.items() if key not in ENGINE_KEYS} | {"judge_model_type": judge}
        sections.rewards[domain] = read_section(Reward, _with_free_keys(data, place), place)
    if shared is not None:
        diag.unused("reward_model")


def _read_auxiliaries(value: Any, sections: Sections, diag: Diagnostics) -> None:
    """Read the models that workflows ask: sections of engines, or of addresses."""
    for name, data in _mapping(value, AUXILIARY, diag).items():
        place = diag.below(f"{AUXILIARY}.{name}")
        if not (isinstance(data, dict) and keys_of(RemoteModelKeys).keys() & data.keys()):
            sections.auxiliaries[name] = read_section(Worker, data, place)
            continue
        remote = sections.auxiliaries[name] = read_section(RemoteModelKeys, data, place)
        for key in ("base_url", "model_name"):
            if remote is not None and key not in remote.written:
                place.error(key, "is missing; write where the model is, and what it is called there")


def _judge_type(reward: Any) -> Any:
    if not isinstance(reward, dict):
        return None
    args = reward.get("args")
    return {**(args if isinstance(args, dict) else {}), **reward}.get("judge_model_type")


def _with_free_keys(data: Any, diag: Diagnostics, model: type[Term] = Reward) -> Any:
    """Move a reward's own keys into `args`, those of its terms too; a key close to a known one is a typing error."""
    if not isinstance(data, dict):
        return data
    known = {*keys_of(model), *model.ignored}
    kept = {key: value for key, value in data.items() if key in known}
    args = {} if kept.get("args") in (None, "None") else kept["args"]
    if not isinstance(args, dict):
        return kept  # told by the check of types
    args = dict(args)
    for key, value in data.items():
        if key in known:
            continue
        near = nearest(str(key), known | REWARD_KEYS_OF_ROLL, SAME_WORD)
        if near and key not in REWARD_KEYS_OF_ROLL:
            diag.error(str(key), f"unknown key; did you mean {near!r}?")
        else:
            args[str(key)] = value
    if isinstance(kept.get("terms"), dict):
        kept["terms"] = {
            str(name): _with_free_keys(term or {}, diag.below(f"terms.{name}"), Term)
            for name, term in kept["terms"].items()
        }
    return {**kept, "args": args}


def _mapping(value: Any, path: str, diag: Diagnostics) -> dict[str, Any]:
    if value is None or isinstance(value, dict):
        return value or {}
    diag.error(path, f"expected a mapping of names to sections, got {value!r}")
    return {}


def read_section(model: type[S], data: Any, diag: Diagnostics, also_known: Set[str] = frozenset()) -> S | None:
    """Validate the section of `diag`; `also_known` are keys that are read elsewhere, for the hints at misspelt ones."""
    if data is None:
        data = {}
    if not isinstance(data, dict):
        diag.error("", f"expected a section with keys, got {data!r}")
        return None
    cleaned = _known_keys(model, data, diag, also_known)
    try:
        # through JSON, because strict mode takes a list for a tuple only there
        section: S = _reader(model).validate_json(json.dumps(cleaned, default=str))
    except ValidationError as error:
        _report(error, diag)
        return None
    _settle(section, cleaned, diag)
    return section


def _reader(model: type[Section]) -> TypeAdapter[Any]:
    """Return pydantic's reader of a section; making one takes milliseconds."""
    if model not in _READERS:
        _READERS[model] = TypeAdapter(model)
    return _READERS[model]


_READERS: dict[type[Section], TypeAdapter[Any]] = {}


def _settle(section: Section, data: Mapping[str, Any], diag: Diagnostics) -> None:
    """Let a section, and those inside it, know where they stand and what of them was written."""
    settle(section, diag, frozenset(data))
    for key in keys_of(type(section)):
        inside, written = getattr(section, key), data.get(key)
        if isinstance(inside, Section):
            _settle(inside, written or {}, diag.below(key))
        elif isinstance(inside, tuple | dict) and written is not None:
            for name, item in inside.items() if isinstance(inside, dict) else enumerate(inside):
                if isinstance(item, Section):
                    _settle(item, written[name], diag.below(f"{key}.{name}"))


def _known_keys(
    model: type[Section], data: dict[str, Any], diag: Diagnostics, also: Set[str] = frozenset()
) -> dict[str, Any]:
    """Return `data` without the keys that are unknown (reported) or have no meaning here (gathered)."""
    kept: dict[str, Any] = {}
    keys = keys_of(model)
    for key, value in data.items():
        if key in keys:
            options = _options(keys[key])
            section = next((one for one in options if isinstance(one, type) and issubclass(one, Section)), None)
            of_each = next((get_args(one)[1] for one in options if get_origin(one) is dict), None)
            if isinstance(of_each, type) and issubclass(of_each, Section) and isinstance(value, dict):
                value = {name: _cleaned(each, of_each, diag.below(f"{key}.{name}")) for name, each in value.items()}
            else:
                value = _cleaned(value, section, diag.below(key))
            # null asks for the default, as leaving the key out does; where it is a value of its own it is written
            if value is not None or types.NoneType in options or Any in options:
                kept[key] = value
        elif key in model.ignored:
            ignore(key, value, diag)
        else:
            problem = typing_error(diag.path, str(key), value, {*keys, *model.ignored, *also}, top_level(diag))
            diag.error(str(key), problem or "unknown key, and no known key is near it; remove it")
    return kept


def _options(annotation: Any) -> tuple[Any, ...]:
    """Return `X` and `None` of `X`, `X | None` and `tuple[X, ...]`."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType, tuple) else (annotation,)


def _cleaned(value: Any, section: type[Section] | None, diag: Diagnostics) -> Any:
    """Return a value as it is validated; `section` is what it, or each of its items, should be."""
    if section is not None and isinstance(value, dict):
        return _known_keys(section, value, diag)
    if section is not None and isinstance(value, list):
        return [_cleaned(item, section, diag.below(str(number))) for number, item in enumerate(value)]
    return None if value == "None" else value  # Python's null, as ROLL's own YAML write it


def ignore(key: str, value: Any, diag: Diagnostics) -> None:
    """Say of a ROLL key without a meaning here what there is to say of its value; null says nothing."""
    if value in (None, "None"):
        return
    for said, sayings in ((diag.warn, SAID), (diag.unsupported, REFUSED)):
        if key in sayings:
            harmless, text = sayings[key]
            if value not in harmless and _setting(value) not in harmless:
                said(key, text if isinstance(value, dict | list) else f"{as_yaml(value)} {text}")
            return
    diag.unused(key)


def _setting(value: Any) -> Any:
    """Return what a value says: of a section its `mode`, None where that is switched off."""
    if isinstance(value, dict):
        return value.get("mode") if value.get("enable", True) else None
    return value


def as_yaml(value: object) -> str:
    """Return a value as YAML has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _report(error: ValidationError, diag: Diagnostics) -> None:
    """Turn pydantic's errors into one sentence a key, with the user's own name for it."""
    expected: dict[str, list[str]] = {}
    inputs: dict[str, Any] = {}
    for item in error.errors(include_url=False):
        # a union adds the tried type ("bool", "tuple[...]") to the location; the user wrote no such key
        parts = takewhile(lambda part: part not in _TYPE_NAMES and "[" not in part, map(str, item["loc"]))
        key = ".".join(filter(None, parts))
        text = "a text that is not empty" if item["type"] == "string_too_short" else str(item["msg"])
        text = text.removeprefix("Input should be ").removeprefix("Value error, ")  # the latter of our own validators
        expected.setdefault(key, []).append(text)
        inputs[key] = item["input"]
    for key, texts in expected.items():
        got = f", got {json.dumps(inputs[key], default=str)[:120]}" if inputs[key] is not None else ""
        diag.error(key, f"should be {' or '.join(dict.fromkeys(texts))}{got}")


_TYPE_NAMES = {"bool", "str", "int", "float", "constrained-int", "constrained-float"}
