"""Complete runs of pure distillation: their files, and real input."""

import asyncio
import io
import json
import os
import re
import time
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from runs import MARK, REPOSITORY, SMALL, Run, wait_until_gone
from stage import Stage, optimizer_of
from transformers import AutoModelForCausalLM, AutoTokenizer

import roll_opd
from roll_opd.commands.main import main
from roll_opd.data.gsm8k import main as convert_gsm8k
from tests.pages import blocks

STEPS = 2


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The page docs/quickstart.md, followed to its end from a notebook's running loop, in fewer steps.

    Student (DP2), inference engine and teacher (TP2) share both slots.
    """
    place = tmp_path_factory.mktemp("runs") / "quickstart"
    assert main(["init", str(place)]) == 0
    overrides = [
        *SMALL,
        "student_train.device_mapping=[0,1]",
        "student_train.training_args.per_device_train_batch_size=32",
        "student_infer.device_mapping=[0]",
        f"max_steps={STEPS}",
        "logged_samples_per_step=64",
        "rollout_dump_dir=x",  # has no effect, and so a warning
        "logging_dir=logs",
    ]

    async def cell(output: io.StringIO) -> dict[str, Any]:
        with redirect_stdout(output):
            return roll_opd.run("distill.yaml", overrides=overrides)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv(MARK, str(place))
        patch.setenv("COLUMNS", "80")
        began = time.monotonic()
        result = asyncio.run(cell(output := io.StringIO()))
        seconds = time.monotonic() - began
    wait_until_gone(str(place))
    latest = place / "output/mine/latest"
    assert result == json.loads((latest / "summary.json").read_text()) | {
        "run_directory": str(latest.resolve()),
        "model": str(latest.resolve() / f"checkpoints/step_{STEPS}/hf"),
    }
    return Run(0, output.getvalue(), latest, seconds)


@pytest.mark.extras
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
    assert f"/{run.path.resolve().name}/report.html" in run.output.partition("Report: ")[2]
    assert '"pure on-policy distillation"' in (run.path / "report.html").read_text()
    facts = json.loads((run.path / "run.json").read_text())
    assert facts["mode"] == "pure" and facts["machine"]["cores"] and facts["versions"]["torch"] and "ended" not in facts
    assert f"max_steps: {STEPS}" in (run.path / "config.yaml").read_text()
    (logs,) = (run.path.parent.parent.parent / "logs").iterdir()
    assert logs.name == f"mine-{run.path.resolve().name}"
    assert (logs / "console.log").read_bytes() == (run.path / "console.log").read_bytes()
    (session,) = (logs / "ray").iterdir()
    assert {file.name for file in session.iterdir()} >= {"raylet.out", "gcs_server.out"}


def test_a_run_shows_what_it_does_and_how_long_it_took(run: Run) -> None:
    """Within 80 columns, but for paths; with everything in `console.log`, and the start-up in the wall time."""
    summary = json.loads((run.path / "summary.json").read_text())
    assert 0.7 * run.seconds < summary["wall_seconds"] <= run.seconds
    in_phases = sum(summary["phase_seconds"].values())
    assert 0 < summary["startup_seconds"] < summary["wall_seconds"] - in_phases + 0.01
    assert {"plan and data", "Ray", "rewards.sums"} < summary["startup_parts"].keys()
    assert all(0 < seconds <= summary["startup_seconds"] for seconds in summary["startup_parts"].values())
    assert run.rows("metrics.jsonl")[0]["time/validate"] > 0
    lines = run.output.splitlines()
    assert [line for line in lines if len(line) > 80 and str(run.path.parent.resolve()) not in line] == []
    assert _without_bars((run.path / "console.log").read_text()) == _without_bars(run.output)
    assert summary["val_accuracy_last"] is None
    assert f"validation accuracy         {summary['val_accuracy_first']:.4f}         -" in run.output
    assert any("these keys" in text and "rollout_dump_dir" in text for text in summary["warnings"])
    for name in ("system/tps", "system/generate_tps", "system/memory_gib", "data/epoch", "tokens/step"):
        assert run.rows("metrics.jsonl")[STEPS][name] > 0, name


def _without_bars(text: str) -> list[str]:
    """Leave out progress bars, which a log has once and which appear only on a busy machine."""
    return [line for line in re.split(r"[\r\n]+", text) if not line.startswith("Checking prompts")]


def test_samples_show_the_tokens_that_were_learned_from(run: Run) -> None:
    rows = run.rows("samples.jsonl")
    assert len(rows) == STEPS * 64
    first = [row for row in rows if row["step"] == 1]
    student = np.concatenate([np.array(row["student_logprobs"]) for row in first])
    teacher = np.concatenate([np.array(row["teacher_logprobs"]["teacher"]) for row in first])
    measured = run.rows("metrics.jsonl")[1]
    assert measured["opd/reverse_kl/mean"] == pytest.approx(float((student - teacher).mean()), abs=1e-6)
    assert all(row["versions"] == [[row["step"] - 1, len(row["action_mask"])]] for row in rows)
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
    assert {(row["step"], row["by"], row["versions"][0][0]) for row in answers} == {(0, "student", 0)}
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


def test_the_checkpoint_loads_in_transformers(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(run.path / f"checkpoints/step_{STEPS}/hf")
    start = AutoModelForCausalLM.from_pretrained(REPOSITORY / "examples/demo/models/student")
    moved = [not torch.equal(a, b) for a, b in zip(model.parameters(), start.parameters(), strict=True)]
    assert all(moved)
    monkeypatch.chdir(run.path.parents[2])  # where the page is when it loads the model
    exec(blocks("quickstart.md", "python")[0].replace("step_20", f"step_{STEPS}"), {})
    assert "661+234=<|end|><|assistant|>" in capsys.readouterr().out.replace(" ", "")


@pytest.mark.extras
def test_the_model_has_a_card_and_the_runs_umask(run: Run) -> None:
    directory = run.path / f"checkpoints/step_{STEPS}/hf"
    umask = os.umask(0o22)
    os.umask(umask)
    assert {file.name: oct(file.stat().st_mode & 0o777) for file in directory.iterdir()} == {
        file.name: oct(0o666 & ~umask) for file in directory.iterdir()
    }
    card = ModelCard.load(directory / "README.md")
    assert card.data.base_model is None and f"step {STEPS}" in card.text  # a directory is no id of the Hub
    code = run.output.partition("\nmodel_dir = ")[2]
    assert (run.path.parents[2] / json.loads(code.partition("\n")[0])).resolve() == directory.resolve()
    assert "AutoModelForCausalLM.from_pretrained(model_dir)" in code and "LLM(model_dir" in code


@pytest.mark.nightly
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
