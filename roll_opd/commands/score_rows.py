"""The rows that `roll-opd score` reads, and the arguments of the teacher file that it writes.

A row has tokens, or an answer that is tokenised here.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from roll_opd.config.plan import DataPlan
from roll_opd.data.files import open_file
from roll_opd.data.rows import DataError
from roll_opd.models.model_info import find_model, read_model
from roll_opd.models.tokenizer_files import vocabulary_fingerprint

PARQUET = ".parquet"


@contextmanager
def tokenised(options: argparse.Namespace) -> Iterator[Path]:
    """Context manager: yield the path of a file whose rows have tokens.

    If the input has answers, they are tokenised and written to a temporary file. Otherwise the path is that of the
    input. Raises DataError for rows that cannot be used.
    """
    source = Path(options.input)
    if has_tokens(source):
        yield source
        return
    from roll_opd.data.dataset import open_prompts  # and transformers
    from roll_opd.data.templates import load_tokenizer

    model = read_model(find_model(options.model))
    rows, _ = open_prompts(
        DataPlan((str(source),), model.max_positions, schema="sft", length_key="max_position_embeddings"),
        load_tokenizer(str(model.path)),
    )
    file = Path(options.output).with_name(f".{Path(options.output).name}.tokens.jsonl")
    try:
        with file.open("w", encoding="utf-8") as out:
            for number in range(len(rows)):
                (row,) = rows.read([number])
                tokens = [*row.tokens.tolist(), *row.answers[0].tolist()]
                out.write(json.dumps({"id": row.id, "tokens": tokens, "prompt_length": len(row.tokens)}) + "\n")
        yield file
    finally:
        file.unlink(missing_ok=True)


def has_tokens(path: Path) -> bool:
    """Return whether the rows of a file have tokens. Only the first row is read.

    The result is also True if this row cannot be decoded or has no column of an answer. The reader of token rows then
    raises the error.
    """
    try:
        _, _, row = next(open_file(str(path)).scan(), (0, 0, {}))
    except (OSError, DataError):
        return True
    answers = {"messages", "conversations", "prompt", "instruction"}
    return not isinstance(row, dict) or "tokens" in row or answers.isdisjoint(row)


def teacher_file(options: argparse.Namespace) -> dict[str, Any] | None:
    """Return the arguments of `TeacherWriter`, except `output`. None if the output is a JSONL file of log-probs."""
    if not options.output.endswith(PARQUET):
        return None
    from roll_opd.data.teacher_files import digest_of

    model = read_model(find_model(options.model))
    facts = {
        "teacher": options.name or model.path.name,
        "tokenizer": vocabulary_fingerprint(model.path),
        "temperature": options.temperature,
    }
    settings = {
        "model": str(model.path),
        "dtype": options.dtype,
        "input": digest_of(Path(options.input)),
    }
    vocabulary = min(options.vocab_size or model.vocab, model.vocab)
    return {"facts": facts, "topk": options.topk, "vocab_size": vocabulary, "settings": settings}
