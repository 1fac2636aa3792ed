"""Prompt data sets on disk.

All rows are checked and indexed in one pass. A row is read and tokenised again when it is drawn. Only the index is kept
in memory, so a data set may be much larger than the memory.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from roll_opd.base.frozen import FrozenDict
from roll_opd.config.plan import DataPlan, StreamPlan
from roll_opd.data.data_checks import (
    EXAMPLES_PER_KIND,
    NOT_LEARNED,
    TEACHER_TOO_LONG,
    TOO_LONG,
    WHOLE_TOO_LONG,
    DataReport,
    FileReport,
    TagRows,
)
from roll_opd.data.messages import MARKS, SPANS
from roll_opd.data.row_files import RowFile, open_file
from roll_opd.data.row_formats import PROMPT_COLUMNS, BadRow, DataError, Row
from roll_opd.data.supervised_rows import COLUMN_KEYS, HISTORY, SCHEMAS, parse_answered
from roll_opd.data.teacher_prompts import TeacherPrompts, names_in
from roll_opd.data.template_check import TEXT_WITH_CALLS
from roll_opd.data.templates import TEMPLATES, PromptText
from roll_opd.data.usable_rows import Index, Indexer, encode, fallback_id, render_row, row_check, template_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from roll_opd.data.teacher_scores import TeacherScores


DEFAULT_STREAM = StreamPlan("all", 1.0)  # name of the only stream, if no streams are configured


@dataclass(frozen=True)
class Prompt:
    """A tokenised row. If a row is drawn in several epochs, the resulting prompts are equal."""

    id: str
    index: int  # position among the prompts of the data set
    tag: str
    tokens: np.ndarray = field(compare=False)  # int64 [P]
    ground_truth: str | None = None
    extra: FrozenDict = field(default_factory=FrozenDict, compare=False)  # other keys of the row, such as test_cases
    answers: tuple[np.ndarray, ...] = field(default=(), compare=False)  # answers of a supervised row, int64 [R] each
    teacher_prompts: dict[str, np.ndarray] = field(default_factory=dict, compare=False)  # see Sample.teacher_prompts
    scores: "TeacherScores | None" = field(default=None, compare=False)  # scores of a row in a teacher file


class PromptSet:
    """An indexed data set of prompts on disk, which are numbered from 0. It is created by `open_prompts`."""

    def __init__(
        self,
        plan: DataPlan,
        tokenizer: "PreTrainedTokenizerBase",
        teachers: TeacherPrompts,
        files: Sequence[RowFile],
        index: Index,
    ) -> None:
        self._plan, self._tokenizer, self._files, self._index = plan, tokenizer, files, index
        self._teachers = teachers
        self._labels = short_names(plan.files)
        self.streams = plan.streams or (DEFAULT_STREAM,)

    def __len__(self) -> int:
        return len(self._index.positions)

    def read(self, numbers: Sequence[int]) -> list[Prompt]:
        """Read the rows with the given numbers, and return their prompts in the same order.

        Raises `DataError` if a file is missing, or if a row has changed since the data set was opened.
        """
        wanted = np.unique(np.asarray(numbers, dtype=np.int64))
        file_of = np.searchsorted(self._index.starts, wanted, side="right") - 1
        rows: list[Row] = []
        for file in np.unique(file_of):
            rows += self._rows(self._files[file], wanted[file_of == file])
        try:
            texts = [render_row(self._tokenizer, row, self._plan) for row in rows]
            read = [self._read_by_teachers(*one) for one in zip(wanted.tolist(), rows, strict=True)]
        except DataError as error:
            raise DataError(
                f"{error}; the row was accepted at the start of the run, so its file has changed since"
            ) from error
        prompts: dict[int, Prompt] = {}
        encoded = encode(self._tokenizer, texts), self._teachers.encode(read)
        whole = zip(wanted.tolist(), rows, *encoded, strict=True)
        for number, row, parts, teacher_prompts in whole:
            every = (*parts, *teacher_prompts.values())
            if row_check(row.id, row.tag, row.ground_truth, every) != self._index.checks[number]:
                raise self._changed(number)
            tokens, *answers = parts
            name, truth = self._name(number, row.id), row.ground_truth
            prompts[number] = Prompt(name, number, row.tag, tokens, truth, row.extra, tuple(answers), teacher_prompts)
        return [prompts[number] for number in numbers]

    def all(self) -> list[Prompt]:
        """Return all prompts in order. This is meant for small data sets, such as validation sets."""
        return self.read(range(len(self)))

    def members(self, stream: StreamPlan) -> np.ndarray:
        """Return the numbers of the prompts in a stream, int64, ascending."""
        inside = np.ones(len(self), dtype=bool)
        if stream.tags is not None:
            codes = [code for code, tag in enumerate(self._index.tag_names) if tag in stream.tags]
            inside &= np.isin(self._index.tags, codes)
        if stream.files is not None:
            for number, file in enumerate(self._plan.files):
                if file not in stream.files:
                    inside[self._index.starts[number] : self._index.starts[number + 1]] = False
        return np.flatnonzero(inside)

    def drawn(self) -> np.ndarray:
        """Return the numbers of all prompts that can be drawn, int64, ascending.

        These are the prompts in the streams with a positive weight.
        """
        members = [self.members(stream) for stream in self.streams if stream.weight > 0]
        return np.unique(np.concatenate([np.empty(0, np.int64), *members]))

    def prompt_hashes(self, numbers: np.ndarray) -> np.ndarray:
        """Return the hashes of the prompts with the given numbers, uint64."""
        return self._index.prompt_hashes[numbers]

    def tags(self, numbers: np.ndarray) -> dict[str, int]:
        """Return the number of prompts with each tag among the given prompts, as a map: tag -> number."""
        counts = np.bincount(self._index.tags[numbers], minlength=len(self._index.tag_names))
        return {name: int(n) for name, n in zip(self._index.tag_names, counts, strict=True) if n}

    def by_tag(self) -> dict[str, TagRows]:
        """Return a map from each tag that can be drawn to its `TagRows`, in the order of the tags' first prompts."""
        found = {}
        for code, tag in enumerate(self._index.tag_names):
            if not self._plan.draws(tag):
                continue
            numbers = np.flatnonzero(self._index.unanswered & (self._index.tags == code))
            named = tuple(self.where(number) for number in numbers[:EXAMPLES_PER_KIND].tolist())
            found[tag] = TagRows(len(numbers), named, self._index.domains.get(tag, FrozenDict()))
        return found

    def fingerprint(self) -> list[dict[str, str | int]]:
        """Return the name, the number of prompts and the digest of each file.

        A digest covers tags, ground truths, tokens, and the ids that are written in rows.
        """
        counts = np.diff(self._index.starts).tolist()
        return [
            {"name": Path(file).name, "prompts": count, "digest": digest}
            for file, count, digest in zip(self._plan.files, counts, self._index.digests, strict=True)
        ]

    def _rows(self, file: RowFile, numbers: np.ndarray) -> list[Row]:
        try:
            values = file.read(self._index.positions[numbers].tolist())
        except OSError as error:
            raise DataError(f"{file.path} can no longer be read: {error}") from error
        if len(values) != len(numbers):
            raise self._changed(int(numbers[-1]))
        rows = []
        for number, value in zip(numbers.tolist(), values, strict=True):
            try:
                rows.append(parse_answered(value, fallback_id(file, self._index.lines[number]), self._plan))
            except BadRow as bad:
                raise self._changed(number) from bad
        return rows

    def _read_by_teachers(self, number: int, row: Row) -> dict[str, PromptText]:
        try:
            return self._teachers.texts(row, template_of(row, self._plan))
        except BadRow as bad:
            raise self._changed(number) from bad

    def _name(self, number: int, identity: str) -> str:
        if not self._index.renamed[number]:
            return identity
        return f"{identity}@{self._labels[self._file_of(number)]}:{self._index.lines[number]}"

    def where(self, number: int) -> str:
        """Return the place of a prompt as "file:line"."""
        return f"{self._files[self._file_of(number)].path}:{self._index.lines[number]}"

    def _file_of(self, number: int) -> int:
        return int(np.searchsorted(self._index.starts, number, side="right")) - 1

    def _changed(self, number: int) -> DataError:
        return DataError(
            f"{self.where(number)} has changed since the start of the run, or the chat template renders it "
            "differently; restore the file and resume from the last checkpoint, or start a new run"
        )


