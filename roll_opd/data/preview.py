"""What is known of a data set before the pass over all its rows: the tags of the first ones, and how many there are."""

import math
from contextlib import suppress
from itertools import islice

from roll_opd.config.plan import DataPlan
from roll_opd.data.files import open_file
from roll_opd.data.rows import BadRow, DataError, tag_of

ROWS_SCANNED = 50_000  # of all files together; enough for a mistake to show


def first_tags(data: DataPlan) -> tuple[set[str], bool]:
    """Return the tags of the files' first rows, and whether those are all rows.

    Unreadable rows and files are left out here; the pass over all rows before a run reports them.
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
    """Return how many rows the files have, at most `limit`; bad ones count. `DataError` for a broken Parquet file."""
    total = sum(open_file(name).count() for name in data.files)
    return total if data.limit is None else min(total, data.limit)


def whole_steps(epochs: float, found: int, rows: int) -> int:
    """Return the steps of `rows` rows that `epochs` passes over `found` rows fill; the last incomplete one is not."""
    return math.floor(epochs * found) // rows
