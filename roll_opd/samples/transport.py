"""Samples and tensors in messages between processes.

`Compact` pickles many small arrays as one buffer. The samples of a step have thousands of arrays, and each array has
only a few dozen numbers. Ray would store each array separately, and this would take longer than some stages of the
step. A list of instances of one dataclass is pickled field by field, and the 1-D arrays of a field are concatenated.

Weights are too large for such messages. They are sent in buckets (`samples.weight_bucket`).
"""

import itertools
import pickle
import warnings
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes; enough for every dtype

# received arrays are read-only views, and tensors made of them are never written to
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


class Compact:
    """A wrapper that pickles a value with one buffer for all of its arrays.

    Unpickling returns the value itself. Its arrays are read-only views of the buffer.
    """

    def __init__(self, value: Any) -> None:
        self._value = value

    def __reduce__(self) -> tuple:
        buffers: list[pickle.PickleBuffer] = []
        pieces = [np.zeros(0, np.uint8)]
        spans: list[tuple[int, int]] = []
        offset = 0
        data = pickle.dumps(_by_fields(self._value), protocol=5, buffer_callback=buffers.append)
        for raw in (buffer.raw() for buffer in buffers):
            spans.append((offset, offset + raw.nbytes))
            padding = -raw.nbytes % _ALIGNMENT
            pieces += [np.frombuffer(part, np.uint8) for part in (raw, bytes(padding)) if len(part)]
            offset += raw.nbytes + padding
        return _opened, (data, np.concatenate(pieces), spans)


def _opened(data: bytes, buffer: np.ndarray, spans: list[tuple[int, int]]) -> Any:
    view = buffer.data.toreadonly()
    value = pickle.loads(data, buffers=[view[start:end] for start, end in spans])
    return value.rows() if isinstance(value, _Rows) else value


class _Rows:
    """Instances of one dataclass, stored as one list of values per field."""

    def __init__(self, kind: type, values: Sequence[Any]) -> None:
        self._kind = kind
        self._columns = {name: _column([value.__dict__[name] for value in values]) for name in values[0].__dict__}

    def rows(self) -> list[Any]:
        names, columns = list(self._columns), [make(*parts) for make, *parts in self._columns.values()]
        found = []
        for values in zip(*columns, strict=True):
            row: Any = object.__new__(self._kind)
            row.__dict__.update(zip(names, values, strict=True))
            found.append(row)
        return found


def _by_fields(value: Any) -> Any:
    if type(value) is not list or len(value) < 2:
        return value
    kind, first = type(value[0]), value[0]
    if not is_dataclass(kind) or not hasattr(first, "__dict__"):
        return value
    alike = all(type(other) is kind and other.__dict__.keys() == first.__dict__.keys() for other in value)
    return _Rows(kind, value) if alike else value


def _column(values: list[Any]) -> tuple[Callable[..., Sequence[Any]], Any, Any]:
    """Return a function that restores the values, and the arguments of this function."""
    first, kinds = values[0], {type(value) for value in values}
    if all(value is first for value in values):
        return _repeated, first, len(values)
    are_flat = kinds == {np.ndarray} and {(value.ndim, value.dtype) for value in values} == {(1, first.dtype)}
    if are_flat and not first.dtype.hasobject:
        return _split, np.concatenate(values), np.cumsum([0, *map(len, values)])
    if kinds == {dict} and all(list(value) == list(first) for value in values):
        return _dicts, list(first), [_column([value[key] for value in values]) for key in first] or len(values)
    return _listed, values, None


def _repeated(value: Any, count: int) -> list[Any]:
    return [value] * count


def _split(array: np.ndarray, ends: np.ndarray) -> list[np.ndarray]:
    return [array[start:end] for start, end in itertools.pairwise(ends.tolist())]


def _dicts(keys: list[Any], columns: Any) -> list[dict[Any, Any]]:
    if not keys:
        return [{} for _ in range(columns)]
    return [dict(zip(keys, row, strict=True)) for row in zip(*(make(*parts) for make, *parts in columns), strict=True)]


def _listed(values: list[Any], _: None) -> list[Any]:
    return values


def as_array(tensor: Tensor) -> np.ndarray:
    """Return a tensor as a NumPy array of the same shape.

    The tensor may be on any device, and it may require gradients. NumPy has no bf16, so a bf16 tensor becomes an int16
    array. No other tensor in a message has the dtype int16.
    """
    tensor = tensor.detach().cpu()
    return (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


def as_tensor(array: np.ndarray) -> Tensor:
    """Return a CPU tensor with the values of the tensor from which `as_array` made this array."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if tensor.dtype is torch.int16 else tensor
