"""Runs of mixed mode: their records, and a killed run that continues with the same results."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import REPOSITORY, RLVR, Run, launch, of_run
from safetensors.torch import load_file
from stage import SHORT, WITH_TEACHER, Stage, frozen, optimizer_of

from roll_opd.tracking.audit import audit

STEPS = 5
# One teacher is the untrained student itself, so its log-probs are known
TEACHERS = (
    frozen("teacher.good", "teacher", "[0,1]", 2, "tag_included: [odd]", "opd_kl_coef: 0.5"),
    frozen("teacher.self", "student", "[1]", 1, "tag_included: [even]"),
)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Two teachers for the tags of two files, each file in the middle of its first epoch after every step.

    Groups with equal samples are replaced by other prompts.
    """
    place = tmp_path_factory.mktemp("rows")
    rows = [json.loads(line) for line in (REPOSITORY / "examples/demo/data/train.jsonl").read_text().splitlines()]
    for tag, some in (("odd", rows[:150]), ("even", rows[150:250])):
        (place / f"{tag}.jsonl").write_text("".join(json.dumps({**row, "tag": tag}) + "\n" for row in some))
    return (
        *SHORT,
        *optimizer_of("actor_train"),
        f"actor_train.data_args.file_name=[{place / 'odd.jsonl'},{place / 'even.jsonl'}]",
        "+actor_train.data_args.interleave_probs=[0.6,0.4]",
        "~teacher",
        *TEACHERS,
        "opd_kl_coef=0.7",
        "allow_self_teacher=true",
        "opd_kl_discount=1",
        "whiten_advantages=true",
        "rewards.math_rule.tag_included=[odd,even]",
        "rewards.math_rule.query_filter_config={type: std_filter, filter_args: {std_threshold: 0.0}}",
        "is_use_additional_prompts=true",
        "max_additional_running_prompts=8",
        f"max_steps={STEPS}",
        "save_steps=2",
        "max_ckpt_to_keep=0",
    )


@pytest.fixture(scope="module")
def mixed(stage: Stage, settings: tuple[str, ...]) -> Run:
    run = stage.run(*settings, config=WITH_TEACHER, name="mixed")
    assert run.code == 0
    return run


def test_advantages_follow_from_the_record_alone(mixed: Run) -> None:
    rows = mixed.rows("samples.jsonl")
    assert len(rows) == STEPS * 64
    for step in range(1, STEPS + 1):
        batch = [row for row in rows if row["step"] == step]
        rewards: dict[str, list[float]] = {}
        for row in batch:
            rewards.setdefault(row["group_id"], []).append(row["reward"])
        normalised = [
            (row["reward"] - np.mean(group)) / (np.std(group, ddof=1) + 1e-6)
            for row in batch
            for group in [rewards[row["group_id"]]]
        ]
        tokens = np.repeat(normalised, [len(row["action_mask"]) for row in batch])
        mean, scale = tokens.mean(), np.sqrt(tokens.var(ddof=1) + 1e-8)
        for row, reward in zip(batch, normalised, strict=True):
            ((name, coefficient),) = row["opd_kl_coef"].items()
            student, scored = (
                np.array(of, np.float32) for of in (row["student_logprobs"], row["teacher_logprobs"][name])
            )
            gap = student - scored  # in the precision of the run: a float32 near -17 is exact to 1e-6 itself
            token_rewards = -coefficient * gap
            token_rewards[-1] += row["reward"]
            assert row["token_level_rewards"] == pytest.approx(token_rewards, abs=1e-6)
            to_go = np.cumsum((coefficient * gap.astype(np.float64))[::-1])[::-1]
            rounded = 1e-6 * max(1.0, np.abs(to_go).max())  # in f32, of the largest summand
            assert row["advantages"] == pytest.approx((reward - mean) / scale - to_go, rel=0.0, abs=rounded)


def test_each_sample_is_scored_by_its_own_teacher(mixed: Run) -> None:
    seen = set()
    for row in mixed.rows("samples.jsonl"):
        assert row["opd_kl_coef"] == ({"good": 0.5} if row["tag"] == "odd" else {"self": 0.7})
        assert row["teacher_logprobs"].keys() == row["opd_kl_coef"].keys()
        if row["step"] == 1:
            (scored,) = row["teacher_logprobs"].values()
            gap = np.abs(np.array(scored) - np.array(row["student_logprobs"])).max()
            assert gap < 1e-6 if row["tag"] == "even" else gap > 1e-3
        seen.add(row["tag"])
    assert seen == {"even", "odd"}


