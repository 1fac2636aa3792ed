"""A JSON array as a file of rows, as `datasets` takes it: read element by element, so that it need not fit in memory.

A row's `line` is its number in the array, from 1, and its `position` the byte at which it begins.
"""

import codecs
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from roll_opd.data.rows import DataError

CHUNK = 2**20  # bytes read at a time, and twice as many whenever an element does not end in them
LARGEST = 2**28  # characters of an element; a bracket that is missing would make one of the whole file
PARTIAL = 16  # characters from the end of what is read that an error in a cut-off element may be: `nul`, `\ud83`
OF_NUMBERS = "0123456789.eE+-"
SPACE = " \t\r\n\ufeff"


class JsonArrayFile:
    """The elements of one array; see `data.files.RowFile`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def scan(self) -> Iterator[tuple[int, int, Any]]:
        with self.path.open("rb") as file:
            window = _Window(file, 0)
            if window.skip() != "[":
                raise self._broken(1, window.position, "an array begins with [")
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
                raise self._broken(number, window.position, "there is more behind the end of the array")

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
            f"{self.path} is no whole JSON array: element {number}, at byte {position}: {what}; correct it, or write"
            " one object a line (JSONL)"
        )


class _Window:
    """The part of a file that is decoded; `position` is the byte that comes next."""

    def __init__(self, file: BinaryIO, position: int) -> None:
        file.seek(position)
        self.position = position
        self._file, self._text, self._next, self._ended = file, "", 0, False
        # what is no UTF-8 is kept, so that bytes can be counted, and is found out as a bad row
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")

    def skip(self) -> str:
        """Pass over white space and return the character behind it, "" at the end of the file."""
        while True:
            rest = self._next
            while rest < len(self._text) and self._text[rest] in SPACE:
                rest += 1
            self.take(rest - self._next)
            if self._next < len(self._text) or not self._more(CHUNK):
                return self._text[self._next : self._next + 1]

    def value(self) -> Any:
        """Decode and take the value that comes next. Raises ValueError where there is none."""
        size = CHUNK
        while True:
            try:
                value, end = json.JSONDecoder().raw_decode(self._text, self._next)
                after = self._text[end : end + 1]
                if self._ended or (after and after not in OF_NUMBERS):  # a number that is cut looks like a whole one
                    break
            except json.JSONDecodeError as error:
                is_cut = "Unterminated" in error.msg or error.pos > len(self._text) - PARTIAL
                if self._ended or not is_cut or len(self._text) - self._next > LARGEST:
                    raise
            self._more(size)
            size *= 2
        self.take(end - self._next)
        return value

    def take(self, characters: int) -> None:
        """Pass over `characters`."""
        taken = self._text[self._next : self._next + characters]
        self.position += len(taken.encode("utf-8", "surrogateescape"))
        self._next += characters

    def _more(self, size: int) -> bool:
        """Read on; False at the end of the file."""
        if self._ended:
            return False
        raw = self._file.read(size)
        self._ended = not raw
        self._text = self._text[self._next :] + self._decoder.decode(raw, self._ended)
        self._next = 0
        return True
