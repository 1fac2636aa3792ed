"""Errors for unknown keys: a misspelt key, a key in the wrong section, or a word of another tool."""

from collections.abc import Iterator, Mapping, Set
from functools import cache
from typing import Any, get_args, get_origin

from roll_opd.base.entry_points import entries, load
from roll_opd.base.failures import RESEMBLES, did_you_mean
from roll_opd.config.compose import COMMAND_LINE
from roll_opd.config.diagnostics import Diagnostics
from roll_opd.config.roll_keys import REWARD_KEYS_OF_ROLL
from roll_opd.config.schema import (
    MIXED_ROLES,
    PIPELINES,
    PURE_ROLES,
    RemoteModelKeys,
    Reward,
    Run,
    Section,
    Supervised,
    SupervisedWorker,
    TeacherWorker,
    Top,
    Worker,
    keys_of,
    lacking,
    supervised_pipelines,
)

ROLES = (PURE_ROLES, MIXED_ROLES)
# minimum similarity of a misspelt and a known key where users choose names, which may be similar by chance
SAME_WORD = 0.85
SAME_SECTION = 0.85  # minimum similarity of a misspelt and a known section: `algorithm` is not `algorithm_type`
MOST_ADVICE = 8  # keys of an unknown section that its error answers
TRAIN, ROLLOUT, TEACHER, FROZEN, CRITIC = "train", "rollout", "teacher", "frozen", "critic"  # kinds of roles
ELSEWHERE = "elsewhere"  # kind of a teacher that uses no device of the run
MEGATRON = (TRAIN, TEACHER, FROZEN, CRITIC)
# options of strategy_args.strategy_config that are often written elsewhere
MEGATRON_OPTIONS = frozenset({
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("sequence_parallel", "use_distributed_optimizer", "recompute_granularity"),
})  # fmt: skip
VLLM_OPTIONS = frozenset({
    *("tensor_parallel_size", "pipeline_parallel_size", "gpu_memory_utilization", "max_model_len", "max_num_seqs"),
    *("enforce_eager", "block_size", "load_format", "sleep_level", "max_num_batched_tokens"),
})  # fmt: skip
NAME = "NAME"  # part of a place: a name that the user chooses
OPTIONS = ("strategy_args", "strategy_config")
Place = tuple[str, ...]


def kind_of(role: str) -> str:
    """Return the kind of the role with this name in a configuration."""
    if role.endswith("_train"):
        return TRAIN
    if role in (TEACHER, CRITIC):
        return role
    return FROZEN if role == "reference" else ROLLOUT


def typing_error(
    path: str, key: str, value: Any, known: Set[str], written: Set[str] = frozenset(), *, may_be_variable: bool = False
) -> str | None:
    """Return the error for an unknown key, or None if the key resembles no known key.

    `may_be_variable` is True for a key at the top of a file. Such a key may define a variable, so it is accepted if it
    resembles no known key and its value is not a section.
    """
    student = _students(written)
    if not path and may_be_variable and not _is_of_role(key):
        place = None
    else:
        place = _best_place(tuple(path.split(".")) if path else (), key, written)
    if place and not path:
        return f"unknown key at the top; {_home(place)}{'.'.join((*place, key))}"
    if place and place[:1] == tuple(path.split("."))[:1]:
        return f"unknown key here; write it at {'.'.join((*place, key))}"
    if advice := _advice(f"{path}.{key}" if path else key, *student):
        return f"unknown key; {advice}"
    is_section = not path and isinstance(value, Mapping)
    if hint := did_you_mean(key, known, "", SAME_SECTION if is_section else RESEMBLES):
        return f"unknown key; {hint}"
    if place is not None:
        return f"unknown key here; write it at {'.'.join((*place, key)) if place else f'the top: {key}'}"
    if not path and is_worker(value, {*keys_of(Worker)}):
        return "unknown role; rename it to an existing role (docs/modes.md), or remove it"
    if is_section and not (may_be_variable and _holds_environments(value)):
        return _foreign_section(key, value, written)
    return None


def unknown_key_problem(
    section: type[Section], key: str, value: Any, known: Set[str], place: Diagnostics
) -> str | None:
    """Return the error for an unknown key of the section at `place`; None for an argument that the section passes on.

    An argument that resembles a key of the section is a misspelt key.
    """
    if section.free:
        hint = did_you_mean(key, known | REWARD_KEYS_OF_ROLL, "", SAME_WORD)
        return f"unknown key; {hint}" if hint and key not in REWARD_KEYS_OF_ROLL else None
    problem = typing_error(place.path, key, value, known, top_level(place))
    return problem or "unknown key, and no known key has a similar name; remove it"


