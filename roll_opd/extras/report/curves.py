"""Curves of the report: read points from rows of `metrics.jsonl`, and downsample them.

A point is (step, value). All functions are pure.
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
    """Return at most `most` points of a curve; `most` must be 4 or more.

    The first and the last point are kept. The points between them are split into ranges of equal length, and the
    minimum and the maximum of each range are kept. Outliers therefore stay, and no points are interpolated.
    """
    if len(curve) <= most:
        return list(curve)
    inner = range(1, len(curve) - 1)
    kept = {0, len(curve) - 1}
    for run in _ranges(inner, (most - 2) // 2):
        kept |= {min(run, key=lambda place: curve[place][1]), max(run, key=lambda place: curve[place][1])}
    return [curve[place] for place in sorted(kept)]


def trend(curve: Sequence[Point], most: int = TREND_POINTS) -> list[tuple[float, float]]:
    """Return the trend of a curve, as means over ranges of equal length.

    The result is empty for a curve of fewer than `TREND_FROM` points.

    Args:
        most: number of ranges.
    """
    if len(curve) < TREND_FROM:
        return []
    runs = [curve[run.start : run.stop] for run in _ranges(range(len(curve)), most)]
    return [(mean([step for step, _ in run]), mean([value for _, value in run])) for run in runs]


def mean(values: Sequence[float]) -> float:
    """Return the mean of `values`, which must not be empty."""
    return sum(values) / len(values)


def ends(values: Sequence[float]) -> tuple[float, float]:
    """Return (mean of the first tenth, mean of the last tenth) of `values`, as in `summary.json`.

    `values` must not be empty.
    """
    tenth = -(-len(values) // 10)
    return mean(values[:tenth]), mean(values[-tenth:])


def spread(items: Sequence[int], most: int) -> list[int]:
    """Return at most `most` items, evenly spaced from the first to the last; `most` must be 2 or more."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def averaged(rows: Sequence[Mapping[str, float]], names: Sequence[str], most: int) -> list[dict[str, float]]:
    """Return the means of metrics over ranges of rows of equal length.

    Each range becomes one row of the result. In this row, the key `step` is the first step of the range, and the key
    `to` is its last step.

    Args:
        names: the metrics that are averaged.
        most: maximum number of ranges.
    """
    groups = [rows[run.start : run.stop] for run in _ranges(range(len(rows)), min(most, len(rows)))]
    return [
        {"step": group[0]["step"], "to": group[-1]["step"]}
        | {name: mean([row.get(name, 0.0) for row in group]) for name in names}
        for group in groups
    ]


def _ranges(places: range, count: int) -> list[range]:
    """Split `places` into `count` ranges whose lengths differ by at most one."""
    edges = [places.start + len(places) * run // count for run in range(count + 1)] if count else []
    return [range(begin, end) for begin, end in itertools.pairwise(edges)]
