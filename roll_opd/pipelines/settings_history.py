"""The settings of a run, including all of its resumes.

The settings are the values of the configuration, under their dotted keys, and hashes of the models and data files. A
part is a range of consecutive steps with the same settings. Every checkpoint stores the parts, so that they are known
even if a run resumes from a checkpoint that was moved.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from roll_opd.base.frozen import FrozenDict
from roll_opd.config.plan import Layout, MegatronPlan, MicroBatchLimits, RunPlan
from roll_opd.config.schema import MIXED_ROLES, PURE_ROLES, CheckpointKeys, keys_of, supervised_pipelines
from roll_opd.config.yaml_files import LOADER
from roll_opd.models.model_info import fingerprint
from roll_opd.tracking.run_directory import RUN_FACTS

Settings = dict[str, Any]  # key of the configuration -> value, in the types of JSON
Changes = dict[str, tuple[Any, Any]]  # key -> value before, value now; None: not set

CONTENT = " (content)"  # suffix of keys whose value is the hash of a model or of data files
WHOLE_BYTES = 16 * 2**20  # files up to this size are hashed completely; of larger files, pieces are hashed
MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model")  # files that determine a model's outputs
DISTRIBUTED_OPTIMIZER = "strategy_args.strategy_config.use_distributed_optimizer"
DTYPE = "model_args.dtype"
# keys that do not influence results
NO_SETTINGS = frozenset({
    *keys_of(CheckpointKeys),
    *("output_dir", "logging_dir", "exp_name", "resume_from_checkpoint", "track_with", "tracker_kwargs"),
    *("logging_steps", "logged_samples_per_step", "device_memory_gb", "max_restarts", "max_lost_workers"),
    *("startup_timeout_s", "server_timeout_s", "shutdown_timeout_s", "host_timeout_s", "stall_timeout_s"),
    "hang_timeout_s",
    "min_batch_fraction",
})  # fmt: skip
SHOWN = 12  # maximum number of changes in the console line of a resumed run
FEW = 4  # maximum number of keys; a larger section that is added or removed counts as one change
LONGEST = 60  # maximum characters of a value in that line
# names of the section of the student, and of its engines
STUDENTS = (PURE_ROLES[0], MIXED_ROLES[0], *(keys.role for keys in supervised_pipelines().values()))
SAMPLERS = (PURE_ROLES[1], MIXED_ROLES[1])


@dataclass(frozen=True)
class RunPart:
    """Consecutive steps with the same settings. `settings` is None if they are unknown.

    `samples` has a digest of each part of the plan on which samples depend.
    """

    first: int
    last: int | None  # None for the current part
    settings: Settings | None
    samples: Mapping[str, str] = field(default_factory=FrozenDict)


@dataclass(frozen=True)
class History:
    """The parts of a run, with the current part last.

    `changes` contains the settings that changed when the run was last resumed. `resampled` is the first part of the
    plan on which samples depend and that changed then; None if there is none.
    """

    parts: tuple[RunPart, ...]
    resumed_after: int | None = None  # step; None: a new run
    changes: Changes = field(default_factory=dict)
    resampled: str | None = None

    def up_to(self, step: int) -> tuple[RunPart, ...]:
        """Return the parts up to the end of `step`."""
        return (*self.parts[:-1], replace(self.parts[-1], last=step))

    def as_json(self, step: int) -> list[dict[str, Any]]:
        """Return the parts for a checkpoint after `step`, in the form that `parts_of` reads."""
        return [asdict(part) | {"samples": dict(part.samples)} for part in self.up_to(step)]

    def as_facts(self, step: int | None = None) -> list[dict[str, Any]]:
        """Return the first and last step of each part, and its changes from the previous part.

        The changes are None if the settings of one of the two parts are unknown.
        """
        found: list[dict[str, Any]] = []
        parts = self.parts if step is None else self.up_to(step)
        for before, part in zip((None, *parts), parts, strict=False):
            changed: dict[str, list[Any]] | None = {}
            if part.settings is None or (before and before.settings is None):
                changed = None
            elif before and before.settings is not None:
                changed = {key: list(change) for key, change in differences(before.settings, part.settings).items()}
            found.append({"first": part.first, "last": part.last, "changed": changed})
        return found

    @property
    def line(self) -> str:
        """Return the console line about the changed settings of a resumed run, or "" for a new run."""
        step = self.resumed_after
        if step is None:
            return ""
        before = self.parts[-2] if len(self.parts) > 1 else None
        if before and before.settings is None and before.last == step:
            return f"Settings of steps {before.first} to {step} are unknown: the checkpoint was saved without them"
        if not self.changes:
            return f"Settings are the same as in step {step}"
        shown = list(changes_text(self.changes))
        more = f"; and {len(shown) - SHOWN} more, in {RUN_FACTS}" if len(shown) > SHOWN else ""
        return f"Settings changed after step {step}: {'; '.join(shown[:SHOWN])}{more}"


def begun(plan: RunPlan) -> History:
    """Return the history of a new run."""
    return History((RunPart(1, None, settings_of(plan), _of_samples(plan)),))


def continued(parts: Sequence[RunPart], plan: RunPlan, step: int) -> History:
    """Return the history of a run that resumes after `step`. If any setting has changed, the history has a new part."""
    before, now = parts[-1], replace(begun(plan).parts[0], first=step + 1)
    changes = {} if before.settings is None else differences(before.settings, now.settings or {})
    resampled = next((name for name, digest in now.samples.items() if before.samples.get(name) != digest), None)
    if before.settings is not None and not changes:
        return History((*parts[:-1], replace(now, first=before.first)), step, resampled=resampled)
    return History((*parts, now), step, changes, resampled)


def parts_of(saved: Any, step: int) -> tuple[RunPart, ...]:
    """Return the parts in a checkpoint of `step`; a single part with unknown settings if they are damaged."""
    try:
        parts = tuple(RunPart(each["first"], each["last"], each["settings"], dict(each["samples"])) for each in saved)
        if parts and all(part.settings is None or isinstance(part.settings, dict) for part in parts):
            return parts
    except (TypeError, KeyError, ValueError):
        pass
    return (RunPart(1, step, None),)


def settings_of(plan: RunPlan) -> Settings:
    """Return the settings of a run, without API keys. Raises OSError if a file cannot be read."""
    written = yaml.load(plan.config_yaml, Loader=LOADER) or {}  # without secrets
    found: Settings = dict(_leaves({key: value for key, value in written.items() if key not in NO_SETTINGS}))
    found |= {"mode": plan.mode, "pipeline": plan.pipeline}
    for role in filter(None, (plan.student, plan.critic)):  # the format of an optimizer state depends on them
        found[f"{role.name}.{DISTRIBUTED_OPTIMIZER}"] = role.optimizer.use_distributed_optimizer
        found[f"{role.name}.{DTYPE}"] = role.model.dtype
    paths = {role.model.path: f"{role.name}.model_args.model_name_or_path" for role in reversed(plan.roles().values())}
    contents = {key: _model_files(Path(path)) for path, key in paths.items()}
    data = {plan.student.name: plan.data}
    data |= {"validation": plan.validation.data} if plan.validation else {}
    data |= {"demonstrations": plan.demonstrations.data} if plan.demonstrations else {}
    contents |= {f"{name}.data_args.file_name": [Path(file) for file in rows.files] for name, rows in data.items()}
    return found | {f"{key}{CONTENT}": _hash(files) for key, files in contents.items() if files}


def _leaves(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of each value that is not a section."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{path}{key}.")
        elif value is not None:
            yield f"{path}{key}", value


def _of_samples(plan: RunPlan) -> dict[str, str]:
    """Return digests of what samples, their rewards and the log-probs of frozen roles depend on, by its name."""
    rollout, objective = plan.rollout, plan.objective
    if rollout is None:
        return {}
    found: dict[str, object] = {
        "seed": plan.seed,
        "workflow": (plan.workflow, plan.data.environments),
        "generating_args": (rollout.sampling, rollout.max_model_len, plan.data.prompt_length),
        "rewards": plan.rewards,
        "opd_objective": (objective.opd_objective, objective.opd_topk, objective.opd_topk_source),
        "reference": plan.reference and _weights(plan.reference),
    }
    for teacher in plan.teachers:
        source = _weights(teacher.role) if teacher.role else teacher.source
        found[teacher.source.name] = replace(teacher, source=source)
    contents = [_model_files(Path(role.model.path)) for role in plan.frozen_roles()]
    found["weights of frozen models"] = [_hash(files) for files in contents]
    return {name: hashlib.sha256(repr(value).encode()).hexdigest()[:12] for name, value in found.items()}


def _weights(role: MegatronPlan) -> MegatronPlan:
    """Return a frozen role without its layout, which does not change its log-probs."""
    layout: dict[str, Any] = {"devices": (), "layout": Layout(), "forward_limits": MicroBatchLimits()}
    return replace(role, **layout, megatron_args=FrozenDict(), env=FrozenDict())


def optimizer_problems(settings: History, checkpoint: Path) -> list[str]:
    """Return an error for each changed setting that makes the optimizer state in `checkpoint` unusable."""
    now, problems = settings.parts[-1].settings or {}, []
    for key, (before, after) in settings.changes.items():
        section = key.removesuffix(f".{DISTRIBUTED_OPTIMIZER}").removesuffix(f".{DTYPE}")
        is_distributed = now.get(f"{section}.{DISTRIBUTED_OPTIMIZER}")
        if None in (before, after) or section == key or is_distributed is None:
            continue
        if key.endswith(DISTRIBUTED_OPTIMIZER) or not is_distributed:
            values = text_of(before), text_of(after)
            problems.append(
                f"{key}: {values[1]} cannot load the optimizer state in {checkpoint}, which was saved with"
                f" {values[0]}; write {values[0]}, or start a new run with resume_from_checkpoint: false"
            )
    return problems


def differences(before: Settings, now: Settings) -> Changes:
    """Return the settings that differ between `before` and `now`.

    If a section was renamed, its name in `now` is used. The content of a path counts only if the path is the same.
    """
    before = renamed(before, now)
    found: Changes = {
        key: (before.get(key), now.get(key))
        for key in dict.fromkeys((*now, *before))
        if before.get(key) != now.get(key)
    }
    found = _whole_sections(found, before, now)
    moved = {
        key for key in found if key.endswith(CONTENT) and (None in found[key] or key.removesuffix(CONTENT) in found)
    }
    return {key: change for key, change in found.items() if key not in moved}


def renamed(before: Settings, now: Settings) -> Settings:
    """Return the settings `before` with the section names that `now` uses.

    The section of the student and the section of its engines have several possible names, so their names may differ
    between two configurations.
    """
    names = {}
    for same in (STUDENTS, SAMPLERS):
        old, new = (next((name for name in same if _has(of, name)), None) for of in (before, now))
        if old and new and old != new:
            names[old] = new
    return {".".join((names.get(head, head), *tail)): before[key] for key in before for head, *tail in [key.split(".")]}


def _whole_sections(found: Changes, before: Settings, now: Settings) -> Changes:
    """Return the changes with a single entry for each large section that was added or removed."""
    whole: dict[str, tuple[Any, Any]] = {}
    keys = Counter(key.partition(".")[0] for key in found if "." in key)
    for section in (name for name, count in keys.items() if count > FEW):
        there = [_has(of, section) for of in (before, now)]
        if there[0] != there[1]:
            whole[section] = ("written" if there[0] else None, "written" if there[1] else None)
    return {key: change for key, change in found.items() if key.partition(".")[0] not in whole} | whole


def _has(settings: Settings, section: str) -> bool:
    return any(key.startswith(f"{section}.") for key in settings)


def _model_files(directory: Path) -> list[Path]:
    """Return the files of a model, except broken links and hidden files, such as `._model.safetensors`."""
    found = (file for pattern in MODEL_FILES for file in directory.glob(pattern) if file.is_file())
    return sorted(file for file in found if not file.name.startswith("."))


def _hash(files: list[Path]) -> str:
    """Return a short hash of the names and contents of files. It does not depend on their directory."""
    digest = hashlib.sha256()
    for file in files:
        small = file.stat().st_size <= WHOLE_BYTES
        content = hashlib.sha256(file.read_bytes()).hexdigest() if small else fingerprint(file)
        digest.update(f"{file.name} {content}\n".encode())
    return digest.hexdigest()[:12]


def changes_text(changes: Mapping[str, tuple[Any, Any]]) -> Iterator[str]:
    """Yield each change as `key: before → now`."""
    for key, (before, now) in changes.items():
        if key.endswith(CONTENT):
            yield f"{key.removesuffix(CONTENT)}: same path, different content ({before} → {now})"
        else:
            yield f"{key}: {text_of(before)} → {text_of(now)}"


def text_of(value: Any) -> str:
    """Return a value as the text that a configuration has, in one line of at most `LONGEST` characters.

    If the text is longer, its end is kept.
    """
    if value is None or isinstance(value, bool):
        text = {None: "none", True: "true", False: "false"}[value]
    elif isinstance(value, float):
        text = f"{value:g}" if float(f"{value:g}") == value else repr(value)
    else:
        text = ", ".join(map(text_of, value)) if isinstance(value, list) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else f"…{text[-LONGEST + 1 :]}"
