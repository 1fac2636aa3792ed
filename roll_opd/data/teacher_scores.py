"""A teacher's scores of one answer: their consistency, and the formats of teacher files.

The format here is that of `roll-opd score --topk`: prompt_ids, response_ids, teacher_logprobs, teacher_topk_ids, ... A
package names further formats as entry points of the group `roll_opd.teacher_formats`. Each is a function from the
file's path, its schema and the key `teacher.compression` to a `FileFormat`. It returns None for a file of another
format, and raises DataError for a file of its format that cannot be read. A row that cannot be decoded becomes a
`BadRow`.

Legend: P prompt tokens, R response tokens, K tokens of a top-k. Entry t of an array belongs to response token t.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_opd.base.entry_points import entries, load
from roll_opd.data.row_formats import BadRow, DataError

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

REST_FLOOR = 1e-8  # smallest probability of the tokens outside a top-k, if there is no `topk_rest`
PLACEHOLDER = -1e3  # lower than any log-prob of a softmax; formats write such values as placeholders
FEWEST_POSITIONS = 4  # number of positions that decide whether a top-k is renormalised
# a softmax gives the tokens outside the top-k at least 1 / SHARE_OF_LAST of the smallest probability in the top-k
SHARE_OF_LAST = 100


@dataclass(frozen=True)
class TeacherScores:
    """The scores of one answer. An array that is not in the file is None."""

    prompt_ids: np.ndarray  # int64 [P]
    response_ids: np.ndarray  # int64 [R]
    logprobs: np.ndarray | None = None  # f32 [R], log-probs of the response tokens
    topk_ids: np.ndarray | None = None  # int32 [R, K]
    topk_logprobs: np.ndarray | None = None  # f32 [R, K], log-probs of the top-k, not renormalised
    topk_rest: np.ndarray | None = None  # f32 [R], log-prob of all other tokens together
    mask: np.ndarray | None = None  # bool [R], true for tokens in the loss; None: all
    teacher: str = ""
    tokenizer: str = ""  # fingerprint of the tokenizer; empty: unknown
    temperature: float = 1.0  # divisor of the logits
    error: float = 1e-6  # relative error of probabilities: 1e-6 for f32, 1e-3 for f16, 0.02 for quantised values


@dataclass(frozen=True)
class Expected:
    """The values that a run expects in every row."""

    vocab_size: int  # token ids of the student
    tokenizer: str = ""  # fingerprint of the student's tokenizer; empty: unknown
    temperature: float = 1.0
    teacher: str = ""  # name of the teacher; empty: any
    topk: int | None = None  # size of the top-k that the objective reads; None: it reads the log-probs of the response


def problem(scores: TeacherScores, expected: Expected) -> str | None:
    """Return a sentence about the first inconsistency in a row, or None if the row is consistent."""
    with np.errstate(over="ignore", invalid="ignore"):
        return next(_problems(scores, expected), None)


def with_rest(scores: TeacherScores) -> np.ndarray | None:
    """Return the log-prob of all tokens outside the top-k together, f32 [R], or None without a top-k.

    This is `topk_rest` if the file has it. Otherwise it is computed as log(1 - Σp), where Σp is the sum of the top-k
    probabilities. The smallest computed value is log(`REST_FLOOR`).
    """
    if scores.topk_logprobs is None or scores.topk_rest is not None:
        return scores.topk_rest
    mass = np.exp(scores.topk_logprobs.astype(np.float64)).sum(1)
    return np.log(np.maximum(1 - mass, REST_FLOOR)).astype(np.float32)


def narrowed(scores: TeacherScores, k: int) -> dict[str, np.ndarray]:
    """Return the `k` most likely tokens of a checked row, as a dict: `topk_ids`, `topk_logprobs` and `topk_rest`."""
    ids, logprobs, rest = scores.topk_ids, scores.topk_logprobs, with_rest(scores)
    assert ids is not None and logprobs is not None and rest is not None
    if ids.shape[1] > k:
        order = np.argsort(-logprobs, axis=1, kind="stable")
        sorted_f64 = np.take_along_axis(logprobs, order, 1).astype(np.float64)
        dropped = np.exp(sorted_f64[:, k:]).sum(1) + np.exp(rest.astype(np.float64))
        ids, logprobs = np.take_along_axis(ids, order, 1)[:, :k], sorted_f64[:, :k]
        rest = np.log(np.maximum(dropped, REST_FLOOR))
    return {
        "topk_ids": ids.astype(np.int32),
        "topk_logprobs": logprobs.astype(np.float32),
        "topk_rest": rest.astype(np.float32),
    }


def _problems(scores: TeacherScores, expected: Expected) -> Iterator[str]:
    yield from _wrong_origin(scores, expected)
    yield from _wrong_lengths(scores, expected)
    yield from _wrong_ids(scores, expected.vocab_size)
    for name in ("logprobs", "topk_logprobs", "topk_rest"):
        values = getattr(scores, name)
        if values is not None:
            yield from _not_logprobs(f"teacher_{name}", values, scores.error)
    if scores.topk_logprobs is not None:
        yield from _wrong_topk(scores)


def _wrong_origin(scores: TeacherScores, expected: Expected) -> Iterator[str]:
    if expected.tokenizer and scores.tokenizer and scores.tokenizer != expected.tokenizer:
        yield f"it was scored with the tokenizer {scores.tokenizer}, but the student's is {expected.tokenizer}"
    if abs(scores.temperature - expected.temperature) > 1e-6:
        yield f"it was scored at temperature {scores.temperature:g}, but the run samples at {expected.temperature:g}"
    if expected.teacher and scores.teacher != expected.teacher:
        yield f"its teacher is {scores.teacher!r}, but teacher.name is {expected.teacher!r}"


def _wrong_lengths(scores: TeacherScores, expected: Expected) -> Iterator[str]:
    tokens = len(scores.response_ids)
    if not len(scores.prompt_ids) or not tokens:
        yield f"it has {len(scores.prompt_ids)} prompt and {tokens} response tokens; it needs at least one of each"
    arrays = (scores.logprobs, scores.topk_ids, scores.topk_logprobs, scores.topk_rest, scores.mask)
    names = ("teacher_logprobs", "teacher_topk_ids", "teacher_topk_logprobs", "teacher_topk_rest", "loss_mask")
    for name, values in zip(names, arrays, strict=True):
        if values is not None and len(values) != tokens:
            yield f"{len(values)} entries of {name} for {tokens} response tokens"
    if (scores.topk_ids is None) != (scores.topk_logprobs is None):
        yield "teacher_topk_ids and teacher_topk_logprobs must both be present, but one is missing"
    if scores.topk_ids is not None and scores.topk_logprobs is not None:
        shapes = scores.topk_ids.shape, scores.topk_logprobs.shape
        if shapes[0] != shapes[1] or len(shapes[0]) != 2 or not shapes[0][1]:
            yield f"teacher_topk_ids has shape {shapes[0]}, teacher_topk_logprobs {shapes[1]}"
    if expected.topk and scores.topk_ids is None:
        yield "it has no top-k, which opd_objective: topk needs; use opd_objective: sampled, or score with --topk"
    if expected.topk and scores.topk_ids is not None and scores.topk_ids.shape[-1] < expected.topk:
        yield f"its top-k has {scores.topk_ids.shape[-1]} tokens, but opd_topk is {expected.topk}"
    if not expected.topk and scores.logprobs is None:
        yield "it has no teacher_logprobs, which opd_objective: sampled needs; use opd_objective: topk"


def _wrong_ids(scores: TeacherScores, vocab_size: int) -> Iterator[str]:
    arrays = {"prompt id": scores.prompt_ids, "response id": scores.response_ids, "top-k id": scores.topk_ids}
    for name, ids in arrays.items():
        if ids is None or not ids.size:
            continue
        worst = int(ids.min()) if ids.min() < 0 else int(ids.max())
        if not 0 <= worst < vocab_size:
            yield f"{name} {worst} is outside the student's vocabulary of {vocab_size}"


def _not_logprobs(name: str, values: np.ndarray, error: float) -> Iterator[str]:
    """Yield a sentence for each kind of value that cannot be a log-prob.

    Values of `topk_rest` have no lower bound, but they must be finite.
    """
    flat = values.reshape(len(values), -1)
    wrong = {
        "is not finite: an overflow of f16, or not computed": ~np.isfinite(flat),
        "is a placeholder instead of a log-prob": flat <= (-np.inf if name.endswith("rest") else PLACEHOLDER),
        "is positive: a logit or a probability": flat > 10 * error,
    }
    if name.endswith("rest"):
        wrong["is not finite: an overflow of f16, or not computed"] = np.isnan(flat) | (flat == np.inf)
    for meaning, found in wrong.items():
        if found.any():
            token, place = np.argwhere(found)[0]
            yield f"{name} {flat[token, place]:g} at response token {token} {meaning}"


def _wrong_topk(scores: TeacherScores) -> Iterator[str]:
    assert scores.topk_ids is not None and scores.topk_logprobs is not None
    ids, logprobs = scores.topk_ids, scores.topk_logprobs.astype(np.float64)
    ordered = np.sort(ids, axis=1)
    if (repeated := (ordered[:, 1:] == ordered[:, :-1]).any(1)).any():
        yield f"a token is twice in the top-k of response token {int(np.argmax(repeated))}"
    mass, last = np.exp(logprobs).sum(1), np.exp(logprobs.min(1))
    tolerance = max(1e-3, 5 * scores.error)
    if (over := mass > 1 + tolerance).any():
        token = int(np.argmax(over))
        yield f"the top-k of response token {token} has the probability {mass[token]:.4f}"
    if scores.topk_rest is not None:
        whole = mass + np.exp(scores.topk_rest.astype(np.float64))
        if (wrong := np.abs(whole - 1) > tolerance).any():
            token = int(np.argmax(wrong))
            yield (
                f"top-k and teacher_topk_rest of response token {token} sum to {whole[token]:.4f}: the top-k is"
                " renormalised, or comes from another computation"
            )
    elif _is_renormalised(mass, last, scores.error):
        yield (
            "its top-k is renormalised: the probabilities sum to 1 at every token, although the least likely of them"
            " is far above 0; write the log-probs over the whole vocabulary"
        )
    if scores.logprobs is not None:
        yield from _contradictions(scores, tolerance)


def _is_renormalised(mass: np.ndarray, last: np.ndarray, error: float) -> bool:
    """Whether the top-k is renormalised: its probabilities sum to 1, although other tokens must have some probability.

    The least likely token of the top-k has the probability `last`. The many tokens outside the top-k are assumed to
    have at least `last` / `SHARE_OF_LAST` in total. Positions where this bound is below the precision `error` are
    ignored.
    """
    decides = last / SHARE_OF_LAST > error
    return int(decides.sum()) >= FEWEST_POSITIONS and bool((np.abs(1 - mass) <= error * 2)[decides].all())


def _contradictions(scores: TeacherScores, tolerance: float) -> Iterator[str]:
    """Yield a sentence if the log-prob of a response token contradicts the top-k."""
    assert scores.logprobs is not None and scores.topk_ids is not None and scores.topk_logprobs is not None
    hit = scores.topk_ids == scores.response_ids[:, None]
    own = scores.logprobs.astype(np.float64)
    inside = np.where(hit, scores.topk_logprobs, 0).sum(1)
    # proportional to the log-prob, as rounding errors in f16 are
    limit = 2 * tolerance * np.maximum(1, np.abs(own))
    differs = np.where(hit.any(1), np.abs(inside - own) > limit, own > scores.topk_logprobs.min(1) + limit)
    if differs.any():
        token = int(np.argmax(differs))
        missing = "above the lowest log-prob of its top-k, which does not contain the token"
        there = f"{inside[token]:.4f} in its top-k" if hit[token].any() else missing
        yield (
            f"the log-prob of response token {token} is {own[token]:.4f}, but {there}: one of the two is shifted,"
            " renormalised or at another temperature"
        )


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
