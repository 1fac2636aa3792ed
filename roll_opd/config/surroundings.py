"""Checks a configuration against the world around it: data files, tags, rewards, disk, resume.

Reads a little of the disk and writes nothing; problems and warnings go to `Findings`.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from roll_opd.config.errors import Findings
from roll_opd.config.frozen import FrozenDict
from roll_opd.config.known_names import (
    DOTTED,
    REWARD_CLASSES_OF_ROLL,
    REWARD_WORKERS,
    TEMPLATES,
)
from roll_opd.config.models import ModelFacts, find_path, places
from roll_opd.config.plan import DataPlan, Mode, RewardPlan
from roll_opd.config.schema import DataArgs, Reward, Top

ROWS_SCANNED = 50_000  # tags are looked up in the first rows of a file; enough for a mistake to show, and fast
CHECKPOINT_BYTES_PER_PARAMETER = 16  # weights, fp32 master weights and two Adam moments, 4 bytes each
DEFAULT_TAG = "math_rule"  # of a row without a tag, as in `roll_opd.data.rows`


def read_data(args: DataArgs, path: str, top: Top, findings: Findings) -> DataPlan | None:
    """Return the prompts' plan with absolute file names, None if a file is missing."""
    if not args.file_name:
        findings.problem(f"{path}.file_name", "is missing; name the JSONL file of prompts")
        return None
    files = []
    for name in args.file_name:
        file = find_path(name)
        if file is None or not file.is_file():
            findings.problem(f"{path}.file_name", f"no file {name!r} from {places()}")
        elif not os.access(file, os.R_OK):
            findings.problem(f"{path}.file_name", f"{file} may not be read")
        else:
            files.append(str(file))
    template = args.template or top.global_template or "native"
    if template not in TEMPLATES:
        key = f"{path}.template" if args.template else "global_template"
        findings.problem(key, f"{template!r} is not a known template; known: {', '.join(TEMPLATES)}")
    if len(files) < len(args.file_name):
        return None
    return DataPlan(tuple(files), top.prompt_length, template, top.on_bad_row, top.on_long_prompt, args.limit)


def read_rewards(rewards: Mapping[str, Reward | None], findings: Findings) -> tuple[RewardPlan, ...]:
    """Return the reward workers; each tag may belong to one domain only."""
    plans = []
    for domain, reward in rewards.items():
        if reward is None:
            continue
        worker = _reward_worker(domain, reward, findings)
        tags = reward.tag_included or None
        plans.append(RewardPlan(domain, worker, tags, reward.world_size, FrozenDict(reward.args)))
    for index, plan in enumerate(plans):
        for other in plans[:index]:
            shared = _shared_tags(plan.tags, other.tags)
            if shared is not None:
                findings.problem(
                    f"rewards.{plan.domain}.tag_included", f"{shared} also belongs to rewards.{other.domain}"
                )
    return tuple(plans)


def _shared_tags(one: tuple[str, ...] | None, other: tuple[str, ...] | None) -> str | None:
    if one is None or other is None:
        return "every tag (tag_included is not written)"
    return next((f"tag {tag!r}" for tag in one if tag in other), None)


def _reward_worker(domain: str, reward: Reward, findings: Findings) -> str:
    name = reward.worker_cls or domain
    known = REWARD_CLASSES_OF_ROLL.get(name.rpartition(".")[2], name)
    is_users_own = DOTTED.fullmatch(known) and not known.startswith("roll.")
    if known not in REWARD_WORKERS and not is_users_own:
        names = ", ".join((*REWARD_WORKERS, *REWARD_CLASSES_OF_ROLL))
        findings.problem(
            f"rewards.{domain}.worker_cls",
            f"no reward worker {name!r}; known: {names}; or write the dotted path of your own class",
        )
    return known


