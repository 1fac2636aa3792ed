"""Print the progress of a run: one line a step, and at the end a table and how to load the model.

Plain text that fits the terminal, so that it reads the same there, in a log file and in CI.
"""

import json
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from roll_opd.terminal import columns, wrapped
from roll_opd.tracking.clock import PHASES
from roll_opd.tracking.metrics import GRADED
from roll_opd.tracking.summary import ACCURACY, GENERATED_TOKENS, LOSS, REVERSE_KL, REWARD, STEP_SECONDS

ETA_STEPS = 20  # the expected time is from the mean of so many last steps
PHASES_SHOWN = 3  # the largest ones, at most
LEAST_SECONDS = 0.5  # of a part of the wall time that is named

SHORT = {
    "generate": "gen",
    "teacher": "teach",
    "old_logprobs": "old",
    "weight_sync": "sync",
    "validate": "val",
    "checkpoint": "save",
}
DOING = {
    None: "between phases",
    "generate": "generating",
    "teacher": "log-probs of frozen models",
    "old_logprobs": "old log-probs",
    "values": "values of the critic",
    "reward": "waiting for rewards",
    "train": "training",
    "weight_sync": "sending weights to the engines",
    "validate": "validating",
    "checkpoint": "saving a checkpoint",
}
# label in the table, its name in a summary, what the last column compares with; the last three are of every step
ROWS = (
    ("validation accuracy", "val_accuracy", "teacher"),
    ("validation reward, mean", "val_reward", "teacher"),
    ("validation loss", "val_loss", "first"),
    ("preference accuracy", "val_preference_accuracy", ""),
    ("training reward, mean", "reward", ""),
    ("training loss", "sft_loss", "first"),
    ("training loss", "dpo_loss", "first"),
    ("reverse KL", "reverse_kl", "first"),
)
OF_EVERY_STEP = ("reward", "sft_loss", "dpo_loss", "reverse_kl")
APART = {"validate": "validation", "checkpoint": "checkpoints"}  # phases that are named beside the steps
RULE = 74  # characters


class Console:
    """Prints the progress of a run of `total_steps` steps."""

    def __init__(self, total_steps: int, stream: TextIO | None = None, frozen: str = SHORT["teacher"]) -> None:
        """`frozen` is the word for the time of frozen models: a run may have a reference policy and no teacher."""
        self._total = total_steps
        self._stream = stream
        self._short = SHORT | {"teacher": frozen}
        self._seconds: deque[float] = deque(maxlen=ETA_STEPS)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the line of a finished step (counted from 1), without metrics that are absent."""
        self.count(metrics)
        self.note(progress_line(step, self._total, metrics, self._eta(step), width=columns(), short=self._short))

    def count(self, metrics: Mapping[str, float]) -> None:
        """Remember how long a step took."""
        self._seconds.append(metrics.get(STEP_SECONDS, 0.0))

    def unfinished(self, step: int, seconds: float, phase: str | None, counts: str) -> str:
        """Return the line of a step that has taken `seconds` so far, and what it is doing; 0 is before the first."""
        parts = [f"step {step}/{self._total}" if step else "before step 1", duration(seconds), DOING[phase]]
        if counts:
            parts[-1] += f": {counts}"
        if step and self._seconds:
            parts.append(f"ETA {duration(max(0.0, self._eta(step - 1) - seconds))}")
        return "  ".join(parts)

    def note(self, text: str) -> None:
        """Print a line of its own."""
        print(wrapped(text, columns()), file=self._stream or sys.stdout, flush=True)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Print the last table of a `summary.json`, and where the time went."""
        for text in filter(None, (before_after_table(summary), totals(summary, self._short))):
            self.note(text)

    def _eta(self, done: int) -> float:
        return (self._total - done) * sum(self._seconds) / max(1, len(self._seconds))


def progress_line(
    step: int,
    total: int,
    metrics: Mapping[str, float],
    eta_seconds: float,
    *,
    width: int,
    short: Mapping[str, str] = SHORT,
) -> str:
    """Return the line of one step, from its metrics; where it is too wide, less is shown."""
    seconds = metrics.get(STEP_SECONDS, 0.0)
    head = f"step {step:>{len(str(total))}}/{total}"
    tail = [f"ETA {duration(eta_seconds)}"] if step < total else []
    numbers = _numbers(metrics, seconds)
    for shown in (len(numbers), *range(len(numbers) - 1, -1, -1)):
        for phases in range(PHASES_SHOWN, -1, -1) if shown == len(numbers) else (0,):
            spent = f"{seconds:.1f}s{_phase_split(metrics, seconds, phases, short)}"
            line = "  ".join([head, *numbers[:shown], spent, *tail])
            if len(line) <= width:
                return line
    return line[:width]