def test_filtered_groups_are_replaced_and_no_prompt_is_lost_or_repeated(mixed: Run) -> None:
    steps = mixed.rows("prompts.jsonl")
    assert all(len(step["ids"]) == 16 for step in steps)
    drawn = [name for step in steps for name in step["ids"] + step["filtered"]]
    assert len(drawn) == len(set(drawn))
    assert any(step["filtered"] for step in steps)
    for row in mixed.rows("samples.jsonl"):
        assert row["advantage_scale"] > 0 and row["reward_scale"] > 1e-3  # no group of equal rewards


@pytest.mark.nightly
def test_terminated_in_a_step_and_resumed_equals_uninterrupted(
    stage: Stage, mixed: Run, settings: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """After SIGTERM, the step ends with a checkpoint; the resumed run has the same results as an uninterrupted run."""
    prompts = stage.place / "terminated"

    def end_in_step_2() -> None:
        while not any(len(path.read_text().splitlines()) == 1 for path in prompts.glob("*/prompts.jsonl")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    settings = (*settings, "save_steps=0")
    watcher = threading.Thread(target=end_in_step_2, daemon=True)
    watcher.start()
    ended = stage.run(*settings, config=WITH_TEACHER, name="terminated")
    assert ended.code == 143 and not watcher.is_alive()
    assert [path.name for path in (ended.path / "checkpoints").iterdir()] == ["step_2"]
    said = capsys.readouterr().err
    assert "ended by SIGTERM after step 2; resume after step 2 with resume_from_checkpoint=true" in said
    resumed = stage.run(*settings, "resume_from_checkpoint=true", config=WITH_TEACHER, name="terminated")
    assert resumed.code == 0 and resumed.path == ended.path
    assert resumed.rows("prompts.jsonl") == mixed.rows("prompts.jsonl")
    one, other = (load_file(run.path / f"checkpoints/step_{STEPS}/hf/model.safetensors") for run in (mixed, resumed))
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def test_killed_in_a_step_and_resumed_equals_uninterrupted(
    stage: Stage, mixed: Run, settings: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run loses its engine, its student and then its launcher; other processes continue it.

    The bits are those of a run without a loss. For random moments, see test_lost_processes.py.
    """
    place, victims = tmp_path / "killed", {1: "ray::RolloutWorker", 2: "ray::TrainWorker"}  # by finished steps
    experiment, settings = place / "demo", (*settings, "exp_name=demo")

    def in_last_step() -> bool:
        steps = max((len(path.read_text().splitlines()) for path in experiment.glob("*/prompts.jsonl")), default=0)
        if steps in victims:
            of_run(place, victims.pop(steps))[0].kill()
        return steps == STEPS - 1

    killed = launch(place, *settings, kill_when=in_last_step, launcher=RLVR, config=WITH_TEACHER)
    assert killed.code == -9, killed.output[-4000:]
    assert not victims
    (engine, student), (_, *found), (_, *wanted) = (
        run.rows(name) for run, name in ((killed, "losses.jsonl"), (killed, "metrics.jsonl"), (mixed, "metrics.jsonl"))
    )
    assert engine["what"].startswith("actor_infer, engine 0") and student["why"].startswith("actor_train, rank 0")
    assert len(found) >= STEPS - 2
    for name in ("actor/total_loss", "actor/grad_norm", "critic/rewards/mean"):
        assert [row[name] for row in found] == [row[name] for row in wanted[: len(found)]], name
    assert not (killed.path / f"checkpoints/step_{STEPS}").exists()
    again = "resume_from_checkpoint=true"
    resumed = stage.run(*settings, again, config=WITH_TEACHER, place=place, name="demo")
    assert resumed.code == 0 and resumed.path == killed.path.resolve()
    printed = capsys.readouterr().out
    assert f"step {STEPS}/{STEPS}" in printed and "reverse KL" in printed
    assert resumed.rows("prompts.jsonl") == mixed.rows("prompts.jsonl")
    assert [row["step"] for row in resumed.rows("metrics.jsonl")] == list(range(STEPS + 1))
    assert len(list(experiment.iterdir())) == 2  # one run and `latest`
    counts, errors = audit(resumed.path)
    assert errors == [] and (counts["steps"], counts["lost processes"]) == (STEPS, 2)
    one, other = (load_file(run.path / f"checkpoints/step_{STEPS}/hf/model.safetensors") for run in (mixed, resumed))
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
