"""Undocumented forms of ROLL's YAML: each is accepted, and has the same meaning as in ROLL."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roll_opd.base.failures import ConfigError
from roll_opd.config.plan import RunPlan
from roll_opd.planner.load_plan import load_plan

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
    assert len(said) == 1 and "norm_mean_type and norm_std_type set" in said[0]


def test_an_rlvr_file_made_pure_by_a_switch_keeps_its_names(plan: Plan, values: dict[str, Any]) -> None:
    _rename_roles(values)
    run = plan({"is_pure_opd": True}, pure=None)
    assert (run.mode, run.student.name, run.rollout.name) == ("pure", "actor_train", "actor_infer")


def test_rewards_may_be_left_out(plan: Plan, root: Path) -> None:
    """With the single domain and the validation that ROLL's YAML files still have."""
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
        ({"num_nodes": 1, "num_gpus_per_node": 2}, "raise or remove num_nodes"),
        ({"validation": {"data_args": {"file_name": "val.jsonl"}}}, "'aime' of the validation data"),
        ({"teacher.model_args.model_name_or_path": "bare"}, "has no tokenizer files"),
    ],
    ids=["reach of the devices", "tag of validation", "no tokenizer"],
)
def test_configurations_for_another_machine_are_planned_and_not_run(
    plan: Plan, problems: Problems, root: Path, monkeypatch: Any, changes: dict[str, Any], sentence: str
) -> None:
    """ROLL overwrites num_nodes and gives unknown tags to math_rule; a laptop may have only config.json."""
    monkeypatch.chdir(root)
    (root / "val.jsonl").write_text(
        '{"id": "1", "messages": [{"role": "user", "content": "ab"}], "tag": "aime", "ground_truth": "1"}\n'
    )
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
            "student_train.strategy_args.strategy_config": {
                "optimizer_cpu_offload": True,
                "ckpt_format": "torch_dist",
                "distrib_optim_fully_reshardable": False,
            },
            "student_infer.strategy_args.strategy_config": {"online_quantization": "ascend_mxfp8"},
        }
    )
    reported = next(text for text in run.warnings if "no effect" in text)
    names = ("model_name", "optimizer_cpu_offload", "ckpt_format", "reshardable", "online_quantization")
    assert all(name in reported for name in names)


def test_variables_of_a_file_are_dropped_with_a_word(plan: Plan) -> None:
    """ROLL ignores unknown keys; most of these are variables of the file."""
    own = {
        "gem_games": {"GuessTheNumber": {"env_type": "game", "template": "${game_template}"}},
        "game_template": "You are playing.",
        "default_history_length": 10,
        "world_size": 1,
        "CUDA_DEVICES": "0,1",
    }
    reported = [text for text in plan(own).warnings if "variables of the file" in text]
    assert [text.partition("): ")[2] for text in reported] == [
        "CUDA_DEVICES, default_history_length, gem_games, world_size"
    ]


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("rollout_batchsize", 8, "rollout_batchsize: unknown key; did you mean 'rollout_batch_size'?"),
        ("critc", {}, "critc: unknown key; did you mean 'critic'?"),
        ("learning_rate", 1e-5, "learning_rate: unknown key at the top; it is a key of training_args of a role"),
        ("device_mapping", "[0]", "device_mapping: unknown key at the top; it is a key of a role"),
        ("policy", {"model_args": {}, "device_mapping": "[0]"}, "policy: unknown role"),
    ],
)
def test_a_typing_error_is_no_variable(problems: Problems, key: str, value: Any, sentence: str) -> None:
    (found,) = problems({key: value})
    assert found.startswith(sentence)


@pytest.mark.parametrize("key", ["parallel", "k2", "answer_key"])
def test_a_hint_needs_a_resemblance(plan: Plan, key: str, problems: Problems) -> None:
    assert any(text.endswith(f": {key}") for text in plan({key: 1}).warnings)
    (found,) = problems({key: ...}, overrides=(f"{key}=1",))  # on the command line it can only be meant as a key
    assert "did you mean" not in found


@pytest.mark.extras
def test_the_last_domain_gets_what_the_others_leave(plan: Plan, problems: Problems, root: Path) -> None:
    """rlvr_pipeline.domain_batch_size: 0.6 and 0.3 of a batch, and the rest."""
    probs = "student_train.data_args.domain_interleave_probs"
    tags = {"rewards.code": {"worker_cls": "code_sandbox", "tag_included": ["code"], "unsafe": True}}
    rows = "".join(
        f'{{"messages": [{{"role": "user", "content": "ab"}}], "tag": "{tag}", "ground_truth": "1"}}\n'
        for tag in ("math", "code")
    )
    (root / "train.jsonl").write_text(rows)
    run = plan({**tags, probs: {"math_rule": 0.6, "code": 0.3}})
    assert [round(stream.weight, 9) for stream in run.data.streams] == [0.6, 0.4]
    assert any("code gets the remainder: 0.4 instead of 0.3" in text for text in run.warnings)
    thirds = plan({probs: {"math_rule": 0.499, "code": 0.5}})
    assert not any("gets the remainder" in text for text in thirds.warnings)
    assert "sum to 1.1" in problems({probs: {"math_rule": 0.6, "code": 0.5}})[0]


def test_rows_that_nobody_draws_need_nobody(plan: Plan, values: dict[str, Any], root: Path) -> None:
    _rename_roles(values)
    rows = "".join(
        f'{{"messages": [{{"role": "user", "content": "ab"}}], "tag": "{tag}", "ground_truth": "1"}}\n'
        for tag in ("math", "RLVR")
    )
    (root / "train.jsonl").write_text(rows)
    changes = {
        "adv_estimator": "grpo",
        "teacher": ...,
        "actor_train.data_args.domain_interleave_probs": {"math_rule": 1},
    }
    run = plan(changes, pure=False)
    assert any(text.startswith("rows with tag RLVR are never drawn") for text in run.warnings)
    assert (run.data.draws("math"), run.data.draws("RLVR")) == (True, False)


