"""Row files on disk (JSONL, JSON array, Parquet): find files, scan all rows, and read single rows by position.

A row has a `line` for error messages. This is the line number in a JSONL file, or the row number in an array or a
Parquet file; both start at 1.

A row also has a `position` for seeking. This is the offset of its first byte in a text file, or its row number in a
Parquet file.

`first_tags` and `count_rows` read a data set quickly, before the pass over all rows.
"""

import glob
import json
import math
import os
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from roll_opd.base.failures import os_sentence
from roll_opd.base.hub import HubError, hub_name
from roll_opd.base.paths import PathError, candidates, find_path, is_hidden, places, regular_file
from roll_opd.config.plan import DataPlan
from roll_opd.data.file_types import SAVED, JsonArrayFile, is_array, is_parquet, refusal, saved
from roll_opd.data.named_sets import DataPart, named_files
from roll_opd.data.row_formats import NOT_JSON, BadRow, DataError, tag_of

SUFFIXES = (".jsonl", ".json", ".parquet")  # suffixes of row files in a directory
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json")  # files of a directory that describe a data set
PARQUET_ROWS = 256  # number of rows decoded at a time; small, as a row may have a megabyte
PARQUET_BUFFER = 2**20  # bytes of a column read at a time
MAX_LINE = 2**26  # maximum bytes of a line; a file with longer lines is not JSONL and would fill the memory


class RowFile(Protocol):
    """A file of rows. A row that cannot be decoded is returned as a `BadRow`."""

    path: Path

    def scan(self) -> Iterator[tuple[int, int, Any]]:
        """Yield (line, position, value) of every non-blank row, in order."""

    def read(self, positions: Sequence[int]) -> list[Any]:
        """Return the values at the given positions, which must be in ascending order."""

    def column(self, name: str) -> Iterator[Any]:
        """Yield the value in the column `name` of each row that can be decoded; None if the row has no such value."""

    def count(self) -> int:
        """Return the number of rows that are not blank. Bad rows are counted too."""

    def bytes_before(self, position: int) -> int:
        """Return the approximate number of bytes before a row. It is used for progress bars."""


def find_files(name: str, dataset_dir: str | None, part: DataPart | None = None) -> list[Path]:
    """Return the files of an entry of `file_name`. An entry is a file, a directory, a pattern, or a name on the hub.

    The entry is looked up as written, and then below `dataset_dir`. Of a data set on the hub, `part` is read; without
    `part`, names on the hub are not found. Raises `DataError` if there is no readable file.
    """
    try:
        return _found(name, dataset_dir, part)
    except HubError as error:
        raise DataError(str(error)) from None
    except PathError as error:
        raise DataError(f"{error} (the path of a JSONL or Parquet file)") from None
    except OSError as error:
        raise DataError(os_sentence(error)) from None


def _found(name: str, dataset_dir: str | None, part: DataPart | None) -> list[Path]:
    candidates = [name, os.path.join(dataset_dir, name)] if dataset_dir else [name]
    for candidate in candidates:
        found = find_path(candidate)
        if found is None:
            files = _matching(candidate)
        elif found.is_dir():
            files = files_below(found)
            if not files:
                raise DataError(
                    f"the directory {found} has no files named {' or '.join(f'*{s}' for s in SUFFIXES)}; add data files"
                )
        else:
            files = [regular_file(found)]
        if files:
            return files
    below = f" or below dataset_dir {dataset_dir!r}" if dataset_dir else ""
    if part and (named := hub_name(name, "dataset")):
        return [Path(file) for file in named_files(named, part).files]
    advice = "give the path of a JSONL or Parquet file"
    advice += ", or the name of a data set on the hub (owner/name)" if part else ""
    raise DataError(f"no file {name!r} from {places()}{below}; {advice}")


