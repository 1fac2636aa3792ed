"""Plan the rows of a run: files, columns, templates, tags and streams; check the first rows of each file.

The checks find rows that a run would refuse, and prompts that no template renders.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

from roll_opd.base.failures import did_you_mean
from roll_opd.base.frozen import FrozenDict, freeze
from roll_opd.base.hub import hub_name
from roll_opd.base.paths import find_path
from roll_opd.config.diagnostics import Diagnostics, as_yaml
from roll_opd.config.plan import DataPlan, RewardPlan, RunPlan, StreamPlan
from roll_opd.config.schema import DataArgs, RowKeys, Run, Section, shared
from roll_opd.data.data_checks import NOT_LEARNED
from roll_opd.data.dataset import columns_needed
from roll_opd.data.file_types import refusal
from roll_opd.data.named_sets import DataPart
from roll_opd.data.row_files import find_files, first_tags, open_file
from roll_opd.data.row_formats import RESERVED_VARIABLES, BadRow, DataError, Row
from roll_opd.data.supervised_rows import COLUMN_KEYS, parse_answered
from roll_opd.data.teacher_files import SCHEMA
from roll_opd.data.templates import TEMPLATES
from roll_opd.models.tokenizer_files import chat_template_of, has_chat_template
from roll_opd.planner.validate_sections import Sections

COLUMNS = ("messages", "prompt", "tag", "id", "ground_truth")  # keys of data_args that name a column
SHARE_TOLERANCE = 0.01  # wide enough for thirds written as 0.33
TRUTH_OF_TASK = ("ground_truth", "task")
ROWS_SEEN = 64  # rows read from each file
Rows = Mapping[str, Sequence[Row | str]]  # section -> its first rows; a text is the reason why a row cannot be used


def read_data(
    args: DataArgs, top: Run, length: int, training: DataArgs | None = None, *, has_answers: bool = False
) -> DataPlan | None:
    """Return the plan of rows, with absolute file names; return None if a file is missing.

    The streams of the plan are added later, by `read_streams`.

    Args:
        length: maximum number of tokens in a row.
        training: for held-out data, the keys of the training data. They name the columns that `args` does not name.
        has_answers: whether the rows need answers.
    """
    if not args.file_name:
        args.diag.error("file_name", "is missing; name the JSONL file of prompts")
        return None
    tasks = bool(getattr(top, "workflow", None))
    part = _part(args, training, has_answers or tasks)
    if not any(hub_name(name, "dataset") and find_path(name) is None for name in args.file_name):
        for key in {"subset", "split"} & args.written:
            args.diag.error(key, "has no effect, as no entry of file_name is a data set by name; remove it")
    files = readable_files(args.file_name, args.dataset_dir, args.diag, "file_name", part)
    template = _template(args, top)
    if files is None:
        return None
    return DataPlan(
        files=files,
        prompt_length=length,
        template=template,
        schema="task" if tasks else DataPlan.schema,
        **shared(RowKeys, top),
        limit=args.limit,
        system_prompt=top.system_prompt or None,
        tag_templates=FrozenDict(top.tag_to_template),
        columns=_columns(args, training),
    )


def _part(args: DataArgs, training: DataArgs | None = None, as_is: bool = False) -> DataPart:
    """Return which part of a data set on the hub is read."""
    named = _columns(args, training)
    columns = tuple(named.get(key, key) for key in COLUMNS if named.get(key) or getattr(args, key))
    return DataPart(tuple(args.subset), args.split or ("test" if training else "train"), columns, as_is)


def readable_files(
    names: Sequence[str], directory: str | None, diag: Diagnostics, key: str, part: DataPart | None = None
) -> tuple[str, ...] | None:
    """Return the absolute names of the files that a key names; return None if one is missing or cannot be read."""
    files: list[Path] = []
    wrong: list[str] = []
    for name in names:
        try:
            files += find_files(name, directory, part)
        except DataError as error:
            wrong.append(str(error))
    for file in files:
        refused = refusal(file) if os.access(file, os.R_OK) else f"{file} may not be read; change its permissions"
        wrong += [refused] if refused else []
    for text in wrong:
        diag.error(key, text)
    return None if wrong else tuple(map(str, files))


def read_answers(
    args: DataArgs, top: Run, keys: Section, length: int, length_key: str, schema: str, training: DataArgs | None = None
) -> DataPlan | None:
    """Return the plan of rows with answers; return None if a file is missing.

    `args`, `length` and `training` have the same meaning as in `read_data`.

    Args:
        keys: a section that may name the columns of the answers.
        length_key: the key that sets the maximum length, for error messages.
        schema: schema of the rows.
    """
    data = read_data(args, top, length, training, has_answers=True)
    named = {own: name for own, key in COLUMN_KEYS.items() if (name := getattr(keys, key, None))}
    if data is None:
        return None
    return replace(data, schema=schema, length_key=length_key, columns=FrozenDict({**data.columns, **named}))


def _columns(args: DataArgs, training: DataArgs | None) -> FrozenDict:
    """Return a map from the name of a column in this package to its name in the file.

    Columns with the same name in both are left out.
    """
    columns: dict[str, str] = {}
    for source in (training, args) if training else (args,):
        written = {key: name for key in COLUMNS if (name := getattr(source, key))}
        if "prompt" in written:
            columns["messages"] = ""  # as in ROLL, an explicit prompt column takes precedence over all other columns
        columns |= written
    return FrozenDict({key: name for key, name in columns.items() if name != key})


def chat_variables(top: Run, roles: Sections) -> FrozenDict:
    """Return the variables of chat templates. Refuse reserved names and variables that no template of the run reads."""
    key, values = "chat_template_kwargs", top.chat_template_kwargs
    train = roles.train
    names = {top.global_template or (train.data_args.template if train else None) or "native"}
    for name in sorted((names | set(top.tag_to_template.values())) & TEMPLATES.keys()):
        template, place = TEMPLATES[name], f"template {name}"
        source: object = template.source
        if template.is_of_tokenizer and train is not None and train.info is not None:
            source, place = chat_template_of(train.info.path), f"the chat template of {train.info.path}"
        for variable, value in values.items():
            fixed = template.variables.get(variable, value)
            if variable in RESERVED_VARIABLES:
                top.diag.error(f"{key}.{variable}", "is set by the package itself; remove it")
            elif fixed != value:
                text = f"{as_yaml(value)} contradicts template {name}, which sets {as_yaml(fixed)}"
                top.diag.error(f"{key}.{variable}", f"{text}; remove one of them")
            elif variable not in str(source or ""):
                top.diag.error(f"{key}.{variable}", f"{place} does not read this variable; remove it")
    return freeze(values)


def _template(args: DataArgs, top: Run) -> str:
    """Return the default template. It applies to rows whose tag has no template.

    As in ROLL, `global_template` takes precedence.
    """
    written = {f"tag_to_template.{tag}": name for tag, name in top.tag_to_template.items()}
    if top.global_template:
        written["global_template"] = top.global_template
    if args.template:
        written[args.diag.at("template")] = args.template
    for key, name in written.items():
        if name not in TEMPLATES:
            hint = did_you_mean(name, TEMPLATES, "write a known one.")
            top.diag.error(key, f"{name!r} is not a known template; {hint} Known: {', '.join(TEMPLATES)}")
    if top.global_template and args.template and top.global_template != args.template:
        args.diag.note("template", f"{args.template} has no effect with global_template {top.global_template}")
    return top.global_template or args.template or "native"


def read_streams(args: DataArgs, data: DataPlan, rewards: Sequence[RewardPlan] = ()) -> tuple[StreamPlan, ...]:
    """Return the streams of rows, with weights that sum to 1.

    The result is empty if the data is not mixed. As in ROLL, `interleave_probs` has no effect if
    `domain_interleave_probs` is set. A single probability of 1 is accepted for any number of files, as in ROLL.
    """
    if args.domain_interleave_probs:
        if not rewards and len(args.domain_interleave_probs) == 1:
            return ()  # a single domain has all tags if no rewards define its tags
        if len(args.interleave_probs) > 1:
            args.diag.add_warning(f"{args.diag.at('interleave_probs')} has no effect with domain_interleave_probs")
        return _by_domain(args, data, rewards)
    return _by_file(args, data) if args.interleave_probs else ()


def _by_domain(args: DataArgs, data: DataPlan, rewards: Sequence[RewardPlan]) -> tuple[StreamPlan, ...]:
    shares, key = args.domain_interleave_probs, "domain_interleave_probs"
    domains = {reward.domain: reward.tags for reward in rewards}
    tags, complete = first_tags(data)
    streams: list[StreamPlan] = []
    weights = _weights(args, key, _with_rest(args, shares))
    for name, weight in zip(shares, weights, strict=True):
        if name not in domains and name not in tags and complete:
            known = sorted({*domains, *tags})
            hint = did_you_mean(name, known, "write an existing one.")
            args.diag.error(
                f"{key}.{name}",
                f"{shares[name]:g} is given to {name!r}, which is neither a domain of rewards nor a tag of the data;"
                f" {hint} Known: {', '.join(known)}",
            )
            continue
        stream = StreamPlan(name, weight, domains.get(name, (name,)))
        for other in streams:
            if (both := shared_tags(stream.tags, other.tags)) is not None:
                args.diag.error(f"{key}.{name}", f"{both} also belongs to {other.name!r}; a row has only one domain")
        if weight and complete and stream.tags is not None and not tags.intersection(stream.tags):
            args.diag.note(f"{key}.{name}", f"no row has one of its tags ({', '.join(stream.tags)}); a run is refused")
        streams.append(stream)
    return tuple(streams)


def _by_file(args: DataArgs, data: DataPlan) -> tuple[StreamPlan, ...]:
    key, names = "interleave_probs", args.file_name
    weights = _weights(args, key, args.interleave_probs)
    if len(weights) == 1:
        return ()
    if len(weights) != len(names):
        args.diag.error(key, f"{len(weights)} probabilities for {len(names)} entries of file_name; write one per entry")
        return ()
    part = _part(args, as_is=data.schema != DataPlan.schema)
    streams: list[StreamPlan] = []
    short = [Path(name).name for name in names]
    for name, last, weight in zip(names, short, weights, strict=True):
        files = tuple(map(str, find_files(name, args.dataset_dir, part)))
        for other in streams:
            if both := set(files).intersection(other.files or ()):
                args.diag.error(key, f"{min(both)} is in two entries of file_name; name each file once")
        streams.append(StreamPlan(last if short.count(last) == 1 else name, weight, files=files))
    return tuple(streams)


def _with_rest(args: DataArgs, shares: Mapping[str, float]) -> list[float]:
    """Return the probabilities of the domains.

    If the configured probabilities sum to less than 1, the last domain gets the remainder, as in ROLL.
    """
    *others, last = shares
    total = sum(shares.values())
    if total >= 1 - SHARE_TOLERANCE - 1e-9:
        return list(shares.values())
    left = 1 - sum(shares[name] for name in others)
    args.diag.note(
        "domain_interleave_probs",
        f"the shares sum to {total:g}; as in ROLL, {last} gets the remainder: {left:g} instead of {shares[last]:g}",
    )
    return [*(shares[name] for name in others), left]


def _weights(args: DataArgs, key: str, shares: Sequence[float]) -> list[float]:
    total = sum(shares)
    if abs(total - 1) > SHARE_TOLERANCE + 1e-9:
        written = ", ".join(f"{share:g}" for share in shares)
        args.diag.error(key, f"{written} sum to {total:g}; change them so that they sum to 1")
        return list(shares)
    return [share / total for share in shares]


def shared_tags(one: tuple[str, ...] | None, other: tuple[str, ...] | None) -> str | None:
    """Return the name of a tag that two parts of a configuration share; None if they share no tag."""
    if one is None or other is None:
        return "every tag (no tag_included is written)"
    return next((f"tag {tag!r}" for tag in one if tag in other), None)


def check_tags(
    roles: Sections,
    rewards: tuple[RewardPlan, ...],
    data: DataPlan | None,
    validation: DataPlan | None,
    diag: Diagnostics,
) -> None:
    """Check that each tag in the data is covered.

    Each tag of the training data needs a teacher. If the run has rewards, each tag of the training and of the
    validation data needs a reward worker.
    """
    teacher_tags = {role.path: role.tag_included or None for role in roles.teachers.values()}
    chosen = teacher_tags | {f"rewards.{reward.domain}": reward.tags for reward in rewards}
    if all(tags is None for tags in chosen.values()):
        return
    all_tags = _tags(data)
    train_tags = {tag for tag in all_tags if data and data.draws(tag)}
    if never := sorted(all_tags - train_tags):
        diag.add_warning(f"rows with tag {', '.join(never)} are never drawn: domain_interleave_probs lacks them")
    validation_tags = _tags(validation)
    present = all_tags | validation_tags
    unscored = {tag for tag in present if rewards and not any(reward.accepts(tag) for reward in rewards)}
    for tag in sorted(train_tags):
        if teacher_tags and not any(tags is None or tag in tags for tags in teacher_tags.values()):
            diag.error("teacher", f"no teacher accepts tag {tag!r} of the training data; add the tag to a tag_included")
        if tag in unscored:
            text = f"no reward accepts tag {tag!r} of the training data"
            if roles.mode == "pure":
                diag.add_warning(f"rewards: {text}, so no reward of these rows is monitored")
            else:
                domains = ", ".join(reward.domain for reward in rewards)
                diag.error("rewards", f"{text}; add the tag to the tag_included of one of {domains}")
    for tag in sorted(validation_tags & unscored):
        text = f"no reward accepts tag {tag!r} of the validation data; add the tag to a tag_included"
        diag.unsupported("rewards", text)
    for path, tags in chosen.items():
        if tags and present and not present.intersection(tags):
            diag.add_warning(f"{path}.tag_included: none of {', '.join(tags)} occurs in the data")


def _tags(data: DataPlan | None) -> set[str]:
    """Return the tags of the rows. For tasks in environments, return the tags of the environments."""
    return set() if data is None else set(data.environments) or first_tags(data)[0]


def data_sets(plan: RunPlan) -> dict[str, DataPlan]:
    """Return the data sets of rows that a run reads, as a map: section -> data set."""
    found = {f"{plan.student.name}.data_args": plan.data}
    found |= {"validation.data_args": plan.validation.data} if plan.validation else {}
    found |= {"demonstrations.data_args": plan.demonstrations.data} if plan.demonstrations else {}
    return {key: data for key, data in found.items() if data.files and data.schema != SCHEMA}


def first_rows(plan: RunPlan) -> Rows:
    """Return the first rows of each data set. Rows that are left out on purpose are left out here too."""
    return {key: _first_rows(data) for key, data in data_sets(plan).items()}


def _first_rows(data: DataPlan) -> list[Row | str]:
    found: list[Row | str] = []
    for name in data.files:
        try:
            rows = open_file(name, columns_needed(data)).scan()
            for line, _, value in islice(rows, min(ROWS_SEEN, data.limit or ROWS_SEEN)):
                try:
                    found.append(parse_answered(value, f"{name}:{line}", data))
                except BadRow as bad:
                    if bad.kind != NOT_LEARNED:
                        found.append(f"{name}:{line}: {': '.join(filter(None, (bad.kind, bad.detail)))}")
        except (DataError, OSError) as error:
            found.append(str(error))
    return found


def unusable_rows(plan: RunPlan, rows: Rows) -> list[str]:
    """Return a problem for each data set that a run would refuse because of its first rows."""
    problems = []
    sets = data_sets(plan)
    for key, some in rows.items():
        bad = [row for row in some if isinstance(row, str)]
        if bad and (sets[key].on_bad_row == "refuse" or len(bad) == len(some)):
            first = f"{len(bad)} of the first {len(some)} rows cannot be used, such as {bad[0]}"
            problems.append(f"{key}.file_name: {first}; correct the rows, or name their columns in {key}")
    return problems


def absent_columns(plan: RunPlan) -> Mapping[str, Sequence[str]]:
    """Return the problems of each section that names a column that no row has, as a map: section -> problems.

    The names that a section takes from the training data are not checked again. If the first rows lack a column, all
    rows are read.
    """
    problems = {}
    for key, data in data_sets(plan).items():
        inherited = {} if data is plan.data else plan.data.columns
        named = {name: column for name, column in data.columns.items() if column and inherited.get(name) != column}
        # a workflow has other keys for the ground truth
        wanted = {name: named[name] for name in COLUMNS if name in named and (name, data.schema) != TRUTH_OF_TASK}
        with suppress(DataError, OSError):  # stated as an unusable row
            if absent := _absent(data, frozenset(wanted.values())):
                first = {name for file in data.files for name in _first_columns(file)}
                problems[key] = [
                    f"{key}.{name}: no row has column {column!r}; name one of {', '.join(sorted(first))}, or remove it"
                    for name, column in wanted.items()
                    if column in absent
                ]
    return problems


def _absent(data: DataPlan, columns: frozenset[str]) -> frozenset[str]:
    """Return those of `columns` that no row of the files has."""
    for name in data.files if columns else ():
        for _, _, value in open_file(name, columns_needed(data)).scan():
            columns -= value.keys() if isinstance(value, dict) else frozenset()
            if not columns:
                return columns
    return columns


def _first_columns(file: str) -> set[str]:
    rows = islice(open_file(file).scan(), ROWS_SEEN)
    return {name for _, _, value in rows if isinstance(value, dict) for name in value}


def plain_prompts(plan: RunPlan, rows: Rows) -> str:
    """Return a warning if prompts are plain texts although the student's tokenizer has a chat template, else ""."""
    if plan.workflow or not has_chat_template(Path(plan.student.model.path)):
        return ""
    plain = [key for key, some in rows.items() if any(isinstance(row, Row) and row.prompt is not None for row in some)]
    if not plain:
        return ""
    return f"{' and '.join(plain)}: prompts that are plain texts are read without chat template; write them as messages"
