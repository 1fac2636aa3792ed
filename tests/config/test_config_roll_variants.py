"""Forms that ROLL's own YAML have and its documents do not tell: each is accepted, and means what ROLL takes it for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roll_opd.config.plan import RunPlan

Plan = Callable[..., RunPlan]
Problems = Callable[..., list[str]]


def _rename_roles(values: dict[str, Any]) -> None:
    values["actor_train"], values["actor_infer"] = values.pop("student_train"), values.pop("student_infer")


def test_pythons_none_is_null(plan: Plan, values: dict[str, Any]) -> None:
    """`norm_mean_type: None`, which YAML reads as a text."""
    _rename_roles(values)
    run = plan({"norm_mean_type": "None", "norm_std_type": "None", "adv_estimator": "reinforce"}, pure=False)
    assert (run.objective.norm_mean_type, run.objective.norm_std_type) == (None, None)


def test_null_takes_grpos_deviation_away(plan: Plan, values: dict[str, Any]) -> None:
    _rename_roles(values)
    run = plan({"adv_estimator": "grpo", "norm_std_type": None}, pure=False)
    assert (run.objective.norm_mean_type, run.objective.norm_std_type) == ("group", None)


def test_older_normalisation_keys(plan: Plan, values: dict[str, Any]) -> None:
    _rename_roles(values)
    off = {"adv_estimator": "grpo", "reward_norm": None, "reward_shift": False, "reward_scale": False}
    assert not any("reward_" in text for text in plan(off, pure=False).warnings)
    said = [text for text in plan({"reward_norm": "group"}, pure=False).warnings if "reward_" in text]
    assert len(said) == 1 and "norm_mean_type and norm_std_type say" in said[0]


def test_an_rlvr_file_made_pure_by_a_switch_keeps_its_names(plan: Plan, values: dict[str, Any]) -> None:
    _rename_roles(values)
    run = plan({"is_pure_opd": True}, pure=None)
    assert (run.mode, run.student.name, run.rollout.name) == ("pure", "actor_train", "actor_infer")


def test_rewards_may_be_left_out(plan: Plan, root: Path) -> None:
    """With the single domain and the validation that ROLL's YAML still have."""
    changes = {
        "rewards": ...,
        "student_train.data_args.domain_interleave_probs": {"math_rule": 1.0},
        "validation": {"data_args": {"file_name": str(root / "train.jsonl")}},
    }
    run = plan(changes)
    assert (run.rewards, run.data.streams, run.validation, run.eval_steps) == ((), (), None, 0)
    assert any(text.startswith("validation: ") for text in run.warnings)


def test_layers_that_divide_with_embedding_and_loss(plan: Plan, problems: Problems) -> None:
    """94 layers in 48 virtual stages, as for Qwen3-235B; here 4 layers in 6 stages and in 3."""
    config = "student_train.strategy_args.strategy_config"
    counted = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    devices = {"student_train.device_mapping": [0, 1, 2], "rollout_batch_size": 12}
    roles = {"student_infer.device_mapping": [0, 1, 2], "teacher.device_mapping": [4, 5], "num_nodes": 2}
    run = plan({config: {"pipeline_model_parallel_size": 3, **counted}, **devices, **roles})
    assert run.student.layout.pp == 3
    assert "4 layers" in problems({config: {"pipeline_model_parallel_size": 3}})[0]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_nodes": 1, "num_gpus_per_node": 2}, "raise num_nodes"),
        ({"validation": {"data_args": {"file_name": "val.jsonl"}}}, "'aime' of the validation data"),
        ({"teacher.model_args.model_name_or_path": "bare"}, "has no tokenizer files"),
    ],
    ids=["reach of the devices", "tag of validation", "no tokenizer"],
)
def test_planned_and_not_run(
    plan: Plan, problems: Problems, root: Path, monkeypatch: Any, changes: dict[str, Any], sentence: str
) -> None:
    """ROLL overwrites num_nodes and gives unknown tags to math_rule; a laptop may have only config.json."""
    monkeypatch.chdir(root)
    (root / "val.jsonl").write_text('{"id": "1", "messages": "[]", "tag": "aime", "ground_truth": "1"}\n')
    (root / "bare").mkdir()
    (root / "bare" / "config.json").write_text((root / "teacher" / "config.json").read_text())
    run = plan(changes, runnable=False)
    assert any(sentence in text for text in run.warnings)
    assert run.num_nodes == (2 if "num_nodes" in changes else 1)
    assert any(sentence in text for text in problems())


def test_settings_of_rolls_engines_are_accepted(plan: Plan) -> None:
    run = plan(
        {
            "model_name": "${exp_name}-1",
            "parse_tool_call_parameter_to_dict": True,
            "student_train.strategy_args.strategy_config": {"optimizer_cpu_offload": True, "ckpt_format": "torch_dist"},
            "student_infer.strategy_args.strategy_config": {"online_quantization": "ascend_mxfp8"},
        }
    )
    told = next(text for text in run.warnings if "no effect" in text)
    assert all(key in told for key in ("model_name", "optimizer_cpu_offload", "ckpt_format", "online_quantization"))
