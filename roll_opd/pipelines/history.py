"""The settings of a run, including all of its resumes.

A part is a range of consecutive steps with the same settings. Every checkpoint stores the parts, so that they are known
even if a run resumes from a checkpoint that was moved.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from roll_opd.base.failures import ConfigError
from roll_opd.base.user_modules import same_modules
from roll_opd.config.plan import RunPlan
from roll_opd.config.schema import MIXED_ROLES, PIPELINES, PURE_ROLES, Top, supervised_pipelines
from roll_opd.pipelines.plan_settings import CONTENT, Settings, as_written, settings_of
from roll_opd.planner.build import load_plan
from roll_opd.tracking.run_directory import RUN_FACTS

DISTRIBUTED_OPTIMIZER = (
    "strategy_args.strategy_config.use_distributed_optimizer"  # key on which the format of an optimizer state depends
)
SHOWN = 12  # maximum number of changes in the console line of a resumed run
FEW = 4  # maximum number of keys; a larger section that is added or removed counts as one change
LONGEST = 60  # maximum characters of a value in that line
# sections of the student
STUDENTS = (PURE_ROLES[0], MIXED_ROLES[0], *(keys.role for keys in supervised_pipelines().values()))
SAMPLERS = (PURE_ROLES[1], MIXED_ROLES[1])
# derived key -> source keys; a change of a derived key is not listed if a source key has changed
FOLLOWS = {
    r".+\.max_model_len": ("prompt_length", "response_length", "sequence_length"),
    "enable_old_logprobs_recompute": (
        *("ppo_epochs", "rollout_batch_size", "num_return_sequences_in_group", "train_env_manager.group_size"),
    ),
    "num_train_epochs": ("max_steps",),
    r"demonstrations\.updates": ("rollout_batch_size", "num_return_sequences_in_group", "expert_data_ratio"),
}
# changes in a line are ordered by the first of these patterns that matches
FIRST = (
    r".*\.(learning_rate|lr_scheduler_\w+.*|warmup_steps)",
    r".*training_args\..*",
    r"mode|pipeline|policy_loss.*|adv_estimator|opd_.*|.*kl.*|.*clip.*|gamma|lambd|beta",
    r"rollout_batch_size|num_return_sequences_in_group|ppo_epochs|max_steps|response_length|prompt_length|seed",
    r"(.*\.)?(model_args|data_args|generating_args)\..*|rewards\..*|workflow.*",
)
SHARED = ("opd_kl_coef", "training_args.max_grad_norm")  # keys of sections that also exist at the top level

# keys on which samples, their log-probs of teachers and reference, or their rewards depend
OF_SAMPLES = (
    r"(.*\.)?generating_args\..*|num_return_sequences_in_group|.*(prompt|response|sequence)_length|seed",
    r"(train_env_manager|custom_envs|workflow|rewards|opd_objective|opd_topk|teacher|rollout_temp).*",
    r".*(filter|tag_included).*|.*max_model_len",
)
# parts of a frozen role that do not change its log-probs
ENGINE_LAYOUT = ("device_mapping", "strategy_args", "infer_batch_size")

Changes = dict[str, tuple[Any, Any]]  # key -> value before, value now; None: not set


@dataclass(frozen=True)
class RunPart:
    """Consecutive steps with the same settings.

    `settings` is None if the settings are unknown, for example if an earlier version saved the checkpoint.
    """

    first: int
    last: int | None  # None for the current part
    settings: Settings | None


@dataclass(frozen=True)
class History:
    """The parts of a run, with the current part last.

    `changes` contains the settings that changed when the run was last resumed.
    """

    parts: tuple[RunPart, ...]
    resumed_after: int | None = None  # step; None: a new run
    changes: Changes = field(default_factory=dict)

    def up_to(self, step: int) -> tuple[RunPart, ...]:
        """Return the parts up to the end of `step`."""
        return (*self.parts[:-1], replace(self.parts[-1], last=step))

    def as_json(self, step: int) -> list[dict[str, Any]]:
        """Return the parts for a checkpoint after `step`, in the form that `parts_of` reads."""
        return [asdict(part) for part in self.up_to(step)]

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
    return History((RunPart(1, None, settings_of(plan)),))


def continued(parts: Sequence[RunPart], plan: RunPlan, step: int) -> History:
    """Return the history of a run that resumes after `step`. If any setting has changed, the history has a new part."""
    settings, known = settings_of(plan), parts[-1].settings
    changes = {} if known is None else differences(known, settings)
    if known is not None and not changes:
        return History((*parts[:-1], replace(parts[-1], last=None, settings=settings)), step)
    return History((*parts, RunPart(step + 1, None, settings)), step, changes)


def parts_of(saved: Any, step: int) -> tuple[RunPart, ...]:
    """Return the parts in a checkpoint of `step`.

    If the checkpoint has no parts, or the parts are damaged, return a single part with unknown settings.
    """
    try:
        parts = tuple(RunPart(int(each["first"]), int(each["last"]), each["settings"]) for each in saved)
        if parts and all(part.settings is None or isinstance(part.settings, dict) for part in parts):
            return parts
    except (TypeError, KeyError, ValueError):
        pass
    return (RunPart(1, step, None),)


def read_settings(run: Path, like: RunPlan) -> Settings | None:
    """Return the settings in the config.yaml of a run, or None if they cannot be read.

    The settings are read from this file if the checkpoint of the run has none.
    """
    if not (run / "config.yaml").is_file():
        return None
    named = like.pipeline if like.pipeline in PIPELINES.keys() - {Top.pipeline} else None
    try:
        with same_modules():
            plan = load_plan(str(run), "config", pure=None if named else like.mode == "pure", pipeline=named)
        return settings_of(plan)
    except (ConfigError, OSError, ValueError):
        return None


def optimizer_problems(settings: History, checkpoint: Path) -> list[str]:
    """Return an error for each changed setting that makes the optimizer state in `checkpoint` unusable."""
    now, problems = settings.parts[-1].settings or {}, []
    for key, (before, after) in settings.changes.items():
        section = key.removesuffix(f".{DISTRIBUTED_OPTIMIZER}").removesuffix(".model_args.dtype")
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

    If a section was renamed, its name in `now` is used. A change that is derived from another change is left out.
    """
    before, now = renamed(as_written(before), now), as_written(now)
    found: Changes = {
        key: (before.get(key), now.get(key))
        for key in dict.fromkeys((*now, *before))
        if before.get(key) != now.get(key)
    }
    found = _whole_sections(found, before, now)
    for key in list(found):
        if _follows(key, found):
            del found[key]
    for key in SHARED:
        sections = [each for each in now if each.endswith(f".{key}")]
        if sections and len({str(found.get(each)) for each in sections}) == 1 and sections[0] in found:
            change = found[sections[0]]
            found = {each: value for each, value in found.items() if each not in sections}
            found[key.rpartition(".")[2]] = change
    return {key: found[key] for key in sorted(found, key=_place)}


def changed_samples(changes: Changes, frozen: Sequence[str]) -> str | None:
    """Return the first changed key that affects samples or the log-probs of frozen roles, or None if there is none.

    `frozen` are the names of the frozen roles.
    """
    for key in changes:
        section, _, rest = key.partition(".")
        if section == "validation":
            continue
        is_layout = section in frozen and rest.startswith(ENGINE_LAYOUT)
        if not is_layout and (section in frozen or any(re.fullmatch(pattern, key) for pattern in OF_SAMPLES)):
            return key
    return None


def _place(key: str) -> int:
    return next((place for place, pattern in enumerate(FIRST) if re.fullmatch(pattern, key)), len(FIRST))


def _follows(key: str, found: Changes) -> bool:
    """Return whether a change is derived from another change."""
    if key.endswith(CONTENT):  # the path also changed, or a hash is missing
        return key.removesuffix(CONTENT) in found or None in found[key]
    follows = any(re.fullmatch(pattern, key) and set(others) & found.keys() for pattern, others in FOLLOWS.items())
    return follows or key.removeprefix("policy_loss_fn_args.") in found.keys() - {key}


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
    return any(key.startswith(f"{section}.") and value is not None for key, value in settings.items())


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
