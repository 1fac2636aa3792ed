"""Split a composed configuration into its sections, and validate each section.

A section with a wrong value becomes None, so later checks run on the other sections only. `unknown_keys` has the errors
for unknown keys. `Diagnostics` collects keys of ROLL that have no effect here.
"""

from collections.abc import Set
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from roll_opd.base import hardware
from roll_opd.base.failures import nearest
from roll_opd.config.diagnostics import Diagnostics
from roll_opd.config.schema import (
    MIXED_ROLES,
    PURE_ROLES,
    Reading,
    RemoteModelKeys,
    Reward,
    Run,
    Section,
    Supervised,
    SupervisedWorker,
    TeacherWorker,
    Worker,
    changed,
    keys_of,
)
from roll_opd.planner.unknown_keys import (
    SAME_WORD,
    is_worker,
    keys_of_other_pipelines,
    unknown_key_problem,
    variables_of_file,
)

S = TypeVar("S", bound=Section)
REFERENCE = "reference"
CRITIC = "critic"
AUXILIARY = "auxiliary_models"
LOCAL_JUDGE = "inference"  # `judge_model_type` of a judge with local engines
SHARED_JUDGE = "cluster"  # `judge_model_type` of a judge whose engine is in section `reward_model`
FRESH_SAMPLES = (
    "a teacher file has scores only of the answers in it, but this run distils on fresh samples of the student"
)
INSTEAD_OF_FILES = (
    "name the teacher's model in model_args.model_name_or_path, or remove student_infer (actor_infer) to train on the"
    " file's answers (pipeline offline_distill)"
)
ENGINE_KEYS = (
    *("model_args", "strategy_args", "generating_args", "device_mapping", "system_envs", "training_args"),
    "num_gpus_per_worker",
)


@dataclass
class Sections:
    """The sections of a validated configuration.

    A section is None if it has a problem. A section that the user did not write is absent. `RoleReader` replaces the
    roles that the run uses by roles with derived values, and sets `train` to `critic`.
    """

    mode: str = ""
    top: Run | None = None
    workers: dict[str, Worker | None] = field(default_factory=dict)  # name of the section -> role
    teachers: dict[str, Worker] = field(default_factory=dict)  # name of the teacher -> role
    rewards: dict[str, Reward | None] = field(default_factory=dict)
    judges: dict[str, Worker] = field(default_factory=dict)  # domain -> the engine that is its judge
    auxiliaries: dict[str, Worker | RemoteModelKeys] = field(default_factory=dict)  # models that workflows call
    pretrain: str | None = None  # `pretrain` as configured; present even if `top` has a wrong value
    lacks_teacher: bool = False  # a teacher's section has a problem
    train: Worker | None = None
    infer: Worker | None = None
    reference: Worker | None = None
    critic: Worker | None = None

    def all(self) -> list[Worker]:
        """Return the student's roles, the teachers, the reference policy and the critic, without the missing ones."""
        found = (self.train, self.infer, *self.teachers.values(), self.reference, self.critic)
        return [role for role in found if role is not None]

    def placed(self) -> list[Worker]:
        """Return every role that has devices."""
        models = [model for model in self.auxiliaries.values() if isinstance(model, Worker)]
        return [*self.all(), *self.judges.values(), *models]

    def written(self) -> list[Worker]:
        """Return all configured roles, except judges and auxiliary models."""
        return [worker for worker in (*self.workers.values(), *self.teachers.values()) if worker is not None]

    @property
    def shared_vocabulary(self) -> int:
        """Number of token ids that are valid for the student and for every teacher with the student's tokenizer.

        The value is 0 if no model could be read.
        """
        roles = [role for role in (self.train, *self.teachers.values()) if role and not role.is_aligned]
        return min((role.info.vocab for role in roles if role.info), default=0)


