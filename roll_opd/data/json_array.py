"""Row file that is one JSON array, as `datasets` reads it; decoded element by element, so it need not fit in memory.

A row's `line` is its number in the array, from 1, and its `position` the offset of its first byte.
"""

import codecs
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from roll_opd.data.rows import DataError

CHUNK = 2**20  # bytes read at a time, doubled while an element does not end in them
MAX_ELEMENT = 2**28  # characters; a missing bracket would make the whole file one element
PARTIAL = 16  # an error this close to the end of the decoded text may be a cut-off token, such as `nul` or `\ud83`
NUMBER_CHARACTERS = "0123456789.eE+-"
SPACE = " \t\r\n\ufeff"


class JsonArrayFile:
    """`RowFile` over the elements of one JSON array."""

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
                raise self._broken(number, window.position, "more text after the end of the array")

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
    """Decoded part of a file; `position` is the offset of the next byte."""

    def __init__(self, file: BinaryIO, position: int) -> None:
        file.seek(position)
        self.position = position
        self._file, self._text, self._next, self._ended = file, "", 0, False
        # keeps invalid UTF-8, so that byte offsets stay right; such a row is reported as a bad row
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")

    def skip(self) -> str:
        """Skip white space; return the next character, "" at the end of the file."""
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
                if self._ended or (after and after not in NUMBER_CHARACTERS):  # a cut-off number is valid JSON
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
        """Advance by `characters`."""
        taken = self._text[self._next : self._next + characters]
        self.position += len(taken.encode("utf-8", "surrogateescape"))
        self._next += characters

    def _more(self, size: int) -> bool:
        """Read and decode `size` more bytes; False at the end of the file."""
        if self._ended:
            return False
        raw = self._file.read(size)
        self._ended = not raw
        self._text = self._text[self._next :] + self._decoder.decode(raw, self._ended)
        self._next = 0
        return True
