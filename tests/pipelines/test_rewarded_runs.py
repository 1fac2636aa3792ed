"""A whole run of mixed mode, and what its record says."""

import json

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
