"""The choice of metrics that get a chart, against a slow search of all of their values."""

import random

from roll_opd.tracking.builtin.tensorboard import new_charts


def shown(rows: list[dict[str, float]]) -> set[str]:
    charted: set[str] = set()
    for row in rows:
        charted.update(new_charts(charted, row))
    return charted


def test_duplicates_and_default_values_have_no_chart() -> None:
    rows = [
        {"opd/reverse_kl/mean": 1 / step, "critic/kl": 3 / step / 3, "actor/lr": 0.1, "actor/skipped_updates": 0.0}
        | {"actor/ratio_mean": 1.0, "critic/score/mean": 0.0, "val_correct/all/mean": 0.0}
        for step in range(2, 9)
    ]
    assert shown(rows) == {"opd/reverse_kl/mean", "actor/lr", "critic/score/mean"}
    rows[5]["actor/skipped_updates"] = 2.0
    rows[6]["val_correct/all/mean"] = 0.5
    assert shown(rows) == {*rows[0]} - {"critic/kl", "actor/ratio_mean"}


def test_a_metric_without_a_chart_equals_one_that_has_a_chart() -> None:
    """Of random metrics, some equal for a while: at every step, the values of the charts are all values."""
    choose = random.Random(0)
    for _ in range(200):
        names = [f"m{number}" for number in range(6)]
        rows = [
            {name: float(choose.randrange(2)) for name in names if choose.random() < 0.9}
            for _ in range(choose.randrange(1, 6))
        ]
        charts = shown(rows)
        for row in rows:
            assert {row[name] for name in row.keys() & charts} == set(row.values())
