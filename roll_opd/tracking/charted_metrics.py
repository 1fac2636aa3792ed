"""Select the metrics that get a chart: neither duplicates of another metric nor constant at their default value."""

import re
from collections.abc import Mapping

# Metrics with a default value: seconds of an unused phase, counts of rare events, the KL loss without a reference
# policy, the ratio of an update with the weights that sampled
DEFAULTS = (
    (re.compile(r"time/.*|rollout/filtered_prompts|reward/[^/]+/(errors|timeouts|zero_variance_rate)(/.*)?"), 0.0),
    (re.compile(r"(actor|critic)/(skipped_updates|clipfrac)|actor/(kl_loss|approx_kl)"), 0.0),
    (re.compile(r"actor/ratio_mean"), 1.0),
)
DIGITS = 9  # compared between duplicates, which may differ in summation order


class ChartedMetrics:
    """Withholds a metric while it has its default value or equals an earlier metric; then returns all its points."""

    def __init__(self) -> None:
        self._shown: set[str] = set()
        self._held: dict[str, list[tuple[int, float]]] = {}  # points of withheld metrics
        self._histories: dict[str, int] = {}  # name -> hash of all steps and values

    def add(self, step: int, metrics: Mapping[str, float]) -> list[tuple[str, int, float]]:
        """Add the metrics of a step; return the points (name, step, value) to chart, earlier steps included."""
        for name, value in metrics.items():
            self._histories[name] = hash((self._histories.get(name), step, f"{value:.{DIGITS}g}"))
        new = []
        for name, value in metrics.items():
            if name in self._shown:
                new.append((name, step, value))
            else:
                self._held.setdefault(name, []).append((step, value))
        charted = {self._histories[name] for name in self._shown}
        for name, points in list(self._held.items()):
            if self._histories[name] not in charted and any(value != _default(name) for _, value in points):
                charted.add(self._histories[name])
                self._shown.add(name)
                new += [(name, *point) for point in self._held.pop(name)]
        return new


def _default(name: str) -> float | None:
    return next((value for pattern, value in DEFAULTS if pattern.fullmatch(name)), None)
