"""Broken configurations as users write them: each message names the key, the value and the remedy.

All run in one process. `test_command_line_error_is_quick_and_exits_with_2` tests that the command prints such a message
within seconds and has exit code 2.
"""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from config_assets import base_values, set_key, write_config, write_model

from roll_opd.base.failures import ConfigError
from roll_opd.planner.load_plan import load_plan

TEACHER = "teacher.strategy_args.strategy_config"
TRAIN = "student_train.strategy_args.strategy_config"
# words of a remedy
REMEDY = re.compile(
    r"should be|did you mean|known:|could be|should hold"
    r"|\b(use|write|give|choose|remove|rename|raise|lower|keep|set|make|change|add|put)\b",
    re.IGNORECASE,
)

# name -> changes, the key and the value that the message must show
BROKEN: dict[str, tuple[dict[str, Any], str, str]] = {
    "number as text": ({"max_steps": "many"}, "max_steps", "many"),
    "text for a switch": ({"is_num_return_sequences_expand": True, "use_opd": "maybe"}, "use_opd", "maybe"),
    "list for a section": ({"student_train.training_args": [1]}, "student_train.training_args", "[1]"),
    "negative learning rate": (
        {"student_train.training_args.learning_rate": -1},
        "student_train.training_args.learning_rate",
        "-1",
    ),
    "fraction of a step": ({"rollout_batch_size": 1.5}, "rollout_batch_size", "1.5"),
    "typo at the top": ({"rolout_batch_size": 8}, "rolout_batch_size", "'rollout_batch_size'"),
    "typo in a role": ({"teacher.device_maping": "[0]"}, "teacher.device_maping", "'device_mapping'"),
    "typo in an engine argument": (
        {"student_infer.strategy_args.strategy_config": {"gpu_memory_utilisation": 0.5}},
        "student_infer.strategy_args.strategy_config.gpu_memory_utilisation",
        "'gpu_memory_utilization'",
    ),
    "typo in a Megatron setting": (
        {f"{TEACHER}.pipeline_parallel_size": 2},
        f"{TEACHER}.pipeline_parallel_size",
        "'pipeline_model_parallel_size'",
    ),
    "no teacher": ({"teacher": ...}, "teacher", "model_name_or_path"),
    "no rollout role": ({"student_infer": ...}, "student_infer", "is missing"),
    "names of the other mode": ({"actor_train": {}}, "actor_train", "'student_train'"),
    "both switches": ({"is_pure_opd": True, "use_opd": True}, "use_opd", "is_pure_opd"),
    "unbalanced range": ({"teacher.device_mapping": "list(range(2,4)"}, "teacher.device_mapping", "list(range(2,4)"),
    "empty range": ({"teacher.device_mapping": "range(4,2)"}, "teacher.device_mapping", "range(4,2)"),
    "code in device_mapping": (
        {"teacher.device_mapping": "__import__('os').system('true')"},
        "teacher.device_mapping",
        "__import__",
    ),
    "device beyond the nodes": ({"num_nodes": 1, "teacher.device_mapping": [6, 7]}, "teacher.device_mapping", "7"),
    "device listed twice": ({"teacher.device_mapping": [2, 2]}, "teacher.device_mapping", "2"),
    "partly overlapping roles": (
        {"teacher.device_mapping": [1, 2]},
        "teacher.device_mapping",
        "1-2",
    ),
    "TP not dividing heads": (
        {"teacher.device_mapping": [0, 1, 2], f"{TEACHER}.tensor_model_parallel_size": 3, "num_nodes": 1},
        f"{TEACHER}.tensor_model_parallel_size",
        "3",
    ),
    "PP not dividing layers": (
        {f"{TEACHER}": {"pipeline_model_parallel_size": 3}, "teacher.device_mapping": [0, 1, 2]},
        f"{TEACHER}.pipeline_model_parallel_size",
        "4 layers",
    ),
    "zero-sized parallelism": ({f"{TRAIN}": {"context_parallel_size": 0}}, f"{TRAIN}.context_parallel_size", "0"),
    "batch not dividing DP": ({"rollout_batch_size": 7}, "rollout_batch_size", "7"),
    "unknown tag": ({"teacher.tag_included": ["code"]}, "teacher", "'math'"),
    "tag owned twice": (
        {"rewards.other": {"worker_cls": "math_rule", "tag_included": ["math"]}},
        "rewards.other.tag_included",
        "'math'",
    ),
    "absent template": ({"global_template": "qwen99"}, "global_template", "qwen99"),
    "absent model": (
        {"teacher.model_args.model_name_or_path": "no/such"},
        "teacher.model_args.model_name_or_path",
        "no/such",
    ),
    "self-teaching": (
        {"teacher.model_args.model_name_or_path": "${student_train.model_args.model_name_or_path}"},
        "teacher.model_args.model_name_or_path",
        "student",
    ),
    "response longer than the model": ({"response_length": 4096}, "generating_args.max_new_tokens", "4096"),
    "temperature 0": (
        {"student_infer.generating_args.temperature": 0},
        "student_infer.generating_args.temperature",
        "0",
    ),
    "no such tracker": ({"track_with": "tensorbord"}, "track_with", "tensorbord"),
    "no such reward": (
        {"rewards.math_rule.worker_cls": "roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorke"},
        "rewards.math_rule.worker_cls",
        "'MathRuleRewardWorker'",
    ),
    "argument that a reward does not take": (
        {"rewards.math_rule.tolerance": 0.1},
        "rewards.math_rule.tolerance",
        "math_rule",
    ),
    "resume from nowhere": ({"resume_from_checkpoint": "no/run"}, "resume_from_checkpoint", "no/run"),
    "interpolation of nothing": ({"exp_name": "${expname}"}, "exp_name", "expname"),
    "value left open": ({"seed": "???"}, "seed", "???"),
    "teacher strategy without log-probs": (
        {"teacher.strategy_args.strategy_name": "vllm"},
        "teacher.strategy_args.strategy_name",
        "'vllm'",
    ),
    "parts of weights to the same devices": ({"weight_sync": "m2n"}, "weight_sync", "share 0"),
    "filter without threshold": (
        {"rewards.math_rule.query_filter_config": {"type": "std_filter"}},
        "rewards.math_rule.query_filter_config.filter_args.std_threshold",
        "std_filter",
    ),
}