def test_options_that_an_engine_no_longer_has(plan: Plan) -> None:
    options = {"cuda_graph_sizes": [8], "VLLM_USE_V1": 0, "sleep_level": 2, "enforce_eager": True}
    run = plan(
        {
            "student_infer.strategy_args.strategy_config": options,
            "student_train.strategy_args.strategy_config": {"max_grad_norm": 1.0, "recompute_modules": "moe,layernorm"},
        }
    )
    assert run.rollout.engine_args == {"enforce_eager": True}
    assert run.student.megatron_args == {"recompute_modules": ("moe", "layernorm")}
    assert any("cuda_graph_sizes: the installed vLLM no longer has this option" in text for text in run.warnings)
    assert any("VLLM_USE_V1: is an environment variable" in text and "system_envs" in text for text in run.warnings)


ROLE = {"model_args": {"dtype": "bf16"}, "device_mapping": "[0]", "strategy_args": {"strategy_name": "fsdp2_train"}}


@pytest.mark.extras
@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"student_pretrain": "Qwen/Qwen2.5-7B", "student": ROLE, "teacher": ROLE}, "off-policy distillation"),
        ({"kd_objective": "forward_kl", "sequence_length": 8, "answer_key": "a"}, "off-policy distillation"),
        ({"student_pretrain": "Qwen/Qwen2.5-VL-7B-Instruct", "student": ROLE}, "is a vision-language"),
        ({"pretrain": "Qwen/Qwen3-Omni-30B-A3B-Thinking", "sft_train": ROLE}, "is a vision-language"),
        (
            {"pretrain": "Qwen/Qwen3.5-27B", "rewards": {"cv": {"worker_cls": "roll.x.DetectionRewardWorker"}}}
            | {"actor_train": ROLE},
            "rewards boxes in images",
        ),
        ({"actor_train": {**ROLE, "data_args": {"video_folder": "v"}}}, "vision, video or audio configuration"),
        ({"custom_envs": {"Sokoban": {}}, "actor_infer": ROLE}, "rollout-only pipelines"),
        (
            {"train_env_manager": {"tags": ["a"]}, "actor_train": {"model_args": {}}, "actor_infer": ROLE},
            "rollout-only pipelines",
        ),
    ],
)
def test_pipelines_that_do_not_exist_here_are_one_sentence(root: Path, values: dict[str, Any], sentence: str) -> None:
    (root / "run.yaml").write_text(json.dumps(values))
    with pytest.raises(ConfigError) as caught:
        load_plan(str(root), "run", runnable=False)
    (found,) = caught.value.problems
    assert sentence in found


def test_an_indented_array_is_counted_by_its_rows(root: Path, plan: Plan, problems: Problems) -> None:
    """ROLL's SFT and DPO files name such files; a line is no row there."""
    rows = [{"instruction": str(n), "output": "1"} for n in range(40)]
    (root / "train.json").write_text(json.dumps(rows, indent=2))
    (root / "rows.csv").write_text("prompt\na\n")
    worker = {
        "model_args": {"model_name_or_path": str(root / "student")},
        "training_args": {"num_train_epochs": 2, "per_device_train_batch_size": 4},
        "data_args": {"file_name": str(root / "train.json")},
        "strategy_args": {"strategy_name": "megatron_train"},
        "device_mapping": "[0]",
    }
    (root / "sft.yaml").write_text(json.dumps({"output_dir": str(root), "sequence_length": 64, "sft_train": worker}))
    plan()  # writes the model
    assert load_plan(str(root), "sft", runnable=False).max_steps == 20
    assert "is a CSV file" in problems({"student_train.data_args.file_name": str(root / "rows.csv")})[0]


@pytest.mark.parametrize(
    ("key", "value", "place"),
    [
        ("student_train.learning_rate", 1e-5, "student_train.training_args.learning_rate"),
        ("student_train.model_args.learning_rate", 1e-5, "student_train.training_args.learning_rate"),
        ("student_infer.temperature", 1.0, "student_infer.generating_args.temperature"),
        (
            "teacher.strategy_args.tensor_model_parallel_size",
            2,
            "teacher.strategy_args.strategy_config.tensor_model_parallel_size",
        ),
        ("student_infer.tensor_parallel_size", 2, "student_infer.strategy_args.strategy_config.tensor_parallel_size"),
        ("teacher.strategy_config", {}, "teacher.strategy_args.strategy_config"),
        # in the section of a role without effect: the place where it has one
        ("teacher.file_name", "x", "student_train.data_args.file_name"),
        ("student_train.temperature", 1.0, "student_infer.generating_args.temperature"),
        ("student_train.num_return_sequences", 4, "student_infer.generating_args.num_return_sequences"),
        ("student_train.training_args.opd_kl_coef", 1.0, "the top: opd_kl_coef"),
        ("teacher.training_args.opd_kl_coef", 1.0, "teacher.opd_kl_coef"),
        ("student_train.hint", "x", "teacher.hint"),
        ("student_train.max_steps", 5, "the top: max_steps"),
    ],
)
def test_a_key_of_another_section_is_named_with_its_place(problems: Problems, key: str, value: Any, place: str) -> None:
    (found,) = problems({key: value})
    assert found.startswith(f"{key}: unknown key here; write it at {place}")
