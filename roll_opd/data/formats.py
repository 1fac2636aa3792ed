"""Detect the format of a row file from its first bytes, and read JSON arrays.

File names are not a reliable sign of the format.

The elements of an array are decoded one by one, so an array may be larger than the memory. The `line` of a row is its
number in the array, starting at 1. The `position` of a row is the offset of its first byte.
"""

import codecs
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from roll_opd.data.rows import DataError

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


CHUNK = 2**20  # bytes read at a time; doubled as long as an element is incomplete
# maximum characters of an element; without it, a missing bracket would make the whole file one element
MAX_ELEMENT = 2**28
# an error this close to the end of the decoded text may come from an incomplete token, such as `nul` or `\ud83`
PARTIAL = 16
NUMBER_CHARACTERS = "0123456789.eE+-"
SPACE = " \t\r\n\ufeff"


class JsonArrayFile:
    """`RowFile` whose rows are the elements of one JSON array."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def scan(self) -> Iterator[tuple[int, int, Any]]:
        with self.path.open("rb") as file:
            window = _Window(file, 0)
            if window.skip() != "[":
                raise self._broken(1, window.position, "an array must begin with [")
            window.take(1)
            number = 0
            while (sign := window.skip()) != "]":
                if number:
                    if sign != ",":
                        raise self._broken(number, window.position, "no comma after it" if sign else "cut off")
                    window.take(1)
                    window.skip()
                number += 1
                position = window.position
                yield number, position, self._value(window, number)
            window.take(1)
            if window.skip():
                raise self._broken(number, window.position, "text after the end of the array")

    def read(self, positions: Sequence[int]) -> list[Any]:
        with self.path.open("rb") as file:
            return [self._value(_Window(file, position), 0) for position in positions]

    def column(self, name: str) -> Iterator[Any]:
        return (value.get(name) for _, _, value in self.scan() if isinstance(value, dict))

    def count(self) -> int:
        return sum(1 for _ in self.scan())

    def bytes_before(self, position: int) -> int:
        return position

    def _value(self, window: "_Window", number: int) -> Any:
        try:
            return window.value()
        except (ValueError, RecursionError) as error:
            raise self._broken(number, window.position, str(error)[:80]) from None

    def _broken(self, number: int, position: int, what: str) -> DataError:
        return DataError(
            f"{self.path} is not a complete JSON array: element {number}, at byte {position}: {what}; correct it, or"
            " write one object per line (JSONL)"
        )


class _Window:
    """The decoded part of a file. `position` is the byte offset of the next character in the file."""

    def __init__(self, file: BinaryIO, position: int) -> None:
        file.seek(position)
        self.position = position
        self._file, self._text, self._next, self._ended = file, "", 0, False
        # keeps invalid UTF-8, so that byte offsets stay correct; the row is reported as a bad row
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")

    def skip(self) -> str:
        """Skip white space, and return the next character, or "" at the end of the file."""
        while True:
            rest = self._next
            while rest < len(self._text) and self._text[rest] in SPACE:
                rest += 1
            self.take(rest - self._next)
            if self._next < len(self._text) or not self._more(CHUNK):
                return self._text[self._next : self._next + 1]

    def value(self) -> Any:
        """Decode and return the next value. Raises ValueError for invalid JSON."""
        size = CHUNK
        while True:
            try:
                value, end = json.JSONDecoder().raw_decode(self._text, self._next)
                after = self._text[end : end + 1]
                if self._ended or (after and after not in NUMBER_CHARACTERS):  # an incomplete number is valid JSON
                    break
            except json.JSONDecodeError as error:
                is_cut = "Unterminated" in error.msg or error.pos > len(self._text) - PARTIAL
                if self._ended or not is_cut or len(self._text) - self._next > MAX_ELEMENT:
                    raise
            self._more(size)
            size *= 2
        self.take(end - self._next)
        return value

    def take(self, characters: int) -> None:
        """Skip a number of characters."""
        taken = self._text[self._next : self._next + characters]
        self.position += len(taken.encode("utf-8", "surrogateescape"))
        self._next += characters

    def _more(self, size: int) -> bool:
        """Read and decode `size` more bytes. Return False at the end of the file."""
        if self._ended:
            return False
        raw = self._file.read(size)
        self._ended = not raw
        self._text = self._text[self._next :] + self._decoder.decode(raw, self._ended)
        self._next = 0
        return True
