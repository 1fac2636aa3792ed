"""Print the progress of a run: one line a step, and a before/after table at the end.

Plain text of at most 110 columns and no cursor movement, so that it reads the same in a terminal, a log file
and CI.
"""

import sys
from collections import deque
from collections.abc import Mapping
from typing import Any, TextIO

from roll_opd.tracking.clock import PHASES
from roll_opd.tracking.summary import ACCURACY, GENERATED_TOKENS, LOSS, REVERSE_KL, STEP_SECONDS

WIDTH = 110
ETA_STEPS = 20  # the expected time is from the mean of so many last steps
PHASES_SHOWN = 3  # the largest ones, at most

_SHORT = {
    "generate": "gen",
    "teacher": "teach",
    "old_logprobs": "old",
    "weight_sync": "sync",
    "validate": "val",
    "checkpoint": "save",
}


class Console:
    """Prints the progress of a run of `total_steps` steps."""

    def __init__(self, total_steps: int, stream: TextIO | None = None) -> None:
        self._total = total_steps
        self._stream = stream or sys.stdout
        self._seconds: deque[float] = deque(maxlen=ETA_STEPS)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the line of a finished step (counted from 1), without metrics that are absent."""
        self._seconds.append(metrics.get(STEP_SECONDS, 0.0))
        eta = (self._total - step) * sum(self._seconds) / len(self._seconds)
        self.note(progress_line(step, self._total, metrics, eta))

    def note(self, text: str) -> None:
        """Print a line of its own."""
        print(text, file=self._stream, flush=True)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Print the before/after table of a `summary.json`."""
        self.note(before_after_table(summary))


def progress_line(step: int, total: int, metrics: Mapping[str, float], eta_seconds: float) -> str:
    """Return the line of one step, from its metrics; where it is too wide, fewer phases are shown."""
    lines = [_line(step, total, metrics, eta_seconds, phases) for phases in range(PHASES_SHOWN, -1, -1)]
    return next((line for line in lines if len(line) <= WIDTH), lines[-1][:WIDTH])


def _line(step: int, total: int, metrics: Mapping[str, float], eta_seconds: float, phases: int) -> str:
    seconds = metrics.get(STEP_SECONDS, 0.0)
    parts = [f"step {step:>{len(str(total))}}/{total}"]
    for label, name, form in (
        ("loss", "sft/loss", ".4f"),
        ("loss", "dpo/loss", ".4f"),
        ("acc", "dpo/accuracy", ".3f"),
        ("val", LOSS, ".4f"),
        ("acc", ACCURACY, ".3f"),
        ("reward", "critic/score/mean", ".3f"),
        ("kl", REVERSE_KL, ".4f"),
        ("len", "tokens/response_length/mean", ".1f"),
    ):
        if name in metrics:
            parts.append(f"{label} {metrics[name]:{form}}")
    if GENERATED_TOKENS in metrics and seconds > 0:
        rate = metrics[GENERATED_TOKENS] / (metrics.get("time/generate") or seconds)
        parts.append(f"{_count(rate)} tok/s")
    parts.append(f"{seconds:.1f}s{_phase_split(metrics, seconds, phases)}")
    if step < total:
        parts.append(f"ETA {duration(eta_seconds)}")
    return "  ".join(parts)


def _phase_split(metrics: Mapping[str, float], seconds: float, count: int) -> str:
    if seconds <= 0:
        return ""
    shares = {phase: metrics.get(f"time/{phase}", 0.0) / seconds for phase in PHASES}
    largest = sorted((phase for phase in PHASES if shares[phase] >= 0.005), key=lambda phase: -shares[phase])
    shown = " ".join(f"{_SHORT.get(phase, phase)} {shares[phase]:.0%}" for phase in largest[:count])
    return f" ({shown})" if shown else ""


def before_after_table(summary: Mapping[str, Any]) -> str:
    """Return the table a run ends with, from the keys of `summary.json`; what was not measured is a dash."""
    accuracy = (summary["val_accuracy_first"], summary["val_accuracy_last"])
    teacher = summary["teacher_val_accuracy"]
    kl = (summary["reverse_kl_first"], summary["reverse_kl_last"])
    rows = [
        ("", "before", "after", "teacher", "ratio"),
        ("validation accuracy", *map(_number, accuracy), _number(teacher), _ratio(accuracy[1], teacher, "of teacher")),
        ("reverse KL", *map(_number, kl), "-", _ratio(kl[1], kl[0], "of first")),
    ]
    if "val_loss_last" in summary:
        losses = (summary["val_loss_first"], summary["val_loss_last"])
        rows[1:] = [("validation loss", *map(_number, losses), "-", _ratio(losses[1], losses[0], "of first"))]
    lines = [
        f"{name:<22}{before:>10}{after:>10}{ref:>10}{ratio:>20}".rstrip() for name, before, after, ref, ratio in rows
    ]
    rule = "-" * 72
    foot = (
        f"{summary['steps']} steps, {_count(summary['generated_tokens'])} generated tokens, "
        f"{duration(summary['wall_seconds'])} wall time"
    )
    return "\n".join([rule, lines[0], rule, *lines[1:], rule, foot])


def duration(seconds: float) -> str:
    """Return seconds as `45s`, `4m12s`, `1h05m` or `2d03h`."""
    whole = round(max(0.0, seconds))
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02d}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def _count(value: float) -> str:
    """Return a count in at most five characters: 950, 10.2k, 3.4M."""
    for scale, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.1f}{suffix}"
    return f"{value:.0f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _ratio(value: float | None, base: float | None, of: str) -> str:
    return "-" if value is None or not base else f"{value / base:.2f} {of}"
