"""Decode the compressed top-k log-probs in DistillKit's parquet files.

Each position has k token ids, and k log-probs in descending order. A token id is packed into ceil(log2 d) bits, where d
is the size of the vocabulary.

The first `exact_k` log-probs are stored as floats. Each of the other log-probs is the sum of a polynomial of its rank
and a quantised residual. The residuals are stored in bins. With delta encoding, these floats and sums are the
differences between neighbouring log-probs.

These parameters are in the file `compression_config.yaml` in the directory of the parquet files.

Source: github.com/arcee-ai/DistillKit, `distillkit/compression`.

Legend: R positions, B bytes of a position, K tokens of the top-k.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FLOATS: dict[str, np.dtype[Any]] = {"float16": np.dtype("<f2"), "float32": np.dtype("<f4"), "float64": np.dtype("<f8")}
BFLOAT16 = "bfloat16"
FUNCTIONS = {"sqrt": np.sqrt, "exp": np.exp}  # terms of the polynomial that are not powers of the rank


class PackedError(Exception):
    """A configuration or a row is not in DistillKit's format."""


@dataclass(frozen=True)
class Bin:
    """The quantised residuals of `num_elements` ranks, which have one common scale."""

    scale_dtype: str
    element_bits: int
    num_elements: int

    @property
    def size(self) -> int:
        """Number of bytes of the residuals in the bin, without its scale."""
        return math.ceil(self.num_elements * self.element_bits / 8)


@dataclass(frozen=True)
class LogprobPacking:
    """The parameters in a `compression_config.yaml`. The names are the same as in the file."""

    d: int
    k: int
    exact_k: int
    exact_dtype: str = "float32"
    polynomial_terms: tuple[str | int, ...] = ()
    term_dtype: str = "float32"
    residual_bins: tuple[Bin, ...] = ()
    delta_encoding: bool = True
    normalize_t: bool = False

    @property
    def id_bits(self) -> int:
        return math.ceil(math.log2(self.d))

    @property
    def id_bytes(self) -> int:
        """Number of bytes of the token ids at a position."""
        return math.ceil(self.k * self.id_bits / 8)

    @property
    def logprob_bytes(self) -> int:
        """Number of bytes of the log-probs at a position."""
        sizes = [self.exact_k * _width(self.exact_dtype), len(self.polynomial_terms) * _width(self.term_dtype)]
        return sum(sizes) + sum(_width(part.scale_dtype) + part.size for part in self.residual_bins)


def read_packing(path: Path) -> LogprobPacking:
    """Read a `compression_config.yaml`. Raises PackedError if the file cannot be read or has other content."""
    import yaml

    try:
        return _packing(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, yaml.YAMLError, UnicodeDecodeError, TypeError, KeyError, ValueError) as error:
        raise PackedError(f"{path} is no compression configuration of DistillKit: {error}") from error


def _packing(values: Mapping[str, Any]) -> LogprobPacking:
    known = {name: values[name] for name in LogprobPacking.__dataclass_fields__ if values.get(name) is not None}
    known["polynomial_terms"] = tuple(known.get("polynomial_terms", ()))
    known["residual_bins"] = tuple(Bin(**part) for part in known.get("residual_bins", ()))
    packing = LogprobPacking(**known)
    for dtype in (packing.exact_dtype, packing.term_dtype, *(part.scale_dtype for part in packing.residual_bins)):
        _width(dtype)
    if not 0 <= packing.exact_k <= packing.k <= packing.d:
        raise ValueError(f"exact_k {packing.exact_k}, k {packing.k} and d {packing.d} must be in ascending order")
    return packing


def unpack_ids(packed_RB: np.ndarray, packing: LogprobPacking) -> np.ndarray:
    """Return the token ids, int32 [R, K].

    `packed_RB` are the packed bytes, uint8 [R, B]. The highest bit of an id comes first.
    """
    if packed_RB.shape[1] != packing.id_bytes:
        raise PackedError(f"{packed_RB.shape[1]} bytes of ids per position, but k and d need {packing.id_bytes}")
    return _integers(packed_RB, packing.id_bits, packing.k).astype(np.int32)


def unpack_logprobs(packed_RB: np.ndarray, packing: LogprobPacking) -> np.ndarray:
    """Return the log-probs, f32 [R, K].

    `packed_RB` are the packed bytes, uint8 [R, B].
    """
    if packed_RB.shape[1] != packing.logprob_bytes:
        raise PackedError(
            f"{packed_RB.shape[1]} bytes of log-probs per position, but the log-probs need {packing.logprob_bytes}"
        )
    exact_RK, rest = _floats(packed_RB, packing.exact_dtype, packing.exact_k)
    coefficients_RC, rest = _floats(rest, packing.term_dtype, len(packing.polynomial_terms))
    approximated = packing.k - packing.exact_k
    others_RK = coefficients_RC @ _polynomial(packing, approximated).T
    start = 0
    for part in packing.residual_bins:
        scale_R1, rest = _floats(rest, part.scale_dtype, 1)
        elements = _integers(rest[:, : part.size], part.element_bits, part.num_elements)
        rest = rest[:, part.size :]
        centred = 2 * elements - 1 if part.element_bits == 1 else elements - 2 ** (part.element_bits - 1)
        others_RK[:, start : start + part.num_elements] += centred * scale_R1
        start += part.num_elements
    logprobs_RK = np.concatenate([exact_RK, others_RK], axis=1)
    return (logprobs_RK.cumsum(1) if packing.delta_encoding else logprobs_RK).astype(np.float32)


def _polynomial(packing: LogprobPacking, count: int) -> np.ndarray:
    """Return the terms of the polynomial at each rank, f64 [count, C]."""
    ranks = np.linspace(0, 1, count) if packing.normalize_t else np.arange(count, dtype=np.float64)
    terms = [FUNCTIONS[term](ranks) if isinstance(term, str) else ranks**term for term in packing.polynomial_terms]
    return np.stack(terms, axis=1) if terms else np.zeros((count, 0))


def _floats(packed_RB: np.ndarray, dtype: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (floats, rest): the first `count` floats of each position, f64 [R, count], and the bytes after them.

    The floats are stored in little-endian order.
    """
    size = count * _width(dtype)
    first = np.ascontiguousarray(packed_RB[:, :size])
    shape = (len(packed_RB), count)
    if dtype == BFLOAT16:  # bf16 is the upper half of an f32
        values = (first.view("<u2").astype(np.uint32) << 16).view("<f4").reshape(shape)
    else:
        values = first.view(FLOATS[dtype]).reshape(shape)
    return values.astype(np.float64), packed_RB[:, size:]


def _integers(packed_RB: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Return `count` unsigned integers of each position, int64 [R, count].

    Each integer has `bits` bits, the highest bit first.
    """
    unpacked = np.unpackbits(packed_RB, axis=1, count=bits * count).reshape(len(packed_RB), count, bits)
    powers = 1 << np.arange(bits - 1, -1, -1, dtype=np.int64)
    return unpacked.astype(np.int64) @ powers


def _width(dtype: str) -> int:
    """Return the number of bytes of a float."""
    if dtype != BFLOAT16 and dtype not in FLOATS:
        raise ValueError(f"unknown float type {dtype!r}")
    return 2 if dtype == BFLOAT16 else FLOATS[dtype].itemsize
