"""`roll-opd plan`: its text and JSON, the memory estimate, and the shipped examples."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from config_assets import PARAMETERS, write_config, write_model

from roll_opd.base.paths import REPOSITORY
from roll_opd.commands.describe import to_json
from roll_opd.commands.main import main
from roll_opd.commands.plan_text import to_text
from roll_opd.models.memory import readable_bytes
from roll_opd.planner.device_mapping import short_devices
from roll_opd.planner.load_plan import load_plan


def test_json_of_the_command(root: Path, values: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "plan",
        "--config_path",
        write_config(root, values),
        "--config_name",
        "run",
        "--json",
        "seed=3",
    ]
    assert main(arguments) == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["mode"], content["pipeline"]) == ("pure", "rlvr")
    (warning,) = content["warnings"]
    assert "student_infer: " in warning and "heads of size 4" in warning
    stages = content["roles"]["teacher"].pop("memory_bytes_of_stages")
    assert [sum(parts.values()) for parts in stages] == [content["roles"]["teacher"]["memory_bytes_per_rank"]]
    assert content["roles"]["teacher"] | {"memory_bytes_per_rank": 0} == {
        "strategy": "megatron_infer",
        "model": str(root / "teacher"),
        "dtype": "fp32",
        "devices": [2, 3],
        "tp": 2,
        "pp": 1,
        "cp": 1,
        "ep": 1,
        "dp": 1,
        "tags": None,
        "opd_kl_coef": 1.0,
        "context": None,
        "follows_student": None,
        "optimizer": None,
        "lora": None,
        "memory_bytes_per_rank": 0,
    }
    for role in content["roles"].values():
        assert role["memory_bytes_per_rank"] > 0
    assert content["roles"]["student_train"]["optimizer"]["lr_scheduler_type"] == "linear"
    assert content["sampling"]["rollout"]["n"] == 2
    assert content["batch"]["sequences_per_step"] == 16


def test_the_description_names_devices_batches_and_warnings(plan: Callable[..., Any]) -> None:
    text = to_text(plan({"rollout_dump_dir": "x"}))
    assert "0-1: student_train, student_infer (take turns)" in text
    assert "8 prompts x 2 responses = 16 sequences per step, in 1 update(s) of 16" in text
    assert "Warnings\n  - these keys" in text


@pytest.mark.extras
def test_routing_and_objective_of_a_mixed_run(plan: Callable[..., Any], values: dict[str, Any], root: Path) -> None:
    single = values["teacher"]
    write_model(root / "other", seed=9)
    other = {**single, "model_args": {"model_name_or_path": str(root / "other")}, "tag_included": ["math"]}
    values["actor_train"], values["actor_infer"] = values.pop("student_train"), values.pop("student_infer")
    values["teacher"] = {"general": single, "special": {**other, "opd_kl_coef": 0.25}}
    filtered = {"type": "std_filter", "filter_args": {"std_threshold": 0.1}}
    run = plan(
        {
            "use_opd": True,
            "adv_estimator": "grpo",
            "norm_mean_type": "group",
            "rewards.math_rule.query_filter_config": filtered,
            "is_use_additional_prompts": True,
        },
        pure=False,
    )
    content = to_json(run)
    assert content["routing"] == {
        "math": {"teachers": ["general", "special"], "rewards": ["math_rule"]},
        "*": {"teachers": ["general"], "rewards": []},
    }
    assert content["objective"]["norm_mean_type"] == "group"
    assert content["rewards"]["math_rule"]["query_filter"] == {"type": "std_filter", "std_threshold": 0.1}
    assert content["batch"]["extra_prompts"] == 16
    assert json.loads(json.dumps(content)) == content
    text = to_text(run)
    assert "on-policy distillation with a reward" in text
    assert "math: teachers general, special; rewards math_rule" in text
    assert "every other tag: teachers general; rewards none" in text
    assert "rewards.math_rule: math_rule x 1, query_filter std_filter std_threshold 0.1" in text
    assert "math_rule: roll_opd.extras.graders.rewards.math_rule, in place of the core's" in text
    formula = (
        "grpo(reward, mean by group, std by group; gamma 1) - 1 * reverse_kl(general) - 0.25 * reverse_kl(special)"
    )
    assert f"advantage = {formula}" in text
    assert "extra_prompts 16" in text


def test_devices_and_bytes_are_written_briefly() -> None:
    assert short_devices([0, 1, 2, 3, 6, 8, 9]) == "0-3,6,8-9"
    assert [readable_bytes(size) for size in (12, 2048, 3 << 20, 5 << 40)] == [
        "12 B",
        "2.0 KiB",
        "3.0 MiB",
        "5120.0 GiB",
    ]


def test_memory_of_the_optimizer_is_sharded(plan: Callable[..., Any]) -> None:
    sharded = plan({"student_train.model_args.dtype": "bf16"}).memory["student_train"][0]
    held = PARAMETERS + 2 * (32 - 8) * 16  # the vocabulary is padded, in embedding and output head
    assert sharded["weights"] == held * 2
    assert sharded["gradients"] == held * 4
    assert sharded["optimizer"] == held * 12 // 2
    whole = plan({"student_train.strategy_args.strategy_config": {"use_distributed_optimizer": False}})
    assert whole.memory["student_train"][0]["optimizer"] == held * 12


def test_demo_example_plans_cleanly() -> None:
    run = load_plan("demo", "onpolicy_distill", pure=True)
    assert run.warnings == ()
    assert run.mode == "pure"
    assert run.sequences_per_step == 256
    assert run.student.mini_batch_sequences == 256
    assert run.rollout is not None
    assert run.student.layout.dp == run.teachers[0].source.layout.dp == run.rollout.engines == 2  # copies on both slots
    assert run.validation is not None
    assert run.validation.evaluate_teacher
    spread = "parallel@teacher.strategy_args.strategy_config=tp2"  # as the file says
    assert load_plan("demo", "onpolicy_distill", [spread], pure=True).teachers[0].source.layout.tp == 2


def test_gsm8k_example_plans_cleanly(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        '{"id": "0", "messages": [{"role": "user", "content": "ab"}], "tag": "math_rule", "ground_truth": "1"}\n'
    )
    run = load_plan("gsm8k", "onpolicy_distill", [f"student_train.data_args.file_name={rows}"], pure=True)
    assert run.warnings == ()
    assert run.max_steps == 5


def test_groups_hold_only_known_keys(root: Path, values: dict[str, Any]) -> None:
    """Every fragment in configs/ composes into a configuration that plans, on enough devices."""
    values["num_gpus_per_node"] = 64
    values["teacher"]["device_mapping"] = "list(range(16,32))"
    write_model(root / "teacher", seed=2, num_attention_heads=8, num_key_value_heads=8)
    directory = write_config(root, values)
    targets = {
        "parallel": "parallel@teacher.strategy_args.strategy_config",
        "rollout": "rollout@student_infer.strategy_args.strategy_config",
        "trackers": "trackers",
    }
    for group, target in targets.items():
        for fragment in sorted((REPOSITORY / "configs" / group).glob("*.yaml")):
            # a plan may name a tracker that is not installed here
            options = {"pure": True, "runnable": group != "trackers"}
            run = load_plan(directory, "run", [f"+{target}={fragment.stem}"], **options)
            assert to_json(run)["roles"]
            assert group != "trackers" or fragment.stem in run.trackers


def test_overrides_may_stand_anywhere(root: Path, values: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_config(root, values)
    arguments = ["plan", "exp_name=one", "--config_path", directory, "max_steps=3", "--config_name", "run"]
    assert main([*arguments, "--json", "~rewards"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["exp_name"], content["batch"]["steps"]) == ("one", 3)
    with pytest.raises(SystemExit) as caught:
        main([*arguments, "--no-such-option"])
    assert caught.value.code == 2
