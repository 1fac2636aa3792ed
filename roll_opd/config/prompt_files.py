"""Which prompt files a configuration names, and which tags their first rows have."""

import glob
import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from roll_opd.config.load import REPOSITORY
from roll_opd.config.models import find_path, places
from roll_opd.config.plan import DataPlan

SUFFIXES = (".jsonl", ".json", ".parquet")  # files taken from a directory
ROWS_SCANNED = 50_000  # tags are looked up in so many first rows of all files together; enough for a mistake to show
DEFAULT_TAG = "math_rule"  # of a row without a tag, as in `roll_opd.data.rows`


def find_prompt_files(name: str, dataset_dir: str | None) -> list[Path]:
    """Return the files that an entry of `file_name` means: a file, those of a directory, or those of a pattern.

    Looked up as it is, then below `dataset_dir`. Raises ValueError with a sentence if there is none.
    """
    candidates = [name, os.path.join(dataset_dir, name)] if dataset_dir else [name]
    for candidate in candidates:
        found = find_path(candidate)
        if found is None:
            files = _matching(candidate)
        elif found.is_dir():
            files = sorted(file for file in found.iterdir() if file.suffix in SUFFIXES and file.is_file())
            if not files:
                raise ValueError(
                    f"the directory {found} has no files named {' or '.join(f'*{s}' for s in SUFFIXES)}; put some there"
                )
        else:
            files = [found]
        if files:
            return files
    below = f" or below dataset_dir {dataset_dir!r}" if dataset_dir else ""
    raise ValueError(f"no file {name!r} from {places()}{below}; give the path of a JSONL or Parquet file")


def _matching(pattern: str) -> list[Path]:
    """The files that a pattern with *, ? or [ ] names, sorted, from the current directory or the repository root."""
    given = Path(pattern).expanduser()
    for place in (given, REPOSITORY / given):
        files = [Path(match) for match in glob.glob(str(place), recursive=True)]
        if files := sorted(file.resolve() for file in files if file.is_file()):
            return files
    return []


def tags_in(data: DataPlan) -> tuple[set[str], bool]:
    """Return the tags of the files' first rows, and whether those are all rows.

    Unreadable rows and files are left out here; the pass over all rows before a run reports them.
    """
    tags: set[str] = set()
    complete = True
    column = data.columns.get("tag", "tag")
    share = ROWS_SCANNED // max(1, len(data.files))
    for file in data.files:
        rows = _tags_of_parquet(file, column) if file.endswith(".parquet") else _tags_of_jsonl(file, column)
        for tag in islice(rows, share if data.limit is None else min(share, data.limit)):
            if tag is None or isinstance(tag, str):
                tags.add(DEFAULT_TAG if tag is None else tag)
        complete = complete and next(rows, rows) is rows
    return tags, complete


def count_rows(data: DataPlan) -> int:
    """Return how many rows the files have, at most `limit`; bad ones count."""
    total = 0
    for file in data.files:
        if file.endswith(".parquet"):
            import pyarrow.parquet as pq

            total += pq.read_metadata(file).num_rows
        else:
            with open(file, "rb") as stream:
                total += sum(1 for line in stream if line.strip())
    return total if data.limit is None else min(total, data.limit)


def _tags_of_jsonl(file: str, column: str) -> Iterator[Any]:
    with open(file, encoding="utf-8", errors="replace") as stream:
        for line in stream:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                yield row.get(column)


def _tags_of_parquet(file: str, column: str) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as table:
            if column not in table.schema_arrow.names:
                yield from (None for _ in range(table.metadata.num_rows))
                return
            for batch in table.iter_batches(columns=[column]):
                yield from batch.column(0).to_pylist()
    except (pa.ArrowException, OSError):
        return
