"""Runs of every algorithm and objective with the same roles: weights change, and the student learns."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import Run
from safetensors.torch import load_file
from stage import CRITIC_SCHEDULE, PURE, REFERENCE, SHORT, WITH_CRITIC, WITH_REWARD, Stage, optimizer_of

from roll_opd.objective.algorithms import algorithm, algorithm_names
from roll_opd.teachers.megatron_teacher import MegatronScorer
from roll_opd.teachers.teacher_interface import LOGPROBS, TeacherAnswer, TokenSequence, Wanted
from tests.cover import cover, tiered

ELSEWHERE = ("sft", "dpo")  # other pipelines: test_supervised_runs.py
NAMES = [name for name in algorithm_names() if name not in ELSEWHERE]
ALSO_ELSEWHERE = ("ppo", "on_policy_distill")  # on every push: test_staged_critic.py, and the divergences below
STEPS = 3
DEMONSTRATIONS = "++demonstrations={data_args: {file_name: examples/demo/data/sft_train.jsonl}}"


def data_flow(name: str) -> tuple:
    """The calls of roles and the columns of samples that an algorithm needs; its formulas are tested without a run."""
    row = algorithm(name)
    return row.advantage == "gae", row.repeat, row.kl_loss, row.expert_data_ratio, name == "on_policy_distill"


def rewarded(stage: Stage, *overrides: str, config: tuple[str, str] = WITH_REWARD) -> Run:
    return stage.run(*SHORT, *optimizer_of("actor_train"), f"max_steps={STEPS}", *overrides, config=config)


def pure(stage: Stage, *overrides: str, place: Path | None = None) -> Run:
    settings = (*SHORT, *optimizer_of("student_train"), f"max_steps={STEPS}")
    return stage.run(*settings, *overrides, config=PURE, place=place)


def last_weights(run: Run) -> Path:
    return run.path / f"checkpoints/step_{STEPS}/hf/model.safetensors"


@pytest.mark.parametrize("name", tiered(NAMES, set(cover(NAMES, of=data_flow)) - set(ALSO_ELSEWHERE)))
def test_every_algorithm_moves_the_weights(stage: Stage, name: str) -> None:
    row, one_step = algorithm(name), "max_steps=1"
    if name == "on_policy_distill":
        run = pure(stage, one_step)
    else:
        roles = [REFERENCE] * bool(row.kl_loss) + [DEMONSTRATIONS] * bool(row.expert_data_ratio)
        settings, config = (
            ((CRITIC_SCHEDULE, "critic_warmup=0"), WITH_CRITIC) if row.advantage == "gae" else ((), WITH_REWARD)
        )
        run = rewarded(stage, one_step, "~adv_estimator", f"+algorithm_type={name}", *roles, *settings, config=config)
    assert run.code == 0
    (row,) = run.rows("metrics.jsonl")[1:]
    assert row["step"] == 1 and 0 < row["actor/grad_norm"] < 1e3 and row["actor/skipped_updates"] == 0
    before, after = load_file(stage.first_weights), load_file(run.path / "checkpoints/step_1/hf/model.safetensors")
    assert all(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.nightly  # of the stage; resumed runs have the same bits on every push
def test_a_run_is_the_same_whatever_was_run_before(stage: Stage) -> None:
    """So a state saved before the first update is whole."""
    one, _, other = (rewarded(stage, f"seed={seed}") for seed in (5, 6, 5))
    of_one, of_other = (load_file(last_weights(run)) for run in (one, other))
    assert all(torch.equal(of_one[name], of_other[name]) for name in of_one)


@pytest.mark.nightly
def test_grpo_learns_the_task(stage: Stage) -> None:
    """The share of right answers (sampled): 0.3 before, more than 0.5 after ten updates."""
    whole_step = ("rollout_batch_size=64", "actor_train.training_args.gradient_accumulation_steps=4")
    run = rewarded(stage, "max_steps=12", *whole_step)
    rewards = [row["critic/score/mean"] for row in run.rows("metrics.jsonl")[1:]]
    assert rewards[0] < 0.4 and np.mean(rewards[-2:]) > 0.5, rewards


def test_grpo_with_a_reference_policy_and_no_teacher(stage: Stage) -> None:
    token_level = ("add_token_level_kl=true", "init_kl_coef=0.05")
    run = rewarded(stage, REFERENCE, "use_kl_loss=true", "kl_loss_coef=0.1", *token_level)
    assert run.code == 0
    metrics = run.rows("metrics.jsonl")
    assert metrics[1]["actor/kl_loss"] == pytest.approx(0, abs=1e-6)  # nothing has been learned yet
    assert metrics[STEPS]["actor/kl_loss"] > 1e-6
    assert not any(name.startswith("opd/reverse_kl") for name in metrics[1])
    for row in run.rows("samples.jsonl"):
        assert row["teacher_logprobs"] == {}
        gap = np.array(row["student_logprobs"]) - np.array(row["ref_logprobs"])
        expected = -0.05 * np.cumsum(gap[::-1])[::-1] + (row["reward"] - row["reward_mean"]) / row["reward_scale"]
        assert row["advantages"] == pytest.approx(expected, abs=1e-6)


DIVERGENCES = {
    "sampled": ("opd_objective=sampled",),
    "full": ("opd_objective=full", "opd_divergence=reverse_kl"),
    "topk": ("opd_objective=topk", "opd_topk=8", "opd_topk_source=student", "opd_divergence=jsd", "opd_jsd_beta=0.9"),
}


# on every push also topk: test_staged_hints.py; and sampled: examples/minimal_opd.py, which learns for longer
@pytest.mark.parametrize("objective", tiered(DIVERGENCES, ["full"]))
def test_distillation_brings_the_student_closer(stage: Stage, objective: str) -> None:
    """To 0.6 x the first reverse KL in six steps; the teacher is on both slots (TP2), the student on one."""
    run = pure(stage, *DIVERGENCES[objective], "max_steps=6")
    assert run.code == 0
    rows = run.rows("metrics.jsonl")[1:]
    assert np.mean([row["opd/reverse_kl/mean"] for row in rows[-2:]]) < 0.6 * rows[0]["opd/reverse_kl/mean"]
    if objective == "sampled":
        return
    losses = [row["actor/opd_loss"] for row in rows]
    assert all(loss > 0 for loss in losses) and np.mean(losses[-2:]) < 0.6 * losses[0]
    assert all(row["actor/total_loss"] == pytest.approx(row["actor/opd_loss"], rel=1e-6) for row in rows)
    samples = run.rows("samples.jsonl")
    assert len(samples) == 6 * 64
    for row in samples:  # the sampled reverse KL is measured as ever, and is no part of an advantage
        assert not np.any(row["advantages"]) and len(row["teacher_logprobs"]["teacher"]) == len(row["student_logprobs"])
    if objective == "full":  # its mean is an estimate of the exact one
        first = [np.array(row["student_logprobs"]) - row["teacher_logprobs"]["teacher"] for row in samples[:64]]
        spread = np.concatenate(first).std() / np.sqrt(sum(len(gaps) for gaps in first))
        assert losses[0] == pytest.approx(rows[0]["opd/reverse_kl/mean"], abs=5 * spread)


@pytest.mark.nightly
def test_a_kl_coefficient_that_adapts_and_a_correction(stage: Stage) -> None:
    """Both on record, step by step and after a resume; arXiv 1909.08593 for the coefficient."""
    token_level = ("add_token_level_kl=true", "init_kl_coef=0.05", "target_kl=0.01", "kl_horizon=640")
    tight = "+train_infer_correction={is_weight: {enabled: true}, filters: [{enabled: true, ratio_low: 0.9999999}]}"
    settings = (REFERENCE, *token_level, tight, "save_steps=2", "max_ckpt_to_keep=0")
    run = rewarded(stage, *settings)
    assert run.code == 0
    rows, coefficient = run.rows("metrics.jsonl")[1:], 0.05
    for row in rows:
        assert row["critic/kl_coef"] == pytest.approx(coefficient, rel=1e-9)
        error = np.clip(row["critic/reference_kl"] / 0.01 - 1, -0.2, 0.2)
        coefficient *= 1 + error * 64 / 640
        assert 0 < row["rollout/correction/masked_rate"] < 1
        assert row["rollout/correction/weight_mean"] == pytest.approx(1, abs=1e-3)
    assert coefficient != 0.05
    for row in run.rows("samples.jsonl"):
        assert row["kl_coef"] == pytest.approx(rows[row["step"] - 1]["critic/kl_coef"])
        ratio = np.exp(np.array(row["student_logprobs"]) - np.array(row["rollout_logprobs"]))
        clear = np.abs(ratio - 0.9999999) > 1e-7
        assert np.array_equal(np.array(row["loss_mask"])[clear], (ratio >= 0.9999999)[clear])
    again = rewarded(stage, *settings, f"resume_from_checkpoint={run.path}/checkpoints/step_2")
    assert again.code == 0
    for name in ("critic/kl_coef", "critic/reference_kl", "rollout/correction/masked_rate", "actor/grad_norm"):
        assert again.rows("metrics.jsonl")[STEPS][name] == rows[STEPS - 1][name]


@pytest.mark.extras
def test_logprobs_that_are_not_finite_end_a_run_after_three_steps(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Updates are skipped and counted, the weights are unchanged, and the samples are recorded."""
    honest = MegatronScorer.score

    async def broken(self: MegatronScorer, *arguments: Any) -> list[TeacherAnswer]:
        answers = await honest(self, *arguments)
        return [replace(answer, logprobs=answer.logprobs * np.float32(np.nan)) for answer in answers]

    monkeypatch.setattr(MegatronScorer, "score", broken)
    run = pure(stage, "max_steps=4", "save_steps=2", "max_ckpt_to_keep=0", "teacher_preflight=false")
    assert run.code == 1
    rows = run.rows("metrics.jsonl")
    assert [(row["step"], row.get("actor/skipped_updates")) for row in rows] == [(0, None), (1, 1.0), (2, 1.0)]
    before, after = load_file(stage.first_weights), load_file(run.path / "checkpoints/step_2/hf/model.safetensors")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    said = capsys.readouterr().err
    assert str(run.path / "skipped_samples.jsonl") in said and "3 consecutive updates" in said
    assert "Stopped after 2 of 4 steps: 3 consecutive updates of " in (run.path / "report.html").read_text()
    samples = run.rows("skipped_samples.jsonl")
    assert len(samples) == 64 and {sample["step"] for sample in samples} == {3}
    for sample in samples:
        acted = np.flatnonzero(sample["action_mask"]).tolist()
        assert sample["not_finite"]["teacher_logprobs.teacher"] == acted
        assert "student_logprobs" not in sample["not_finite"] and None not in sample["student_logprobs"]


