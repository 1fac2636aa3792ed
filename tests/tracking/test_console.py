"""The console output of a run, in terminals of any width."""

import ast
import io
import unicodedata
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from roll_opd.tracking.console import Console, cut, example, progress_line, validation
from roll_opd.tracking.results_table import before_after_table, duration, loading, totals
from roll_opd.tracking.summary import summarize, within_noise
from tests.each import each

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
WHOLE = (
    "step  12/160  acc 0.445  reward 0.213  kl 0.4621  len 25.3  6.5k tok/s  2.0s (gen 50% train 30% teach 10%)"
    "  ETA 4m56s"
)


def line_of(metrics: Mapping[str, float] = METRICS, **options: Any) -> str:
    return progress_line(12, 160, metrics, eta_seconds=296, **{"width": 200, **options})


def table_of(*rows: dict[str, float]) -> dict[str, list[str]]:
    """Label -> cells of the last table."""
    lines = before_after_table(summarize(rows)).splitlines()[3:-1]
    return {line[:24].strip(): line[24:].split() for line in lines}


def test_a_line_of_a_step() -> None:
    assert line_of() == WHOLE
    assert "ref" not in WHOLE and "reference 10%" in line_of(short={"teacher": "reference"})


@each("width", range(40, len(WHOLE) + 2))
def test_a_line_fits_and_leaves_out_as_little_as_it_can(width: int) -> None:
    line = line_of(width=width)
    assert len(line) <= width
    assert line.startswith("step  12/160") and line.endswith("ETA 4m56s") and "2.0s" in line
    if width >= 80:
        assert "acc 0.445  reward 0.213  kl 0.4621" in line
    assert len(line) <= len(line_of(width=width + 1))


def test_a_line_stays_within_the_width_at_scale() -> None:
    large = {name: value * 1000 for name, value in METRICS.items()}
    large.update({"time/step": 9000.0, "time/old_logprobs": 4000.0, "time/weight_sync": 3000.0})
    assert len(progress_line(12345, 100000, large, eta_seconds=9e9, width=80)) <= 80


def test_a_line_leaves_out_missing_metrics() -> None:
    assert progress_line(3, 3, {}, eta_seconds=0, width=80) == "step 3/3  0.0s"


def test_the_remaining_time_follows_the_last_steps() -> None:
    stream = io.StringIO()
    console = Console(total_steps=4, stream=stream)
    assert console.unfinished(1, 17.0, "generate", "generated 3/8") == (
        "step 1/4  17s  generated 3/8"  # nothing is known of the end yet
    )
    for step, seconds in ((1, 2.0), (2, 4.0)):
        console.step(step, {"time/step": seconds})
    assert stream.getvalue().splitlines()[1].endswith("ETA 6s")
    assert console.unfinished(3, 1.0, "train", "") == "step 3/4  1s  ETA 5s  training"
    assert console.unfinished(3, 9.0, "validate", "generated 1/8") == "step 3/4  9s  validating: generated 1/8"
    assert console.unfinished(0, 1.0, "validate", "") == "before step 1  1s  validating"


def test_the_table_of_distillation_and_where_the_time_went() -> None:
    rows = [
        {"step": 0, "val_correct/all/mean": 0.125, "val_correct/teacher/mean": 1.0}
        | {"time/startup": 40.0, "time/validate": 3.0},
        {"step": 1, "opd/reverse_kl/mean": 1.6, "rollout/generated_tokens": 1500, "time/step": 61.0}
        | {"time/generate": 46.0, "time/train": 15.0},
        {"step": 2, "opd/reverse_kl/mean": 0.4, "val_correct/all/mean": 0.875, "time/step": 61.0}
        | {"time/generate": 46.0, "time/validate": 10.0, "time/checkpoint": 5.0},
    ]
    assert table_of(*rows) == {
        "validation accuracy": ["0.1250", "0.8750", "1.0000", "0.88", "of", "teacher"],
        "reverse KL": ["1.6000", "0.4000", "-", "0.25", "of", "first"],
    }
    summary = summarize(rows)
    summary["wall_seconds"] += 4.0  # after the last step
    assert totals(summary).splitlines() == [
        "2 steps, 1.5k generated tokens, 2m49s wall time",
        "  start-up 40s, steps 1m47s (gen 86% train 14%), validation 13s, checkpoints 5s, end 4s",
    ]
    summary["startup_parts"] = {"Ray": 4.0, "plan and data": 5.2, "rewards.sums": 0.3, "teacher": 30.0, "student": 29.0}
    assert totals(summary).splitlines()[2] == "  start-up waited for: teacher 30s, student 29s, plan and data 5s"


def test_a_resumed_run_waited_in_its_last_start_up() -> None:
    """The second line has the start-up time of all parts of the run; its phases are known only for the last part."""
    rows = [
        {"step": n, "time/startup": waited, "time/step": 1.0, "time/train": 1.0} for n, waited in ((1, 40.0), (2, 6.0))
    ]
    summary = summarize(rows) | {"startup_parts": {"teacher": 5.0, "Ray": 1.0}}
    assert totals(summary).splitlines()[1:] == [
        "  start-up 46s, steps 2s (train 100%)",
        "  last start-up, 6s, waited for: teacher 5s, Ray 1s",
    ]


