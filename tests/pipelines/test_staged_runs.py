"""Runs of every algorithm and objective by the same roles: they move the weights, and what is to teach teaches."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import Run
from safetensors.torch import load_file
from stage import Stage, open_stage

from roll_opd.config.algorithms import ALGORITHMS

ELSEWHERE = ("sft", "dpo")  # other pipelines: test_supervised_runs.py
STEPS = 3

WITH_REWARD, PURE = ("demo", "rlvr"), ("demo", "onpolicy_distill")
SHORT = (
    "deterministic=true",
    "rollout_batch_size=16",
    "validation=null",
    "eval_steps=0",
    "save_steps=0",
    "samples_per_step=64",
)


def optimizer_of(role: str) -> tuple[str, ...]:
    schedule = {"learning_rate": "3e-4", "warmup_steps": "0", "lr_scheduler_type": "constant"}
    settings = {**schedule, "gradient_accumulation_steps": "1"}
    return tuple(f"{role}.training_args.{name}={value}" for name, value in settings.items())


def role(name: str, model: str, devices: str, strategy: str, more: str = "") -> str:
    return (
        f"++{name}={{model_args: {{model_name_or_path: examples/demo/models/{model}, dtype: fp32}}, {more} "
        f'device_mapping: "{devices}", strategy_args: {{{strategy}}}, '
        "use_dynamic_batching_in_infer: true, max_tokens_per_microbatch_in_infer: 12288}"
    )


TEACHER = role(
    "teacher", "teacher", "[0,1]", "strategy_name: megatron_infer, strategy_config: {tensor_model_parallel_size: 2}"
)
REFERENCE = role("reference", "student", "[1]", "strategy_name: megatron_infer")
CRITIC = role(
    "critic",
    "student",
    "[1]",
    "strategy_name: megatron_train",
    "training_args: {learning_rate: 1e-3, weight_decay: 0, per_device_train_batch_size: 64},"
    " use_dynamic_batching_in_train: true, max_tokens_per_microbatch_in_train: 4096,",
)

EXPERT = "++expert={data_args: {file_name: examples/demo/data/sft_train.jsonl}}"


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    everyone = (TEACHER, REFERENCE, CRITIC, "use_opd=true", "opd_kl_coef=1", "adv_estimator=gae", "use_kl_loss=true")
    place = tmp_path_factory.mktemp("stage")
    with open_stage(place, *SHORT, *optimizer_of("actor_train"), *everyone, config=WITH_REWARD) as opened:
        yield opened


def rewarded(stage: Stage, *overrides: str) -> Run:
    return stage.run(*SHORT, *optimizer_of("actor_train"), f"max_steps={STEPS}", *overrides, config=WITH_REWARD)


def pure(stage: Stage, *overrides: str) -> Run:
    settings = (*SHORT, *optimizer_of("student_train"), f"max_steps={STEPS}")
    return stage.run(*settings, *overrides, config=PURE, pure=True)


def last_weights(run: Run) -> Path:
    return run.path / f"checkpoints/step_{STEPS}/hf/model.safetensors"


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in ELSEWHERE])
def test_every_algorithm_moves_the_weights(stage: Stage, name: str) -> None:
    row = ALGORITHMS[name]
    if name == "on_policy_distill":
        run = pure(stage)
    else:
        roles = [REFERENCE] * row.use_reference + [CRITIC] * row.use_critic + [EXPERT] * bool(row.expert_data_ratio)
        run = rewarded(stage, "~adv_estimator", f"+algorithm_type={name}", *roles)
    assert run.code == 0
    rows = run.rows("metrics.jsonl")[1:]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        assert 0 < row["actor/grad_norm"] < 1e3 and row["actor/skipped_updates"] == 0
    before, after = load_file(stage.first_weights), load_file(last_weights(run))
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_a_run_is_the_same_whatever_was_run_before(stage: Stage) -> None:
    """So a state saved before the first update is whole."""
    one, _, other = (rewarded(stage, f"seed={seed}") for seed in (5, 6, 5))
    of_one, of_other = (load_file(last_weights(run)) for run in (one, other))
    assert all(torch.equal(of_one[name], of_other[name]) for name in of_one)


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


@pytest.mark.parametrize("objective", DIVERGENCES)
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
