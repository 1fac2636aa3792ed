"""Reading and writing the ends of pipes."""

import os
from collections.abc import Callable
from contextlib import suppress


def read_exactly(end: int, count: int) -> bytes:
    """Return `count` bytes, fewer where the pipe ends before."""
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
    """Write what the pipe takes at once; what is left of `data`, empty where nobody reads."""
    try:
        return data[os.write(end, data[:65536]) :]
    except BlockingIOError:
        return data
    except OSError:
        return data[:0]


def drain(end: int, into: bytearray, room: int) -> bool:
    """Read what is there; False at the end of the pipe. One byte above `room` tells that there was more."""
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
    """Close a pipe; it may be closed already."""
    with suppress(OSError):
        os.close(end)
