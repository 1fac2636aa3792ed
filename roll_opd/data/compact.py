"""`Compact`, an envelope for values made of many small arrays on their way to another process.

A step's samples hold thousands of arrays of a few dozen numbers. Ray gives each of them a place of its own in the
object store, which takes longer than the work some stages do on them; in one buffer they travel as one.
"""

import pickle
from typing import Any

import numpy as np

_ALIGNMENT = 16  # bytes, enough for every dtype


class Compact:
    """Wraps a value; what arrives is the value itself, its arrays read-only views of one buffer."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __reduce__(self) -> tuple:
        buffers: list[pickle.PickleBuffer] = []
        pieces: list[bytes | memoryview] = []
        spans: list[tuple[int, int]] = []
        offset = 0
        data = pickle.dumps(self._value, protocol=5, buffer_callback=buffers.append)
        for raw in (buffer.raw() for buffer in buffers):
            spans.append((offset, offset + raw.nbytes))
            padding = -raw.nbytes % _ALIGNMENT
            pieces += [raw, bytes(padding)]
            offset += raw.nbytes + padding
        return _opened, (data, np.frombuffer(b"".join(pieces), np.uint8), spans)


def _opened(data: bytes, buffer: np.ndarray, spans: list[tuple[int, int]]) -> Any:
    view = buffer.data.toreadonly()
    return pickle.loads(data, buffers=[view[start:end] for start, end in spans])
