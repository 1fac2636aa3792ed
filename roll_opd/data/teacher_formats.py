"""Formats of teacher files: decode a row group of a parquet file to `TeacherScores`.

    ours          `roll-opd score --topk`: prompt_ids, response_ids, teacher_logprobs, teacher_topk_ids, ...
    Lightning-OPD prompt (text), metadata.response_tokens, metadata.teacher_log_probs; arXiv 2604.13010
    DistillKit    input_ids, compressed_logprobs, bytepacked_indices, and `compression_config.yaml` next to the files

A row that cannot be decoded becomes a `BadRow`. The files of Lightning-OPD and DistillKit do not state the tokenizer or
the temperature. Both programs score at temperature 1.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_opd.data.packed_logprobs import LogprobPacking, PackedError, read_packing, unpack_ids, unpack_logprobs
from roll_opd.data.rows import BadRow, DataError
from roll_opd.data.teacher_scores import TeacherScores
from roll_opd.data.templates import token_ids

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

INCONSISTENT = "with inconsistent teacher scores"
VERSION_KEY, VERSION = b"roll_opd.teacher_scores", "1"  # key of the file's metadata
VOCABULARY_KEY = b"roll_opd.vocab_size"
PACKING_FILE = "compression_config.yaml"
QUANTISED_ERROR = 0.02  # relative error of probabilities due to DistillKit's compression
HALF_ERROR = 1e-3  # relative error of probabilities for log-probs in f16


@dataclass(frozen=True)
class FileFormat:
    """A recognised file format: the columns to read, and a function that decodes tables with these columns."""

    name: str
    columns: tuple[str, ...]
    decode: Callable[["pa.Table"], Iterator[TeacherScores | BadRow]]


def recognised(
    path: Path, schema: "pa.Schema", tokenizer: "PreTrainedTokenizerBase", packing: str | None = None
) -> FileFormat:
    """Return the format of a file. Raises DataError if the format is unknown.

    The format is recognised by the columns of the file. `packing` is the path of DistillKit's compression
    configuration. If it is None, the configuration is expected next to the file.
    """
    names = set(schema.names)
    if (version := (schema.metadata or {}).get(VERSION_KEY, VERSION.encode()).decode()) != VERSION:
        raise DataError(
            f"{path}: the file has version {version} of teacher files, but this program reads {VERSION}; score again"
        )
    if {"prompt_ids", "response_ids"} <= names and {"teacher_logprobs", "teacher_topk_ids"} & names:
        return FileFormat("roll_opd", tuple(name for name in _OWN if name in names), _own_rows)
    if "metadata" in names and "prompt" in names and _fields(schema, "metadata") >= {"response_tokens"}:
        if "teacher_log_probs" not in _fields(schema, "metadata"):
            raise DataError(
                f"{path}: metadata has no teacher_log_probs, so this is an intermediate file of Lightning-OPD; compute"
                " the log-probs first (prepare_lightning_opd.py --compute-teacher-logprobs)"
            )
        return FileFormat("Lightning-OPD", ("prompt", "metadata"), lambda table: _lightning_rows(table, tokenizer))
    if {"input_ids", "compressed_logprobs", "bytepacked_indices"} <= names:
        settings = packing_of(path, packing)
        columns = ("input_ids", "compressed_logprobs", "bytepacked_indices")
        return FileFormat("DistillKit", columns, lambda table: _packed_rows(table, settings))
    if {"packed_indices", "exact_values", "coeffs"} <= names:
        raise DataError(
            f"{path}: DistillKit's legacy compression stores centred logits without the normaliser, so there are no"
            " log-probs; sample the teacher again with a compression_config.yaml"
        )
    raise DataError(
        f"{path}: no known teacher file has the columns {', '.join(sorted(names)) or '(none)'}; write a teacher file"
        " with `roll-opd score --topk`"
    )


def _fields(schema: "pa.Schema", name: str) -> set[str]:
    import pyarrow as pa

    kind = schema.field(name).type
    return {kind.field(place).name for place in range(kind.num_fields)} if pa.types.is_struct(kind) else set()


def packing_of(path: Path, packing: str | None) -> LogprobPacking:
    """Return the compression of a DistillKit file. Raises DataError if the compression configuration is missing."""
    file = Path(packing) if packing else path.parent / PACKING_FILE
    try:
        return read_packing(file)
    except PackedError as error:
        raise DataError(f"{path} is compressed by DistillKit: {error}; name the file in teacher.compression") from None


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


def _own_rows(table: "pa.Table") -> Iterator[TeacherScores | BadRow]:
    arrays = {field: lists(table[name]) for name, field in _ARRAYS.items() if name in table.column_names}
    texts = {name: table[name].to_pylist() for name in ("teacher", "tokenizer") if name in table.column_names}
    temperatures = table["temperature"].to_pylist() if "temperature" in table.column_names else None
    for row in range(table.num_rows):
        found = {field: values[row] for field, values in arrays.items()}
        facts: dict[str, Any] = {name: values[row] or "" for name, values in texts.items()}
        if temperatures and temperatures[row] is not None:
            facts["temperature"] = float(temperatures[row])
        yield _scores(found, facts)


def _lightning_rows(table: "pa.Table", tokenizer: "PreTrainedTokenizerBase") -> Iterator[TeacherScores | BadRow]:
    prompts, metadata = table["prompt"].to_pylist(), _struct(table["metadata"])
    masks = lists(metadata["loss_mask"]) if "loss_mask" in metadata else [None] * table.num_rows
    answers = metadata["response"].to_pylist() if "response" in metadata else [None] * table.num_rows
    columns = lists(metadata["response_tokens"]), lists(metadata["teacher_log_probs"]), masks
    for prompt, answer, tokens, logprobs, mask in zip(prompts, answers, *columns, strict=True):
        if not isinstance(prompt, str):
            yield BadRow(INCONSISTENT, "prompt is no text")
            continue
        ids = np.array(tokenizer.encode(prompt, add_special_tokens=False), np.int64)
        row = _scores({"prompt_ids": ids, "response_ids": tokens, "logprobs": logprobs, "mask": mask}, {})
        if isinstance(row, TeacherScores) and answer is not None and not _is_text_of(row, answer, prompt, tokenizer):
            row = BadRow(
                INCONSISTENT, "response_tokens are not the tokens of the text response in the student's tokenizer"
            )
        yield row


def _is_text_of(row: TeacherScores, text: str, prompt: str, tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether the response tokens are tokens of `text` after the prompt.

    This holds if the tokens decode to `text`, or if they equal the encoding of `text`. The tokens of a truncated answer
    may decode to `text` although the encoding of `text` has other tokens.
    """
    tokens = row.response_ids.tolist()
    if any(not 0 <= token < len(tokenizer) for token in tokens):
        return False
    return tokenizer.decode(tokens) == text or token_ids(tokenizer, [text], [prompt])[0] == tokens


