"""Read and write pipes."""

import os
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
    """Write without blocking; return the rest of `data`, empty if the reader has closed."""
    try:
        return data[os.write(end, data[:65536]) :]
    except BlockingIOError:
        return data
    except OSError:
        return data[:0]


def drain(end: int, into: bytearray, room: int) -> bool:
    """Read available data up to one byte above `room`, which marks an overflow; False at the end of the pipe."""
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
