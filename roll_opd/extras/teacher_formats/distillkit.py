"""Teacher files of DistillKit: input_ids, compressed_logprobs, bytepacked_indices, and `compression_config.yaml`.

The files do not state the tokenizer or the temperature, which is 1.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from roll_opd.data.row_formats import BadRow, DataError
from roll_opd.data.teacher_scores import INCONSISTENT, FileFormat, TeacherScores, lists, scores_of
from roll_opd.extras.teacher_formats.packed_logprobs import (
    LogprobPacking,
    PackedError,
    read_packing,
    unpack_ids,
    unpack_logprobs,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

COLUMNS = ("input_ids", "compressed_logprobs", "bytepacked_indices")
LEGACY = {"packed_indices", "exact_values", "coeffs"}
PACKING_FILE = "compression_config.yaml"
QUANTISED_ERROR = 0.02  # relative error of probabilities due to the compression


def recognise(path: Path, schema: "pa.Schema", compression: str | None) -> FileFormat | None:
    """Return the format if the columns are those of DistillKit."""
    if set(schema.names) >= LEGACY:
        raise DataError(
            f"{path}: DistillKit's legacy compression stores centred logits without the normaliser, so there are no"
            " log-probs; sample the teacher again with a compression_config.yaml"
        )
    if not set(schema.names) >= set(COLUMNS):
        return None
    packing = _packing_of(path, compression)
    return FileFormat("DistillKit", COLUMNS, partial(_packed_rows, packing=packing), packing.k)


def _packing_of(path: Path, compression: str | None) -> LogprobPacking:
    """Return the compression of a DistillKit file. Raises DataError if the compression configuration is missing."""
    file = Path(compression) if compression else path.parent / PACKING_FILE
    try:
        return read_packing(file)
    except PackedError as error:
        raise DataError(f"{path} is compressed by DistillKit: {error}; name the file in teacher.compression") from None


def _packed_rows(
    table: "pa.Table", tokenizer: "PreTrainedTokenizerBase", *, packing: LogprobPacking
) -> Iterator[TeacherScores | BadRow]:
    """Decode rows of a DistillKit file.

    The log-probs that are stored at position i predict token i + 1. The format does not mark the end of the prompt, so
    all tokens except the first one count as the response.
    """
    columns = (lists(table[name]) for name in COLUMNS)
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
        yield scores_of(found, {"error": QUANTISED_ERROR})


def _position_bytes(values: np.ndarray) -> np.ndarray:
    """Return the bytes of each position of a row, uint8 [R, B]. A row has at least one position."""
    return values.reshape(len(values), -1).astype(np.uint8)
