"""Runs of SFT and DPO: learning, resumes after a kill, and refused configurations."""

import json
from pathlib import Path

import pytest
import torch
from runs import REPOSITORY, Run, launch
from safetensors.torch import load_file

from roll_opd.commands import run as launcher

pytestmark = pytest.mark.usefixtures("forks")
DPO = {"launcher": "start_dpo_pipeline.py", "config": ("demo", "dpo")}
SFT = {"launcher": "start_sft_pipeline.py", "config": ("demo", "sft")}
STEPS, SAVED = 20, 9
SETTINGS = (
    "deterministic=true",
    "exp_name=demo",
    f"max_steps={STEPS}",
    f"save_steps={SAVED}",
    "max_ckpt_to_keep=0",
    f"eval_steps={STEPS}",
)


@pytest.fixture(scope="module")
def dpo(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Student and reference policy on both slots (TP2), in turn."""
    run = launch(tmp_path_factory.mktemp("dpo") / "run", *SETTINGS, **DPO)
    assert run.code == 0, run.output[-4000:]
    return run


def test_sft_learns_and_leaves_everything_it_promises(tmp_path: Path) -> None:
    """Held-out loss at most a fifth of the first in 20 steps (measured: 0.09)."""
    run = launch(tmp_path / "run", *SETTINGS, **SFT)
    assert run.code == 0, run.output[-4000:]
    summary = json.loads((run.path / "summary.json").read_text())
    assert summary["steps"] == STEPS and summary["generated_tokens"] == 0
    assert summary["val_loss_last"] < 0.2 * summary["val_loss_first"]
    rows = run.rows("metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert {"sft/loss", "sft/tokens", "actor/grad_norm", "actor/lr", "time/train"} <= rows[1].keys()
    assert len({name for row in run.rows("prompts.jsonl")[:15] for name in row["ids"]}) == 15 * 64  # no repeats
    assert (run.path / f"checkpoints/step_{STEPS}/hf/model.safetensors").exists()
    table = run.output.partition("before")[2]
    assert "validation loss" in table and "training loss" in table and "learned tokens" in table
    assert not any(word in table for word in ("teacher", "generated", "reverse KL"))
    assert list((run.path / "tensorboard").iterdir())


@pytest.mark.nightly
def test_dpo_learns_which_of_two_answers_is_chosen(dpo: Run) -> None:
    """Held-out pair accuracy at least .9 in 20 steps; before the first step every margin is exactly 0."""
    rows = dpo.rows("metrics.jsonl")
    assert rows[0]["val/loss"] == pytest.approx(0.693147, abs=1e-5) and rows[0]["val/dpo/margin"] == pytest.approx(0)
    assert rows[-1]["val/dpo/accuracy"] >= 0.9
    assert rows[-1]["val/dpo/margin"] == pytest.approx(
        rows[-1]["val/dpo/chosen_reward"] - rows[-1]["val/dpo/rejected_reward"], abs=1e-6
    )


@pytest.mark.nightly
def test_killed_in_a_save_and_resumed_equals_uninterrupted(dpo: Run, tmp_path: Path) -> None:
    """Bit for bit; two ranks write while they learn, and the reference policy is the student as it began."""
    experiment, saving = tmp_path / "killed" / "demo", 2 * SAVED
    settings = (*SETTINGS, "async_save=true")

    def in_save() -> bool:
        return any(experiment.glob(f"*/checkpoints/.partial_step_{saving}/state/*.distcp"))

    killed = launch(tmp_path / "killed", *settings, kill_when=in_save, **DPO)
    assert killed.code == -9, killed.output[-4000:]
    assert not (killed.path / f"checkpoints/step_{saving}").exists()
    resumed = launch(tmp_path / "killed", *settings, "resume_from_checkpoint=true", **DPO)
    assert resumed.code == 0, resumed.output[-4000:]
    assert resumed.rows("prompts.jsonl") == dpo.rows("prompts.jsonl")
    assert [row["step"] for row in resumed.rows("metrics.jsonl")] == list(range(STEPS + 1))
    assert len(list(experiment.iterdir())) == 2  # one run and `latest`
    assert not list(resumed.path.glob("checkpoints/.partial*"))
    one, other = (load_file(run.path / f"checkpoints/step_{STEPS}/hf/model.safetensors") for run in (dpo, resumed))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("schema", "override", "expected"),
    [
        ("sft", "train_batchsize=3", "train_batch_size"),
        ("sft", "max_steps=null", "num_train_epochs"),
        ("sft", "algorithm_type=dpo", "schema dpo"),
        ("sft", "train_batch_size=7", "train_batch_size"),
        ("sft", "sft_train.data_args.file_name=examples/demo/data/train.jsonl", "without an answer"),
        ("dpo", "loss_agg_mode=token-mean", "seq-mean-token-mean"),
        ("dpo", "ipo=true", "ipo"),
        ("dpo", "actor_train.max_tokens_per_microbatch_in_train=100", "max_tokens_per_microbatch_in_train"),
    ],
)
def test_what_cannot_work_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    schema: str,
    override: str,
    expected: str,
) -> None:
    monkeypatch.chdir(REPOSITORY)
    arguments = ["--config_path", "demo", "--config_name", schema, f"output_dir={tmp_path / 'out'}", override]
    assert launcher.main("test", pipeline=schema, arguments=arguments) == 2
    assert not (tmp_path / "out").exists()
    assert expected in capsys.readouterr().err


@pytest.mark.nightly
def test_a_student_that_explodes_leaves_the_samples_on_record(tmp_path: Path) -> None:
    """With the log-probs that the skipped update computed."""
    run = launch(
        tmp_path / "run",
        "exp_name=demo",
        "eval_steps=0",
        "sft_train.training_args.learning_rate=1e30",
        **SFT,
    )
    assert run.code == 1, run.output[-4000:]
    assert run.rows("metrics.jsonl")[-1]["actor/skipped_updates"] == 1
    samples = run.rows("skipped_samples.jsonl")
    assert str((run.path / "skipped_samples.jsonl").resolve()) in run.output
    assert samples
    for sample in samples:
        assert len(sample["student_logprobs"]) == len(sample["tokens"]) - sample["prompt_length"]