def read_sections(
    values: dict[str, Any], variables: frozenset[str], keys: type[Run], mode: str, diag: Diagnostics
) -> Sections:
    """Validate the configuration `values`; report problems and warnings to `diag`.

    An unknown key is accepted as a variable of the user if another value refers to it. Any other unknown key is dropped
    with a warning, or it is an error if it looks like a misspelt key, see `variables_of_file`.

    Args:
        variables: top-level keys that other values refer to, as `${name}`.
        keys: the class that defines the keys of the pipeline.
        mode: the mode of the run. ROLL's pure distillation maps `teacher` to `reference`, so a pure configuration may
            give the teacher this name.
    """
    pretrain = values.get("pretrain")
    sections = Sections(mode, pretrain=pretrain if isinstance(pretrain, str) else None)
    roles: dict[str, type[Worker]] = dict.fromkeys((*PURE_ROLES, *MIXED_ROLES, REFERENCE, CRITIC), Worker)
    supervised = keys if issubclass(keys, Supervised) else None
    if supervised:
        roles = {supervised.role: SupervisedWorker} | ({REFERENCE: Worker} if supervised.has_reference else {})
    known = {
        *keys_of(keys),
        *roles,
        *(("teacher", "rewards", "reward_model", AUXILIARY) if supervised is None else ()),
    }
    left_out = variables_of_file(values, known, keys.ignored, variables, diag)
    if supervised is None:
        left_out |= keys_of_other_pipelines(values, known, diag)
    rest = {key: value for key, value in values.items() if key not in left_out}
    if supervised and supervised.has_reference:
        rest.setdefault(REFERENCE, {})
    teacher = REFERENCE if mode == "pure" and not values.get("teacher") and values.get(REFERENCE) else "teacher"
    for role, worker in roles.items():
        if role in rest and role != teacher:
            sections.workers[role] = read_section(worker, rest.pop(role), diag.below(role))
    if supervised is None:
        rest.setdefault("teacher", None)
        _read_teachers(rest.pop(teacher), teacher, sections, diag)
        rest.pop("teacher", None)
        _read_rewards(rest.pop("rewards", None), rest.pop("reward_model", None), sections, diag)
        _read_auxiliaries(rest.pop(AUXILIARY, None), sections, diag)
    sections.top = _with_devices(read_section(keys, rest, diag, known), sections)
    return sections


def _with_devices(top: Run | None, sections: Sections) -> Run | None:
    """Set num_gpus_per_node to the number of devices of this machine.

    Nothing is set if the configuration has num_gpus_per_node, or a device_mapping in any role.
    """
    workers = (*sections.workers.values(), *sections.teachers.values(), *sections.judges.values())
    written = any(worker is not None and worker.device_mapping is not None for worker in workers)
    if top is None or written or "num_gpus_per_node" in top.written:
        return top
    return changed(top, {"num_gpus_per_node": hardware.devices()})


def _read_teachers(value: Any, name: str, sections: Sections, diag: Diagnostics) -> None:
    """Read the teachers from the section called `name`.

    If the section itself has keys of a role, it describes a single teacher, which is named "teacher".
    """
    section, single, mapping = name, name, _mapping(value, name, diag)
    of_files = [name for name, data in mapping.items() if isinstance(data, dict) and "files" in data]
    if "files" in mapping or of_files:
        for name in of_files or [""]:
            place = diag.below(f"{section}.{name}".rstrip("."))
            place.error("files", f"{FRESH_SAMPLES}; {INSTEAD_OF_FILES}")
        sections.lacks_teacher = True
        return
    keys = {*keys_of(TeacherWorker), *Worker.ignored}
    # `model_arg:` is a misspelt key of the single teacher, not a teacher of that name
    misspelt = any(nearest(str(key), keys, SAME_WORD) for key, data in mapping.items() if not is_worker(data, keys))
    if keys.intersection(mapping) or misspelt:
        mapping, section = {"teacher": mapping}, ""
    for name, data in mapping.items():
        place = diag.below(f"{section}.{name}" if section else single)
        if teacher := read_section(TeacherWorker, data, place):
            sections.teachers[str(name)] = teacher
        sections.lacks_teacher |= teacher is None


def _read_rewards(value: Any, shared: Any, sections: Sections, diag: Diagnostics) -> None:
    """Read the rewards, and the engines of local judges.

    The keys of a local judge's engine are in the section of its reward.

    Args:
        shared: the section `reward_model`. It describes the engine of the first reward that uses the shared judge.
    """
    for domain, data in _mapping(value, "rewards", diag).items():
        place, judge = diag.below(f"rewards.{domain}"), _judge_type(data)
        if isinstance(data, dict) and isinstance(terms := data.get("terms"), dict):
            data = {**data, "terms": {name: term or {} for name, term in terms.items()}}
        if judge == SHARED_JUDGE and isinstance(shared, dict):
            judged = read_section(Worker, shared, diag.below("reward_model"))
            sections.judges |= {domain: judged} if judged else {}
            data, shared = data | {"judge_model_type": LOCAL_JUDGE}, None
        elif judge == LOCAL_JUDGE:
            of_engine = {key: value for key, value in data.items() if key in ENGINE_KEYS}
            judged = read_section(Worker, of_engine, place)
            sections.judges |= {domain: judged} if judged else {}
            data = {key: value for key, value in data.items() if key not in ENGINE_KEYS} | {"judge_model_type": judge}
        sections.rewards[domain] = read_section(Reward, data, place)
    if shared is not None:
        diag.unused("reward_model")


