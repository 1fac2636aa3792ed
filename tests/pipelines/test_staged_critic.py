"""A run of PPO: the critic in the metrics, in the checkpoint, and its effect on the student."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from runs import REPOSITORY, Run
from stage import CRITIC_SCHEDULE, SHORT, WITH_CRITIC, Stage, optimizer_of

from roll_opd.config.plan import ModelPlan
from roll_opd.pipelines.checkpoints import Checkpoint, damage
from roll_opd.pipelines.start_checks import checkpoint_problems
from roll_opd.planner.load_plan import load_plan

STEPS, WARMUP, SAVED = 4, 2, 3
LEARNING_STEPS = 10  # of a run in which the task is learned
SETTINGS = (
    *SHORT,
    *optimizer_of("actor_train"),
    CRITIC_SCHEDULE,
    "rollout_batch_size=64",
    "num_return_sequences_in_group=1",
    f"max_steps={STEPS}",
    f"critic_warmup={WARMUP}",
    f"save_steps={SAVED}",
    "max_ckpt_to_keep=0",
    "logged_samples_per_step=64",
)
LEARNING = (
    "rollout_batch_size=256",
    "actor_train.training_args.gradient_accumulation_steps=4",
    f"max_steps={LEARNING_STEPS}",
    f"save_steps={LEARNING_STEPS}",
)


def ppo(stage: Stage, *overrides: str, name: str) -> Run:
    done = stage.run(*SETTINGS, *overrides, config=WITH_CRITIC, name=name)
    assert done.code == 0
    return done


@pytest.fixture(scope="module")
def run(stage: Stage) -> Run:
    return ppo(stage, name="ppo")


@pytest.fixture(scope="module")
def long_run(stage: Stage) -> Run:
    return ppo(stage, *LEARNING, name="long_ppo")


@pytest.mark.nightly  # on every push: both losses and their updates against naive training, in megatron_engine
def test_the_student_learns_the_task(long_run: Run) -> None:
    """The share of right answers (sampled): 0.3 before, more than 0.6 after eight updates."""
    rewards = [row["critic/score/mean"] for row in long_run.rows("metrics.jsonl")[1:]]
    assert len(rewards) == LEARNING_STEPS
    assert np.mean(rewards[:WARMUP]) < 0.4
    assert np.mean(rewards[-2:]) > 0.6


@pytest.mark.nightly
def test_the_critic_comes_to_know_what_a_state_is_worth(long_run: Run) -> None:
    rows = long_run.rows("metrics.jsonl")[1:]
    assert np.mean([row["critic/explained_variance"] for row in rows[2:6]]) > 0.05
    gaps = [abs(row["critic/values/mean"] - row["critic/returns/mean"]) for row in rows]
    assert gaps[0] > 0.15 and np.mean(gaps[-3:]) < 0.1
    assert all(row["critic/skipped_updates"] == 0 for row in rows)


def test_before_the_first_update_every_value_is_0(run: Run) -> None:
    rows = run.rows("metrics.jsonl")[1:]
    assert rows[0]["critic/values/max"] == rows[0]["critic/values/min"] == 0.0
    assert rows[0]["critic/explained_variance"] == pytest.approx(0.0, abs=1e-9)
    assert rows[1]["critic/values/max"] > rows[1]["critic/values/min"]


def test_in_the_first_steps_the_critic_learns_alone(run: Run) -> None:
    rows = run.rows("metrics.jsonl")[1:]
    assert ["actor/pg_loss" in row for row in rows] == [False] * WARMUP + [True] * (STEPS - WARMUP)
    assert all("critic/loss" in row and row["critic/skipped_updates"] == 0 for row in rows)


def test_advantages_follow_from_the_record_alone(run: Run) -> None:
    rows = run.rows("samples.jsonl")
    assert len(rows) == STEPS * 64
    for step in range(1, STEPS + 1):
        batch = [row for row in rows if row["step"] == step]
        found = [advantages_of(row) for row in batch]
        every = np.concatenate(found)
        mean, scale = every.mean(), np.sqrt(every.var(ddof=1) + 1e-8)
        for row, raw in zip(batch, found, strict=True):
            assert row["advantages"] == pytest.approx((raw - mean) / scale, abs=1e-6)


def advantages_of(row: dict) -> np.ndarray:
    """Before whitening; every token of the demo is an action."""
    assert all(row["action_mask"])
    values, result, later = row["values"], [], 0.0
    for t in reversed(range(len(values))):
        last = t == len(values) - 1
        reward = (row["reward"] - row["reward_mean"]) / row["reward_scale"] if last else 0.0
        step = reward + row["gamma"] * (0.0 if last else values[t + 1]) - values[t]
        later = step + row["gamma"] * row["lambd"] * later
        result.append(later)
    return np.array(result[::-1])


@pytest.mark.nightly
def test_resumed_and_prolonged_equals_uninterrupted(stage: Stage, run: Run) -> None:
    """Student and critic continue with the same results, and the earlier rows of the record remain."""
    experiment = stage.place / "prolonged"
    shutil.copytree(run.path.parent, experiment, symlinks=True)
    for later in experiment.glob(f"*/checkpoints/step_{STEPS}"):
        shutil.rmtree(later)
    again = ppo(stage, "resume_from_checkpoint=true", f"max_steps={STEPS + 1}", name="prolonged")
    straight, resumed = run.rows("metrics.jsonl"), again.rows("metrics.jsonl")
    assert [row["step"] for row in resumed] == list(range(STEPS + 2))
    assert resumed[: SAVED + 1] == straight[: SAVED + 1]
    before, after = straight[STEPS], resumed[STEPS]
    names = {name for name in before if not name.startswith(("time/", "system/")) and name != "timestamp"}
    assert {name: after[name] for name in names} == {name: before[name] for name in names}


@pytest.mark.parametrize(
    ("damaged", "reported"),
    [
        ("critic/state/common.pt", "critic/state cannot be read (RuntimeError: PytorchStreamReader failed"),
        ("critic/state/.metadata", "critic/state cannot be read ("),
        ("state/__0_0.distcp", "state/__0_0.distcp is cut off: 100 of "),
        ("hf/model.safetensors", "hf: model.safetensors"),
        ("run_state.json", "run_state.json cannot be read ("),
    ],
)
def test_a_damaged_checkpoint_is_reported_with_the_one_before_it(
    stage: Stage, run: Run, damaged: str, reported: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is started, and with the later one where it was."""
    shutil.copytree(run.path, tmp_path / run.path.name)
    checkpoints = tmp_path / run.path.name / "checkpoints"
    assert damage(checkpoints / f"step_{STEPS}") is None
    file = checkpoints / f"step_{STEPS}" / damaged
    file.write_bytes(file.read_bytes()[:100])
    resumed = (f"resume_from_checkpoint={tmp_path}", f"max_steps={STEPS + 1}")  # an experiment, of one run
    assert stage.run(*SETTINGS, *resumed, config=WITH_CRITIC, name="damaged").code == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"{checkpoints}/step_{STEPS}/{reported}" in said and "Traceback" not in said
    assert f"resume from the checkpoint before it with resume_from_checkpoint={checkpoints}/step_{SAVED}" in said


def test_a_checkpoint_without_a_critic_is_refused(run: Run, tmp_path: Path) -> None:
    saved = run.path / "checkpoints" / f"step_{STEPS}"
    config = json.loads((saved / "critic" / "hf" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]
    plan = load_plan("demo", "ppo", pure=False)
    assert checkpoint_problems(plan, Checkpoint.read(saved)) == []
    shutil.copytree(saved, tmp_path / "bare", ignore=shutil.ignore_patterns("critic"))
    (found,) = checkpoint_problems(plan, Checkpoint.read(tmp_path / "bare"))
    assert "has no critic" in found
    other = replace(plan.critic, model=ModelPlan(str(REPOSITORY / "examples/demo/models/teacher")))
    (found,) = checkpoint_problems(replace(plan, critic=other), Checkpoint.read(saved))
    assert "trained from another model" in found and "layers: 3 in the checkpoint, 4 in the model" in found
