"""Curves of the report: extract points from rows of `metrics.jsonl` and downsample them, with pure functions.

A point is (step, value).
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence

Point = tuple[int, float]

MAX_POINTS = 1000  # maximum points of a curve, about the columns of a screen
TREND_FROM = 200  # a curve with at least this many points gets a trend line
TREND_POINTS = 100


def points(rows: Iterable[Mapping[str, float]], name: str) -> list[Point]:
    """Return the (step, value) points of a metric."""
    return [(int(row["step"]), row[name]) for row in rows if name in row]


def downsample(curve: Sequence[Point], most: int = MAX_POINTS) -> list[Point]:
    """Return no more points than `most` (4 or more): the first, the last, and the extremes of ranges of equal length.

    Outliers are kept; points are not interpolated.
    """
    if len(curve) <= most:
        return list(curve)
    inner = range(1, len(curve) - 1)
    kept = {0, len(curve) - 1}
    for run in _ranges(inner, (most - 2) // 2):
        kept |= {min(run, key=lambda place: curve[place][1]), max(run, key=lambda place: curve[place][1])}
    return [curve[place] for place in sorted(kept)]


def trend(curve: Sequence[Point], most: int = TREND_POINTS) -> list[tuple[float, float]]:
    """Return the means over `most` ranges of equal length; empty for a curve of fewer than `TREND_FROM` points."""
    if len(curve) < TREND_FROM:
        return []
    runs = [curve[run.start : run.stop] for run in _ranges(range(len(curve)), most)]
    return [(mean([step for step, _ in run]), mean([value for _, value in run])) for run in runs]


def mean(values: Sequence[float]) -> float:
    """Return the mean of `values`, which must not be empty."""
    return sum(values) / len(values)


def ends(values: Sequence[float]) -> tuple[float, float]:
    """Return the means of the first and the last tenth of `values` (not empty), as in `summary.json`."""
    tenth = -(-len(values) // 10)
    return mean(values[:tenth]), mean(values[-tenth:])


def spread(items: Sequence[int], most: int) -> list[int]:
    """Return no more items than `most` (2 or more), evenly spread from the first to the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def averaged(rows: Sequence[Mapping[str, float]], names: Sequence[str], most: int) -> list[dict[str, float]]:
    """Return the means of `names` over up to `most` equal ranges of rows.

    In a returned row, the keys `step` and `to` are the first and the last step of its range.
    """
    groups = [rows[run.start : run.stop] for run in _ranges(range(len(rows)), min(most, len(rows)))]
    return [
        {"step": group[0]["step"], "to": group[-1]["step"]}
        | {name: mean([row.get(name, 0.0) for row in group]) for name in names}
        for group in groups
    ]


def _ranges(places: range, count: int) -> list[range]:
    """Return `places` cut into `count` ranges with lengths that differ by at most one."""
    edges = [places.start + len(places) * run // count for run in range(count + 1)] if count else []
    return [range(begin, end) for begin, end in itertools.pairwise(edges)]
