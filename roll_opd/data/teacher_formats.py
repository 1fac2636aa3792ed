"""Formats of teacher files: decode a row group of a parquet file to `TeacherScores`.

This module has the format of `roll-opd score --topk`: prompt_ids, response_ids, teacher_logprobs, teacher_topk_ids, ...
A package names further formats as entry points of the group `roll_opd.teacher_formats`. Each is a function from the
file's path, its schema and the key `teacher.compression` to a `FileFormat`. It returns None for a file of another
format, and raises DataError for a file of its format that cannot be read.

A row that cannot be decoded becomes a `BadRow`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_opd.base.entry_points import entries, load
from roll_opd.data.rows import BadRow, DataError
from roll_opd.data.teacher_scores import TeacherScores

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

INCONSISTENT = "with inconsistent teacher scores"
VERSION_KEY, VERSION = b"roll_opd.teacher_scores", "1"  # key of the file's metadata
VOCABULARY_KEY = b"roll_opd.vocab_size"
HALF_ERROR = 1e-3  # relative error of probabilities for log-probs in f16


@dataclass(frozen=True)
class FileFormat:
    """A recognised file format: the columns to read, and a function that decodes tables with these columns."""

    name: str
    columns: tuple[str, ...]
    decode: Callable[["pa.Table", "PreTrainedTokenizerBase"], Iterator[TeacherScores | BadRow]]
    topk: int | None = None  # size of every top-k, if the format states it


def recognised(path: Path, schema: "pa.Schema", compression: str | None = None) -> FileFormat:
    """Return the format of a file, recognised by its columns. Raises DataError if the format is unknown.

    `compression` is the path of a compression configuration; if it is None, the configuration is expected next to the
    file.
    """
    names = set(schema.names)
    if (version := (schema.metadata or {}).get(VERSION_KEY, VERSION.encode()).decode()) != VERSION:
        raise DataError(
            f"{path}: the file has version {version} of teacher files, but this program reads {VERSION}; score again"
        )
    if {"prompt_ids", "response_ids"} <= names and {"teacher_logprobs", "teacher_topk_ids"} & names:
        return FileFormat("roll_opd", tuple(name for name in _OWN if name in names), _own_rows)
    for entry in entries("teacher_formats").values():
        try:
            found: FileFormat | None = load(entry)(path, schema, compression)
        except ImportError as error:
            raise DataError(str(error)) from error
        if found:
            return found
    raise DataError(
        f"{path}: no known teacher file has the columns {', '.join(sorted(names)) or '(none)'}; write a teacher file"
        " with `roll-opd score --topk`"
    )


_ARRAYS = {
    "prompt_ids": "prompt_ids",
    "response_ids": "response_ids",
    "teacher_logprobs": "logprobs",
    "teacher_topk_ids": "topk_ids",
    "teacher_topk_logprobs": "topk_logprobs",
    "teacher_topk_rest": "topk_rest",
    "loss_mask": "mask",
}
_DTYPES = {"prompt_ids": np.int64, "response_ids": np.int64, "topk_ids": np.int32, "mask": np.bool_}
_OWN = (*_ARRAYS, "teacher", "tokenizer", "temperature")


def _own_rows(table: "pa.Table", tokenizer: "PreTrainedTokenizerBase") -> Iterator[TeacherScores | BadRow]:
    arrays = {field: lists(table[name]) for name, field in _ARRAYS.items() if name in table.column_names}
    texts = {name: table[name].to_pylist() for name in ("teacher", "tokenizer") if name in table.column_names}
    temperatures = table["temperature"].to_pylist() if "temperature" in table.column_names else None
    for row in range(table.num_rows):
        found = {field: values[row] for field, values in arrays.items()}
        facts: dict[str, Any] = {name: values[row] or "" for name, values in texts.items()}
        if temperatures and temperatures[row] is not None:
            facts["temperature"] = float(temperatures[row])
        yield scores_of(found, facts)


def scores_of(arrays: Mapping[str, np.ndarray | None], facts: Mapping[str, Any]) -> TeacherScores | BadRow:
    """Return a row's arrays as `TeacherScores`, or a `BadRow` if an array cannot be converted to its dtype."""
    made: dict[str, Any] = dict(facts)
    for name, values in arrays.items():
        if values is None:
            if name in ("prompt_ids", "response_ids"):
                return BadRow(INCONSISTENT, f"{name} is empty")
            continue
        if values.dtype == np.float16:
            made["error"] = max(made.get("error", 0.0), HALF_ERROR)
        dtype = _DTYPES.get(name, np.float32)
        if name not in ("mask", "topk_rest", "logprobs", "topk_logprobs") and values.dtype.kind not in "iu":
            if not len(values):
                return BadRow(INCONSISTENT, f"{name} is empty")
            return BadRow(INCONSISTENT, f"{name} has values that are not integers")
        if values.dtype == object:
            return BadRow(INCONSISTENT, f"{name} has entries of different lengths")
        with np.errstate(over="ignore"):
            made[name] = values.astype(dtype)
    return TeacherScores(**made)


def lists(column: Any) -> list[np.ndarray | None]:
    """Return the value of a list column in each row, or None where the value is missing.

    A list becomes an array [R], and a list of lists becomes an array [R, K]. If the inner lists of a row differ in
    length, they become an array of objects.
    """
    import pyarrow as pa

    whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(whole, pa.ChunkedArray):
        whole = pa.concat_arrays(whole.chunks)
    if not (pa.types.is_list(whole.type) or pa.types.is_large_list(whole.type)):
        return [None] * len(whole)
    ends, inner = whole.offsets.to_numpy(), whole.values
    missing = whole.is_null().to_numpy(zero_copy_only=False)
    if pa.types.is_fixed_size_list(inner.type):
        flat = inner.flatten().to_numpy(zero_copy_only=False).reshape(-1, inner.type.list_size)
        return [None if gone else flat[a:b] for a, b, gone in zip(ends, ends[1:], missing, strict=False)]
    if not (pa.types.is_list(inner.type) or pa.types.is_large_list(inner.type)):
        flat = inner.to_numpy(zero_copy_only=False)
        return [None if gone else flat[a:b] for a, b, gone in zip(ends, ends[1:], missing, strict=False)]
    places, flat = inner.offsets.to_numpy(), inner.values.to_numpy(zero_copy_only=False)
    return [
        None if gone else _rectangle(flat, places[a : b + 1])
        for a, b, gone in zip(ends, ends[1:], missing, strict=False)
    ]


def _rectangle(flat: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return the inner lists of a row as one array [R, K], or as an array of objects if their lengths differ.

    `places` has the offsets of the inner lists in `flat`.
    """
    widths = np.diff(places)
    if not len(widths):
        return np.zeros((0, 1), flat.dtype)
    if (widths == widths[0]).all():
        return flat[places[0] : places[-1]].reshape(len(widths), widths[0])
    ragged = np.empty(len(widths), object)
    ragged[:] = [flat[a:b] for a, b in pairwise(places)]
    return ragged
