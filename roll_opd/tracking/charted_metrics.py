"""Which metrics of a run are worth a chart of their own: not the second name of another, and not what never happens."""

import re
from collections.abc import Mapping

# What is this value for as long as nothing happens: seconds of a phase that a run does not have, events that have not
# come, a KL loss without a reference policy, the ratio of an update that begins with the weights that sampled
UNEVENTFUL = (
    (re.compile(r"time/.*|rollout/filtered_prompts|reward/[^/]+/(errors|timeouts|zero_variance_rate)(/.*)?"), 0.0),
    (re.compile(r"(actor|critic)/(skipped_updates|clipfrac)|actor/(kl_loss|approx_kl)"), 0.0),
    (re.compile(r"actor/ratio_mean"), 1.0),
)
DIGITS = 9  # that two names of one number agree in, however it was summed


class Curves:
    """Holds a metric back for as long as it was uneventful, or always equal to an earlier one; then gives all of it."""

    def __init__(self) -> None:
        self._shown: set[str] = set()
        self._held: dict[str, list[tuple[int, float]]] = {}  # of those that are not shown
        self._histories: dict[str, int] = {}  # a hash of all steps and values, by name

    def add(self, step: int, metrics: Mapping[str, float]) -> list[tuple[str, int, float]]:
        """Take the metrics of a step; return (name, step, value) of what is to be shown now, older steps included."""
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
            if self._histories[name] not in charted and any(value != _uneventful(name) for _, value in points):
                charted.add(self._histories[name])
                self._shown.add(name)
                new += [(name, *point) for point in self._held.pop(name)]
        return new


def _uneventful(name: str) -> float | None:
    return next((value for pattern, value in UNEVENTFUL if pattern.fullmatch(name)), None)
