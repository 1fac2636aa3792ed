"""Exceptions of runs, and messages for users about errors of the system, of services and of code.

The messages explain system errors and their remedies (with a full disk, the file system and its free space), unexpected
errors and misspelt names. Code that reads user files converts OSError to its own error types, with the messages of this
module. Commands print all other exceptions as one line instead of a traceback. Errors of services are distinguished
from other errors: if a service is down, slow or overloaded, a call of it fails whatever its input is.
"""

import difflib
import errno
import html
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Sequence
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


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "", at_least: float = RESEMBLES) -> str:
    """Return a question that names the known name nearest to `name`, or `otherwise` if no name is similar."""
    near = nearest(name, known, at_least)
    return f"did you mean {near!r}?" if near else otherwise


def _is_misspelt(name: str, right: str) -> bool:
    """Whether each part of `name` resembles the part of `right` at its place.

    `name` may lack separators and parts of `right`, and may have additional parts from `ADDED`.
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


class EndpointError(ValueError):
    """An address, a header or a limit of an `http_endpoint` cannot be used. The message states the remedy."""


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


BUSY = (408, 425, 429)  # statuses of HTTP with which a server asks to try again
# bases of errors of connections that are no OSError: (package, name)
CONNECTION_ERRORS = {
    ("aiohttp", "ClientConnectionError"),
    ("grpc", "RpcError"),
    ("http", "HTTPException"),
    ("httpx", "TransportError"),
    ("httpx2", "TransportError"),  # of huggingface_hub
    ("openai", "APIConnectionError"),
    ("urllib3", "HTTPError"),
}
OF_A_PATH = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)


def is_passing(status: int) -> bool:
    """Return whether a request that got this status of HTTP may succeed later."""
    return status in BUSY or (status >= 500 and status != 501)


def of_a_service(error: BaseException) -> bool:
    """Return whether an error, or an error that led to it, states that a service failed.

    Such errors are failed connections, timeouts of requests, and HTTP statuses of temporary failures. An exception may
    also state this itself, with the attribute `of_a_service`. The first error that states it decides.
    """
    return next((stated for stated in map(_statement, _causes(error)) if stated is not None), False)


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__


def _statement(error: BaseException) -> bool | None:
    stated = getattr(error, "of_a_service", None)
    if isinstance(stated, bool):
        return stated
    if (status := _status(error)) is not None:
        return is_passing(status)
    if isinstance(error, OSError):
        return None if isinstance(error, OF_A_PATH) else True
    bases = {(base.__module__.partition(".")[0], base.__name__) for base in type(error).__mro__}
    return True if CONNECTION_ERRORS & bases else None


def _status(error: BaseException) -> int | None:
    """Return the status of HTTP that an error of a client states."""
    holders = (error, getattr(error, "response", None))
    stated = [getattr(holder, name, None) for holder in holders for name in ("status_code", "status", "code")]
    return next((one for one in stated if type(one) is int and 100 <= one < 600), None)


FULL = (errno.ENOSPC, errno.EDQUOT)
LITTLE = 16 * 2**20  # with fewer free bytes, an error that matches `_WRITER` counts as a full disk
# messages for a full disk from other processes, Rust libraries and Ray
_NO_SPACE = re.compile(
    r"No space left on device|Disk quota exceeded|\bos error (?:28|122)\b|\bcode: (?:28|122)\b|StorageFull"
    r"|disk's utilization is over capacity"
)
# messages of libraries that do not include the system's reason
_WRITER = re.compile(
    r"PytorchStreamWriter|unexpected pos \d|iostream error|basic_ios::clear|while serializing"
    r"|\d+ requested and \d+ written"
)


class DiskFull(Exception):
    """A run ends because a disk is full; the message names the file system and the remedy."""


def full_disk(error: BaseException, *places: Path) -> str | None:
    """Return "the disk is full: ..." if a full disk caused `error`, else None.

    `places` are directories. If the error does not name a file, the message is about the fullest of these directories.
    """
    for each in _chain(error):
        if isinstance(each, OSError) and each.errno in FULL:
            named = [Path(os.fsdecode(each.filename))] if isinstance(each.filename, str | bytes) else []
            return _sentence(named or places, is_quota=each.errno == errno.EDQUOT)
        text = str(each)
        if _NO_SPACE.search(text):
            return _sentence(places, is_quota="quota exceeded" in text)
        if _WRITER.search(text) and any(_free(place) < LITTLE for place in places):
            return _sentence(places)
    return None


def reason(error: BaseException, *places: Path) -> str:
    """Return the reason for a failed write.

    This is the message of `full_disk` if a full disk is the cause. Otherwise it is the error as text.
    """
    return full_disk(error, *places) or repr(error)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes.

    This includes the causes inside exception groups, and causes that were raised in other processes.
    """
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if not isinstance(each, BaseException) or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        left += [each.__context__, each.__cause__, getattr(each, "cause", None)]
        left += each.exceptions if isinstance(each, BaseExceptionGroup) else ()


def _sentence(places: list[Path] | tuple[Path, ...], *, is_quota: bool = False) -> str:
    place = min(places, key=_free, default=None)
    if place is None:
        return "the disk is full"
    if is_quota:
        return f"the disk is full: your quota on the file system of {place} is used up"
    there = os.statvfs(_existing(place))
    if there.f_files and not there.f_favail:
        return f"the disk is full: the file system of {place} has no free inodes"
    size = there.f_frsize
    return (
        f"the disk is full: the file system of {place} has {there.f_bavail * size / 2**20:.0f} of"
        f" {there.f_blocks * size / 2**20:.0f} MiB free"
    )


def _free(place: Path) -> int:
    there = os.statvfs(_existing(place))
    return there.f_bavail * there.f_frsize


def _existing(place: Path) -> Path:
    place = place.absolute()
    return next(parent for parent in (place, *place.parents) if parent.exists())


LENGTH = 300  # maximum characters of an excerpt
READ = 100_000  # characters of an answer in which the title of a page is searched
_IS_PAGE = re.compile(
    r"\s*(<\?xml[^>]*>\s*|<!--.*?-->\s*)*<(!doctype\s+html|html|head|title|body|center|h1)\b", re.I | re.S
)
# an element without an end reaches to the end of the text, so that a search takes linear time
_TITLE = re.compile(r"<(title|h1)\b[^>]*>(.*?)(?:</\1\s*>|\Z)", re.I | re.S)
_HIDDEN = re.compile(r"<(script|style)\b.*?(?:</\1\s*>|\Z)|<!--.*?(?:-->|\Z)", re.I | re.S)
_TAG = re.compile(r"<[^>]*>?")


def excerpt(text: str, most: int = LENGTH) -> str:
    """Return the beginning of a text in one line of at most `most` characters, and "..." if the text is longer.

    Of an HTML page, only the title is returned, or the text without tags if the page has no title.
    """
    text = text[:READ]
    if _IS_PAGE.match(text):
        text = _page_text(text)
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 3].rstrip() + "..."


def _page_text(page: str) -> str:
    page = _HIDDEN.sub(" ", page)
    titles = (_TAG.sub(" ", found[2]) for found in _TITLE.finditer(page))
    title = next((one for one in titles if one.strip()), None)
    return html.unescape(_TAG.sub(" ", page) if title is None else title)
