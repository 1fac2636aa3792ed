"""The console: what a user reads, at most 110 columns of it."""

import io

import pytest

from roll_opd.tracking.console import WIDTH, Console, before_after_table, duration, progress_line
from roll_opd.tracking.summary import summarize

METRICS = {
    "val_correct/all/mean": 0.445,
    "critic/score/mean": 0.2134,
    "opd/reverse_kl/mean": 0.46211,
    "tokens/response_length/mean": 25.31,
    "rollout/generated_tokens": 6500.0,
    "time/step": 2.0,
    "time/generate": 1.0,
    "time/train": 0.6,
    "time/teacher": 0.2,
    "time/weight_sync": 0.1,
}


def test_a_line_of_a_step() -> None:
    metrics = {name: value for name, value in METRICS.items() if name != "val_correct/all/mean"}
    assert progress_line(12, 160, metrics, eta_seconds=296) == (
        "step  12/160  reward 0.213  kl 0.4621  len 25.3  6.5k tok/s  2.0s (gen 50% train 30% teach 10%)  ETA 4m56s"
    )


def test_a_wide_line_shows_fewer_phases() -> None:
    line = progress_line(12, 160, METRICS, eta_seconds=296)
    assert line == (
        "step  12/160  acc 0.445  reward 0.213  kl 0.4621  len 25.3  6.5k tok/s  2.0s (gen 50% train 30%)  ETA 4m56s"
    )
    assert len(line) <= WIDTH


def test_a_line_stays_within_the_width_at_scale() -> None:
    large = {name: value * 1000 for name, value in METRICS.items()}
    large.update({"time/step": 9000.0, "time/old_logprobs": 4000.0, "time/weight_sync": 3000.0})
    assert len(progress_line(12345, 100000, large, eta_seconds=9e9)) <= WIDTH


def test_a_line_says_nothing_of_what_is_absent() -> None:
    assert progress_line(3, 3, {}, eta_seconds=0) == "step 3/3  0.0s"


def test_the_console_expects_the_end_from_the_last_steps() -> None:
    stream = io.StringIO()
    console = Console(total_steps=4, stream=stream)
    for step, seconds in ((1, 2.0), (2, 4.0)):
        console.step(step, {"time/step": seconds})
    assert stream.getvalue().splitlines()[1].endswith("ETA 6s")


def test_the_table_of_a_run() -> None:
    rows = [
        {"step": 0, "val_correct/all/mean": 0.125, "val_correct/teacher/mean": 1.0},
        {"step": 1, "opd/reverse_kl/mean": 1.6, "rollout/generated_tokens": 1500, "time/step": 61.0},
        {"step": 2, "opd/reverse_kl/mean": 0.4, "val_correct/all/mean": 0.875, "time/step": 61.0},
    ]
    lines = before_after_table(summarize(rows)).splitlines()
    assert lines[3].split() == [
        "validation",
        "accuracy",
        "0.1250",
        "0.8750",
        "1.0000",
        "0.88",
        "of",
        "teacher",
    ]
    assert lines[4].split() == ["reverse", "KL", "1.6000", "0.4000", "-", "0.25", "of", "first"]
    assert lines[-1] == "2 steps, 1.5k generated tokens, 2m02s wall time"
    assert before_after_table(summarize([])).count("-  ") > 3


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.6, "1m00s"), (252, "4m12s"), (3900, "1h05m"), (183600, "2d03h")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