def variables_of_file(
    values: Mapping[str, Any], known: set[str], ignored: frozenset[str], variables: frozenset[str], diag: Diagnostics
) -> set[str]:
    """Return the unknown top-level keys that may be variables of the file.

    Variables that no value refers to are recorded in `diag.dropped`.

    ROLL ignores all unknown keys. Here an unknown key is a typing error in three cases: its name resembles a known key,
    some section has a key of this name, or its value has keys of a role.
    """
    own = set()
    for key, value in values.items():
        if key in known:
            continue
        if key in variables:
            own.add(key)
        elif key in ignored or diag.origins.get(str(key)) == COMMAND_LINE:
            continue  # an override that no file refers to is not a variable
        elif not typing_error("", str(key), value, {*known, *ignored}, may_be_variable=True):
            own.add(key)
            diag.dropped.add(str(key))
    return own


def keys_of_other_pipelines(values: Mapping[str, Any], known: set[str], diag: Diagnostics) -> set[str]:
    """Return the keys that only other pipelines with a rollout have. They are reported as keys without effect."""
    others = {key for keys in PIPELINES.values() if issubclass(keys, Top) for key in keys_of(keys)}
    found = (values.keys() & others) - known
    diag.unused(*found)
    return found


def _advice(path: str, train: str, infer: str) -> str | None:
    """Return what to write in place of another tool's key, from the entry points in the group `roll_opd.key_words`.

    `path` is the dotted path of the key; `train` and `infer` are the names of the student's sections.
    """
    return next((text for entry in entries("key_words").values() if (text := load(entry)(path, train, infer))), None)


def _leaves(section: Mapping[str, Any], path: str) -> Iterator[str]:
    """Yield the dotted path of each value below the section at `path` that is not itself a section."""
    for key, value in section.items():
        place = f"{path}.{key}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, place)
        else:
            yield place


def _holds_environments(section: Mapping[str, Any]) -> bool:
    """Whether a section defines environments, which ROLL's files keep for `custom_envs` even if they refer to none."""
    return bool(section) and all(isinstance(one, Mapping) and "env_type" in one for one in section.values())


def _foreign_section(key: str, section: Mapping[str, Any], written: Set[str]) -> str:
    """Return the error for an unknown section at the top, with the keys here for the words of other tools in it."""
    known = []
    for path in _leaves(section, key):
        advice = _advice(path, *_students(written))
        last = path.rpartition(".")[2]
        if advice is None and (place := _best_place((key,), last, written)) is not None:
            advice = f"use {'.'.join((*place, last))}"
        known += [f"for {path} {advice}"] if advice else []
    remedy = ", ".join(known[:MOST_ADVICE]) or "move its keys to the sections of docs/configuration.md, or remove it"
    return f"unknown section, which no value of the file refers to; {remedy}"


def _home(place: Place) -> str:
    """Return the words before the full path of a key in the error about an unknown top-level key."""
    if not _is_role(place[0]):
        return "write it at "
    section = ".".join(place[1:])
    home = f"{section} of a role" if section else "a teacher" if place[0] == TEACHER else "a role"
    return f"it is a key of {home}; write it at "


def _best_place(path: Place, key: str, written: Set[str]) -> Place | None:
    """Return the section nearest to `path` in which a key has an effect, or None if there is no such section."""
    found = [_named(place, path) for place, keys in _places(path, written) if key in keys and _is_read(place, key)]
    found = [place for place in found if place != path]
    return max(found, key=lambda place: _shared(place, path), default=None)