def check_tags(
    mode: Mode,
    teacher_tags: Mapping[str, tuple[str, ...] | None],
    rewards: tuple[RewardPlan, ...],
    data: DataPlan | None,
    validation: DataPlan | None,
    findings: Findings,
) -> None:
    """Check tags; `teacher_tags` maps a teacher's section to its tags, None for every tag.

    Every tag in the data needs a teacher (training) and a reward worker (where rewards count).
    """
    if not any(tags is not None for tags in (*teacher_tags.values(), *(reward.tags for reward in rewards))):
        return
    train_tags = tags_in(data) if data else set()
    validation_tags = tags_in(validation) if validation else set()
    for tag in sorted(train_tags):
        if teacher_tags and not any(tags is None or tag in tags for tags in teacher_tags.values()):
            findings.problem("teacher", f"no teacher has tag {tag!r} of the training data in its tag_included")
        if rewards and not any(reward.scores(tag) for reward in rewards):
            text = f"no reward has tag {tag!r} of the training data in its tag_included"
            if mode == "pure":
                findings.warn(f"rewards: {text}; its reward is not monitored")
            else:
                findings.problem("rewards", text)
    for tag in sorted(validation_tags):
        if rewards and not any(reward.scores(tag) for reward in rewards):
            findings.problem("rewards", f"no reward has tag {tag!r} of the validation data in its tag_included")
    present = train_tags | validation_tags
    for path, tags in [
        *teacher_tags.items(),
        *((f"rewards.{reward.domain}", reward.tags) for reward in rewards),
    ]:
        if tags and present and not present.intersection(tags):
            findings.warn(f"{path}.tag_included: none of {', '.join(tags)} occurs in the data")


def tags_in(data: DataPlan) -> set[str]:
    """Return the tags of the first rows of the files; unreadable rows are for the dataset to report."""
    tags: set[str] = set()
    for file in data.files:
        with open(file, encoding="utf-8", errors="replace") as stream:
            for index, line in enumerate(stream):
                if index >= ROWS_SCANNED or (data.limit is not None and index >= data.limit):
                    break
                try:
                    row = json.loads(line)
                except ValueError:
                    continue
                if isinstance(row, dict) and isinstance(tag := row.get("tag", DEFAULT_TAG), str):
                    tags.add(tag)
    return tags


def check_output(top: Top, exp_name: str, student: ModelFacts | None, findings: Findings) -> None:
    """Check that the run directory can be made and that at least one checkpoint fits on its disk."""
    if not exp_name or "/" in exp_name or exp_name in (".", ".."):
        findings.problem("exp_name", f"{exp_name!r} cannot name a directory; use letters, digits, - and _")
    wanted = Path(top.output_dir).expanduser().absolute() / exp_name
    place = next(parent for parent in (wanted, *wanted.parents) if parent.exists())
    if not place.is_dir():
        findings.problem("output_dir", f"{place} is a file, so {wanted} cannot be made; choose another directory")
        return
    if not os.access(place, os.W_OK | os.X_OK):
        findings.problem("output_dir", f"{place} may not be written; choose another directory")
        return
    if student is None:
        return
    needed = student.parameters * CHECKPOINT_BYTES_PER_PARAMETER
    free = shutil.disk_usage(place).free
    if free < needed:
        findings.problem(
            "output_dir",
            f"one checkpoint of {student.parameters:,} parameters takes about {needed / 2**30:.1f} GiB,"
            f" but {place}"
            f" has {free / 2**30:.1f} GiB free; choose another directory",
        )


def read_resume(top: Top, findings: Findings) -> bool | str:
    """Return what to resume from: False, True (the newest of this experiment) or an existing directory."""
    if isinstance(top.resume_from_checkpoint, bool):
        return top.resume_from_checkpoint
    found = find_path(top.resume_from_checkpoint)
    if found is None or not found.is_dir():
        findings.problem(
            "resume_from_checkpoint",
            f"{top.resume_from_checkpoint!r} is no directory; give a run or checkpoint directory, or true",
        )
        return False
    return str(found)