@pytest.mark.nightly  # on every push: all verdicts of a teacher in test_staged_teachers.py, and its refusal below
def test_the_preflight_of_a_sound_teacher_changes_no_bit(stage: Stage) -> None:
    checked, unchecked = (pure(stage, "max_steps=1", *more) for more in ((), ("teacher_preflight=false",)))
    rows = json.loads((checked.path / "summary.json").read_text())["preflight"]["teacher"]
    assert len(rows) == 12 and {row["verdict"] for row in rows} == {"ok"}, rows
    assert "teacher" not in json.loads((unchecked.path / "summary.json").read_text())["preflight"]
    weights = [load_file(run.path / "checkpoints/step_1/hf/model.safetensors") for run in (checked, unchecked)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.nightly  # on every push: refusals and values of the check in test_engine_check.py
@pytest.mark.parametrize("mode", ["synchronous", "async"])
def test_the_engine_check_changes_no_bit(stage: Stage, mode: str) -> None:
    settings = ["max_steps=3"] if mode == "synchronous" else ["max_steps=3", "async_generation_ratio=1"]
    checked, unchecked = (pure(stage, *settings, *more) for more in ((), ("engine_check=false",)))
    assert all("rollout/engine/z" in row for row in checked.rows("metrics.jsonl")[1:])
    assert not any("rollout/engine/z" in row for row in unchecked.rows("metrics.jsonl"))
    weights = [load_file(run.path / "checkpoints/step_3/hf/model.safetensors") for run in (checked, unchecked)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("action", ["error", pytest.param("warn", marks=pytest.mark.nightly)])
def test_the_preflight_finds_a_teacher_at_another_temperature(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], action: str
) -> None:
    """It ends the run before a step, unless `teacher_preflight` is `warn`."""
    honest = MegatronScorer.score

    async def hotter(
        self: MegatronScorer, sequences: Sequence[TokenSequence], temperature: float, wanted: Wanted = LOGPROBS
    ) -> list[TeacherAnswer]:
        is_of_the_run = wanted == LOGPROBS
        return await honest(self, sequences, 2 * temperature if is_of_the_run else temperature, wanted)

    monkeypatch.setattr(MegatronScorer, "score", hotter)
    if action == "warn":
        assert pure(stage, "teacher_preflight=warn", "max_steps=1").code == 0
        return
    run = pure(stage)
    assert run.code == 1 and [row["step"] for row in run.rows("metrics.jsonl")] == [0]
    assert "the preflight of teacher teacher failed: sampling temperature" in capsys.readouterr().err


@pytest.mark.nightly  # on every push: a teacher that is the student in test_rewarded_runs.py, and `full` above
def test_a_student_that_is_its_own_teacher_learns_nothing(stage: Stage) -> None:
    """Neither from sampled tokens nor from the whole vocabulary."""
    myself = REFERENCE.replace("reference", "teacher", 1)
    run = pure(stage, "~teacher", myself, "allow_self_teacher=true", "opd_objective=full", "max_steps=1")
    assert run.code == 0
    for row in run.rows("samples.jsonl"):
        gap = np.array(row["student_logprobs"]) - np.array(row["teacher_logprobs"]["teacher"])
        assert np.abs(gap).max() < 1e-6
    assert abs(run.rows("metrics.jsonl")[1]["actor/opd_loss"]) < 1e-6


def test_a_full_disk_keeps_the_last_checkpoint(
    stage: Stage, small_disk: Callable[[int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    room = small_disk(10)  # MiB: for one checkpoint of the demo's student and not for two
    run = pure(stage, "save_steps=1", "max_ckpt_to_keep=0", place=room)
    assert run.code == 2
    said = capsys.readouterr().err
    assert "could not be written" in said and "MiB free" in said and "resume_from_checkpoint=true" in said
    assert [path.name for path in run.path.glob("checkpoints/*")] == ["step_1"]
    assert (run.path / "checkpoints/step_1/hf/model.safetensors").stat().st_size > 1_000_000
