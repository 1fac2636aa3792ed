"""What a run prints, on record: a copy in its directory, its warnings, and a line that is updated in place.

There is one standard output a process, so there is one recording at a time.
"""

import os
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from roll_opd.base.terminal import columns

CONSOLE_LOG = "console.log"
WARNING = "warning: "  # what a warning begins with, on standard error
CLEAR = "\r\x1b[K"  # back to the first column, and erase the line
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")  # ECMA-48
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline

_current: "Recording | None" = None


@contextmanager
def recorded() -> Iterator["Recording"]:
    """Record what is printed inside the block; inside another such block, it is that one's recording."""
    global _current
    if _current:
        yield _current
        return
    _current = recording = Recording()
    try:
        yield recording
    finally:
        _current = None
        recording.end()


class Recording:
    """Stands between this process and its standard output and error, from its making to `end`."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.warnings: list[str] = []
        self._lock = threading.RLock()
        self._lines: list[str] = []  # until there is a file
        self._file: Path | None = None
        self._ended = False
        self._has_live_line = False
        self._terminal = sys.stdout
        self._copies = (_Copy(sys.stdout, self, of_errors=False), _Copy(sys.stderr, self, of_errors=True))
        sys.stdout, sys.stderr = self._copies

    @property
    def is_live(self) -> bool:
        """Whether standard output is a terminal, on which a line can be updated."""
        return bool(self._terminal and self._terminal.isatty()) and os.environ.get("TERM") != "dumb"

    def keep_in(self, directory: Path) -> None:
        """Append what has been printed, and what will be, to `CONSOLE_LOG` in `directory`."""
        with self._lock:
            self._file = directory / CONSOLE_LOG
            self._add(self._lines)
            self._lines = []

    def show_live(self, text: str) -> None:
        """Show a line that is replaced by the next one, or erased before anything else is printed."""
        with self._lock:
            self._terminal.write(f"{CLEAR}{text[: columns() - 1]}")
            self._terminal.flush()
            self._has_live_line = True

    def end(self) -> None:
        """Put standard output and error back, and close the file."""
        with self._lock:
            self._erase_live_line()
            for copy in self._copies:
                copy.end()
            self._ended = True
            if sys.stdout is self._copies[0]:
                sys.stdout = self._copies[0].stream
            if sys.stderr is self._copies[1]:
                sys.stderr = self._copies[1].stream

    def _write(self, copy: "_Copy", text: str) -> int:
        with self._lock:
            if not self._ended:
                self._erase_live_line()
                if copy.of_errors and text.startswith(WARNING):  # `print` hands a text over whole
                    self.warnings.append(" ".join(text.removeprefix(WARNING).split()))
                self._add(copy.lines(text))
            return copy.stream.write(text)

    def _erase_live_line(self) -> None:
        if self._has_live_line:
            self._has_live_line = False
            self._terminal.write(CLEAR)
            self._terminal.flush()

    def _add(self, lines: Sequence[str]) -> None:
        with self._lock:
            if self._file is None:
                self._lines.extend(lines)
            elif lines:
                with suppress(OSError):  # a full disk: what else is written there says so
                    append(self._file, lines)


class _Copy:
    """A text stream that the recording reads, too. Whatever else there is to a stream is the original's."""

    def __init__(self, stream: TextIO, recording: Recording, *, of_errors: bool) -> None:
        self.stream, self.of_errors = stream, of_errors
        self._recording, self._rest = recording, ""

    def write(self, text: str) -> int:
        return self._recording._write(self, text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def lines(self, text: str) -> list[str]:
        """Return the lines that `text` completes, as they would be read in a terminal."""
        *whole, rest = (self._rest + text).split("\n")
        self._rest = "\r".join(rest.split("\r")[-2:])  # of a line that is updated for hours, what is there now
        return [readable(line) for line in whole]

    def end(self) -> None:
        """Complete the last line."""
        if self._rest:
            self._recording._add(self.lines("\n"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def append(file: Path, lines: Sequence[str]) -> None:
    """Write `lines` at the end of `file`."""
    with file.open("a", encoding="utf-8", errors="backslashreplace") as opened:
        opened.writelines(f"{line}\n" for line in lines)


def readable(line: str) -> str:
    """Return what a terminal shows of a line in the end: its last update, without control characters."""
    updates = [part for part in ESCAPES.sub("", line).split("\r") if part]
    return CONTROLS.sub("", updates[-1]) if updates else ""