def files_below(directory: Path, pattern: str = "*") -> list[Path]:
    """Return the row files of a directory that match `pattern`, sorted.

    Hidden files, files in hidden directories, and descriptions of a data set are no row files. Raises `DataError` if
    `datasets` wrote the directory with save_to_disk, and `PathError` for a broken link.
    """
    if message := saved(directory):
        raise DataError(message)
    found = [
        file
        for file in directory.glob(pattern)
        if file.suffix in SUFFIXES and file.name not in DESCRIPTIONS and not file.is_dir()
    ]
    return sorted(regular_file(file) for file in found if not is_hidden(file.relative_to(directory)))


def _matching(pattern: str) -> list[Path]:
    """Return the files that match a pattern with *, ? or [ ].

    The pattern is tried in each place of `candidates`, until a place has a match.
    """
    for place in candidates(pattern):
        # the names of existing directories, such as `runs [1]`, are no patterns
        parent = next((parent for parent in (place, *place.parents) if parent.exists()), Path())
        pattern = os.path.join(glob.escape(str(parent)), place.relative_to(parent))
        files = [Path(match) for match in glob.glob(pattern, recursive=True)]
        if files := sorted(file.resolve() for file in files if file.is_file()):
            for place in {file.parent for file in files if file.name in SAVED}:
                if message := saved(place):
                    raise DataError(message)
            return files
    return []


def open_file(name: str, columns: Collection[str] | None = None) -> RowFile:
    """Open a row file: Parquet, a JSON array, or else JSONL. Raises `DataError` for other formats.

    A pass over a Parquet file reads only the given `columns`. If `columns` is None, it reads all columns.
    """
    path = Path(name)
    if message := refusal(path):
        raise DataError(message)
    if is_parquet(path):
        return ParquetFile(path, columns)
    return JsonArrayFile(path) if is_array(path) else JsonlFile(path)


class JsonlFile:
    """`RowFile` with one JSON object per line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def scan(self) -> Iterator[tuple[int, int, Any]]:
        position = 0
        with self.path.open("rb") as file:
            for line, raw in enumerate(self._lines(file), start=1):
                if raw.strip():
                    yield line, position, _decode(raw)
                position += len(raw)

    def read(self, positions: Sequence[int]) -> list[Any]:
        with self.path.open("rb") as file:
            return [_decode(_line_at(file, position)) for position in positions]

    def column(self, name: str) -> Iterator[Any]:
        return (value.get(name) for _, _, value in self.scan() if isinstance(value, dict))

    def count(self) -> int:
        with self.path.open("rb") as file:
            return sum(1 for raw in self._lines(file) if raw.strip())

    def bytes_before(self, position: int) -> int:
        return position

    def _lines(self, file: BinaryIO) -> Iterator[bytes]:
        if not os.fstat(file.fileno()).st_size:
            return  # also limits files of /proc, which report size 0 and may never end
        for number, raw in enumerate(iter(partial(file.readline, MAX_LINE), b""), start=1):
            if len(raw) == MAX_LINE:
                raise DataError(f"{self.path}:{number} is longer than {MAX_LINE >> 20} MiB; write one row per line")
            yield raw


class ParquetFile:
    """`RowFile` over a Parquet file.

    To read a row, its row group is decoded from the start to the row. Reading is therefore faster with small row
    groups.
    """

    def __init__(self, path: Path, columns: Collection[str] | None = None) -> None:
        """Open the file. A pass over the file reads only `columns`, because other columns may be large."""
        self.path = path
        with opened_parquet(path) as file:
            names = file.schema_arrow.names
            self._names = set(names)
            self._columns = names if columns is None else [name for name in names if name in columns]
            groups = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        self._starts = [0, *accumulate(groups)]  # first row of each group, and the number of rows
        self._groups = range(len(groups))
        self._bytes = path.stat().st_size

    def scan(self) -> Iterator[tuple[int, int, Any]]:
        for number, value in enumerate(self._values(self._groups, self._columns)):
            yield number + 1, number, value

    def column(self, name: str) -> Iterator[Any]:
        columns = [name] if name in self._names else []
        return (value.get(name) for value in self._values(self._groups, columns))

    def count(self) -> int:
        return self._starts[-1]

    def read(self, positions: Sequence[int]) -> list[Any]:
        values: list[Any] = []
        wanted: dict[int, list[int]] = {}  # row group -> places of rows in it
        for position in positions:
            group = bisect_right(self._starts, position) - 1
            wanted.setdefault(group, []).append(position - self._starts[group])
        for group, rows in wanted.items():
            left = iter(rows)
            row = next(left)
            for number, value in enumerate(self._values([group], None)):
                if number == row:
                    values.append(value)
                    if (row := next(left, -1)) < 0:
                        break
        return values

    def bytes_before(self, position: int) -> int:
        return self._bytes * position // max(1, self._starts[-1])

    def _values(self, groups: Sequence[int], columns: list[str] | None) -> Iterator[dict[str, Any]]:
        with opened_parquet(self.path) as file:
            for batch in file.iter_batches(PARQUET_ROWS, row_groups=list(groups), columns=columns):
                if columns == []:  # without a known column, every row is bad, but is counted
                    yield from ({} for _ in range(batch.num_rows))
                else:
                    yield from batch.to_pylist()


@contextmanager
def opened_parquet(path: Path) -> Iterator[Any]:
    """Open a Parquet file. Raises `DataError` if it cannot be opened, or cannot be read inside the `with` block."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, buffer_size=PARQUET_BUFFER, pre_buffer=False) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable Parquet file: {error}") from error


