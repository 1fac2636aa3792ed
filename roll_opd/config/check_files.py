"""Checks that read files: rows and their tags, models beside each other, the run's directory, what to resume from.

Reads a little of the disk and writes nothing; problems and warnings go to `Diagnostics`.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from roll_opd.config.errors import Diagnostics
from roll_opd.config.plan import DataPlan, RewardPlan, StreamPlan
from roll_opd.config.roles import Role, Roles
from roll_opd.config.schema import DataArgs, Run, Section
from roll_opd.data.files import find_files
from roll_opd.data.formats import refusal
from roll_opd.data.preview import first_tags
from roll_opd.data.rows import DataError
from roll_opd.data.templates import TEMPLATES
from roll_opd.frozen import FrozenDict
from roll_opd.hf.model_info import ModelFilesError, ModelInfo, same_weights
from roll_opd.hf.tokenizer_files import compare_tokenizers, has_tokenizer, largest_token_id
from roll_opd.hints import nearest
from roll_opd.paths import expanded, find_path

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
SHARE_TOLERANCE = 0.01  # thirds written as 0.33 are meant to be thirds
LONGEST_NAME = 255  # bytes of a directory's name


def read_data(
    args: DataArgs, path: str, top: Run, length: int, diagnostics: Diagnostics, training: DataArgs | None = None
) -> DataPlan | None:
    """Return the rows' plan with absolute file names, None if a file is missing. Streams: `read_streams`.

    `length` is the most tokens of a row. Columns that held-out data do not name are called as in the `training` data.
    """
    if not args.file_name:
        diagnostics.problem(f"{path}.file_name", "is missing; name the JSONL file of prompts")
        return None
    files: list[Path] = []
    missing = False
    for name in args.file_name:
        try:
            files += find_files(name, args.dataset_dir)
        except DataError as error:
            diagnostics.problem(f"{path}.file_name", str(error))
            missing = True
    for file in files:
        refused = f"{file} may not be read" if not os.access(file, os.R_OK) else refusal(file)
        if refused:
            diagnostics.problem(f"{path}.file_name", refused)
            missing = True
    template = _template(args, path, top, diagnostics)
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


def with_answers(data: DataPlan, keys: Section, schema: str, length_key: str) -> DataPlan:
    """Return `data` as rows of `schema`, which bring answers in columns that `keys` may name."""
    named = {own: name for key, own in ANSWER_KEYS.items() if (name := getattr(keys, key, None))}
    return replace(data, schema=schema, length_key=length_key, columns=FrozenDict({**data.columns, **named}))


def _columns(args: DataArgs, training: DataArgs | None) -> FrozenDict:
    """Return what the file calls a column, where that is another name."""
    columns: dict[str, str] = {}
    for source in (training, args) if training else (args,):
        written = {key: name for key in ("messages", "prompt", "tag", "id") if (name := getattr(source, key))}
        if "prompt" in written:
            columns["messages"] = ""  # as in ROLL: who names the prompt means it, whatever else the rows have
        columns |= written
    return FrozenDict({key: name for key, name in columns.items() if name != key})


def _template(args: DataArgs, path: str, top: Run, diagnostics: Diagnostics) -> str:
    """Return the template of rows whose tag has none of its own; `global_template` goes first, as in ROLL."""
    written = {f"tag_to_template.{tag}": name for tag, name in top.tag_to_template.items()}
    if top.global_template:
        written["global_template"] = top.global_template
    if args.template:
        written[f"{path}.template"] = args.template
    for key, name in written.items():
        if name not in TEMPLATES:
            near = nearest(name, TEMPLATES)
            hint = f"; did you mean {near!r}?" if near else "."
            diagnostics.problem(key, f"{name!r} is not a known template{hint} Known: {', '.join(TEMPLATES)}")
    if top.global_template and args.template and top.global_template != args.template:
        diagnostics.warn(f"{path}.template: {args.template} has no effect beside global_template {top.global_template}")
    return top.global_template or args.template or "native"


def read_streams(
    args: DataArgs, path: str, data: DataPlan, rewards: Sequence[RewardPlan], diagnostics: Diagnostics
) -> tuple[StreamPlan, ...]:
    """Return the streams of rows with weights that sum to 1; none where nothing is mixed.

    As in ROLL, `interleave_probs` counts for nothing beside `domain_interleave_probs`, and one probability of 1 is
    accepted whatever the number of files.
    """
    if args.domain_interleave_probs:
        if not rewards and len(args.domain_interleave_probs) == 1:
            return ()  # one domain and no rewards that could say what belongs to it: everything
        if len(args.interleave_probs) > 1:
            diagnostics.warn(f"{path}.interleave_probs has no effect beside domain_interleave_probs")
        return _by_domain(args.domain_interleave_probs, f"{path}.domain_interleave_probs", data, rewards, diagnostics)
    if args.interleave_probs:
        return _by_file(args, f"{path}.interleave_probs", diagnostics)
    return ()


def _by_domain(
    shares: dict[str, float], key: str, data: DataPlan, rewards: Sequence[RewardPlan], diagnostics: Diagnostics
) -> tuple[StreamPlan, ...]:
    domains = {reward.domain: reward.tags for reward in rewards}
    tags, complete = first_tags(data)
    streams: list[StreamPlan] = []
    weights = _weights(_with_rest(shares, key, diagnostics), key, diagnostics)
    for (name, share), weight in zip(shares.items(), weights, strict=True):
        if name not in domains and name not in tags and complete:
            known = sorted({*domains, *tags})
            near = nearest(name, known)
            hint = f"; did you mean {near!r}?" if near else "; write one of those that exist:"
            diagnostics.problem(
                f"{key}.{name}",
                f"{share:g} is given to {name!r}, which is neither a domain of rewards nor a tag of the data{hint}"
                f" Known: {', '.join(known)}",
            )
            continue
        stream = StreamPlan(name, weight, domains.get(name, (name,)))
        for other in streams:
            if (both := shared_tags(stream.tags, other.tags)) is not None:
                diagnostics.problem(f"{key}.{name}", f"{both} also belongs to {other.name!r}; a row has one domain")
        if weight and complete and stream.tags is not None and not tags.intersection(stream.tags):
            diagnostics.warn(
                f"{key}.{name}: no row of the data has one of its tags ({', '.join(stream.tags)}); a run with this"
                " data will be refused"
            )
        streams.append(stream)
    return tuple(streams)


def _by_file(args: DataArgs, key: str, diagnostics: Diagnostics) -> tuple[StreamPlan, ...]:
    weights = _weights(args.interleave_probs, key, diagnostics)
    if len(weights) == 1:
        return ()
    if len(weights) != len(args.file_name):
        diagnostics.problem(
            key, f"{len(weights)} probabilities for {len(args.file_name)} entries of file_name; write one for each"
        )
        return ()
    streams: list[StreamPlan] = []
    short = [Path(name).name for name in args.file_name]
    for name, weight in zip(args.file_name, weights, strict=True):
        files = tuple(map(str, find_files(name, args.dataset_dir)))
        for other in streams:
            if both := set(files).intersection(other.files or ()):
                diagnostics.problem(key, f"{min(both)} is in two entries of file_name; name each file once")
        label = Path(name).name if short.count(Path(name).name) == 1 else name
        streams.append(StreamPlan(label, weight, files=files))
    return tuple(streams)


def _with_rest(shares: Mapping[str, float], key: str, diagnostics: Diagnostics) -> list[float]:
    """Return the shares, with what they leave given to the last domain, as ROLL gives it the rest of a batch."""
    *others, last = shares
    left = 1 - sum(shares[name] for name in others)
    if sum(shares.values()) >= 1 - SHARE_TOLERANCE - 1e-9:
        return list(shares.values())
    diagnostics.warn(
        f"{key}: the shares sum to {sum(shares.values()):g}; as in ROLL the last domain gets what the others leave:"
        f" {last} {left:g} instead of {shares[last]:g}"
    )
    return [*(shares[name] for name in others), left]


def _weights(shares: Sequence[float], key: str, diagnostics: Diagnostics) -> list[float]:
    total = sum(shares)
    if abs(total - 1) > SHARE_TOLERANCE + 1e-9:
        written = ", ".join(f"{share:g}" for share in shares)
        diagnostics.problem(key, f"{written} sum to {total:g}; change them so that they sum to 1")
        return list(shares)
    return [share / total for share in shares]


def shared_tags(one: tuple[str, ...] | None, other: tuple[str, ...] | None) -> str | None:
    """Say which tag two parts of a configuration both have, None where they share none."""
    if one is None or other is None:
        return "every tag (no tag_included is written)"
    return next((f"tag {tag!r}" for tag in one if tag in other), None)


def check_tags(
    mode: str,
    teacher_tags: Mapping[str, tuple[str, ...] | None],
    rewards: tuple[RewardPlan, ...],
    data: DataPlan | None,
    validation: DataPlan | None,
    diagnostics: Diagnostics,
) -> None:
    """Check tags; `teacher_tags` maps a teacher's section to its tags, None for every tag.

    Every tag in the data needs a teacher (training) and a reward worker (where rewards count).
    """
    if not any(tags is not None for tags in (*teacher_tags.values(), *(reward.tags for reward in rewards))):
        return
    all_tags = first_tags(data)[0] if data else set()
    train_tags = {tag for tag in all_tags if data and data.draws(tag)}
    if never := sorted(all_tags - train_tags):
        diagnostics.warn(
            f"rows with tag {', '.join(never)} are never drawn: no domain of domain_interleave_probs with a share"
            " has them"
        )
    validation_tags = first_tags(validation)[0] if validation else set()
    for tag in sorted(train_tags):
        if teacher_tags and not any(tags is None or tag in tags for tags in teacher_tags.values()):
            diagnostics.problem(
                "teacher", f"no teacher has tag {tag!r} of the training data in its tag_included; add it there"
            )
        if rewards and not any(reward.accepts(tag) for reward in rewards):
            text = f"no reward has tag {tag!r} of the training data in its tag_included"
            if mode == "pure":
                diagnostics.warn(f"rewards: {text}; its reward is not monitored")
            else:
                domains = ", ".join(reward.domain for reward in rewards)
                diagnostics.problem("rewards", f"{text}; add it to one of {domains}")
    for tag in sorted(validation_tags):
        if rewards and not any(reward.accepts(tag) for reward in rewards):
            diagnostics.block(
                "rewards", f"no reward has tag {tag!r} of the validation data in its tag_included; add it"
            )
    present = all_tags | validation_tags
    for path, tags in [*teacher_tags.items(), *((f"rewards.{reward.domain}", reward.tags) for reward in rewards)]:
        if tags and present and not present.intersection(tags):
            diagnostics.warn(f"{path}.tag_included: none of {', '.join(tags)} occurs in the data")


def compare_models(
    roles: Roles, allow_self_teacher: bool, diagnostics: Diagnostics, teacher_tokenizer_check: str = "strict"
) -> None:
    """Check that the rollout runs the trained model, teachers differ from it and token ids mean the same to all."""
    train, infer = roles.train, roles.infer
    if train is None or train.info is None:
        return
    _check_vocabulary(train, diagnostics)
    if infer is not None and infer.info is not None and infer.info.path != train.info.path:
        diagnostics.problem(
            f"{infer.path}.model_args.model_name_or_path",
            f"{infer.info.path} is not the model that {train.path} trains ({train.info.path}); leave it out",
        )
    for role, what in ((roles.reference, "reference policy"), (roles.critic, "critic")):
        if role is not None:
            _compare_tokenizers(train, role, what, diagnostics)
    for role in roles.teachers.values():
        if role.info is None:
            continue
        if not allow_self_teacher and _same_weights(train, role, diagnostics):
            same = "path" if train.info.path == role.info.path else "weights"
            diagnostics.problem(
                f"{role.path}.model_args.model_name_or_path",
                f"the teacher has the student's {same} ({role.info.path}), so there is nothing to learn from it; give"
                " another model, or set allow_self_teacher: true",
            )
        if not _compare_tokenizers(train, role, "teacher", diagnostics, teacher_tokenizer_check):
            continue
        _check_vocabulary(role, diagnostics)
        if role.info.vocab < train.info.vocab:
            diagnostics.warn(
                f"{role.path}: the teacher has {role.info.vocab} token ids, the student {train.info.vocab}; the ids"
                " between are padding that the student must not sample; opd_objective: sampled compares log-probs that"
                " count what it gives them"
            )


def _same_weights(train: Role, role: Role, diagnostics: Diagnostics) -> bool:
    with diagnostics.about(f"{role.path}.model_args.model_name_or_path"):
        return train.info is not None and role.info is not None and same_weights(train.info, role.info)
    return False


def _compare_tokenizers(train: Role, role: Role, what: str, diagnostics: Diagnostics, check: str = "strict") -> bool:
    """Check that every token id of the student's is the same token to `role`; False if its files cannot be read.

    Whatever else differs is a warning, and so is another token where `check` is "warn".
    """
    if role.info is None or train.info is None:
        return False
    if not (has_tokenizer(role.info.path) and has_tokenizer(train.info.path)):
        return False  # told by the roles
    key = f"{role.path}.model_args.model_name_or_path"
    try:
        found = compare_tokenizers(train.info.path, role.info.path, what)
    except ModelFilesError as error:
        diagnostics.problem(key, str(error))
        return False
    if found.conflict:
        sentence = f"the tokenizers of student and {what} differ: {found.conflict}"
        if check == "warn":
            diagnostics.warn(f"{key}: {sentence}; its log-probs of such tokens mean nothing")
        else:
            way_out = ", or set teacher_tokenizer_check: warn to go on" if what == "teacher" else ""
            diagnostics.problem(
                key, f"{sentence}; a {what} can only score tokens that it has, so give a model of one family{way_out}"
            )
    if found.differences:
        diagnostics.warn(
            f"{role.path}: the tokenizers of student and {what} differ in what no token id depends on:"
            f" {'; '.join(found.differences)}; the student's tokenizer and template count"
        )
    return True


def _check_vocabulary(role: Role, diagnostics: Diagnostics) -> None:
    if role.info is None:
        return
    key = f"{role.path}.model_args.model_name_or_path"
    try:
        largest = largest_token_id(role.info.path)
    except ModelFilesError as error:
        diagnostics.problem(key, str(error))
        return
    if largest is not None and largest >= role.info.vocab:
        diagnostics.problem(
            key,
            f"the tokenizer uses token id {largest}, but the model has only {role.info.vocab} (vocab_size); give model"
            " and tokenizer of the same release",
        )


def check_output(top: Run, exp_name: str, student: ModelInfo | None, diagnostics: Diagnostics) -> str:
    """Return `output_dir`, `~` replaced; check that the run directory can be made and that a checkpoint fits on it."""
    if not exp_name or "/" in exp_name or exp_name in (".", ".."):
        diagnostics.problem("exp_name", f"{exp_name!r} cannot name a directory; use letters, digits, - and _")
    elif len(os.fsencode(exp_name)) > LONGEST_NAME:
        diagnostics.problem("exp_name", f"{exp_name!r} is longer than the {LONGEST_NAME} bytes of a directory's name")
    else:
        with diagnostics.about("output_dir"):
            _check_place(expanded(top.output_dir).absolute() / exp_name, student, diagnostics)
    return os.path.expanduser(top.output_dir)


def _check_place(wanted: Path, student: ModelInfo | None, diagnostics: Diagnostics) -> None:
    place = next(parent for parent in (wanted, *wanted.parents) if parent.exists())
    if not place.is_dir():
        diagnostics.problem("output_dir", f"{place} is a file, so {wanted} cannot be made; choose another directory")
        return
    if not os.access(place, os.W_OK | os.X_OK):
        diagnostics.block("output_dir", f"{place} may not be written; choose another directory")
        return
    if student is None:
        return
    needed = student.parameters * CHECKPOINT_BYTES_PER_PARAMETER
    free = shutil.disk_usage(place).free
    if free < needed:
        diagnostics.block(
            "output_dir",
            f"one checkpoint of {student.parameters:,} parameters takes about {needed / 2**30:.1f} GiB, but {place}"
            f" has {free / 2**30:.1f} GiB free; choose another directory",
        )


def read_resume(top: Run, diagnostics: Diagnostics) -> bool | str:
    """Return what to resume from: False, True (the newest of this experiment) or an existing directory."""
    if isinstance(top.resume_from_checkpoint, bool):
        return top.resume_from_checkpoint
    with diagnostics.about("resume_from_checkpoint"):
        found = find_path(top.resume_from_checkpoint)
        if found is not None and found.is_dir():
            return str(found)
        diagnostics.problem(
            "resume_from_checkpoint",
            f"{top.resume_from_checkpoint!r} is no directory; give a run or checkpoint directory, or true",
        )
    return False
