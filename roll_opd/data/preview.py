"""Tags and row counts of a data set, read quickly before the pass over all rows."""

import math
from contextlib import suppress
from itertools import islice

from roll_opd.config.plan import DataPlan
from roll_opd.data.files import open_file
from roll_opd.data.rows import BadRow, DataError, tag_of

ROWS_SCANNED = 50_000  # over all files; enough to detect a wrong tag or column


def first_tags(data: DataPlan) -> tuple[set[str], bool]:
    """Return the tags of the first rows of each file, and whether all rows were read.

    Unreadable rows and files are skipped here; the pass over all rows before a run reports them.
    """
    tags: set[str] = set()
    complete = True
    column = data.columns.get("tag", "tag")
    share = ROWS_SCANNED // max(1, len(data.files))
    share = share if data.limit is None else min(share, data.limit)
    for name in data.files:
        try:
            rows = open_file(name).column(column)
            for tag in islice(rows, share):
                with suppress(BadRow):
                    tags.add(tag_of(tag))
            complete = complete and next(rows, rows) is rows
        except (DataError, OSError):
            continue
    return tags, complete


def count_rows(data: DataPlan) -> int:
    """Return the number of rows, bad ones included, at most `limit`. Raises `DataError` for a broken Parquet file."""
    total = sum(open_file(name).count() for name in data.files)
    return total if data.limit is None else min(total, data.limit)


def whole_steps(epochs: float, found: int, rows: int) -> int:
    """Return the number of complete steps of `rows` rows in `epochs` passes over `found` rows."""
    return math.floor(epochs * found) // rows
