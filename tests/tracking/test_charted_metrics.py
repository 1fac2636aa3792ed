"""The choice of metrics that get a chart, against a slow search of all of their values."""

import random

from roll_opd.tracking.builtin.tensorboard import ChartedMetrics


def shown(rows: list[dict[str, float]]) -> dict[str, list[tuple[int, float]]]:
    curves: dict[str, list[tuple[int, float]]] = {}
    tracker = ChartedMetrics()
    for step, row in enumerate(rows):
        for name, at, value in tracker.add(step, row):
            curves.setdefault(name, []).append((at, value))
    return curves


def history(rows: list[dict[str, float]], name: str) -> list[tuple[int, float]]:
    return [(step, row[name]) for step, row in enumerate(rows) if name in row]


def test_duplicates_and_default_values_have_no_chart() -> None:
    rows = [
        {"opd/reverse_kl/mean": 1 / step, "critic/kl": 3 / step / 3, "actor/lr": 0.1, "actor/skipped_updates": 0.0}
        | {"actor/ratio_mean": 1.0, "critic/score/mean": 0.0, "val_correct/all/mean": 0.0}
        for step in range(1, 9)
    ]
    assert shown(rows).keys() == {"opd/reverse_kl/mean", "actor/lr", "critic/score/mean"}
    rows[5]["actor/skipped_updates"] = 1.0
    rows[6]["val_correct/all/mean"] = 0.5
    later = shown(rows)
    assert later["actor/skipped_updates"] == history(rows, "actor/skipped_updates")
    assert later["val_correct/all/mean"] == history(rows, "val_correct/all/mean")


def test_every_point_is_charted_once() -> None:
    """Of random metrics, some equal for a while: every history is the history of exactly one chart."""
    choose = random.Random(0)
    for _ in range(200):
        names = [f"m{number}" for number in range(6)]
        rows = [
            {name: float(choose.randrange(2)) for name in names if choose.random() < 0.9}
            for _ in range(choose.randrange(1, 6))
        ]
        charts = shown(rows)
        assert all(charts[name] == history(rows, name) for name in charts)
        wanted = {tuple(history(rows, name)) for name in names if history(rows, name)}
        assert {tuple(points) for points in charts.values()} == wanted
