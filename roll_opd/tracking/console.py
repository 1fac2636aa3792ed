"""Console output of a run: a live display of long steps, one line for each step, and a table at the end.

The output is plain text within the width of the terminal, so it looks the same in a log file and in CI.
"""

import sys
import threading
import unicodedata
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from roll_opd.base.terminal import columns, wrapped
from roll_opd.tracking.results_table import (
    PHASES_SHOWN,
    SHORT,
    before_after_table,
    count_of,
    duration,
    phase_split,
    totals,
)
from roll_opd.tracking.reward_metrics import GRADED
from roll_opd.tracking.summary import (
    ACCURACY,
    DRAFT_ACCEPTANCE,
    FAILED_RATE,
    GENERATED_TOKENS,
    LOSS,
    REVERSE_KL,
    REWARD,
    STEP_SECONDS,
    VAL_REWARD,
    with_rewards,
)

ETA_STEPS = 20  # number of last steps from whose mean duration the remaining time is estimated

PHASE_TEXTS = {
    None: "between phases",
    "generate": "generating",
    "teacher": "log-probs of teachers and reference",
    "old_logprobs": "old log-probs",
    "values": "values of the critic",
    "reward": "waiting for rewards",
    "train": "training",
    "weight_sync": "sending weights to the engines",
    "validate": "validating",
    "checkpoint": "saving a checkpoint",
}
MAX_CUT = 10_000  # characters of a text from which a line is cut
PHASES_WITH_COUNTS = ("generate", "teacher")  # for these phases, only counters are shown


class Console:
    """Prints the progress lines and the final table of a run."""

    def __init__(self, total_steps: int, stream: TextIO | None = None, frozen: str = SHORT["teacher"]) -> None:
        """Create the console output.

        Args:
            total_steps: number of steps of the run.
            stream: where to print; standard output by default.
            frozen: label for the time of teachers and reference.
        """
        self._total = total_steps
        self._stream = stream
        self._short = SHORT | {"teacher": frozen}
        self._seconds: deque[float] = deque(maxlen=ETA_STEPS)
        self._graded: dict[str, float] = {}  # last value of `GRADED`; set as soon as a reward was neither 0 nor 1

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the line of a finished step. The first step is 1."""
        self.count(metrics)
        metrics = self.with_grading(metrics)
        self.note(progress_line(step, self._total, metrics, self._eta(step), width=columns(), short=self._short))

    def with_grading(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Return the metrics with the last value of `GRADED`, if any step has had this metric.

        This way, the mean validation reward keeps its label at steps without a validation.
        """
        self._graded |= {name: metrics[name] for name in (GRADED,) if name in metrics}
        return {**self._graded, **metrics}

    def count(self, metrics: Mapping[str, float]) -> None:
        """Record the duration of a step. The remaining time is estimated from the durations of the last steps."""
        self._seconds.append(metrics.get(STEP_SECONDS, 0.0))

    def unfinished(self, step: int, seconds: float, phase: str | None, counts: str) -> str:
        """Return the line of a running step. It shows the seconds since the step's start, the phase and the counters.

        Step 0 is the start-up of the run.
        """
        parts = [f"step {step}/{self._total}" if step else "before step 1", duration(seconds)]
        left = self._eta(step - 1) - seconds if step else 0.0
        if left > 0:
            parts.append(f"ETA {duration(left)}")
        text = [] if counts and phase in PHASES_WITH_COUNTS else [PHASE_TEXTS[phase]]
        parts.append(": ".join([*text, *([counts] if counts else [])]))
        return "  ".join(parts)

    def note(self, text: str) -> None:
        """Print a text, wrapped to the width of the terminal."""
        print(wrapped(text, columns()), file=self._stream or sys.stdout, flush=True)

    def example(self, step: int, answer: Mapping[str, Any]) -> None:
        """Print an answer to a held-out prompt after `step` steps. `answer` is a row of the validation samples."""
        self.note(example(step, answer, columns()))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Print the final table and the times of the run.

        Args:
            summary: the content of `summary.json`.
        """
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
    """Return the line of one step. It shows the step's metrics and is at most `width` characters long."""
    seconds = metrics.get(STEP_SECONDS, 0.0)
    head = f"step {step:>{len(str(total))}}/{total}"
    tail = [f"ETA {duration(eta_seconds)}"] if step < total else []
    numbers = _numbers(metrics, seconds)
    for shown in (len(numbers), *range(len(numbers) - 1, -1, -1)):
        for phases in range(PHASES_SHOWN, -1, -1) if shown == len(numbers) else (0,):
            spent = f"{seconds:.1f}s{phase_split(metrics, seconds, phases, short)}"
            line = "  ".join([head, *numbers[:shown], spent, *tail])
            if len(line) <= width:
                return line
    return line[:width]


