"""Prompt rows as a user brings them: JSONL or Parquet files in ROLL's form, read and checked row by row.

A row that cannot be used is never lost in silence: it is counted by kind, the first few of each kind are
named as `file:line`, and the plan says whether the run is refused or goes on without it.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from roll_opd.config.frozen import FrozenDict, freeze
from roll_opd.config.plan import DataPlan

EXAMPLES_PER_KIND = 3  # bad rows named for each kind; the rest are only counted

NOT_JSON = "not JSON"
NOT_AN_OBJECT = "not a JSON object"
NO_PROMPT = "neither messages nor prompt"
EMPTY = "empty messages or prompt"
WRONG_TYPE = "a field of the wrong type"

_KNOWN_KEYS = frozenset({"id", "tag", "messages", "prompt", "ground_truth", "source", "difficulty"})


class DataError(ValueError):
    """The data a user gave cannot be used; the message says where and what to do."""


@dataclass(frozen=True)
class Row:
    """One usable row: a conversation in `messages`, or else a text in `prompt` that is given to the model as
    it is.
    """

    id: str
    tag: str
    messages: tuple[FrozenDict, ...] = ()  # {"role": str, "content": str, ...}
    prompt: str | None = None
    ground_truth: str | None = None
    source: str | None = None
    difficulty: str | float | None = None
    extra: FrozenDict = field(default_factory=FrozenDict)  # every other key of the row


@dataclass(frozen=True)
class RowReport:
    """What was read: usable rows, and bad rows by kind with the first few of each as `file:line (detail)`."""

    rows: int
    bad_counts: FrozenDict = field(default_factory=FrozenDict)  # kind -> int
    bad_examples: FrozenDict = field(default_factory=FrozenDict)  # kind -> tuple of str
    renamed: int = 0  # rows whose id another row already had, and that were given `id@file:line`

    @property
    def bad(self) -> int:
        """Bad rows of every kind."""
        return sum(self.bad_counts.values())

    def describe_bad(self) -> str:
        """The bad rows by kind, one line a kind."""
        lines = []
        for kind, count in self.bad_counts.items():
            named = ", ".join(self.bad_examples[kind])
            more = ", ..." if count > len(self.bad_examples[kind]) else ""
            lines.append(f"  {count} x {kind}: {named}{more}")
        return "\n".join(lines)

    def summary(self) -> str:
        """What to tell the user: one line, and one more for each kind of bad row."""
        text = f"{self.rows} rows read"
        if self.renamed:
            text += f", {self.renamed} with an id that another row has were given a new one"
        return text if not self.bad else f"{text}, {self.bad} dropped:\n{self.describe_bad()}"


class _BadRow(Exception):
    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail


def load_rows(plan: DataPlan, default_tag: str = "math_rule") -> tuple[list[Row], RowReport]:
    """Read `plan.files` in order, at most `plan.limit` usable rows.

    A row has `messages` (a JSON string, or a list, of `{"role", "content"}`) or `prompt`, and may have `id`,
    `tag`, `ground_truth`, `source` and `difficulty`. A missing tag becomes `default_tag`, a missing id
    `file-stem:line`. In Parquet files "line" is the number of the row, from 1. Raises `DataError` where a
    file is missing, where no row is usable, and on any bad row when `plan.on_bad_row` is "refuse".
    """
    rows: list[Row] = []
    seen: set[str] = set()
    counts: dict[str, int] = {}
    examples: dict[str, list[str]] = {}
    renamed = 0
    for path in _existing_files(plan.files):
        for line, value in _read(path):
            if plan.limit is not None and len(rows) >= plan.limit:
                break
            try:
                if isinstance(value, _BadRow):
                    raise value
                row = _parse_row(value, fallback_id=f"{path.stem}:{line}", default_tag=default_tag)
            except _BadRow as bad:
                counts[bad.kind] = counts.get(bad.kind, 0) + 1
                if counts[bad.kind] <= EXAMPLES_PER_KIND:
                    detail = f" ({bad.detail})" if bad.detail else ""
                    examples.setdefault(bad.kind, []).append(f"{path}:{line}{detail}")
                continue
            if row.id in seen:
                renamed += 1
                row = replace(row, id=f"{row.id}@{path}:{line}")
            seen.add(row.id)
            rows.append(row)
    report = RowReport(len(rows), FrozenDict(counts), FrozenDict(examples), renamed)
    _refuse_if_asked(report, plan)
    return rows, report


def _refuse_if_asked(report: RowReport, plan: DataPlan) -> None:
    if report.bad and plan.on_bad_row == "refuse":
        raise DataError(
            f"{report.bad} rows cannot be used:\n{report.describe_bad()}\n"
            "Correct them, or set `on_bad_row: drop` to go on without them."
        )
    if not report.rows:
        found = f"; all {report.bad} rows are bad:\n{report.describe_bad()}" if report.bad else ""
        raise DataError(f"no usable row in {', '.join(plan.files)}{found or ': the files are empty'}")


def _existing_files(files: tuple[str, ...]) -> list[Path]:
    if not files:
        raise DataError("no prompt file is given; name at least one JSONL or Parquet file in data_args.file_name")
    missing = [name for name in files if not Path(name).is_file()]
    if missing:
        raise DataError(f"prompt files that do not exist: {', '.join(missing)}")
    return [Path(name) for name in files]


def _read(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (line, value) for each row; a value that could not be decoded is a `_BadRow`."""
    if path.suffix == ".parquet":
        yield from _read_parquet(path)
        return
    with path.open("rb") as file:
        for line, raw in enumerate(file, start=1):
            if raw.strip():
                yield line, _decode(raw)


