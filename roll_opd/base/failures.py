"""What an exception means to a user: a sentence for what the system refuses, and for what nobody has foreseen.

Every part that looks at a user's files turns the system's exceptions into its own errors with these sentences; what
still comes through is told by the commands themselves, never as a traceback.
"""

import errno
import os
import re
import sys
import sysconfig
import traceback
from pathlib import Path

DEBUG = "ROLL_OPD_DEBUG"  # set: tracebacks are printed, and what every process of a run says
LONGEST_QUOTE = 400  # characters of a user's text in a message; what is longer is cut in the middle
REMEDIES = {
    errno.EACCES: "give yourself the right to it (ls -ld shows whose it is), or name another",
    errno.EPERM: "give yourself the right to it (ls -ld shows whose it is), or name another",
    errno.ENAMETOOLONG: "use a shorter name (255 bytes a name, 4095 a path)",
    errno.ELOOP: "a link on the way leads back to itself; correct it",
    errno.ENOTDIR: "a part of it is a file and not a directory; correct the path",
    errno.EISDIR: "it is a directory; name a file",
    errno.ENOENT: "it is not there; correct the path",
    errno.EROFS: "the file system is read-only; choose another directory",
    errno.ENOSPC: "free space, or choose another directory",
    errno.EDQUOT: "free some of your quota, or choose another directory",
    errno.EIO: "the disk or the network file system below it fails; look at dmesg, or use a copy elsewhere",
    errno.ESTALE: "the network file system has lost it; mount it again, or use a copy elsewhere",
    errno.EMFILE: "too many files are open; raise the limit (ulimit -n)",
    errno.ENFILE: "too many files are open on this machine; end some of its processes",
    errno.ENOMEM: "the machine is out of memory; end some of its processes",
}
_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
# in the last line of a traceback
_RAISED = re.compile(r"^((?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt|Failure))(?:: (.*))?$")
_QUOTED = re.compile(rf"(?<!\w)'[^'\n]{{{LONGEST_QUOTE},}}'|(?<!\w)\"[^\"\n]{{{LONGEST_QUOTE},}}\"")
_UNBROKEN = re.compile(rf"\S{{{LONGEST_QUOTE},}}")
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


class ConfigError(Exception):
    """The user's configuration is wrong. `problems` holds one sentence each; nothing has been started."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = [shortened(text) for text in problems]
        super().__init__(self.problems)

    def __str__(self) -> str:
        many = len(self.problems) > 1
        head = f"the configuration has {len(self.problems)} problems:" if many else "the configuration has a problem:"
        return "\n".join([head, *(f"  {index}. {text}" for index, text in enumerate(self.problems, start=1))])


def os_sentence(error: OSError) -> str:
    """Say which file the system refuses, why, and what to do."""
    if error.errno == errno.ENOENT and not _has_current_directory():
        return "the current directory is gone; change to one that exists"
    name = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
    why = (error.strerror or str(error) or type(error).__name__).rstrip(".")
    return shortened(f"{name}{why}; {REMEDIES.get(error.errno or 0, 'look at the file and its file system')}")


def _has_current_directory() -> bool:
    try:
        return bool(os.getcwd())
    except FileNotFoundError:
        return False


def place_of(error: BaseException) -> str:
    """Return "file.py:12", where the error was raised as far as the user, else this package, can do anything about it.

    That is the innermost line that is neither a library's nor Python's own; "" for an error that was never raised.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    theirs = [frame for frame in frames if not frame.filename.startswith((*_LIBRARIES, _PACKAGE))]
    ours = [frame for frame in frames if frame.filename.startswith(_PACKAGE)]
    innermost = (theirs or ours or frames)[-1:]
    return "".join(f"{frame.filename}:{frame.lineno}" for frame in innermost)


def unforeseen(error: BaseException) -> str:
    """Return a sentence for an error that has none of its own, from before anything was started."""
    if isinstance(error, OSError):
        return os_sentence(error)
    if isinstance(error, MemoryError):
        return "the machine is out of memory; end some of its processes, or give less data at a time"
    said = " ".join(str(error).split())
    what = f"{type(error).__name__}{f': {said}' if said else ''}"
    hint = "" if DEBUG in os.environ else f"; {DEBUG}=1 shows the traceback"
    return shortened(
        f"nothing was started, because of an error that nobody has foreseen: {what} ({place_of(error)}){hint}"
    )


def tell_unforeseen(error: BaseException) -> None:
    """Print the sentence of `unforeseen`, and with ROLL_OPD_DEBUG the traceback before it."""
    if DEBUG in os.environ:
        traceback.print_exception(error)
    print(f"roll-opd: {unforeseen(error)}", file=sys.stderr)


def last_raised(output: str) -> str | None:
    """Return "Kind: message" of the first exception that a process printed the traceback of; None where it did not.

    The first one is the cause of those after it. Prefixes of log lines are left out.
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
    """Return a message without what no terminal should get, and with a user's longest texts cut in the middle."""

    def cut(found: re.Match[str]) -> str:
        whole = found[0]
        return f"{whole[: LONGEST_QUOTE // 2]}…({len(whole):,} characters)…{whole[-20:]}"

    text = _UNBROKEN.sub(cut, _QUOTED.sub(cut, text))
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


def file_kind(path: Path) -> str:
    """Return what `path` is where it is not a regular file: "a directory", "a FIFO (named pipe)", "a device", ..."""
    kinds = {
        Path.is_dir: "a directory",
        Path.is_fifo: "a FIFO (named pipe)",
        Path.is_socket: "a socket",
        Path.is_char_device: "a device",
        Path.is_block_device: "a device",
    }
    return next((kind for test, kind in kinds.items() if test(path)), "no regular file on a disk")