def open_prompts(plan: DataPlan, tokenizer: "PreTrainedTokenizerBase") -> tuple[PromptSet, DataReport]:
    """Return (prompts, report) after one pass that checks and indexes the rows of `plan.files`.

    Only the first `plan.limit` rows are used. `plan.on_long_prompt` sets whether a row with more than
    `plan.prompt_length` tokens is dropped or refused. `plan.on_bad_row` sets this for all other unusable rows.

    Raises `DataError` if a row is refused, a file is missing, a template is unknown or missing, no row is usable, or a
    stream with a positive weight has no prompt.
    """
    for template in (plan.template, *plan.tag_templates.values()):
        if template not in TEMPLATES:
            raise DataError(f"unknown template {template!r}; known are {', '.join(sorted(TEMPLATES))}")
    files = _existing_files(plan)
    teachers = TeacherPrompts(plan.contexts, tokenizer)
    index, reports, longest = Indexer(plan, tokenizer, teachers).index(files)
    prompts = PromptSet(plan, tokenizer, teachers, files, index)
    streams = {stream.name: prompts.members(stream) for stream in plan.streams}
    report = DataReport(
        files=reports,
        length_key=plan.length_key,
        most_tokens=plan.prompt_length,
        longest=longest,
        renamed=int(index.renamed.sum()),
        streams=FrozenDict({name: len(members) for name, members in streams.items()}),
        undrawn=FrozenDict(_undrawn(prompts, list(streams.values()))),
        warnings=unread_warnings(reports, plan.schema),
    )
    check_report(report, plan)
    return prompts, report


def short_names(files: Sequence[str]) -> list[str]:
    """Return the shortest unique path suffix of each file; full paths if a file occurs twice."""
    parts = [Path(file).parts for file in files]
    for count in range(1, max(map(len, parts), default=1)):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return list(files)