def _read_auxiliaries(value: Any, sections: Sections, diag: Diagnostics) -> None:
    """Read the auxiliary models of workflows.

    Each section describes either inference engines or the address of a server.
    """
    for name, data in _mapping(value, AUXILIARY, diag).items():
        place = diag.below(f"{AUXILIARY}.{name}")
        if not (isinstance(data, dict) and keys_of(RemoteModelKeys).keys() & data.keys()):
            if local := read_section(Worker, data, place):
                sections.auxiliaries[name] = local
        elif remote := read_section(RemoteModelKeys, data, place):
            sections.auxiliaries[name] = remote
            for key in sorted({"base_url", "model_name"} - remote.written):
                place.error(key, "is missing; write both base_url and model_name")


def _judge_type(reward: Any) -> Any:
    if not isinstance(reward, dict):
        return None
    args = reward.get("args")
    return {**(args if isinstance(args, dict) else {}), **reward}.get("judge_model_type")


def _mapping(value: Any, path: str, diag: Diagnostics) -> dict[str, Any]:
    if value is None or isinstance(value, dict):
        return value or {}
    diag.error(path, f"expected a mapping of names to sections, got {value!r}")
    return {}


def read_section(model: type[S], data: Any, diag: Diagnostics, also_known: Set[str] = frozenset()) -> S | None:
    """Validate the section that `diag` belongs to; return None if the section has a wrong value.

    Args:
        model: the class of the section.
        data: the section as configured.
        also_known: valid keys that other code reads. The hint for a misspelt key may name them.
    """
    if data is None:
        data = {}
    if not isinstance(data, dict):
        diag.error("", f"expected a section with keys, got {data!r}")
        return None

    def is_free(section: type[Section], key: str, value: Any, place: Diagnostics) -> bool:
        known = {*keys_of(section), *section.ignored, *(also_known if section is model else ())}
        problem = unknown_key_problem(section, key, value, known, place)
        if problem:
            place.error(key, problem)
        return problem is None

    paths: dict[int, str] = {}
    copied = _copied(data, "", paths)
    try:
        section: S = _validator(model).validate_python(copied, context=Reading(diag, paths, is_free))
    except ValidationError as error:
        _report(error, diag)
        return None
    return section


def _copied(value: Any, path: str, paths: dict[int, str]) -> Any:
    """Return a copy of a value that contains JSON types only.

    The path of each copied mapping is recorded in `paths`, by the `id` of the mapping.
    """
    if isinstance(value, dict):
        copied = {str(key): _copied(item, f"{path}.{key}" if path else str(key), paths) for key, item in value.items()}
        paths[id(copied)] = path
        return copied
    if isinstance(value, list):
        return [_copied(item, f"{path}.{number}", paths) for number, item in enumerate(value)]
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _validator(model: type[Section]) -> TypeAdapter[Any]:
    """Return the pydantic validator of a section.

    Validators are cached, because it takes milliseconds to create one.
    """
    if model not in _VALIDATORS:
        _VALIDATORS[model] = TypeAdapter(model)
    return _VALIDATORS[model]


_VALIDATORS: dict[type[Section], TypeAdapter[Any]] = {}


def _report(error: ValidationError, diag: Diagnostics) -> None:
    """Report the errors that pydantic found, with one sentence for each key."""
    expected: dict[str, list[str]] = {}
    inputs: dict[str, Any] = {}
    for item in error.errors(include_url=False):
        # a union adds the tried type ("bool", "tuple[...]") to the location; the user wrote no such key
        parts = takewhile(lambda part: part not in _TYPE_NAMES and "[" not in part, map(str, item["loc"]))
        key = ".".join(filter(None, parts))
        text = _EXPECTED.get(item["type"]) or str(item["msg"])
        # the second prefix comes from our own validators
        text = text.removeprefix("Input should be ").removeprefix("Value error, ")
        expected.setdefault(key, []).append(text)
        inputs[key] = item["input"]
    for key, texts in expected.items():
        got = f", got {diag.as_written(key, inputs[key])}" if inputs[key] is not None else ""
        diag.error(key, f"should be {' or '.join(dict.fromkeys(texts))}{got}")


_TYPE_NAMES = {"bool", "str", "int", "float", "constrained-int", "constrained-float"}
_EXPECTED = {  # type of pydantic's error -> the expected value, in YAML's words
    "string_too_short": "a text that is not empty",
    "tuple_type": "a valid array",
    "dict_type": "an object",
    "dataclass_type": "an object",
}