def _numbers(metrics: Mapping[str, float], seconds: float) -> list[str]:
    """Return the numbers of a step as texts, the most important number first."""
    validation = ("val reward", VAL_REWARD) if GRADED in metrics else ("acc", ACCURACY)
    metrics = with_rewards(metrics)
    numbers = [
        f"{label} {metrics[name]:{form}}"
        for label, name, form in (
            ("loss", "sft/loss", ".4f"),
            ("loss", "dpo/loss", ".4f"),
            ("acc", "dpo/accuracy", ".3f"),
            ("val", LOSS, ".4f"),
            (*validation, ".3f"),
            ("reward", REWARD, ".3f"),
            ("kl", REVERSE_KL, ".4f"),
            ("len", "tokens/response_length/mean", ".1f"),
            ("drafts", DRAFT_ACCEPTANCE, ".0%"),
        )
        if name in metrics
    ]
    if metrics.get(FAILED_RATE):
        numbers.insert(0, f"failed {metrics[FAILED_RATE]:.0%}")
    if GENERATED_TOKENS in metrics and seconds > 0:
        rate = metrics[GENERATED_TOKENS] / (metrics.get("time/generate") or seconds)
        numbers.append(f"{count_of(rate)} tok/s")
    return numbers


def validation(metrics: Mapping[str, float]) -> str:
    """Return the validation result as text.

    The result is the accuracy. If some rewards are neither 0 nor 1, it is the mean reward.
    """
    if GRADED in metrics:
        return f"mean validation reward {with_rewards(metrics)[VAL_REWARD]:.3f}"
    return f"validation accuracy {metrics[ACCURACY]:.3f}"


def example(step: int, answer: Mapping[str, Any], width: int) -> str:
    """Return prompt, answer, ground truth and score of a row of the validation samples, each in one line."""
    score = "" if answer["reward"] is None else f"{answer['reward']:g}"
    reason = f" ({answer['reward_reason']})" if answer["reward_reason"] else ""
    parts = {
        "prompt": answer["prompt"],
        "answer": answer["response"] or "(empty)",
        "ground truth": answer["ground_truth"] or "",
        "score": score + reason,
    }
    head = f"Example after step {step}:" if step else "Example before training:"
    names = {name: f"  {name:<12}  " for name, text in parts.items() if text}
    return "\n".join([head, *(start + cut(parts[name], width - len(start)) for name, start in names.items())])


def cut(text: str, width: int) -> str:
    """Return the beginning of `text` in one line of at most `width` columns, without control characters."""
    text = "".join(character if character.isprintable() else " " for character in text[:MAX_CUT])
    return shortened(" ".join(text.split()), width)


def shortened(line: str, width: int) -> str:
    """Return a line, cut to at most `width` columns. A line that was cut ends with an ellipsis."""
    if columns_of(line) <= width:
        return line
    line = line[:width]
    while columns_of(line) >= width:
        line = line[:-1]
    return f"{line.rstrip()}…"


def columns_of(text: str) -> int:
    """Return the number of columns of a text: a wide character has two, a combining mark has none."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


LIVE_DELAY_S, LIVE_INTERVAL_S = 5.0, 1.0  # seconds until a live line is shown, and between its updates
JOIN_TIMEOUT_S = 1.0  # the status call may block forever while Ray shuts down
# seconds from the start of a step to its first line, and longest interval between lines; the intervals double
FIRST_LINE_S, MAX_INTERVAL_S = 15.0, 600.0


class Count:
    """A counter of finished items out of a total. `what` is the verb that is shown with it, such as `generated`."""

    def __init__(self, what: str, total: int = 0) -> None:
        self.what, self.total, self.done = what, total, 0

    def begin(self, total: int) -> None:
        """Set the counter to 0 and the number of items to `total`."""
        self.total, self.done = total, 0

    def one(self, *_: object) -> None:
        """Count one item as finished. The arguments are ignored, so this method can be used as a callback."""
        self.done += 1


class Progress:
    """The counters that the progress lines show."""

    def __init__(self) -> None:
        self._shown: list[Count] = []

    @contextmanager
    def showing(self, *counts: Count) -> Iterator[None]:
        """Show these counters while the `with` block runs."""
        self._shown += counts
        try:
            yield
        finally:
            for count in counts:
                self._shown.remove(count)

    def text(self) -> str:
        """Return the unfinished counters as text, such as `generated 3/8, scored 1/8`.

        A counter is left out if its total is 1 or less.
        """
        counts = dict.fromkeys(self._shown)
        return ", ".join(f"{count.what} {count.done}/{count.total}" for count in counts if count.done < count.total > 1)


# returns (seconds since the start of the running step, status line); None between steps
StepStatus = Callable[[], tuple[float, str] | None]


@contextmanager
def show_progress(
    status: StepStatus, line: Callable[[str], None], live: Callable[[str], None] | None
) -> Iterator[None]:
    """Print the status of long steps from a separate thread, while the `with` block runs.

    Args:
        status: returns the current status.
        line: prints a line. It is called at increasing intervals, and only if `live` is None.
        live: prints a line that replaces the previous live line. It is None if the output is not a terminal.
    """
    done = threading.Event()

    def work() -> None:
        due = FIRST_LINE_S
        before = 0.0
        while not done.wait(LIVE_INTERVAL_S):
            now = status()
            if now is None:
                continue
            seconds, text = now
            if seconds < before:  # a new step
                due = FIRST_LINE_S
            before = seconds
            if live:
                if seconds >= LIVE_DELAY_S:
                    live(text)
            elif seconds >= due:
                line(text)
                due = seconds + min(seconds, MAX_INTERVAL_S)

    thread = threading.Thread(target=work, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(JOIN_TIMEOUT_S)