@pytest.mark.parametrize("name", BROKEN, ids=lambda name: name.replace(" ", "-"))
def test_broken_configuration(name: str, problems: Callable[..., list[str]]) -> None:
    changes, key, value = BROKEN[name]
    start = time.process_time()  # not the clock's: other work on the machine is not this command's
    found = problems(changes)
    assert time.process_time() - start < 2
    about = [text for text in found if key in text.partition(": ")[0]]
    assert about, found
    assert any(value in text and REMEDY.search(text) for text in about), about


MIXED_BROKEN: dict[str, tuple[dict[str, Any], str, str]] = {
    "no rewards to learn from": ({"rewards": ...}, "rewards", "use_opd"),
    "data tag without a reward": ({"rewards.math_rule.tag_included": ["code"]}, "rewards", "'math'"),
    "no reference policy": ({"use_kl_loss": True}, "use_kl_loss", "true"),
    "no such estimator": ({"adv_estimator": "gpro"}, "adv_estimator", "gpro"),
    "estimator without an implementation": ({"adv_estimator": "skip_obs_gae"}, "adv_estimator", "skip_obs_gae"),
    "names of pure distillation": ({"student_train": {}}, "student_train", "'actor_train'"),
}


@pytest.mark.parametrize("name", MIXED_BROKEN, ids=lambda name: name.replace(" ", "-"))
def test_broken_mixed_configuration(name: str, values: dict[str, Any], problems: Callable[..., list[str]]) -> None:
    changes, key, value = MIXED_BROKEN[name]
    values["actor_train"], values["actor_infer"] = values.pop("student_train"), values.pop("student_infer")
    values |= {"use_opd": True, "adv_estimator": "grpo"}
    about = [text for text in problems(changes, pure=False) if text.startswith(f"{key}: ")]
    assert any(value in text and REMEDY.search(text) for text in about), about


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", "is empty; write"),
        ("# nothing but a comment\n", "is empty; write"),
        ("student_train: [1\n", "line"),
        ("a: 1\n\tb: 2\n", "line 2"),
        ("max_steps: 1\nmax_steps: 2\n", "max_steps"),
        ("defaults:\n  - nowhere/to_be_found\n", "nowhere/to_be_found"),
    ],
)
def test_broken_file(root: Path, text: str, shown: str) -> None:
    (root / "broken.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_plan(str(root), "broken")
    assert "broken.yaml" in str(caught.value)
    assert shown in str(caught.value)


def test_several_mistakes_are_reported_together(root: Path) -> None:
    """A user should not have to run the command once for each."""
    values = base_values(root)
    write_model(root / "teacher", seed=2, num_attention_heads=3, num_key_value_heads=3)
    for key, value in {"rolout_batch_size": 1, "global_template": "x", "rollout_batch_size": 7}.items():
        set_key(values, key, value)
    with pytest.raises(ConfigError) as caught:
        load_plan(write_config(root, values), "run", pure=True)
    assert len(caught.value.problems) >= 4
