"""Pipes of a case, and the cleanup after a case: kill its processes and remove its files."""

import os
import signal
import stat
from collections.abc import Callable
from contextlib import suppress


def read_exactly(end: int, count: int) -> bytes:
    """Read `count` bytes from a pipe, or fewer if the pipe ends before."""
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
    """Write a part of the data to a pipe without blocking; return the rest of the data.

    The rest is empty if the reader has closed the pipe.
    """
    try:
        return data[os.write(end, data[:65536]) :]
    except BlockingIOError:
        return data
    except OSError:
        return data[:0]


def drain(end: int, into: bytearray, room: int) -> bool:
    """Append the available data of a pipe to `into`; return False at the end of the pipe.

    `into` gets at most one byte more than `room`. This byte shows that there is too much data.
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
    """Close a pipe; do nothing if it is already closed."""
    with suppress(OSError):
        os.close(end)


IS_INIT = os.getpid() == 1  # true in a pid namespace, false in unsafe mode
SHARED_MEMORY = "/dev/shm"


def kill_all(child: int | None = None) -> None:
    """Kill and reap all processes of the case.

    In a sandbox, these are all processes except this one.
    """
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
    """Remove the files of a case from its directory and, in a sandbox, from shared memory.

    If this raises OSError, the sandbox must not be reused.
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

    A tree can be too deep for paths and for recursion. Nested directories are therefore moved to the top first.
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
    """Return whether an entry is a directory.

    A directory is made accessible, so that its content can be removed.
    """
    if not stat.S_ISDIR(os.lstat(name, dir_fd=parent).st_mode):
        return False
    os.chmod(name, 0o700, dir_fd=parent)
    return True
