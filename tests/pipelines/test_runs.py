"""Whole runs of pure distillation: what they leave behind, and real input."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import REPOSITORY, SMALL, Run, launch
from stage import Stage, optimizer_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from roll_opd.data.gsm8k import main as convert_gsm8k

STEPS = 2


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Student (DP2), inference engine and teacher (TP2) share both slots."""
    return launch(
        tmp_path_factory.mktemp("runs") / "whole",
        *SMALL,
        "student_train.device_mapping=[0,1]",
        "student_train.training_args.per_device_train_batch_size=32",
        "student_infer.device_mapping=[0]",
        f"max_steps={STEPS}",
        "samples_per_step=64",
    )


def test_a_run_leaves_everything_it_promises(run: Run) -> None:
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
    assert f"Report: {run.path.resolve() / 'report.html'}" in run.output
    assert '"pure on-policy distillation"' in (run.path / "report.html").read_text()
    facts = json.loads((run.path / "run.json").read_text())
    assert facts["mode"] == "pure" and facts["machine"]["cores"] and facts["versions"]["torch"] and "ended" not in facts
    assert f"max_steps: {STEPS}" in (run.path / "config.yaml").read_text()


def test_samples_tell_what_was_learned_from(run: Run) -> None:
    rows = run.rows("samples.jsonl")
    assert len(rows) == STEPS * 64
    first = [row for row in rows if row["step"] == 1]
    student = np.concatenate([np.array(row["student_logprobs"]) for row in first])
    teacher = np.concatenate([np.array(row["teacher_logprobs"]["teacher"]) for row in first])
    measured = run.rows("metrics.jsonl")[1]
    assert measured["opd/reverse_kl/mean"] == pytest.approx(float((student - teacher).mean()), abs=1e-6)
    assert all(row["weights_version"] == row["step"] - 1 for row in rows)
    reference = AutoModelForCausalLM.from_pretrained(REPOSITORY / "examples/demo/models/teacher", dtype=torch.float32)
    row = first[0]
    tokens, length = torch.tensor(row["tokens"]), row["prompt_length"]
    with torch.no_grad():
        logprobs = reference(tokens[None]).logits[0].log_softmax(-1)
    expected = [float(logprobs[place - 1, tokens[place]]) for place in range(length, len(tokens))]
    assert row["teacher_logprobs"]["teacher"] == pytest.approx(expected, abs=1e-5)


def test_the_record_says_which_token_is_which_text_and_how_held_out_prompts_were_answered(run: Run) -> None:
    tokenizer = AutoTokenizer.from_pretrained(REPOSITORY / "examples/demo/models/student")
    answers = run.rows("validation_samples.jsonl")
    assert len(answers) == 64 == len({row["id"] for row in answers})
    assert {(row["step"], row["by"], row["weights_version"]) for row in answers} == {(0, "student", 0)}
    for row in [*run.rows("samples.jsonl"), *answers]:
        ids = row["tokens"][row["prompt_length"] :]
        pieces = [row["response"][begin:end] for begin, end in pairwise([0, *row["token_ends"]])]
        assert pieces == [tokenizer.decode([token]) for token in ids]  # each of the demo's tokens is whole characters
        assert len(row["teacher_logprobs"]["teacher"]) == len(row["rollout_logprobs"]) == len(ids)


def test_prompts_are_taken_in_the_seeds_order_without_repeats(run: Run) -> None:
    ids = [name for row in run.rows("prompts.jsonl") for name in row["ids"]]
    assert len(ids) == STEPS * 16 == len(set(ids))
    order = [int(name.removeprefix("train-")) for name in ids]
    assert order != sorted(order)


def test_the_checkpoint_loads_in_transformers(run: Run) -> None:
    model = AutoModelForCausalLM.from_pretrained(run.path / f"checkpoints/step_{STEPS}/hf")
    start = AutoModelForCausalLM.from_pretrained(REPOSITORY / "examples/demo/models/student")
    moved = [not torch.equal(a, b) for a, b in zip(model.parameters(), start.parameters(), strict=True)]
    assert all(moved)


def test_gsm8k_prompts_train(stage: Stage, tmp_path: Path, gsm8k_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    assert convert_gsm8k(["--input", str(gsm8k_dir / "train.jsonl"), "--output", str(rows)]) == 0
    run = stage.run(
        f"student_train.data_args.file_name={rows}",
        *optimizer_of("student_train"),
        "student_train.max_tokens_per_microbatch_in_train=4096",
        "teacher.max_tokens_per_microbatch_in_infer=12288",
        config=("gsm8k", "onpolicy_distill"),
        name="gsm8k",
    )
    assert run.code == 0
    assert "7473 prompts" in capsys.readouterr().out.replace(",", "")
    assert [row["step"] for row in run.rows("metrics.jsonl")] == list(range(6))
