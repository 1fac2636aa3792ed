"""Whole runs on real parts: every phase, both device layouts, kill and resume, real input."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import REPOSITORY, SMALL, Run, launch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from roll_opd.data.gsm8k import main as convert_gsm8k

STEPS = 4

# Student (DP2), inference engine and teacher (TP2) share both slots
COLOCATED = (
    *SMALL,
    "student_train.device_mapping=[0,1]",
    "student_train.training_args.per_device_train_batch_size=32",
    "student_infer.device_mapping=[0]",
    f"max_steps={STEPS}",
    "save_steps=2",
    "max_ckpt_to_keep=0",
    "samples_per_step=64",
)


@pytest.fixture(scope="module")
def interleaved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """`COLOCATED` with two files, each of which is in the middle of its first epoch after every step."""
    place = tmp_path_factory.mktemp("rows")
    rows = (REPOSITORY / "examples/demo/data/train.jsonl").read_text().splitlines(keepends=True)
    (place / "a.jsonl").write_text("".join(rows[:60]))
    (place / "b.jsonl").write_text("".join(rows[60:90]))
    return (
        *COLOCATED,
        f"student_train.data_args.file_name=[{place / 'a.jsonl'},{place / 'b.jsonl'}]",
        "+student_train.data_args.interleave_probs=[0.7,0.3]",
    )


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, interleaved: tuple[str, ...]) -> Run:
    return launch(tmp_path_factory.mktemp("runs") / "whole", *interleaved)


def weights(run: Run, step: int) -> dict[str, torch.Tensor]:
    return load_file(run.path / f"checkpoints/step_{step}/hf/model.safetensors")


def test_a_run_leaves_everything_it_promises(uninterrupted: Run) -> None:
    run = uninterrupted
    assert run.code == 0, run.output[-4000:]
    assert "reverse KL" in run.output and f"step {STEPS}/{STEPS}" in run.output
    summary = json.loads((run.path / "summary.json").read_text())
    assert summary["steps"] == STEPS and 0 <= summary["val_accuracy_first"] <= 1
    assert summary["teacher_val_accuracy"] is None
    assert set(summary["phase_seconds"]) >= {"generate", "teacher", "train", "weight_sync", "other"}
    rows = run.rows("metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    for name in ("actor/grad_norm", "actor/lr", "opd/reverse_kl/p95", "rollout/train_logprob_gap/max", "time/step"):
        assert name in rows[1], name
    assert rows[1]["rollout/train_logprob_gap/max"] < 1e-4  # the engine samples from the weights that are trained
    assert list((run.path / "tensorboard").iterdir())
    assert "max_steps: 4" in (run.path / "config.yaml").read_text()


def test_samples_tell_what_was_learned_from(uninterrupted: Run) -> None:
    rows = uninterrupted.rows("samples.jsonl")
    assert len(rows) == STEPS * 64
    first = [row for row in rows if row["step"] == 1]
    student = np.concatenate([np.array(row["student_logprobs"]) for row in first])
    teacher = np.concatenate([np.array(row["teacher_logprobs"]["teacher"]) for row in first])
    measured = uninterrupted.rows("metrics.jsonl")[1]
    assert measured["opd/reverse_kl/mean"] == pytest.approx(float((student - teacher).mean()), abs=1e-6)
    assert all(row["weights_version"] == row["step"] - 1 for row in rows)
    reference = AutoModelForCausalLM.from_pretrained(REPOSITORY / "examples/demo/models/teacher", dtype=torch.float32)
    row = first[0]
    tokens, length = torch.tensor(row["tokens"]), row["prompt_length"]
    with torch.no_grad():
        logprobs = reference(tokens[None]).logits[0].log_softmax(-1)
    expected = [float(logprobs[place - 1, tokens[place]]) for place in range(length, len(tokens))]
    assert row["teacher_logprobs"]["teacher"] == pytest.approx(expected, abs=1e-5)


def test_prompts_are_taken_in_the_seeds_order_without_repeats(uninterrupted: Run) -> None:
    ids = [name for row in uninterrupted.rows("prompts.jsonl") for name in row["ids"]]
    assert len(ids) == STEPS * 16 == len(set(ids))
    order = [int(name.removeprefix("train-")) for name in ids]
    assert order != sorted(order)
    from_a = np.cumsum([number < 60 for number in order])
    assert np.abs(from_a - 0.7 * np.arange(1, len(order) + 1)).max() < 2  # the shares, at any moment


def test_the_checkpoint_loads_in_transformers(uninterrupted: Run) -> None:
    model = AutoModelForCausalLM.from_pretrained(uninterrupted.path / f"checkpoints/step_{STEPS}/hf")
    start = AutoModelForCausalLM.from_pretrained(REPOSITORY / "examples/demo/models/student")
    moved = [not torch.equal(a, b) for a, b in zip(model.parameters(), start.parameters(), strict=True)]
    assert all(moved)


def test_killed_twice_and_resumed_equals_uninterrupted(
    uninterrupted: Run, interleaved: tuple[str, ...], tmp_path: Path
) -> None:
    """Killed in the middle of a step, then in the middle of the last save; both in mid-epoch of two files."""
    experiment = tmp_path / "killed" / "demo"

    def in_step_4() -> bool:
        return any(len(path.read_text().splitlines()) == 3 for path in experiment.glob("*/prompts.jsonl"))

    def in_save_4() -> bool:
        return any(experiment.glob(f"*/checkpoints/.partial_step_{STEPS}/state/*.distcp"))

    resume = "resume_from_checkpoint=true"
    for arguments, moment in ((interleaved, in_step_4), ((*interleaved, resume), in_save_4)):
        killed = launch(tmp_path / "killed", *arguments, kill_when=moment)
        assert killed.code == -9, killed.output[-4000:]
        assert not (killed.path / f"checkpoints/step_{STEPS}").exists()
    resumed = launch(tmp_path / "killed", *interleaved, resume)
    assert resumed.code == 0, resumed.output[-4000:]
    assert resumed.rows("prompts.jsonl") == uninterrupted.rows("prompts.jsonl")
    assert [row["step"] for row in resumed.rows("metrics.jsonl")] == list(range(STEPS + 1))
    assert len(list(experiment.iterdir())) == 2  # one run and `latest`
    assert not list(resumed.path.glob("checkpoints/.partial*"))
    expected = weights(uninterrupted, STEPS)
    for name, tensor in weights(resumed, STEPS).items():
        assert torch.equal(tensor, expected[name]), name


def test_gsm8k_prompts_train(tmp_path: Path, gsm8k_dir: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    assert convert_gsm8k(["--input", str(gsm8k_dir / "train.jsonl"), "--output", str(rows)]) == 0
    run = launch(
        tmp_path / "output",
        f"student_train.data_args.file_name={rows}",
        config=("gsm8k", "onpolicy_distill"),
    )
    assert run.code == 0, run.output[-4000:]
    assert "7,473 prompts" in run.output or "7473 prompts" in run.output
    assert [row["step"] for row in run.rows("metrics.jsonl")][-1] == 5