def _packed_rows(table: "pa.Table", packing: LogprobPacking) -> Iterator[TeacherScores | BadRow]:
    """Decode rows of a DistillKit file.

    The log-probs that are stored at position i predict token i + 1. The format does not mark the end of the prompt, so
    all tokens except the first one count as the response.
    """
    columns = (lists(table[name]) for name in ("input_ids", "compressed_logprobs", "bytepacked_indices"))
    for tokens, logprobs, indices in zip(*columns, strict=True):
        if tokens is None or logprobs is None or indices is None or len(tokens) < 2:
            yield BadRow(INCONSISTENT, "an empty value, positions of different sizes, or fewer than two tokens")
            continue
        scored = len(tokens) - 1
        if not scored <= len(logprobs) == len(indices) <= len(tokens):
            counts = f"{len(logprobs)} positions of log-probs and {len(indices)} of ids for {len(tokens)} tokens"
            yield BadRow(INCONSISTENT, counts)
            continue
        try:
            ids = unpack_ids(_position_bytes(indices)[:scored], packing)
            values = unpack_logprobs(_position_bytes(logprobs)[:scored], packing)
        except PackedError as error:
            yield BadRow(INCONSISTENT, str(error))
            continue
        found = {"prompt_ids": tokens[:1], "response_ids": tokens[1:], "topk_ids": ids, "topk_logprobs": values}
        yield _scores(found, {"error": QUANTISED_ERROR})


def _position_bytes(values: np.ndarray) -> np.ndarray:
    """Return the bytes of each position of a row, uint8 [R, B]. A row has at least one position."""
    return values.reshape(len(values), -1).astype(np.uint8)


def _scores(arrays: Mapping[str, np.ndarray | None], facts: Mapping[str, Any]) -> TeacherScores | BadRow:
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


def _struct(column: Any) -> dict[str, Any]:
    """Return the fields of a struct column, as a dict: field name -> values."""
    import pyarrow as pa

    whole = column.combine_chunks()
    whole = whole if isinstance(whole, pa.StructArray) else pa.concat_arrays(whole.chunks)
    return {whole.type.field(place).name: whole.field(place) for place in range(whole.type.num_fields)}


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
