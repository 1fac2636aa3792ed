"""Tracker that prints all metrics of a step to standard output."""

from collections.abc import Mapping

from roll_opd.tracking.run_directory import RunDirectory
from roll_opd.tracking.tracker_registry import register


@register("stdout")
class StdoutTracker:
    """Prints the metrics of a step as one line of text."""

    def __init__(self, run: RunDirectory, resume_step: int | None) -> None:
        pass

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        numbers = " ".join(f"{name}={value:.6g}" for name, value in sorted(metrics.items()))
        print(f"step={step} {numbers}", flush=True)

    def close(self) -> None:
        pass
