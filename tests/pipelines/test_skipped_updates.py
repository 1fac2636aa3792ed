"""Log-probs that are not finite: updates are skipped and counted, weights stay, the third in a row ends the run."""

import shutil
from pathlib import Path

import numpy as np
import torch
from runs import REPOSITORY, SMALL, launch
from safetensors.torch import load_file, save_file

MODELS = REPOSITORY / "examples/demo/models"


def test_a_teacher_whose_logprobs_are_not_finite(tmp_path: Path) -> None:
    teacher = tmp_path / "teacher"
    shutil.copytree(MODELS / "teacher", teacher)
    weights = load_file(teacher / "model.safetensors")
    next(tensor for name, tensor in weights.items() if name.endswith("norm.weight"))[0] = torch.nan
    save_file(weights, teacher / "model.safetensors", {"format": "pt"})

    run = launch(
        tmp_path / "run",
        *SMALL,
        f"teacher.model_args.model_name_or_path={teacher}",
        "max_steps=4",
        "save_steps=2",
        "max_ckpt_to_keep=0",
        "validation=null",
    )
    assert run.code == 1, run.output[-4000:]
    rows = run.rows("metrics.jsonl")
    assert [(row["step"], row.get("actor/skipped_updates")) for row in rows] == [(0, None), (1, 1.0), (2, 1.0)]
    after = load_file(run.path / "checkpoints/step_2/hf/model.safetensors")
    before = load_file(MODELS / "student/model.safetensors")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())

    saved = (run.path / "skipped_samples.jsonl").resolve()
    assert str(saved) in run.output and "3 updates in a row" in run.output
    samples = run.rows("skipped_samples.jsonl")
    assert len(samples) == 64 and {sample["step"] for sample in samples} == {3}
    for sample in samples:
        acted = np.flatnonzero(sample["action_mask"]).tolist()
        assert sample["not_finite"]["teacher_logprobs.teacher"] == acted
        assert "student_logprobs" not in sample["not_finite"] and None not in sample["student_logprobs"]


def test_a_student_that_explodes(tmp_path: Path) -> None:
    """In SFT, too; the samples have the log-probs that the skipped update computed."""
    run = launch(
        tmp_path / "run",
        "exp_name=demo",
        "eval_steps=0",
        "sft_train.training_args.learning_rate=1e30",
        launcher="start_sft_pipeline.py",
        config=("demo", "sft"),
    )
    assert run.code == 1, run.output[-4000:]
    assert run.rows("metrics.jsonl")[-1]["actor/skipped_updates"] == 1
    samples = run.rows("skipped_samples.jsonl")
    assert str((run.path / "skipped_samples.jsonl").resolve()) in run.output
    assert samples
    for sample in samples:
        assert len(sample["student_logprobs"]) == len(sample["tokens"]) - sample["prompt_length"]
