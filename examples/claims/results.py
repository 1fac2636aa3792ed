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

    def steps_to_bar(self, arm: str) -> list[int]:
        """Return the first validated step at the bar; for a run that did not reach it, its last step."""
        return [
            next((row["step"] for row in run["curve"] if row["accuracy"] >= self.bars[arm]), run["curve"][-1]["step"])
            for run in self.of(arm)
        ]

    def best(self, arm: str) -> list[float]:
        """Return the highest validation accuracy."""
        return [max(row["accuracy"] for row in run["curve"]) for run in self.of(arm)]

    def mean_reward(self, arm: str) -> list[float]:
        """Return the mean reward of all samples in training."""
        found = []
        for run in self.of(arm):
            pairs = itertools.pairwise(run["curve"])
            rewards = [row["reward"] * (row["step"] - before["step"]) for before, row in pairs]
            found.append(round(sum(rewards) / run["curve"][-1]["step"], 4))
        return found

    def last(self, arm: str) -> list[float]:
        """Return the last validation accuracy."""
        return [run["curve"][-1]["accuracy"] for run in self.of(arm)]


def plot(runs: Runs, panels: Mapping[str, Sequence[str]]) -> str:
    """Return an SVG with a panel for each title and its arms: accuracy over steps, a thin line for each seed."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH * len(panels)}" height="{HEIGHT}"'
        ' font-family="sans-serif" font-size="11" fill="#1d1c1a">',
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    last = max(row["step"] for run in runs.runs for row in run["curve"])
    for number, (title, arms) in enumerate(panels.items()):
        parts += [f'<g transform="translate({number * WIDTH} 0)">', *_panel(runs, title, arms, last), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(runs: Runs, title: str, arms: Sequence[str], last: int) -> list[str]:
    def x(step: float) -> float:
        return LEFT + math.log(step + 1) / math.log(last + 1) * (WIDTH - LEFT - RIGHT)

    def y(accuracy: float) -> float:
        return HEIGHT - BOTTOM - accuracy * (HEIGHT - TOP - BOTTOM)

    parts = [f'<text x="{LEFT}" y="18" font-size="13" font-weight="600">{escape(title)}</text>']
    for tick in (0, 0.2, 0.4, 0.6, 0.8, 1):
        parts.append(f'<path d="M{LEFT} {y(tick):.1f}H{WIDTH - RIGHT}" stroke="#e5e1d8"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for step in (0, 1, 3, 10, 30, 100, 300, 1000):
        if step <= last:
            parts.append(f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">{step}</text>')
    for number, arm in enumerate(arms):
        colour = COLOURS[number % len(COLOURS)]
        for run in runs.of(arm):
            path = "L".join(f"{x(row['step']):.1f} {y(row['accuracy']):.1f}" for row in run["curve"])
            parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        at = LEFT + (WIDTH - LEFT) / len(arms) * number
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - 10}" fill="{colour}" font-weight="600">{escape(arm)}</text>')
    return parts


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