CHANGES = {
    "actor_infer.generating_args.temperature": "settings changed",
    "opd_kl_coef": "settings changed",
    "teacher.model_args.model_name_or_path": "settings changed",
    "max_steps": "0.25 of first",
    "actor_train.training_args.learning_rate": "0.25 of first",
    "learning_rate": "0.25 of first",
    "actor_train.strategy_args.strategy_config.tensor_model_parallel_size": "0.25 of first",
}


@pytest.mark.parametrize("key", CHANGES)
def test_a_ratio_compares_steps_of_the_same_settings(key: str) -> None:
    rows = [{"step": 1, "opd/reverse_kl/mean": 1.6}, {"step": 2, "opd/reverse_kl/mean": 0.4}]
    first = {"first": 1, "last": 1, "changed": {}}
    parts = [first, {"first": 2, "last": 2, "changed": {key: [1, 2]}}]
    assert before_after_table(summarize(rows) | {"parts": parts}).splitlines()[3].endswith(CHANGES[key])
    unknown = [first, {"first": 2, "last": 2, "changed": None}]
    assert before_after_table(summarize(rows) | {"parts": unknown}).splitlines()[3].endswith("settings unknown")
    assert before_after_table(summarize(rows) | {"parts": [first]}).splitlines()[3].endswith("0.25 of first")


def test_a_table_has_the_rows_of_its_pipeline() -> None:
    rlvr = [{"step": 0, "val_correct/all/mean": 0.1}]
    rlvr += [{"step": step, "critic/score/mean": step / 4} for step in (1, 2)] + [
        {"step": 2, "val_correct/all/mean": 1}
    ]
    assert table_of(*rlvr) == {
        "validation accuracy": ["0.1000", "1.0000"],
        "mean training reward": ["0.2500", "0.5000"],
    }
    sft = [{"step": 0, "val/loss": 2.0}, {"step": 1, "sft/loss": 3.0}, {"step": 2, "sft/loss": 1.5, "val/loss": 1.0}]
    sft = [{**row, "tokens/step": 900.0, "tokens/learned": 600.0} if row["step"] else row for row in sft]
    assert table_of(*sft) == {
        "validation loss": ["2.0000", "1.0000", "0.50", "of", "first"],
        "training loss": ["3.0000", "1.5000", "0.50", "of", "first"],
    }
    assert totals(summarize(sft)) == "2 steps, 1.2k learned tokens, 0s wall time"
    sampled = [{"step": step, "rollout/generated_tokens": 900.0, "tokens/learned": 600.0} for step in (1, 2)]
    assert totals(summarize(sampled)) == "2 steps, 1.8k generated tokens, 1.2k learned tokens, 0s wall time"
    same = [{**row, "tokens/learned": 900.0} for row in sampled]
    assert totals(summarize(same)) == "2 steps, 1.8k generated tokens, 0s wall time"
    dpo = [{"step": 0, "val/loss": 0.7, "val/dpo/accuracy": 0.0}, {"step": 2, "val/loss": 0.5, "val/dpo/accuracy": 0.9}]
    assert table_of(*dpo)["preference accuracy"] == ["0.0000", "0.9000"]
    for rows in (rlvr, sft, dpo):
        assert "teacher" not in before_after_table(summarize(rows))
    assert before_after_table(summarize([])) == ""


def test_missing_values_are_a_dash() -> None:
    """`eval_steps: 0` measures before the first step alone, and one step has no first and last."""
    only_before = [{"step": 0, "val_correct/all/mean": 0.125, "val/loss": 2.0}, {"step": 1, "opd/reverse_kl/mean": 1.6}]
    assert table_of(*only_before) == {
        "validation accuracy": ["0.1250", "-"],
        "validation loss": ["2.0000", "-"],
        "reverse KL": ["1.6000", "-"],
    }
    assert summarize(only_before)["val_accuracy_last"] is None
    assert table_of({"step": 4, "val_correct/all/mean": 0.5})["validation accuracy"] == ["-", "0.5000"]
    nothing_right = [{"step": 0, "val_correct/all/mean": 0.0, "val_correct/teacher/mean": 0.0}]
    assert table_of(*nothing_right)["validation accuracy"] == ["0.0000", "-", "0.0000"]


def test_only_accuracy_is_called_accuracy() -> None:
    graded = {"val_correct/all/mean": 0.0, "val/reward/all/mean": -0.25, "val/reward/max": 0.5}
    rows = [{"step": 0, "val_correct/all/mean": 0.0, "val_correct/teacher/mean": 0.75}, {"step": 1, **graded}]
    summary = summarize(rows)
    assert table_of(*rows) == {"mean validation reward": ["0.0000", "-0.2500", "0.7500", "-0.33", "of", "teacher"]}
    assert summary["val_accuracy_last"] is summary["teacher_val_accuracy"] is None
    assert (summary["val_reward_last"], summary["teacher_val_reward"]) == (-0.25, 0.75)
    assert "val reward -0.250" in line_of(graded) and "acc" not in line_of(graded)
    assert validation(graded) == "mean validation reward -0.250"
    assert validation(rows[0]) == "validation accuracy 0.000"


