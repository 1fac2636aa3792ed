"""Detect the format of a row file from its first bytes, and read JSON arrays.

File names are not a reliable sign of the format.

The elements of an array are decoded one by one, so an array may be larger than the memory. The `line` of a row is its
number in the array, starting at 1. The `position` of a row is the offset of its first byte.
"""

import json
import mmap
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from roll_opd.data.row_formats import DataError

FIRST_BYTES = 2**20  # bytes that are read to detect the format
BOM = b"\xef\xbb\xbf"
PARQUET = b"PAR1"
# first bytes of unsupported files -> format, remedy
FOREIGN = {
    b"\x1f\x8b": ("compressed with gzip", "unpack it (gunzip {name})"),
    b"\x28\xb5\x2f\xfd": ("compressed with Zstandard", "unpack it (zstd -d {name})"),
    b"BZh": ("compressed with bzip2", "unpack it (bunzip2 {name})"),
    b"\xfd7zXZ": ("compressed with xz", "unpack it (unxz {name})"),
    b"PK\x03\x04": ("a zip archive or a spreadsheet", "unpack or export it"),
    b"ARROW1": (
        "an Arrow file",
        'convert it: pyarrow.parquet.write_table(pyarrow.feather.read_table("{name}"), "rows.parquet")',
    ),
    b"\xff\xff\xff\xff": (
        "an Arrow file",
        'convert it: datasets.Dataset.from_file("{name}").to_parquet("rows.parquet")',
    ),
    b"SQLite format 3": ("an SQLite database", "export its rows"),
    b"\xff\xfe": ("UTF-16 text", "save it as UTF-8 (iconv -f UTF-16 -t UTF-8)"),
    b"\xfe\xff": ("UTF-16 text", "save it as UTF-8 (iconv -f UTF-16 -t UTF-8)"),
}
TABLES = {".csv": "a CSV file", ".tsv": "a table with tabs"}  # text formats that are recognised only by file name
SEPARATORS = {".csv": ",", ".tsv": "\\t"}


# file in a directory that `datasets` wrote with save_to_disk -> the part of it that becomes one Parquet file
SAVED = {"state.json": "", "dataset_dict.json": '["train"]'}


def saved(directory: Path) -> str | None:
    """Return an error message with a remedy if `datasets` wrote the directory with save_to_disk, else None.

    The rows are in Arrow files, and the JSON files of such a directory have no rows.
    """
    for name, part in SAVED.items():
        if (directory / name).is_file() and (part or (directory / "dataset_info.json").is_file()):
            return (
                f"{directory} was written by save_to_disk, as Arrow files; convert it:"
                f' datasets.load_from_disk("{directory}"){part}.to_parquet("rows.parquet"), and name the result'
            )
    return None


def is_parquet(path: Path) -> bool:
    """Return whether a file starts with Parquet's first bytes or has the suffix .parquet."""
    return path.suffix == ".parquet" or _head(path, len(PARQUET)) == PARQUET


def is_array(path: Path) -> bool:
    """Return whether a text file is a single JSON array of rows. `datasets` also reads this format."""
    with path.open("rb") as file:
        head = file.read(len(BOM))
        file.seek(len(BOM) if head == BOM else 0)
        line = b""
        while not line.strip():
            line = file.readline(FIRST_BYTES)
            if not line:
                return False
        if not line.lstrip().startswith(b"["):
            return False
        try:
            json.loads(line)
        except (ValueError, RecursionError):
            return True  # the array continues on the next lines
        # an array in one line is either the complete file or a bad first row of a JSONL file
        return not any(rest.strip() for rest in iter(lambda: file.read(FIRST_BYTES), b""))


