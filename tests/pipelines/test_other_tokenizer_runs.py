"""Runs of the demo with a teacher of another tokenizer."""

from pathlib import Path

import pytest
from runs import launch

OTHER = (
    "teacher_tokenizer_check=align",
    "teacher.model_args.model_name_or_path=examples/demo/models/other_tokenizer",
)
SHORT = ("max_steps=20", "eval_steps=20", "save_steps=0", "validation.evaluate_teacher=false", "trackers=stdout")


@pytest.mark.nightly
@pytest.mark.timeout(1800)  # two runs of 20 steps: 4 minutes of CPU time
def test_a_teacher_of_another_tokenizer_reaches_nearly_the_accuracy_of_the_students(tmp_path: Path) -> None:
    """The teacher has other merges, other special tokens and another template."""
    accuracy = {}
    for name, changes in (("same", ()), ("other", OTHER)):
        run = launch(tmp_path / name, *SHORT, *changes)
        assert run.code == 0, run.output[-4000:]
        last = run.rows("metrics.jsonl")[-1]
        accuracy[name] = last["val_correct/all/mean"]
        assert name == "same" or last["opd/alignment/teacher/uncovered"] == 0
    assert accuracy["same"] > 0.9
    assert accuracy["other"] >= 0.95 * accuracy["same"]