def test_a_mean_reward_keeps_its_name_where_a_steps_rewards_happen_to_be_0_or_1() -> None:
    stream = io.StringIO()
    console = Console(total_steps=2, stream=stream)
    console.with_grading({"val_correct/all/mean": 0.5, "val/reward/max": 0.7})  # a teacher's
    console.step(1, {"val_correct/all/mean": 0.0})
    assert "val reward 0.000" in stream.getvalue() and "acc" not in stream.getvalue()


def test_the_ratio_to_the_teacher_has_its_uncertainty() -> None:
    """Two standard errors of a ratio of independent means, against drawing both very often."""
    rows = [
        {"step": 0, "val_correct/all/mean": 0.1, "val_correct/all/stderr": 0.02}
        | {"val_correct/teacher/mean": 0.8, "val_correct/teacher/stderr": 0.04},
        {"step": 4, "val_correct/all/mean": 0.6, "val_correct/all/stderr": 0.05},
    ]
    rng = np.random.default_rng(0)
    ratios = rng.normal(0.6, 0.05, 100_000) / rng.normal(0.8, 0.04, 100_000)
    ratio, *words = table_of(*rows)["validation accuracy"][3:]
    assert words == ["of", "teacher"]
    value, error = map(float, ratio.split("±"))
    assert value == 0.75 and error == pytest.approx(2 * ratios.std(), abs=0.01)
    summary = summarize(rows)
    assert (summary["val_stderr_first"], summary["val_stderr_last"]) == (0.02, 0.05)
    assert summary["teacher_val_stderr"] == 0.04
    assert within_noise(0.12, 0.05, 0.04) and not within_noise(0.14, 0.05, 0.04) and not within_noise(0.0, None, None)


@pytest.mark.parametrize("is_chat", [True, False])
def test_the_script_that_loads_a_model_is_python(is_chat: bool) -> None:
    """The script has a main guard; with a model without a chat template, it continues a text."""
    code = "\n".join(loading('a "b"\\ü/hf', "4+5=", is_chat=is_chat))
    model_dir = compile(code, "shown", "exec").co_consts
    assert 'a "b"\\ü/hf' in model_dir
    assert all(line.startswith("    ") for line in code.partition("__main__")[2].splitlines()[1:] if line)
    assert ("llm.chat(" in code) == is_chat and ("llm.generate(" in code) != is_chat


@pytest.mark.parametrize(
    ("prompt", "kept"),
    [
        ("4+5=", "4+5="),
        ('  What is\n"1\\2"?\t\n', 'What is\n"1\\2"?'),
        ("word " * 40, ("word " * 14).strip()),
        ("x" * 500, "x" * 69),
        ("数" * 500, "数" * 34),
        ("\x1b[31m\u2028\u202e\x7f😀", "\x1b[31m\u2028\u202e\x7f😀"),
        ("Solve this.\r\n\r\n" + "\n" * 60 + "1", "Solve this."),
    ],
)
def test_the_script_asks_with_a_prompt_of_the_run(prompt: str, kept: str) -> None:
    """It is one line of at most 80 columns, and the same text, or its beginning."""
    line = loading("hf", prompt)[1]
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in line)
    assert len(line) + wide <= 80 and line.isprintable()
    found = ast.literal_eval(line.removeprefix("prompt = "))
    assert found == kept


@each(("seconds", "text"), [(0, "0s"), (59.6, "1m00s"), (252, "4m12s"), (3900, "1h05m"), (183600, "2d03h")])
def test_durations_are_written_in_their_largest_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_an_example_has_four_short_lines_for_any_text() -> None:
    texts = (
        "9",
        "",
        " \n\n4\t+ 5 ",
        "\x1b[2J\u202eabc\u2028d",
        "東京" * 500,
        "e\u0301" * 500,
        "x" * 10**6,
        "\n" * 10**6,
    )
    row = {"prompt": "4+5=", "response": "9", "ground_truth": "9", "reward": 0.5, "reward_reason": "right"}
    for width in (20, 40, 80):
        for text in texts:
            changed = row | {"prompt": f"q {text}", "response": text, "ground_truth": text, "reward_reason": text}
            lines = example(8, changed, width).split("\n")
            assert [line.split()[0] for line in lines[1:]] == ["prompt", "answer", *["ground"] * bool(text), "score"]
            assert all(line.isprintable() for line in lines)
            for line in lines[1:]:
                shown = unicodedata.normalize("NFC", line)
                assert sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in shown) <= width
    assert cut("a  b\nc", 5) == "a b c" and cut("abcdef", 5) == "abcd…" and cut("東京都", 5) == "東京…"
    stream = io.StringIO()
    Console(10, stream).example(0, row | {"reward": None, "reward_reason": "", "ground_truth": None})
    assert stream.getvalue().splitlines()[0] == "Example before training:" and "score" not in stream.getvalue()
    assert "0.5 (right)" in example(1, row, 80)
