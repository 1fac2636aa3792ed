"""TensorBoard event files: the metrics as charts, and a few samples and the configuration as text."""

import json
from collections.abc import Mapping
from typing import Any

from roll_opd.tracking.charted_metrics import ChartedMetrics
from roll_opd.tracking.registry import register
from roll_opd.tracking.run_directory import SAMPLES, RunDirectory

SAMPLES_SHOWN = 3  # of a step
MAX_TEXT = 4000  # characters of a prompt or response
FACTS = ("id", "tag", "reward", "finish_reason")
TEXT_GROWTH = 1.25  # factor between steps with samples: 30 such steps in 1,000


@register("tensorboard")
class TensorBoardTracker:
    """TensorBoard event files; after a resume the events of later steps are purged from view."""

    def __init__(self, run: RunDirectory, resume_step: int | None, log_dir: str | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge_step = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(log_dir=log_dir or str(run.tensorboard), purge_step=purge_step)
        self._curves = ChartedMetrics()
        self._points: list[tuple[str, int, float]] = []
        self._step = -1
        self._samples = run.path / SAMPLES
        self._read = self._samples.stat().st_size if self._samples.exists() else 0  # bytes
        self._unseen: list[dict[str, Any]] = []  # samples of the last step read, not written yet
        self._next_texts = 1.0
        if resume_step is None and run.config_file.exists():
            self._writer.add_text("config", _code(run.config_file.read_text(encoding="utf-8")), 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step != self._step:  # a repeated step could not be written before
            self._points = self._curves.add(step, metrics)
            self._step = step
        for name, at, value in self._points:
            self._writer.add_scalar(name, value, global_step=at)
        if step >= self._next_texts:
            self._next_texts = step * TEXT_GROWTH
            self._show_samples(step)
        self._writer.flush()  # a killed run keeps what it has logged

    def close(self) -> None:
        self._show_samples(self._step)
        self._writer.close()

    def _show_samples(self, step: int) -> None:
        """Write the samples of the last step up to `step` with new samples."""
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
