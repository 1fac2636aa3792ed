"""Whole runs of mixed mode and of plain reinforcement learning, and what their record says."""

import json
from pathlib import Path

import numpy as np
import pytest
from runs import REPOSITORY, RLVR, Run, launch

STEPS = 3
SMALL = (
    "rollout_batch_size=16",
    "actor_train.training_args.gradient_accumulation_steps=1",
    "validation=null",
    "eval_steps=0",
    "save_steps=0",
    "samples_per_step=64",
    f"max_steps={STEPS}",
    "exp_name=demo",
)
TWO_TEACHERS = """+teacher={
  good: {
    model_args: {model_name_or_path: examples/demo/models/teacher, dtype: fp32},
    strategy_args: {strategy_name: megatron_infer, strategy_config: {tensor_model_parallel_size: 2}},
    device_mapping: "[0,1]", tag_included: [odd], opd_kl_coef: 0.5},
  self: {
    model_args: {model_name_or_path: examples/demo/models/student, dtype: fp32},
    strategy_args: {strategy_name: megatron_infer}, device_mapping: "[1]", tag_included: [even]}}"""


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two teachers for two tags; groups whose samples are all alike are replaced by other prompts."""
    place = tmp_path_factory.mktemp("mixed")
    rows = [json.loads(line) for line in (REPOSITORY / "examples/demo/data/train.jsonl").read_text().splitlines()]
    tagged = [{**row, "tag": ("even", "odd")[number % 2]} for number, row in enumerate(rows)]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tagged))
    return launch(
        place / "run",
        *SMALL,
        f"actor_train.data_args.file_name={place / 'rows.jsonl'}",
        "~teacher",
        TWO_TEACHERS.replace("\n", " "),
        "opd_kl_coef=0.7",
        "allow_self_teacher=true",
        "opd_kl_discount=1",
        "whiten_advantages=true",
        "rewards.math_rule.tag_included=[odd,even]",
        "rewards.math_rule.query_filter_config={type: std_filter, filter_args: {std_threshold: 0.0}}",
        "is_use_additional_prompts=true",
        "max_additional_running_prompts=8",
        launcher=RLVR,
        config=("demo", "rlvr_opd"),
    )


def test_advantages_follow_from_the_record_alone(mixed: Run) -> None:
    assert mixed.code == 0, mixed.output[-4000:]
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
            gap = np.array(row["student_logprobs"]) - np.array(row["teacher_logprobs"][name])
            token_rewards = -coefficient * gap
            token_rewards[-1] += row["reward"]
            assert row["token_level_rewards"] == pytest.approx(token_rewards, abs=1e-6)
            to_go = np.cumsum((coefficient * gap)[::-1])[::-1]
            assert row["advantages"] == pytest.approx((reward - mean) / scale - to_go, abs=1e-6)


def test_each_sample_is_scored_by_its_own_teacher(mixed: Run) -> None:
    """One teacher is the untrained student itself, so its log-probs are known."""
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


def test_grpo_with_a_reference_policy_and_no_teacher(tmp_path: Path) -> None:
    """Its token-level KL has a coefficient that adapts, and a resumed run goes on with the one it had reached."""
    settings = (
        *SMALL,
        "+reference={model_args: {model_name_or_path: examples/demo/models/student, dtype: fp32}, "
        'strategy_args: {strategy_name: megatron_infer}, device_mapping: "[1]"}',
        "use_kl_loss=true",
        "kl_loss_coef=0.1",
        "add_token_level_kl=true",
        "init_kl_coef=0.05",
        "+target_kl=0.001",
        "+kl_horizon=100",
        "+train_infer_correction={is_weight: {enabled: true}, filters: [{enabled: true}]}",
        "deterministic=true",
        "save_steps=2",
        "max_ckpt_to_keep=0",
    )
    run = launch(tmp_path / "run", *settings, launcher=RLVR, config=("demo", "rlvr"))
    assert run.code == 0, run.output[-4000:]
    metrics = run.rows("metrics.jsonl")
    assert metrics[1]["actor/kl_loss"] == pytest.approx(0, abs=1e-6)  # nothing has been learned yet
    assert metrics[STEPS]["actor/kl_loss"] > 1e-6
    assert not any(name.startswith("opd/reverse_kl") for name in metrics[1])
    coefficient = 0.05
    for row in metrics[1:]:
        assert row["critic/kl_coef"] == pytest.approx(coefficient, rel=1e-12)
        error = min(max(row["critic/reference_kl"] / 0.001 - 1, -0.2), 0.2)
        coefficient *= 1 + error * 64 / 100
        assert row["rollout/correction/masked_rate"] == 0  # the engines agree
        assert row["rollout/correction/weight_mean"] == pytest.approx(1, abs=1e-4)
    assert metrics[1]["critic/kl_coef"] != metrics[2]["critic/kl_coef"] != metrics[3]["critic/kl_coef"]
    resume = f"resume_from_checkpoint={run.path.resolve()}/checkpoints/step_2"
    parts = launch(tmp_path / "parts", *settings, resume, launcher=RLVR, config=("demo", "rlvr"))
    assert parts.code == 0, parts.output[-4000:]
    (last,) = parts.rows("metrics.jsonl")
    assert last["critic/kl_coef"] == metrics[3]["critic/kl_coef"]
    assert last["critic/advantages/mean"] == metrics[3]["critic/advantages/mean"]
    for row in run.rows("samples.jsonl"):
        assert row["teacher_logprobs"] == {}
        gap = np.array(row["student_logprobs"]) - np.array(row["ref_logprobs"])
        expected = (
            -row["kl_coef"] * np.cumsum(gap[::-1])[::-1] + (row["reward"] - row["reward_mean"]) / row["reward_scale"]
        )
        assert row["advantages"] == pytest.approx(expected, abs=1e-6)
