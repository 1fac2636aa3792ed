"""TensorBoard event files: the metrics as charts, and a few samples and the configuration as text.

A metric gets no chart as long as it equals another metric or has its default value (`new_charts`).
"""

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from roll_opd.tracking.run_directory import METRICS, SAMPLES, RunDirectory, read_jsonl, write_atomic
from roll_opd.tracking.summary import ACCURACY, REVERSE_KL, REWARD, VAL_REWARD
from roll_opd.tracking.tracker_registry import register

# Metrics with a default value: seconds of an unused phase, counts of rare events, the KL loss without a reference
# policy, the importance ratio in an update of the weights that drew the samples
DEFAULTS = (
    (re.compile(r"time/.*|rollout/filtered_prompts|reward/[^/]+/(errors|timeouts|zero_variance_rate)(/.*)?"), 0.0),
    (re.compile(r"(actor|critic)/(skipped_updates|clipfrac)|actor/(kl_loss|approx_kl)"), 0.0),
    (re.compile(r"actor/ratio_mean"), 1.0),
)
LAYOUT = {  # charts of the tab "Custom Scalars"; their metrics always have a chart
    "Reverse KL to the teacher": (REVERSE_KL,),
    "Student and teacher": (
        "opd/student_perplexity",
        "opd/teacher_perplexity",
        "opd/teacher_logprob",
        REVERSE_KL,
    ),
    "Reward and validation": (REWARD, ACCURACY, VAL_REWARD),
    "Training engine against inference engine": (
        "rollout/train_logprob_gap/mean",
        "rollout/mismatch/ratio_mean",
        "rollout/engine/bias",
    ),
}
CHARTS = "charts.json"  # names of the metrics that have a chart
DIGITS = 9  # duplicates may differ in summation order, so they are compared with a tolerance


def new_charts(charted: Collection[str], metrics: Mapping[str, float]) -> list[str]:
    """Return the metrics of a step that get a chart from now on.

    A metric gets a chart at the first step at which its value is not its default, and differs from the values of all
    charted metrics.
    """
    values = {_rounded(metrics[name]) for name in charted if name in metrics}
    new = []
    for name, value in metrics.items():
        default = next((given for pattern, given in DEFAULTS if pattern.fullmatch(name)), None)
        if name not in charted and value != default and _rounded(value) not in values:
            values.add(_rounded(value))
            new.append(name)
    return new


def _rounded(value: float) -> str:
    return f"{value:.{DIGITS}g}"


SAMPLES_SHOWN = 3  # maximum samples of a step
MAX_TEXT = 4000  # maximum characters of a prompt or response
FACTS = ("id", "tag", "reward", "finish_reason")
TEXT_GROWTH = 1.25  # ratio of successive steps with samples: 30 such steps in 1,000


@register("tensorboard")
class TensorBoardTracker:
    """Writes TensorBoard event files.

    A resumed run repeats some steps. TensorBoard then hides the old events of these steps. A metric that has a chart
    keeps it: the names are stored next to the event files. The earlier points of a metric that gets a chart later are
    read from metrics.jsonl.
    """

    def __init__(self, run: RunDirectory, resume_step: int | None, log_dir: str | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge_step = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(log_dir=log_dir or str(run.tensorboard), purge_step=purge_step)
        self._metrics_file = run.path / METRICS
        self._charts = Path(self._writer.log_dir) / CHARTS
        known = resume_step is not None and self._charts.exists()
        charted = json.loads(self._charts.read_text(encoding="utf-8")) if known else ()
        self._charted = {*charted, *(name for names in LAYOUT.values() for name in names)}
        self._writer.add_custom_scalars({"roll_opd": {of: ["Multiline", list(names)] for of, names in LAYOUT.items()}})
        self._step = -1
        self._samples = run.path / SAMPLES
        self._read = self._samples.stat().st_size if self._samples.exists() else 0  # bytes
        self._unseen: list[dict[str, Any]] = []  # samples of the last step that was read; not written yet
        self._next_texts = 1.0
        if resume_step is None and run.config_file.exists():
            self._writer.add_text("config", _code(run.config_file.read_text(encoding="utf-8")), 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        new = new_charts(self._charted, metrics)
        for name in metrics.keys() & self._charted | set(new):
            self._writer.add_scalar(name, metrics[name], global_step=step)
        if new:
            earlier = [row for row in read_jsonl(self._metrics_file) if row["step"] < step]
            for name, row in ((name, row) for row in earlier for name in new if name in row):
                self._writer.add_scalar(name, row[name], global_step=row["step"])
            self._charted.update(new)
            write_atomic(self._charts, json.dumps(sorted(self._charted)))
        self._step = step
        if step >= self._next_texts:
            self._next_texts = step * TEXT_GROWTH
            self._show_samples(step)
        self._writer.flush()  # a killed run keeps what it has logged

    def close(self) -> None:
        self._show_samples(self._step)
        self._writer.close()

    def _show_samples(self, step: int) -> None:
        """Write samples of the latest step that has new samples. Samples of steps after `step` are ignored."""
        if not self._samples.exists():
            return
        with self._samples.open("rb") as file:
            file.seek(self._read)
            while (line := file.readline()).endswith(b"\n"):  # an incomplete line is still being written
                row = json.loads(line)
                if row["step"] > step:
                    break
                if self._unseen and self._unseen[0]["step"] != row["step"]:
                    self._unseen = []
                self._unseen.append(row)
                self._read = file.tell()
        for number, row in enumerate(self._unseen[:SAMPLES_SHOWN]):
            self._writer.add_text(f"samples/{number}", _as_markdown(row), row["step"])
        self._unseen = []


def _as_markdown(row: Mapping[str, Any]) -> str:
    head = ", ".join(f"{name} {row[name]}" for name in FACTS if row.get(name) not in (None, ""))
    texts = [f"**{name}**\n\n{_code(row[name][:MAX_TEXT])}" for name in ("prompt", "response")]
    return "\n\n".join([head, *texts])


def _code(text: str) -> str:
    """Return `text` as a Markdown code block."""
    return "\n".join(f"    {line}" for line in text.splitlines())
