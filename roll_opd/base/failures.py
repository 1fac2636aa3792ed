"""Exceptions of runs, and messages for users.

The messages explain system errors and their remedies, unexpected errors and misspelt names. Code that reads user files
converts OSError to its own error types, with the messages of this module. Commands print all other exceptions as one
line instead of a traceback.
"""

import difflib
import errno
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

DEBUG = "ROLL_OPD_DEBUG"  # set: print tracebacks and the output of all processes
MAX_QUOTE = 400  # characters of user text in a message; longer text is cut in the middle
REMEDIES = {
    errno.EACCES: "get permission for the path (ls -ld shows the owner), or use a different path",
    errno.EPERM: "get permission for the path (ls -ld shows the owner), or use a different path",
    errno.ENAMETOOLONG: "use a shorter name (at most 255 bytes per name, 4095 per path)",
    errno.ELOOP: "the path has a loop of symbolic links; correct these links",
    errno.ENOTDIR: "a part of the path is a file, not a directory; correct the path",
    errno.EISDIR: "the path is a directory; choose a file",
    errno.ENOENT: "the path does not exist; correct the path",
    errno.EROFS: "the file system is read-only; choose another directory",
    errno.ENOSPC: "free some disk space, or choose another directory",
    errno.EDQUOT: "free some of your quota, or choose another directory",
    errno.EIO: "the disk or its network file system fails; check dmesg, or use a copy elsewhere",
    errno.ESTALE: "the network file system lost the file; remount it, or use a copy elsewhere",
    errno.EMFILE: "too many files are open; raise the limit (ulimit -n)",
    errno.ENFILE: "too many files are open on this machine; end some of its processes",
    errno.ENOMEM: "the machine is out of memory; end some of its processes",
}
_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
# last line of a traceback
_RAISED = re.compile(r"^((?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt|Failure))(?:: (.*))?$")
_QUOTED = re.compile(rf"(?<!\w)'[^'\n]{{{MAX_QUOTE},}}'|(?<!\w)\"[^\"\n]{{{MAX_QUOTE},}}\"")
_UNBROKEN = re.compile(rf"\S{{{MAX_QUOTE},}}")
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


class ConfigError(Exception):
    """The user's configuration is wrong, so nothing has been started.

    `problems` contains one sentence for each problem.
    """

    def __init__(self, problems: list[str]) -> None:
        self.problems = [shortened(text) for text in problems]
        super().__init__(self.problems)

    def __str__(self) -> str:
        many = len(self.problems) > 1
        head = f"the configuration has {len(self.problems)} problems:" if many else "the configuration has a problem:"
        return "\n".join([head, *(f"  {index}. {text}" for index, text in enumerate(self.problems, start=1))])


def os_sentence(error: OSError) -> str:
    """Return a message for an OSError. It states the file, the reason and the remedy."""
    if error.errno == errno.ENOENT and not _has_current_directory():
        return "the current directory has been deleted; change to an existing directory"
    name = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
    why = (error.strerror or str(error) or type(error).__name__).rstrip(".")
    return shortened(f"{name}{why}; {REMEDIES.get(error.errno or 0, 'check the file and its file system')}")


def _has_current_directory() -> bool:
    try:
        return bool(os.getcwd())
    except FileNotFoundError:
        return False