def _numbers(metrics: Mapping[str, float], seconds: float) -> list[str]:
    """Return what a step measured, the most important first."""
    validation = "val reward" if GRADED in metrics else "acc"
    numbers = [
        f"{label} {metrics[name]:{form}}"
        for label, name, form in (
            ("loss", "sft/loss", ".4f"),
            ("loss", "dpo/loss", ".4f"),
            ("acc", "dpo/accuracy", ".3f"),
            ("val", LOSS, ".4f"),
            (validation, ACCURACY, ".3f"),
            ("reward", REWARD, ".3f"),
            ("kl", REVERSE_KL, ".4f"),
            ("len", "tokens/response_length/mean", ".1f"),
        )
        if name in metrics
    ]
    if GENERATED_TOKENS in metrics and seconds > 0:
        rate = metrics[GENERATED_TOKENS] / (metrics.get("time/generate") or seconds)
        numbers.append(f"{_count(rate)} tok/s")
    return numbers


def _phase_split(metrics: Mapping[str, float], seconds: float, count: int, short: Mapping[str, str]) -> str:
    if seconds <= 0:
        return ""
    shares = {phase: metrics.get(f"time/{phase}", 0.0) / seconds for phase in PHASES}
    largest = sorted((phase for phase in PHASES if shares[phase] >= 0.005), key=lambda phase: -shares[phase])
    shown = " ".join(f"{short.get(phase, phase)} {shares[phase]:.0%}" for phase in largest[:count])
    return f" ({shown})" if shown else ""


def before_after_table(summary: Mapping[str, Any]) -> str:
    """Return the table a run ends with, from the keys of `summary.json`, with the rows that its pipeline measures.

    What was not measured, or once alone, is a dash.
    """
    teacher = summary.get("teacher_val_reward", summary.get("teacher_val_accuracy"))
    rows = []
    for label, name, base in ROWS:
        first, last = (summary.get(f"{name}_{end}") for end in ("first", "last"))
        if first is None and last is None:
            continue
        if name in OF_EVERY_STEP and summary["steps"] < 2:
            last = None
        of_teacher = teacher if base == "teacher" else None
        compared = {"teacher": of_teacher, "first": first}.get(base)
        rows.append((label, first, last, of_teacher, _ratio(last, compared, f"of {base}")))
    if not rows:
        return ""
    has_teacher, has_ratio = (any(row[column] not in (None, "") for row in rows) for column in (3, 4))
    lines = [_table_row("", "before", "after", "teacher" if has_teacher else "", "ratio" if has_ratio else "")]
    lines += [
        _table_row(label, _number(first), _number(last), _number(of_teacher) if has_teacher else "", ratio)
        for label, first, last, of_teacher, ratio in rows
    ]
    rule = "-" * RULE
    return "\n".join([rule, lines[0], rule, *lines[1:], rule])


def _table_row(label: str, before: str, after: str, teacher: str, ratio: str) -> str:
    middle = f"{teacher:>10}" if teacher else ""
    return f"{label:<24}{before:>10}{after:>10}{middle}{ratio:>20}".rstrip()


def totals(summary: Mapping[str, Any], short: Mapping[str, str] = SHORT) -> str:
    """Return the steps, the tokens, the wall time of the whole process, and its parts, from the keys of a summary."""
    tokens = []
    if summary["generated_tokens"]:
        tokens = [f"{_count(summary['generated_tokens'])} generated tokens"]
    elif summary.get("learned_tokens"):
        tokens = [f"{_count(summary['learned_tokens'])} tokens of prompts and answers"]
    phases = summary["phase_seconds"]
    of_steps = {f"time/{name}": seconds for name, seconds in phases.items() if name not in APART}
    steps, startup = sum(of_steps.values()), summary.get("startup_seconds", 0.0)
    parts = {
        "start-up": startup,
        "steps": steps,
        **{APART[name]: phases[name] for name in APART},
        "end": summary["wall_seconds"] - startup - sum(phases.values()),
    }
    split = {"steps": _phase_split(of_steps, steps, PHASES_SHOWN, short)}
    named = ", ".join(
        f"{name} {duration(seconds)}{split.get(name, '')}"
        for name, seconds in parts.items()
        if seconds >= LEAST_SECONDS
    )
    first = ", ".join([f"{summary['steps']} steps", *tokens, f"{duration(summary['wall_seconds'])} wall time"])
    return f"{first}\n  {named}" if named else first


def loading(directory: Path | str) -> Sequence[str]:
    """Return lines of Python that load the model in `directory`: with transformers, or with vLLM."""
    path = json.dumps(str(directory), ensure_ascii=False)  # quoted, and escaped
    return (
        f"model_dir = {path}",
        "",
        "from transformers import AutoModelForCausalLM",
        "model = AutoModelForCausalLM.from_pretrained(model_dir)",
        "",
        "from vllm import LLM",
        "llm = LLM(model_dir)",
    )


def validation(metrics: Mapping[str, float]) -> str:
    """Return how good answers to held-out prompts are: their accuracy, or their mean reward where that is none."""
    what = "mean validation reward" if GRADED in metrics else "validation accuracy"
    return f"{what} {metrics[ACCURACY]:.3f}"


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
    return "" if value is None or not base else f"{value / base:.2f} {of}"