def _existing_files(plan: DataPlan) -> list[RowFile]:
    if not plan.files:
        raise DataError("no prompt file is given; name at least one JSONL or Parquet file in data_args.file_name")
    missing = [name for name in plan.files if not Path(name).is_file()]
    if missing:
        raise DataError(f"prompt files that do not exist: {', '.join(missing)}")
    columns = columns_needed(plan)
    return [open_file(name, columns) for name in plan.files]


def _undrawn(prompts: PromptSet, streams: list[np.ndarray]) -> dict[str, int]:
    """Return the number of prompts that are in no stream, as a map: tag -> number."""
    if not streams:
        return {}
    undrawn = np.ones(len(prompts), dtype=bool)
    for members in streams:
        undrawn[members] = False
    return prompts.tags(np.flatnonzero(undrawn))


def check_report(report: DataReport, plan: DataPlan) -> None:
    """Raise `DataError` if there are rows that `plan` refuses, if no row is usable, or if a drawn stream is empty."""
    remedies = []
    counts = report.bad_counts
    too_long = counts[TOO_LONG] + counts[WHOLE_TOO_LONG] + counts[TEACHER_TOO_LONG]
    if too_long and plan.on_long_prompt == "refuse":
        limits = [f"`{plan.length_key}` (now {plan.prompt_length})"] * (too_long > counts[TEACHER_TOO_LONG])
        limits += ["the teacher's `prompt_length`"] * bool(counts[TEACHER_TOO_LONG])
        remedies.append(f"raise {' and '.join(limits)} or set `on_long_prompt: drop`")
    if report.bad > too_long + counts[NOT_LEARNED] and plan.on_bad_row == "refuse":
        remedies.append("correct the rows or set `on_bad_row: drop`")
    if remedies:
        raise DataError(
            f"{report.bad} rows cannot be used:\n{report.describe_bad()}\nTo continue, {' and '.join(remedies)}."
        )
    if not report.prompts:
        names = ", ".join(file.path for file in report.files)
        if not report.rows:
            raise DataError(f"no usable row in {names}: the files are empty")
        raise DataError(
            f"no usable row in {names}; all {report.rows} rows are bad:\n{report.describe_bad()}\n"
            f"Check the files, the column names, `{plan.length_key}` and the template."
        )
    empty = [stream.name for stream in plan.streams if stream.weight > 0 and not report.streams[stream.name]]
    if empty:
        raise DataError(
            f"there is no prompt to draw for {', '.join(map(repr, empty))}, as no usable row has its tag or file."
            " Remove it from `domain_interleave_probs` or `interleave_probs`, or add rows with its tags."
        )


# columns that, in every schema, define a prompt and its tag
_USUAL = ("id", "tag", "domain", "messages", "conversations", "system", "prompt", "ground_truth", *PROMPT_COLUMNS)
# ignored column or key -> remedy
_LEFT_OUT = {
    "system": "write it as the first message",
    HISTORY: "write the turns as `messages`",
    "tools": "write a list of objects with a name, as in OpenAI's API, and write `messages`",
    TEXT_WITH_CALLS: "the chat template renders only the tool calls of such a turn",
    "functions": "write a list of objects with a name, as in OpenAI's API",
    **dict.fromkeys(MARKS, "the weight of a row or a turn may be 0 or 1, or true or false"),
    **dict.fromkeys(SPANS, "parts of a turn cannot be excluded; exclude a whole turn with `weight: 0`"),
}


def columns_needed(plan: DataPlan) -> frozenset[str] | None:
    """Return the columns that are read for tokens, ids, tags and ground truths; None if all columns are needed.

    The other columns do not change the prompt. A workflow needs all columns, because it may read any column of its
    task.
    """
    if plan.schema == "task":
        return None
    of_schema = (*SCHEMAS[plan.schema].columns, *MARKS, *SPANS, HISTORY) if plan.schema in SCHEMAS else ()
    hints = (text for context in plan.contexts for text in (context.hint, context.system_prompt) if text)
    named = (name for text in hints for name in names_in(text))
    return frozenset((*_USUAL, *of_schema, *named, *plan.columns.values()))


def unread_warnings(files: Sequence[FileReport], schema: str) -> tuple[str, ...]:
    """Return a warning for each column or key that is ignored. It has the number of rows, a remedy and the file."""
    counts = sum((file.unread for file in files), Counter())
    warnings = []
    for name, count in counts.items():
        first, *others = (file.path for file in files if file.unread[name])
        where = f"{first} and {len(others)} more files" if others else first
        having = "row has" if count == 1 else "rows have"
        warnings.append(f"{count} {having} `{name}`, which is ignored; {_remedy(name, schema)} ({where})")
    return tuple(warnings)


def _remedy(name: str, schema: str) -> str:
    if schema not in SCHEMAS or name not in COLUMN_KEYS:
        return _LEFT_OUT.get(name, "the chat template does not render it")
    return f"{COLUMN_KEYS[name]}: {name} adds it" if SCHEMAS[schema].has_prompt_keys else "write it in `instruction`"
