"""Results of a claim: the runs of its arms, and their plot as one SVG file."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import mean
from typing import Any

WIDTH, HEIGHT = 360, 260  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 34, 46
COLOURS = ("#1f5fa8", "#c2571a", "#3d7a45", "#aa4499", "#9a958b", "#1d1c1a")


@dataclass(frozen=True)
class Runs:
    """The runs in a result file; the lists below have a value for each seed."""

    runs: Sequence[Mapping[str, Any]]
    bars: Mapping[str, float]  # arm -> accuracy at which it ends

    def of(self, arm: str) -> list[Mapping[str, Any]]:
        """Return the runs of an arm."""
        return [run for run in self.runs if run["arm"] == arm]

    def series(self, arm: str, key: str) -> list[list[float]]:
        """Return a measurement at all validations that have it."""
        return [[row[key] for row in run["curve"] if key in row] for run in self.of(arm)]

    def steps_to_bar(self, arm: str) -> list[int]:
        """Return the first validated step at the bar; for a run that did not reach it, its last step."""
        return [
            next((row["step"] for row in run["curve"] if row["accuracy"] >= self.bars[arm]), run["curve"][-1]["step"])
            for run in self.of(arm)
        ]

    def best(self, arm: str) -> list[float]:
        """Return the highest validation accuracy."""
        return [max(values) for values in self.series(arm, "accuracy")]

    def alarm_steps(self, arm: str) -> list[int]:
        """Return the step of the first alarm; without an alarm, one more than the last step.

        "alarm" in a row is the share of the steps since the last validation that came after the alarm or with it.
        """
        found = []
        for run in self.of(arm):
            pairs = itertools.pairwise(run["curve"])
            found.append(1 + round(sum((1 - row["alarm"]) * (row["step"] - before["step"]) for before, row in pairs)))
        return found

    def mean_reward(self, arm: str) -> list[float]:
        """Return the mean reward of all samples in training."""
        found = []
        for run in self.of(arm):
            pairs = itertools.pairwise(run["curve"])
            rewards = [row["reward"] * (row["step"] - before["step"]) for before, row in pairs]
            found.append(round(sum(rewards) / run["curve"][-1]["step"], 4))
        return found

    def last(self, arm: str, key: str = "accuracy") -> list[float]:
        """Return a measurement at the last validation."""
        return [values[-1] for values in self.series(arm, key)]


@dataclass(frozen=True)
class Panel:
    """A panel of a plot: two measurements of some arms. The axis of steps is logarithmic."""

    arms: Sequence[str]
    y: str = "accuracy"
    x: str = "step"


def plot(runs: Runs, panels: Mapping[str, Panel]) -> str:
    """Return an SVG with the panels by title; a thin line for each run."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH * len(panels)}" height="{HEIGHT}"'
        ' font-family="sans-serif" font-size="11" fill="#1d1c1a">',
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    for number, (title, panel) in enumerate(panels.items()):
        # panels with the same measurement have the same axis
        xs, ys = ([p for p in panels.values() if getattr(p, axis) == getattr(panel, axis)] for axis in "xy")
        most = (max(_values(runs, xs, "x"), default=1.0), max([1.0, *_values(runs, ys, "y")]))
        parts += [f'<g transform="translate({number * WIDTH} 0)">', *_panel(runs, title, panel, most), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _values(runs: Runs, panels: Sequence[Panel], axis: str) -> list[float]:
    arms = ((arm, getattr(panel, axis)) for panel in panels for arm in panel.arms)
    return [value for arm, key in arms for values in runs.series(arm, key) for value in values]


def _panel(runs: Runs, title: str, panel: Panel, most: tuple[float, float]) -> list[str]:
    def x(value: float) -> float:
        share = math.log(value + 1) / math.log(most[0] + 1) if panel.x == "step" else value / most[0]
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value / most[1] * (HEIGHT - TOP - BOTTOM)

    heading = title if panel.y == "accuracy" else f"{title}: {panel.y}"
    parts = [f'<text x="{LEFT}" y="18" font-size="13" font-weight="600">{escape(heading)}</text>']
    for tick in ticks(most[1]):
        parts.append(f'<path d="M{LEFT} {y(tick):.1f}H{WIDTH - RIGHT}" stroke="#e5e1d8"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in (0, 1, 3, 10, 30, 100, 300, 1000, 3000) if panel.x == "step" else ticks(most[0]):
        if tick <= most[0]:
            parts.append(f'<text x="{x(tick):.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">{tick:g}</text>')
    if panel.x != "step":
        parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - BOTTOM - 6}" text-anchor="end">{escape(panel.x)}</text>')
    at = float(LEFT)
    for number, arm in enumerate(panel.arms):
        colour = COLOURS[number % len(COLOURS)]
        for run in runs.of(arm):
            rows = [row for row in run["curve"] if panel.x in row and panel.y in row]
            path = "L".join(f"{x(row[panel.x]):.1f} {y(row[panel.y]):.1f}" for row in rows)
            parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - 10}" fill="{colour}" font-weight="600">{escape(arm)}</text>')
        at += (WIDTH - LEFT) * (len(arm) + 2) / sum(len(name) + 2 for name in panel.arms)
    return parts


def ticks(most: float) -> list[float]:
    """Return round numbers from 0 to `most`, in four to eight steps."""
    unit = 10.0 ** math.floor(math.log10(most / 4))
    unit *= max(factor for factor in (1, 2, 5) if unit * factor <= most / 4)
    return [round(number * unit, 10) for number in range(int(most / unit + 1e-9) + 1)]


def table(runs: Runs) -> str:
    """Return a Markdown table with a line for each arm."""
    lines = ["| arm | seeds | steps to the bar | best accuracy | mean of the last accuracy |", "|---|---|---|---|---|"]
    for arm in dict.fromkeys(run["arm"] for run in runs.runs):
        seeds = ", ".join(str(run["seed"]) for run in runs.of(arm))
        steps = [
            str(step) if best >= runs.bars[arm] else f"not in {step}"
            for step, best in zip(runs.steps_to_bar(arm), runs.best(arm), strict=True)
        ]
        best = ", ".join(f"{value:.2f}" for value in runs.best(arm))
        lines.append(f"| {arm} | {seeds} | {', '.join(steps)} | {best} | {mean(runs.last(arm)):.2f} |")
    return "\n".join(lines)


def cost(results: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Return the CPU hours of all runs in result files, and the largest peak memory in GiB that a file has."""
    hours = sum(run["seconds"] for result in results for run in result["runs"]) / 3600
    return round(hours, 2), round(max(result.get("peak_bytes", 0) for result in results) / 2**30, 2)
