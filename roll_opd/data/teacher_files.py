"""Data sets of teacher files (answers with a teacher's scores), and their writer.

A data set checks all rows in one pass at the start. Only the locations of the rows stay in memory, so a row is read
again when it is drawn. Reading a row decodes its whole row group, which has `ROWS_OF_A_GROUP` rows.

The writer makes a file in parts, so that interrupted scoring can continue after the last complete part. A part is a
parquet file in `.OUTPUT.parts/`, which gets its final name when it is complete. At the end, all parts are joined to one
file, which is renamed to OUTPUT. Parts that were written with other settings or from another input are discarded.

Legend: R response tokens, K tokens of a top-k.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_opd.base.frozen import FrozenDict
from roll_opd.config.plan import DataPlan, StreamPlan
from roll_opd.data.data_checks import WHOLE_TOO_LONG, DataReport, FileReport
from roll_opd.data.dataset import DEFAULT_STREAM, Prompt, check_report
from roll_opd.data.row_files import opened_parquet
from roll_opd.data.row_formats import BadRow, DataError
from roll_opd.data.teacher_scores import (
    INCONSISTENT,
    VERSION,
    VERSION_KEY,
    VOCABULARY_KEY,
    Expected,
    FileFormat,
    TeacherScores,
    lists,
    problem,
    recognised,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

ROWS_OF_A_GROUP = 64
GROUPS_IN_MEMORY = 4
SCHEMA = "scored"  # schema of a `DataPlan` for teacher files


@dataclass(frozen=True)
class _Place:
    """Location of a row.

    - `file`, `group`, `row`: indices of the file, of the row group in the file, and of the row in the group.
    - `digest`: hash of the row's content.
    """

    file: int
    group: int
    row: int
    digest: bytes


class TeacherFile:
    """A parquet file of scored answers. Raises DataError if the file cannot be read or has another format."""

    def __init__(self, path: Path, tokenizer: "PreTrainedTokenizerBase", compression: str | None = None) -> None:
        self.path, self._tokenizer = path, tokenizer
        with opened_parquet(self.path) as file:
            schema, self.groups = file.schema_arrow, file.num_row_groups
            self.rows = file.metadata.num_rows
        self.format: FileFormat = recognised(path, schema, compression)
        self._has_ids = "id" in schema.names
        self.group = lru_cache(GROUPS_IN_MEMORY)(self._group)

    def _group(self, number: int) -> list[tuple[str, TeacherScores | BadRow]]:
        """Return (id, content) of each row in a row group. If the file has no column `id`, every id is ""."""
        columns = [*self.format.columns, *(["id"] if self._has_ids else [])]
        with opened_parquet(self.path) as file:
            table: pa.Table = file.read_row_group(number, columns=columns)
        ids = [str(value) for value in table["id"].to_pylist()] if self._has_ids else [""] * table.num_rows
        return list(zip(ids, self.format.decode(table, self._tokenizer), strict=True))


class ScoredSet:
    """Scored answers, numbered from 0. The class has the methods of `PromptSet`; `open_teacher_files` creates it."""

    streams: tuple[StreamPlan, ...] = (DEFAULT_STREAM,)

    def __init__(self, files: Sequence[TeacherFile], places: Sequence[_Place]) -> None:
        self._files, self._places = files, places

    def __len__(self) -> int:
        return len(self._places)

    def members(self, stream: StreamPlan) -> np.ndarray:
        """Return the numbers of all rows, int64."""
        return np.arange(len(self), dtype=np.int64)

    def read(self, numbers: Sequence[int]) -> list[Prompt]:
        """Return the rows with these numbers, in the given order.

        Raises DataError if a row has changed since it was checked.
        """
        found: dict[int, Prompt] = {}
        for number in sorted(set(numbers), key=lambda number: (self._places[number].file, self._places[number].group)):
            place = self._places[number]
            file = self._files[place.file]
            name, scores = file.group(place.group)[place.row]
            if isinstance(scores, BadRow) or _digest(name, scores) != place.digest:
                raise DataError(
                    f"{file.path}: row {place.row + 1} of row group {place.group} has changed since the start of the"
                    " run; restore the file and resume from the last checkpoint, or start a new run"
                )
            found[number] = Prompt(
                id=name or f"{file.path.stem}/{place.group}/{place.row}",
                index=number,
                tag="",
                tokens=scores.prompt_ids,
                answers=(scores.response_ids,),
                scores=scores,
            )
        return [found[number] for number in numbers]

    def all(self) -> list[Prompt]:
        """Return all rows in order. Used for held-out rows."""
        return self.read(range(len(self)))

    def fingerprint(self) -> list[dict[str, str | int]]:
        """Return the name, number of rows and digest of each file."""
        found: list[dict[str, str | int]] = []
        for number, file in enumerate(self._files):
            own = [place.digest for place in self._places if place.file == number]
            digest = blake2b(b"".join(own), digest_size=8).hexdigest()
            found.append({"name": file.path.name, "prompts": len(own), "digest": digest})
        return found


def open_teacher_files(
    plan: DataPlan, tokenizer: "PreTrainedTokenizerBase", expected: Expected, compression: str | None = None
) -> tuple[ScoredSet, DataReport]:
    """Check every row of `plan.files` in one pass. Returns (rows, report): the usable rows, and a report on all rows.

    - `plan.on_bad_row`: whether a row is refused or dropped if it cannot be decoded or has inconsistent scores.
    - `plan.on_long_prompt`: whether a row is refused or dropped if its prompt and answer have more than
      `plan.prompt_length` tokens.

    Raises DataError if a row is refused, or if no row is usable.
    """
    files = [TeacherFile(Path(name), tokenizer, compression) for name in plan.files]
    places: list[_Place] = []
    reports: list[FileReport] = []
    longest = 0
    for number, file in enumerate(files):
        report = FileReport(str(file.path))
        for place, name, scores in _rows(number, file):
            if plan.limit is not None and sum(one.rows for one in (*reports, report)) >= plan.limit:
                break
            report.rows += 1
            if isinstance(scores, BadRow):
                report.add_bad(scores.args[0], report.rows, scores.args[1])
                continue
            tokens = len(scores.prompt_ids) + len(scores.response_ids)
            longest = max(longest, tokens)
            if why := problem(scores, expected):
                report.add_bad(INCONSISTENT, report.rows, why)
            elif tokens > plan.prompt_length:
                report.add_bad(WHOLE_TOO_LONG, report.rows, f"{tokens} tokens")
            else:
                report.prompts += 1
                places.append(replace(place, digest=_digest(name, scores)))
        reports.append(report)
    found = DataReport(tuple(reports), plan.length_key, plan.prompt_length, longest, streams=FrozenDict())
    check_report(found, plan)
    return ScoredSet(files, places), found


def _rows(number: int, file: TeacherFile) -> Iterator[tuple[_Place, str, TeacherScores | BadRow]]:
    for group in range(file.groups):
        for row, (name, scores) in enumerate(file.group(group)):
            yield _Place(number, group, row, b""), name, scores


@dataclass(frozen=True)
class FileFacts:
    """Facts from the metadata and the first rows of teacher files."""

    vocab_size: int | None  # smallest number of token ids over which log-probs are normalised; None: not stated
    topk: int | None  # size of the smallest top-k; None: no top-k


def facts_of(files: Sequence[str], compression: str | None) -> FileFacts:
    """Return the facts of teacher files, from a small part of each file. Raises DataError for an unreadable file."""
    vocabularies, sizes = [], []
    for name in files:
        with opened_parquet(Path(name)) as file:
            schema = file.schema_arrow
            if (value := (schema.metadata or {}).get(VOCABULARY_KEY)) is not None:
                vocabularies.append(int(value))
            if (topk := recognised(Path(name), schema, compression).topk) is not None:
                sizes.append(topk)
            elif "teacher_topk_ids" in schema.names:
                first = next(file.iter_batches(1, columns=["teacher_topk_ids"]), None)
                rows = lists(first["teacher_topk_ids"]) if first is not None else []
                sizes += [row.shape[1] for row in rows if row is not None and row.ndim == 2]
    return FileFacts(min(vocabularies, default=None), min(sizes, default=None))


def _digest(name: str, scores: TeacherScores) -> bytes:
    state = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8)
    for values in (scores.prompt_ids, scores.response_ids, scores.logprobs, scores.topk_ids, scores.topk_logprobs):
        state.update(b"-" if values is None else np.ascontiguousarray(values).tobytes())
    return state.digest()


ROWS_OF_A_PART = 4 * ROWS_OF_A_GROUP
SETTINGS_FILE = "settings.json"
CODEC = "zstd"


class TeacherWriter:
    """Writer of one teacher file.

    Args:
        output: the parquet file.
        facts: columns that have the same value in all rows: teacher, tokenizer, temperature.
        topk: number of tokens in the top-k (K). None: write only the log-probs of the response tokens.
        vocab_size: number of token ids over which the log-probs are normalised.
        settings: settings that determine the scores; parts written with other settings are discarded.
    """

    def __init__(
        self,
        output: Path,
        facts: Mapping[str, str | float],
        topk: int | None,
        vocab_size: int,
        settings: Mapping[str, Any],
    ) -> None:
        self.output, self.facts, self.topk, self.vocab_size = output, facts, topk, vocab_size
        self.parts = output.with_name(f".{output.name}.parts")
        self._settings = json.dumps({**settings, **facts, "topk": topk, "vocab_size": vocab_size}, sort_keys=True)
        self._open()

    def _open(self) -> None:
        file = self.parts / SETTINGS_FILE
        if self.parts.is_dir() and not (file.is_file() and file.read_text(encoding="utf-8") == self._settings):
            shutil.rmtree(self.parts)
        self.parts.mkdir(exist_ok=True)
        file.write_text(self._settings, encoding="utf-8")

    def missing(self, rows: Iterator[dict[str, Any]]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """Yield (number, input rows) of each part that has not been written yet."""
        for number in count():
            part = list(islice(rows, ROWS_OF_A_PART))
            if not part:
                return
            if not self._part(number).is_file():
                yield number, part

    def write(self, number: int, rows: Sequence[Mapping[str, Any]], scores: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Write the part with this number.

        - `rows`: input rows with `id`, `tokens` and `prompt_length`.
        - `scores`: arrays of each row, as returned by `compute_targets`.
        """
        table = self._table(rows, scores)
        partial = self._part(number).with_suffix(".partial")
        _write([table], partial, table.schema)
        partial.replace(self._part(number))

    def finish(self) -> None:
        """Join all parts into the output, and remove the parts."""
        import pyarrow.parquet as pq

        files = sorted(self.parts.glob("*.parquet"))
        partial = self.output.with_name(f".{self.output.name}.partial")
        schema = pq.read_schema(files[0])
        groups = (pq.ParquetFile(file).read_row_group(g) for file in files for g in range(_groups(file)))
        _write(groups, partial, schema)
        partial.replace(self.output)
        shutil.rmtree(self.parts)

    def _part(self, number: int) -> Path:
        return self.parts / f"{number:08d}.parquet"

    def _table(self, rows: Sequence[Mapping[str, Any]], scores: Sequence[Mapping[str, np.ndarray]]) -> "pa.Table":
        import pyarrow as pa

        prompts = [np.asarray(row["tokens"][: row["prompt_length"]], np.int32) for row in rows]
        responses = [np.asarray(row["tokens"][row["prompt_length"] :], np.int32) for row in rows]
        columns: dict[str, Any] = {
            "id": pa.array([str(row["id"]) for row in rows]),
            "prompt_ids": _lists(prompts),
            "response_ids": _lists(responses),
            "teacher_logprobs": _lists([found["logprobs"] for found in scores]),
        }
        if self.topk is not None:
            columns["teacher_topk_ids"] = _lists([found["topk_ids"].astype(np.int32) for found in scores])
            columns["teacher_topk_logprobs"] = _lists([found["topk_logprobs"] for found in scores])
            columns["teacher_topk_rest"] = _lists([found["topk_rest"] for found in scores])
        columns |= {name: pa.array([value] * len(rows)) for name, value in self.facts.items()}
        metadata = {VERSION_KEY: VERSION, VOCABULARY_KEY: str(self.vocab_size)}
        return pa.table(columns).replace_schema_metadata(metadata)


def digest_of(path: Path) -> str:
    """Return a digest of a file's content."""
    state = blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(2**20):
            state.update(block)
    return state.hexdigest()


def _lists(values: Sequence[np.ndarray]) -> "pa.Array":
    """Return a column with one value per array: a list for an array [R], a list of lists for an array [R, K]."""
    import pyarrow as pa

    ends = np.cumsum([0, *map(len, values)], dtype=np.int32)
    flat = np.concatenate(values)
    inner = pa.array(flat.reshape(-1))
    if flat.ndim == 2:
        inner = pa.FixedSizeListArray.from_arrays(inner, flat.shape[1])
    return pa.ListArray.from_arrays(pa.array(ends), inner)


def _groups(file: Path) -> int:
    import pyarrow.parquet as pq

    return int(pq.ParquetFile(file).num_row_groups)


def _write(tables: Any, path: Path, schema: "pa.Schema") -> None:
    import pyarrow.parquet as pq

    with pq.ParquetWriter(path, schema, compression=CODEC) as writer:
        for table in tables:
            writer.write_table(table, row_group_size=ROWS_OF_A_GROUP)
