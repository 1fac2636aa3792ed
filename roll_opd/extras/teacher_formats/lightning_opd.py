"""Teacher files of Lightning-OPD (arXiv 2604.13010): prompt (text), metadata.response_tokens and .teacher_log_probs.

The files do not state the tokenizer or the temperature, which is 1.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_opd.data.row_formats import BadRow, DataError
from roll_opd.data.teacher_scores import INCONSISTENT, FileFormat, TeacherScores, lists, scores_of
from roll_opd.data.templates import token_ids

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase


def recognise(path: Path, schema: "pa.Schema", compression: str | None) -> FileFormat | None:
    """Return the format if the columns are those of Lightning-OPD."""
    if not {"metadata", "prompt"} <= set(schema.names) or "response_tokens" not in _fields(schema, "metadata"):
        return None
    if "teacher_log_probs" not in _fields(schema, "metadata"):
        raise DataError(
            f"{path}: metadata has no teacher_log_probs, so this is an intermediate file of Lightning-OPD; compute"
            " the log-probs first (prepare_lightning_opd.py --compute-teacher-logprobs)"
        )
    return FileFormat("Lightning-OPD", ("prompt", "metadata"), _rows)


def _fields(schema: "pa.Schema", name: str) -> set[str]:
    import pyarrow as pa

    kind = schema.field(name).type
    return {kind.field(place).name for place in range(kind.num_fields)} if pa.types.is_struct(kind) else set()


def _rows(table: "pa.Table", tokenizer: "PreTrainedTokenizerBase") -> Iterator[TeacherScores | BadRow]:
    prompts, metadata = table["prompt"].to_pylist(), _struct(table["metadata"])
    masks = lists(metadata["loss_mask"]) if "loss_mask" in metadata else [None] * table.num_rows
    answers = metadata["response"].to_pylist() if "response" in metadata else [None] * table.num_rows
    columns = lists(metadata["response_tokens"]), lists(metadata["teacher_log_probs"]), masks
    for prompt, answer, tokens, logprobs, mask in zip(prompts, answers, *columns, strict=True):
        if not isinstance(prompt, str):
            yield BadRow(INCONSISTENT, "prompt is no text")
            continue
        ids = np.array(tokenizer.encode(prompt, add_special_tokens=False), np.int64)
        row = scores_of({"prompt_ids": ids, "response_ids": tokens, "logprobs": logprobs, "mask": mask}, {})
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


def _struct(column: Any) -> dict[str, Any]:
    """Return the fields of a struct column, as a dict: field name -> values."""
    import pyarrow as pa

    whole = column.combine_chunks()
    whole = whole if isinstance(whole, pa.StructArray) else pa.concat_arrays(whole.chunks)
    return {whole.type.field(place).name: whole.field(place) for place in range(whole.type.num_fields)}