def place_of(error: BaseException) -> str:
    """Return the place where an error was raised, as "file.py:12"; "" for an error that was never raised.

    The place is in the innermost frame of the user's code. If there is no such frame, it is in the innermost frame of
    this package. Frames of libraries and of Python are skipped.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    user_frames = [frame for frame in frames if not frame.filename.startswith((*_LIBRARIES, _PACKAGE))]
    package_frames = [frame for frame in frames if frame.filename.startswith(_PACKAGE)]
    innermost = (user_frames or package_frames or frames)[-1:]
    return "".join(f"{frame.filename}:{frame.lineno}" for frame in innermost)


def unexpected(error: BaseException) -> str:
    """Return the message for an unexpected error that occurs before anything has been started."""
    if isinstance(error, OSError):
        return os_sentence(error)
    if isinstance(error, MemoryError):
        return "the machine is out of memory; end some of its processes, or process less data at a time"
    text_of_error = " ".join(str(error).split())
    what = f"{type(error).__name__}{f': {text_of_error}' if text_of_error else ''}"
    hint = "" if DEBUG in os.environ else f"; {DEBUG}=1 shows the traceback"
    return shortened(f"nothing was started because of an unexpected error: {what} ({place_of(error)}){hint}")


def print_unexpected(error: BaseException) -> None:
    """Print the message of `unexpected`. If ROLL_OPD_DEBUG is set, print the traceback before it."""
    if DEBUG in os.environ:
        traceback.print_exception(error)
    print(f"roll-opd: {unexpected(error)}", file=sys.stderr)


def last_raised(output: str) -> str | None:
    """Return "Kind: message" from the first traceback in a process's output; None if there is no traceback.

    The first traceback is used because it is the cause of the later ones. Prefixes of log lines are removed.
    """
    lines = [re.sub(r"^(?:\([^)]*\) )?(?:[A-Z]+ [\d-]+ [\d:.]+ \[[^]]*\] )?", "", line) for line in output.splitlines()]
    started = False
    for number, line in enumerate(lines):
        started = started or line.startswith("Traceback (most recent call last)")
        found = _RAISED.match(line) if started else None
        if found:
            more = [follows.strip() for follows in lines[number + 1 : number + 3] if follows[:1] == " "]
            return shortened(" ".join([line, *more]))
    return None


def shortened(text: str) -> str:
    """Return a message with control characters escaped. Long quoted or unbroken text is cut in the middle."""

    def cut(found: re.Match[str]) -> str:
        whole = found[0]
        return f"{whole[: MAX_QUOTE // 2]}…({len(whole):,} characters)…{whole[-20:]}"

    text = _UNBROKEN.sub(cut, _QUOTED.sub(cut, text))
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


def file_kind(path: Path) -> str:
    """Describe a path that is not a regular file: "a directory", "a FIFO (named pipe)", "a device", ..."""
    kinds = {
        Path.is_dir: "a directory",
        Path.is_fifo: "a FIFO (named pipe)",
        Path.is_socket: "a socket",
        Path.is_char_device: "a device",
        Path.is_block_device: "a device",
    }
    return next((kind for test, kind in kinds.items() if test(path)), "not a regular file")


RESEMBLES = 0.75  # minimum similarity ratio of difflib; below it hints are wrong
WITHOUT_SEPARATORS = 0.9  # the same, for names that are compared without their separators


SAME_PART = 0.6  # minimum similarity of a misspelt and a right part of a name; "input" and "output" have 0.55
ADDED = frozenset({"max", "num", "n", "total", "opd"})  # parts that do not give a name another meaning


def nearest(name: str, known: Iterable[str], at_least: float = RESEMBLES) -> str | None:
    """Return the known name that is most similar to `name`; None if no name is similar.

    Two names are different if a whole part differs (max_prompt_length, val_prompt_length).
    """
    found = difflib.get_close_matches(name, sorted(known), n=8, cutoff=at_least)
    return next((one for one in found if _is_misspelt(name, one)), None)


def _is_misspelt(name: str, right: str) -> bool:
    """Whether each part of `name` resembles the part of `right` at its place.

    Separators may be missing, and parts of `right` as well. `name` may have parts in `ADDED` in addition.
    """
    parts, wanted = (re.split(r"[_.\- ]", text.casefold()) for text in (name, right))
    if len(parts) == len(wanted):
        return all(_ratio(*pair) >= SAME_PART for pair in zip(parts, wanted, strict=True))
    short, long = sorted((parts, wanted), key=len)
    rest = iter(long)
    if all(part in rest for part in short) and (short is parts or ADDED.issuperset(set(long) - set(short))):
        return True
    return _ratio("".join(parts), "".join(wanted)) >= WITHOUT_SEPARATORS


def _ratio(one: str, other: str) -> float:
    return 1.0 if one == other else difflib.SequenceMatcher(None, one, other).ratio()


class WorkflowError(ValueError):
    """A workflow cannot be used. The message states the place and the remedy."""


class RunError(RuntimeError):
    """The run cannot continue. The message states the reason and what to check."""


class SkippedUpdates(RunError):
    """Too many consecutive updates were skipped. `samples` contains the samples of the last update."""

    def __init__(self, message: str, samples: Sequence[Any]) -> None:
        super().__init__(message)
        self.samples = samples


class Interrupted(KeyboardInterrupt):
    """Ctrl-C ended the run; the message states how to resume."""


class Terminated(RunError):
    """SIGTERM ended the run; the message names the saved checkpoint and how to resume."""
