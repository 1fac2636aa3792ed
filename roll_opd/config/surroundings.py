"""Checks a configuration against the world around it: data files, tags, disk, resume.

Reads a little of the disk and writes nothing; problems and warnings go to `Findings`.
"""

import difflib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from roll_opd.config.errors import Findings
from roll_opd.config.frozen import FrozenDict
from roll_opd.config.known_names import TEMPLATES
from roll_opd.config.models import ModelFacts, find_path
from roll_opd.config.plan import DataPlan, Mode, RewardPlan
from roll_opd.config.prompt_files import find_prompt_files, tags_in
from roll_opd.config.schema import DataArgs, Run, Section

# our names for columns of rows with answers, which a key of the configuration may name otherwise
ANSWER_KEYS = {
    "prompt_key": "instruction",
    "query_key": "input",
    "system_key": "system",
    "response_key": "output",
    "chosen_key": "chosen",
    "rejected_key": "rejected",
}
CHECKPOINT_BYTES_PER_PARAMETER = 16  # weights, fp32 master weights and two Adam moments, 4 bytes each


def read_data(
    args: DataArgs, path: str, top: Run, length: int, findings: Findings, training: DataArgs | None = None
) -> DataPlan | None:
    """Return the prompts' plan with absolute file names, None if a file is missing. Streams: `read_streams`.

    `length` is the most tokens of a row. Columns that held-out data do not name are called as in the `training` data.
    """
    if not args.file_name:
        findings.problem(f"{path}.file_name", "is missing; name the JSONL file of prompts")
        return None
    files: list[Path] = []
    missing = False
    for name in args.file_name:
        try:
            files += find_prompt_files(name, args.dataset_dir)
        except ValueError as error:
            findings.problem(f"{path}.file_name", str(error))
            missing = True
    for file in files:
        if not os.access(file, os.R_OK):
            findings.problem(f"{path}.file_name", f"{file} may not be read")
            missing = True
    template = _template(args, path, top, findings)
    if missing:
        return None
    return DataPlan(
        files=tuple(map(str, files)),
        prompt_length=length,
        template=template,
        on_bad_row=top.on_bad_row,
        on_long_prompt=top.on_long_prompt,
        limit=args.limit,
        tag_templates=FrozenDict(top.tag_to_template),
        columns=_columns(args, training),
    )


def _columns(args: DataArgs, training: DataArgs | None) -> FrozenDict:
    """What the file calls a column, where that is another name."""
    columns: dict[str, str] = {}
    for source in (training, args) if training else (args,):
        written = {key: name for key in ("messages", "prompt", "tag", "id") if (name := getattr(source, key))}
        if "prompt" in written:
            columns["messages"] = ""  # as in ROLL: who names the prompt means it, whatever else the rows have
        columns |= written
    return FrozenDict({key: name for key, name in columns.items() if name != key})


def answer_columns(data: DataPlan, keys: Section) -> FrozenDict:
    """The columns of `data`, and those that `keys` name for rows with answers."""
    named = {own: name for key, own in ANSWER_KEYS.items() if (name := getattr(keys, key, None))}
    return FrozenDict({**data.columns, **named})


def _template(args: DataArgs, path: str, top: Run, findings: Findings) -> str:
    """The template of rows whose tag has none of its own; `global_template` goes first, as in ROLL."""
    written = {f"tag_to_template.{tag}": name for tag, name in top.tag_to_template.items()}
    if top.global_template:
        written["global_template"] = top.global_template
    if args.template:
        written[f"{path}.template"] = args.template
    for key, name in written.items():
        if name not in TEMPLATES:
            near = difflib.get_close_matches(name, TEMPLATES, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            findings.problem(key, f"{name!r} is not a known template{hint} Known: {', '.join(TEMPLATES)}")
    if top.global_template and args.template and top.global_template != args.template:
        findings.warn(f"{path}.template: {args.template} has no effect beside global_template {top.global_template}")
    return top.global_template or args.template or "native"


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
    train_tags = tags_in(data)[0] if data else set()
    validation_tags = tags_in(validation)[0] if validation else set()
    for tag in sorted(train_tags):
        if teacher_tags and not any(tags is None or tag in tags for tags in teacher_tags.values()):
            findings.problem(
                "teacher", f"no teacher has tag {tag!r} of the training data in its tag_included; add it there"
            )
        if rewards and not any(reward.accepts(tag) for reward in rewards):
            text = f"no reward has tag {tag!r} of the training data in its tag_included"
            if mode == "pure":
                findings.warn(f"rewards: {text}; its reward is not monitored")
            else:
                findings.problem(
                    "rewards", f"{text}; add it to one of {', '.join(reward.domain for reward in rewards)}"
                )
    for tag in sorted(validation_tags):
        if rewards and not any(reward.accepts(tag) for reward in rewards):
            findings.block("rewards", f"no reward has tag {tag!r} of the validation data in its tag_included; add it")
    present = train_tags | validation_tags
    for path, tags in [
        *teacher_tags.items(),
        *((f"rewards.{reward.domain}", reward.tags) for reward in rewards),
    ]:
        if tags and present and not present.intersection(tags):
            findings.warn(f"{path}.tag_included: none of {', '.join(tags)} occurs in the data")


def check_output(top: Run, exp_name: str, student: ModelFacts | None, findings: Findings) -> None:
    """Check that the run directory can be made and that at least one checkpoint fits on its disk."""
    if not exp_name or "/" in exp_name or exp_name in (".", ".."):
        findings.problem("exp_name", f"{exp_name!r} cannot name a directory; use letters, digits, - and _")
    wanted = Path(top.output_dir).expanduser().absolute() / exp_name
    place = next(parent for parent in (wanted, *wanted.parents) if parent.exists())
    if not place.is_dir():
        findings.problem("output_dir", f"{place} is a file, so {wanted} cannot be made; choose another directory")
        return
    if not os.access(place, os.W_OK | os.X_OK):
        findings.block("output_dir", f"{place} may not be written; choose another directory")
        return
    if student is None:
        return
    needed = student.parameters * CHECKPOINT_BYTES_PER_PARAMETER
    free = shutil.disk_usage(place).free
    if free < needed:
        findings.block(
            "output_dir",
            f"one checkpoint of {student.parameters:,} parameters takes about {needed / 2**30:.1f} GiB,"
            f" but {place}"
            f" has {free / 2**30:.1f} GiB free; choose another directory",
        )


def read_resume(top: Run, findings: Findings) -> bool | str:
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