def refusal(path: Path) -> str | None:
    """Return an error message with a remedy if a file's format is not supported; None if it is supported."""
    if not path.is_file() or is_parquet(path):
        return None
    read = "rows are read from JSONL (one object per line), a JSON array or Parquet"
    if path.suffix in TABLES:
        convert = f'pandas.read_csv("{path.name}", sep="{SEPARATORS[path.suffix]}")'
        convert += f'.to_json("{path.stem}.jsonl", orient="records", lines=True)'
        return f"{path} is {TABLES[path.suffix]}; {read}; convert it with {convert}"
    head = _head(path, FIRST_BYTES)
    for start, (what, advice) in FOREIGN.items():
        if head.startswith(start):
            return f"{path} is {what}; {read}: {advice.format(name=path.name)} and name the result"
    if _is_spread(head):
        advice = f"write one object per line (jq -c . {path.name} > {path.stem}.jsonl)"
        return f"{path} has JSON objects over several lines; {read}: {advice}, or write the objects as an array"
    return None


def _is_spread(head: bytes) -> bool:
    """Return whether a text begins with a JSON object that spans several lines."""
    text = head.decode("utf-8-sig", errors="replace").lstrip()
    if not text.startswith("{"):
        return False
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return False
    return "\n" in text[:end]


def _head(path: Path, size: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(size)
    except OSError:
        return b""  # an error is reported when the file is read


# a token that ends an element or changes its nesting; the brackets and commas in a string are part of it
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{},]', re.DOTALL)
_NESTING = {b"[": 1, b"{": 1, b"]": -1, b"}": -1}
_SPACE = re.compile(rb"[ \t\r\n]*")


class JsonArrayFile:
    """`RowFile` whose rows are the elements of one JSON array. The file is mapped into memory, not read as a whole."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def scan(self) -> Iterator[tuple[int, int, Any]]:
        data = self._mapped()
        start = _after_space(data, len(BOM) if data[: len(BOM)] == BOM else 0)
        if data[start : start + 1] != b"[":
            raise self._broken(1, start, "an array must begin with [")
        first = _after_space(data, start + 1)
        number, end = 0, first if data[first : first + 1] == b"]" else start
        while data[end : end + 1] != b"]":
            number += 1
            position, value, end = self._element(data, end + 1, number)
            yield number, position, value
        if (rest := _after_space(data, end + 1)) < len(data):
            raise self._broken(number, rest, "text after the end of the array")

    def read(self, positions: Sequence[int]) -> list[Any]:
        data = self._mapped()
        return [self._element(data, position, 0)[1] for position in positions]

    def column(self, name: str) -> Iterator[Any]:
        return (value.get(name) for _, _, value in self.scan() if isinstance(value, dict))

    def count(self) -> int:
        return sum(1 for _ in self.scan())

    def bytes_before(self, position: int) -> int:
        return position

    def _mapped(self) -> mmap.mmap:
        with self.path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def _element(self, data: mmap.mmap, start: int, number: int) -> tuple[int, Any, int]:
        """Return (position, value, end) of the element after `start`; `end` is the comma or the bracket after it."""
        position, depth = _after_space(data, start), 0
        for token in _TOKEN.finditer(data, position):
            if not depth and token[0] in (b",", b"]"):
                break
            depth += _NESTING.get(token[0], 0)
        else:
            raise self._broken(number, len(data), "cut off")
        try:
            # keeps invalid UTF-8; the row is reported as a bad row
            value = json.loads(data[position : token.start()].decode("utf-8", "surrogateescape"))
        except (ValueError, RecursionError) as error:
            is_next = isinstance(error, json.JSONDecodeError) and error.msg == "Extra data"
            raise self._broken(number, position, "no comma after it" if is_next else str(error)[:80]) from None
        return position, value, token.start()

    def _broken(self, number: int, position: int, what: str) -> DataError:
        return DataError(
            f"{self.path} is not a complete JSON array: element {number}, at byte {position}: {what}; correct it, or"
            " write one object per line (JSONL)"
        )


def _after_space(data: mmap.mmap, position: int) -> int:
    space = _SPACE.match(data, position)
    assert space  # it may be empty
    return space.end()