def _decode(raw: bytes) -> Any:
    try:
        return json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        return _BadRow(NOT_JSON, str(error)[:80])


def _read_parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        line = 0
        for batch in pq.ParquetFile(path).iter_batches():
            for value in batch.to_pylist():
                line += 1
                yield line, value
    except pa.ArrowException as error:
        raise DataError(f"{path} is not a readable Parquet file: {error}") from error


def _parse_row(value: Any, fallback_id: str, default_tag: str) -> Row:
    if not isinstance(value, dict):
        raise _BadRow(NOT_AN_OBJECT, type(value).__name__)
    # Parquet gives every row every column: an absent value is None there
    value = {key: item for key, item in value.items() if item is not None}
    messages, prompt = _parse_prompt(value)
    tag = value.get("tag", default_tag)
    if not isinstance(tag, str) or not tag:
        raise _BadRow(WRONG_TYPE, "tag must be a text that is not empty")
    return Row(
        id=_text(value, "id") or fallback_id,
        tag=tag,
        messages=messages,
        prompt=prompt,
        ground_truth=_text(value, "ground_truth"),
        source=_text(value, "source"),
        difficulty=_number_or_text(value, "difficulty"),
        extra=FrozenDict({key: item for key, item in value.items() if key not in _KNOWN_KEYS}),
    )


def _parse_prompt(value: dict[str, Any]) -> tuple[tuple[FrozenDict, ...], str | None]:
    if "messages" in value:
        return _parse_messages(value["messages"]), None
    if "prompt" not in value:
        raise _BadRow(NO_PROMPT)
    prompt = value["prompt"]
    if not isinstance(prompt, str):
        raise _BadRow(WRONG_TYPE, f"prompt must be a text, not {type(prompt).__name__}")
    if not prompt.strip():
        raise _BadRow(EMPTY)
    return (), _encodable(prompt, "prompt")


def _parse_messages(messages: Any) -> tuple[FrozenDict, ...]:
    if isinstance(messages, str):
        if not messages.strip():
            raise _BadRow(EMPTY)
        try:
            messages = json.loads(messages)
        except (ValueError, RecursionError) as error:
            raise _BadRow(NOT_JSON, f"messages: {str(error)[:80]}") from None
    if not isinstance(messages, list):
        raise _BadRow(WRONG_TYPE, f"messages must be a list, not {type(messages).__name__}")
    for message in messages:
        if not isinstance(message, dict):
            raise _BadRow(WRONG_TYPE, f"a message must be an object, not {type(message).__name__}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise _BadRow(WRONG_TYPE, f"every message needs a text in {key!r}")
            _encodable(message[key], key)
    if not any(message["content"].strip() for message in messages):
        raise _BadRow(EMPTY)
    return freeze(messages)


def _encodable(text: str, name: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise _BadRow(WRONG_TYPE, f"{name} holds half of a surrogate pair, which no tokenizer takes") from None
    return text


def _text(value: dict[str, Any], key: str) -> str | None:
    """A text field; numbers are taken as their text, because ids and answers are often written so."""
    item = value.get(key)
    if item is None or isinstance(item, str):
        return item
    if isinstance(item, int | float) and not isinstance(item, bool):
        return str(item)
    raise _BadRow(WRONG_TYPE, f"{key} must be a text or a number, not {type(item).__name__}")


def _number_or_text(value: dict[str, Any], key: str) -> str | float | None:
    item = value.get(key)
    return item if isinstance(item, int | float) and not isinstance(item, bool) else _text(value, key)
