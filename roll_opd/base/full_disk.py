"""Recognize errors that a full disk causes, and report the file system and its free space."""

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

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
