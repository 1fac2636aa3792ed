"""Copy a run's output to its `console.log`, collect warnings, and show a line that is updated in place.

A process has only one standard output, so only one tee is active at a time.
"""

import os
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from roll_opd.base.failures import os_sentence
from roll_opd.base.terminal import columns

CONSOLE_LOG = "console.log"
WARNING = "warning: "  # prefix of a warning on standard error
CLEAR = "\r\x1b[K"  # return to the first column and erase the line
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")  # ECMA-48
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # control characters except tab and newline

_current: "StdoutTee | None" = None


@contextmanager
def tee_output() -> Iterator["StdoutTee"]:
    """Copy all output inside the block. A nested block uses the tee of the outer block."""
    global _current
    if _current:
        yield _current
        return
    _current = tee = StdoutTee()
    try:
        yield tee
    finally:
        _current = None
        tee.end()


class StdoutTee:
    """Replaces standard output and standard error of this process, and copies both to files.

    `write_to` sets the files. `end` restores both streams.
    """

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.warnings: list[str] = []
        self._lock = threading.RLock()
        self._lines: list[str] = []  # lines printed before `write_to`
        self._files: tuple[Path, ...] = ()
        self._incomplete: set[Path] = set()  # files that lack a line, because a write failed
        self._ended = False
        self._has_live_line = False
        self._terminal = sys.stdout
        self._copies = (_Copy(sys.stdout, self, of_errors=False), _Copy(sys.stderr, self, of_errors=True))
        sys.stdout, sys.stderr = self._copies

    @property
    def is_live(self) -> bool:
        """Whether standard output is a terminal in which a line can be updated in place."""
        return bool(self._terminal and self._terminal.isatty()) and os.environ.get("TERM") != "dumb"

    def write_to(self, *directories: Path) -> None:
        """Write all output to the file `CONSOLE_LOG` in each directory, including the output before this call."""
        with self._lock:
            self._files = tuple(directory / CONSOLE_LOG for directory in directories)
            self._add(self._lines)
            self._lines = []

    def leave(self, directory: Path) -> None:
        """Write no more output to the file in `directory`, which is going to be removed."""
        with self._lock:
            self._files = tuple(file for file in self._files if file.parent != directory)

    def show_live(self, text: str) -> None:
        """Show a line in the terminal. The next call replaces the line, and any other output erases it."""
        with self._lock:
            self._terminal.write(f"{CLEAR}{text[: columns() - 1]}")
            self._terminal.flush()
            self._has_live_line = True

    def end(self) -> None:
        """Restore standard output and standard error."""
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
                if copy.of_errors and text.startswith(WARNING):  # `print` writes its text in one call
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
            if not self._files:
                self._lines.extend(lines)
            for file in self._files if lines else ():
                try:
                    append(file, lines)
                except OSError as error:
                    self._warn_once(file, error)

    def _warn_once(self, file: Path, error: OSError) -> None:
        if file not in self._incomplete:
            self._incomplete.add(file)
            error.filename = error.filename or str(file)
            self.warnings.append(f"lines are missing: {os_sentence(error)}")
            self._copies[1].stream.write(f"{WARNING}{self.warnings[-1]}\n")


class _Copy:
    """A text stream that passes all writes to the tee.

    All other attributes are read from the original stream.
    """

    def __init__(self, stream: TextIO, tee: StdoutTee, *, of_errors: bool) -> None:
        self.stream, self.of_errors = stream, of_errors
        self._tee, self._rest = tee, ""

    def write(self, text: str) -> int:
        return self._tee._write(self, text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def lines(self, text: str) -> list[str]:
        """Return the lines that are complete after `text` is written, as a terminal shows them."""
        *whole, rest = (self._rest + text).split("\n")
        self._rest = "\r".join(rest.split("\r")[-2:])  # removes earlier updates of a live line
        return [readable(line) for line in whole]

    def end(self) -> None:
        """Add the last line to the tee, even if it has no newline."""
        if self._rest:
            self._tee._add(self.lines("\n"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def append(file: Path, lines: Sequence[str]) -> None:
    """Append `lines` to a file."""
    with file.open("a", encoding="utf-8", errors="backslashreplace") as opened:
        opened.writelines(f"{line}\n" for line in lines)


def readable(line: str) -> str:
    """Return the text of a line as a terminal shows it after the last update, without control characters."""
    updates = [part for part in ESCAPES.sub("", line).split("\r") if part]
    return CONTROLS.sub("", updates[-1]) if updates else ""
