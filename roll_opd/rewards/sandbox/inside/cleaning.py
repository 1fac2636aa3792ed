"""Pipes of a case, and the cleanup after the case: kill its processes and remove its files."""

import os
import signal
import stat
from collections.abc import Callable
from contextlib import suppress


def read_exactly(end: int, count: int) -> bytes:
    """Read `count` bytes, fewer at the end of the pipe."""
    parts = bytearray()
    while len(parts) < count:
        part = os.read(end, min(count - len(parts), 1 << 20))
        if not part:
            break
        parts += part
    return bytes(parts)


def write_all(end: int, data: bytes, write: Callable[..., int] = os.write) -> None:
    view = memoryview(data)
    while view:
        view = view[write(end, view) :]


def feed_some(end: int, data: bytes) -> bytes:
    """Write a part of `data` without blocking, and return the rest.

    The rest is empty if the reader has closed the pipe.
    """
    try:
        return data[os.write(end, data[:65536]) :]
    except BlockingIOError:
        return data
    except OSError:
        return data[:0]


def drain(end: int, into: bytearray, room: int) -> bool:
    """Read the available data into `into`; return False at the end of the pipe.

    At most one byte more than `room` is read. The additional byte marks an overflow.
    """
    while len(into) <= room:
        try:
            part = os.read(end, min(1 << 16, room + 1 - len(into)))
        except BlockingIOError:
            return True
        if not part:
            return False
        into += part
    return True


def close(end: int) -> None:
    """Close a pipe, which may already be closed."""
    with suppress(OSError):
        os.close(end)


IS_INIT = os.getpid() == 1  # true in a pid namespace, false in unsafe mode
SHARED_MEMORY = "/dev/shm"


def kill_all(child: int | None = None) -> None:
    """Kill and reap all other processes."""
    if IS_INIT:
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        with suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        return
    for _ in range(1000):  # without a pid namespace: kill children of this subreaper until there are none
        try:
            with open(f"/proc/{os.getpid()}/task/{os.getpid()}/children") as file:
                pids = [int(pid) for pid in file.read().split()]
        except OSError:
            pids = [child] if child else []
        if not pids:
            return
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def empty(directory: str) -> None:
    """Remove the files of a case in its directory and, in a sandbox, in shared memory. If it raises OSError, the
    sandbox must not be reused.
    """
    for place in (directory, SHARED_MEMORY) if IS_INIT else (directory,):
        os.chmod(place, 0o700)
        top = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _remove_content(top)
            if IS_INIT:  # attributes of the directory could pass data to the next case
                with suppress(OSError):  # no extended attributes on this file system
                    for name in os.listxattr(top):
                        os.removexattr(top, name)
                os.utime(top, (0, 0))
        finally:
            os.close(top)


def _remove_content(top: int) -> None:
    """Remove the content of a directory.

    A tree can be too deep for paths and for recursion. Therefore nested directories are first moved to the top.
    """
    while names := os.listdir(top):
        for name in names:
            if not _is_directory(name, top):
                os.unlink(name, dir_fd=top)
                continue
            end = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
            try:
                for inner in os.listdir(end):
                    if _is_directory(inner, end):
                        os.rename(inner, os.urandom(16).hex(), src_dir_fd=end, dst_dir_fd=top)
                    else:
                        os.unlink(inner, dir_fd=end)
            finally:
                os.close(end)
            os.rmdir(name, dir_fd=top)


def _is_directory(name: str, parent: int) -> bool:
    """Return whether an entry is a directory. If it is a directory, make it accessible first."""
    if not stat.S_ISDIR(os.lstat(name, dir_fd=parent).st_mode):
        return False
    os.chmod(name, 0o700, dir_fd=parent)
    return True