def _line_at(file: Any, position: int) -> bytes:
    file.seek(position)
    return file.readline()


def _decode(raw: bytes) -> Any:
    try:
        return json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return BadRow(NOT_JSON, f"the line is not UTF-8: {error.reason} at byte {error.start}")
    except (ValueError, RecursionError) as error:
        return BadRow(NOT_JSON, str(error)[:80])


ROWS_SCANNED = 50_000  # number of rows over all files; enough to detect a wrong tag or column


def first_tags(data: DataPlan) -> tuple[set[str], bool]:
    """Return (tags, complete): the tags of the first rows of each file, and whether the files have no other rows.

    Rows and files that cannot be read are skipped. They are reported by the pass over all rows before a run.
    """
    tags: set[str] = set()
    complete = True
    column = data.columns.get("tag", "tag")
    share = ROWS_SCANNED // max(1, len(data.files))
    share = share if data.limit is None else min(share, data.limit)
    for name in data.files:
        with suppress(OSError):
            found, whole = _tags_of_file(name, column, share, _version(name))
            tags |= found
            complete = complete and whole
    return tags, complete


def _version(name: str) -> tuple[int, ...]:
    """Return numbers that change if a file's content or permissions change. Raises OSError if the file is missing."""
    stat = os.stat(name)
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


@lru_cache(maxsize=64)  # cached, as several checks of the planner read the same file
def _tags_of_file(name: str, column: str, share: int, version: tuple[int, ...]) -> tuple[frozenset[str], bool]:
    """Return (tags, complete): the tags of the first rows of a file, and whether the file has no other rows.

    At most `share` rows are read. The result is cached for each `version` of the file.
    """
    tags: set[str] = set()
    try:
        rows = open_file(name).column(column)
        for tag in islice(rows, share):
            with suppress(BadRow):
                tags.add(tag_of(tag))
        return frozenset(tags), next(rows, rows) is rows
    except (DataError, OSError):
        return frozenset(tags), True


def count_rows(data: DataPlan) -> int:
    """Return the number of rows, but at most `limit`. Bad rows are counted too.

    Raises `DataError` for a Parquet file that cannot be read.
    """
    total = sum(open_file(name).count() for name in data.files)
    return total if data.limit is None else min(total, data.limit)


def whole_steps(epochs: float, found: int, rows: int) -> int:
    """Return the number of complete steps in a number of epochs.

    Args:
        epochs: number of passes over the data.
        found: number of rows in the data.
        rows: number of rows in a step.
    """
    return math.floor(epochs * found) // rows