def _shared(one: Place, other: Place) -> int:
    """Return the number of leading parts that two paths have in common."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _named(place: Place, path: Place) -> Place:
    """Return `place` with each `NAME` replaced by the part of `path` at the same position.

    A `NAME` is replaced only if all parts before it are the same in both paths. Otherwise `path` is in another section.
    """
    found: Place = ()
    for number, part in enumerate(place):
        found += (path[number] if part == NAME and found == path[:number] and len(path) > number else part,)
    return found


def _is_read(place: Place, key: str) -> bool:
    """Whether a key has an effect in the section at `place`. Outside the sections of roles, every key has an effect."""
    if not place or not _is_role(place[0]):
        return True
    inside = place[2:] if place[:2] == (TEACHER, NAME) else place[1:]
    return lacking(TeacherWorker(), (*inside, key)[0], {"kind": kind_of(place[0])}) is None


def _places(path: Place, written: Set[str]) -> Iterator[tuple[Place, Set[str]]]:
    """Yield (place, keys) for each section that a configuration can have.

    `written` has the top-level keys of the configuration. The sections to which a misplaced key is likely to belong
    come first.
    """
    train, infer = (next((names[at] for names in ROLES if names[at] in written), None) for at in (0, 1))
    supervised = _supervised(written)
    rolled_out = [keys for keys in PIPELINES.values() if issubclass(keys, Top)]  # Top comes first
    tops: list[type[Run]] = [supervised] if supervised else [*rolled_out]
    roles: dict[Place, type[Section]] = {}
    if supervised:
        roles[(supervised.role,)] = SupervisedWorker
    else:
        several = path[:1] == (TEACHER,) and len(path) > 1 and path[1] not in keys_of(TeacherWorker)
        roles[(train or PURE_ROLES[0],)] = roles[(infer or PURE_ROLES[1],)] = Worker
        roles[(TEACHER, NAME) if several else (TEACHER,)] = TeacherWorker
        roles[("critic",)] = Worker
    roles[("reference",)] = Worker
    yield (), {key for top in tops for key in keys_of(top)}
    for root, section in roles.items():
        yield from _tree(section, root).items()
        own = MEGATRON_OPTIONS if kind_of(root[0]) in MEGATRON else VLLM_OPTIONS
        if root[:1] == path[:1]:  # options of the other engine are found too, because they are errors here
            own = MEGATRON_OPTIONS | VLLM_OPTIONS
        yield (*root, *OPTIONS), own
    if not supervised:
        yield from _tree(Reward, ("rewards", NAME)).items()
    for top in tops:
        yield from _tree(top, ()).items()
    if not supervised:
        yield from _tree(RemoteModelKeys, ("auxiliary_models", NAME)).items()


def _supervised(written: Set[str]) -> type[Supervised] | None:
    """Return the keys of the supervised pipeline whose role is written, or None if there is no such role."""
    if TEACHER in written or any(infer in written for _, infer in ROLES):
        return None
    return next((one for one in supervised_pipelines().values() if one.role in written), None)


def _students(written: Set[str]) -> tuple[str, str]:
    """Return (training role, rollout role): the names of the student's sections, by the roles that are written."""
    supervised = _supervised(written)
    names = next((names for names in ROLES if not written.isdisjoint(names)), PURE_ROLES)
    return (supervised.role, names[1]) if supervised else names


def _tree(section: type[Section], root: Place) -> Mapping[Place, Set[str]]:
    """Return a map from the place of each section to its keys, for `section` and all sections inside it."""
    found: dict[Place, Set[str]] = {root: keys_of(section).keys()}
    for key, annotation in keys_of(section).items():
        for inside, names in _sections(annotation):
            found.update(_tree(inside, (*root, key, *names)))
    return found


def _sections(annotation: Any) -> Iterator[tuple[type[Section], Place]]:
    """Yield (section, path) for each section in a type annotation.

    The path is relative to the key. It contains `NAME` for the keys of a map, and "0" for the items of a tuple.
    """
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation, ()
    names: Place = (NAME,) if get_origin(annotation) is dict else ("0",) if get_origin(annotation) is tuple else ()
    for one in get_args(annotation):
        yield from ((inside, (*names, *below)) for inside, below in _sections(one))


@cache
def _is_of_role(key: str) -> bool:
    """Whether one of the sections of a role declares a key."""
    sections = ("", "model_args", "training_args", "data_args", "generating_args")
    tree = _tree(TeacherWorker, (TEACHER,))
    return any(key in keys for place, keys in tree.items() if ".".join(place[1:]) in sections)


def _is_role(name: str) -> bool:
    return name in (TEACHER, "reference", "critic") or name.endswith(("_train", "_infer"))


def top_level(diag: Diagnostics) -> Set[str]:
    """Return the top-level keys that the configuration sets."""
    return {key.partition(".")[0] for key in diag.origins}


def is_worker(data: Any, keys: set[str]) -> bool:
    """Whether a value is a mapping with keys of a role."""
    return isinstance(data, dict) and not keys.isdisjoint(data)
