"""Write a teacher file in parts, so that interrupted scoring can continue after the last complete part.

A part is a parquet file in `.OUTPUT.parts/`. It gets its final name when it is complete. At the end, all parts are
joined to one file, which is renamed to OUTPUT. Parts that were written with other settings or from another input are
discarded.

Legend: R response tokens, K tokens of a top-k.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_opd.data.teacher_files import ROWS_OF_A_GROUP
from roll_opd.data.teacher_formats import VERSION, VERSION_KEY, VOCABULARY_KEY

if TYPE_CHECKING:
    import pyarrow as pa

ROWS_OF_A_PART = 4 * ROWS_OF_A_GROUP
SETTINGS_FILE = "settings.json"
CODEC = "zstd"


class TeacherWriter:
    """Writer of one teacher file.

    Args:
        output: the parquet file.
        facts: columns that have the same value in all rows: teacher, tokenizer, temperature.
        topk: number of tokens in the top-k (K). None: write only the log-probs of the response tokens.
        vocab_size: number of token ids over which the log-probs are normalised.
        settings: settings that determine the scores; parts written with other settings are discarded.
    """

    def __init__(
        self,
        output: Path,
        facts: Mapping[str, str | float],
        topk: int | None,
        vocab_size: int,
        settings: Mapping[str, Any],
    ) -> None:
        self.output, self.facts, self.topk, self.vocab_size = output, facts, topk, vocab_size
        self.parts = output.with_name(f".{output.name}.parts")
        self._settings = json.dumps({**settings, **facts, "topk": topk, "vocab_size": vocab_size}, sort_keys=True)
        self._open()

    def _open(self) -> None:
        file = self.parts / SETTINGS_FILE
        if self.parts.is_dir() and not (file.is_file() and file.read_text(encoding="utf-8") == self._settings):
            shutil.rmtree(self.parts)
        self.parts.mkdir(exist_ok=True)
        file.write_text(self._settings, encoding="utf-8")

    def missing(self, rows: Iterator[dict[str, Any]]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """Yield (number, input rows) of each part that has not been written yet."""
        for number in count():
            part = list(islice(rows, ROWS_OF_A_PART))
            if not part:
                return
            if not self._part(number).is_file():
                yield number, part

    def write(self, number: int, rows: Sequence[Mapping[str, Any]], scores: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Write the part with this number.

        - `rows`: input rows with `id`, `tokens` and `prompt_length`.
        - `scores`: arrays of each row, as returned by `compute_targets`.
        """
        table = self._table(rows, scores)
        partial = self._part(number).with_suffix(".partial")
        _write([table], partial, table.schema)
        partial.replace(self._part(number))

    def finish(self) -> None:
        """Join all parts into the output, and remove the parts."""
        import pyarrow.parquet as pq

        files = sorted(self.parts.glob("*.parquet"))
        partial = self.output.with_name(f".{self.output.name}.partial")
        schema = pq.read_schema(files[0])
        groups = (pq.ParquetFile(file).read_row_group(g) for file in files for g in range(_groups(file)))
        _write(groups, partial, schema)
        partial.replace(self.output)
        shutil.rmtree(self.parts)

    def _part(self, number: int) -> Path:
        return self.parts / f"{number:08d}.parquet"

    def _table(self, rows: Sequence[Mapping[str, Any]], scores: Sequence[Mapping[str, np.ndarray]]) -> "pa.Table":
        import pyarrow as pa

        prompts = [np.asarray(row["tokens"][: row["prompt_length"]], np.int32) for row in rows]
        responses = [np.asarray(row["tokens"][row["prompt_length"] :], np.int32) for row in rows]
        columns: dict[str, Any] = {
            "id": pa.array([str(row["id"]) for row in rows]),
            "prompt_ids": _lists(prompts),
            "response_ids": _lists(responses),
            "teacher_logprobs": _lists([found["logprobs"] for found in scores]),
        }
        if self.topk is not None:
            columns["teacher_topk_ids"] = _lists([found["topk_ids"].astype(np.int32) for found in scores])
            columns["teacher_topk_logprobs"] = _lists([found["topk_logprobs"] for found in scores])
            columns["teacher_topk_rest"] = _lists([found["topk_rest"] for found in scores])
        columns |= {name: pa.array([value] * len(rows)) for name, value in self.facts.items()}
        metadata = {VERSION_KEY: VERSION, VOCABULARY_KEY: str(self.vocab_size)}
        return pa.table(columns).replace_schema_metadata(metadata)


def digest_of(path: Path) -> str:
    """Return a digest of a file's content."""
    state = blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(2**20):
            state.update(block)
    return state.hexdigest()


def _lists(values: Sequence[np.ndarray]) -> "pa.Array":
    """Return a column with one value per array: a list for an array [R], a list of lists for an array [R, K]."""
    import pyarrow as pa

    ends = np.cumsum([0, *map(len, values)], dtype=np.int32)
    flat = np.concatenate(values)
    inner = pa.array(flat.reshape(-1))
    if flat.ndim == 2:
        inner = pa.FixedSizeListArray.from_arrays(inner, flat.shape[1])
    return pa.ListArray.from_arrays(pa.array(ends), inner)


def _groups(file: Path) -> int:
    import pyarrow.parquet as pq

    return int(pq.ParquetFile(file).num_row_groups)


def _write(tables: Any, path: Path, schema: "pa.Schema") -> None:
    import pyarrow.parquet as pq

    with pq.ParquetWriter(path, schema, compression=CODEC) as writer:
        for table in tables:
            writer.write_table(table, row_group_size=ROWS_OF_A_GROUP)
