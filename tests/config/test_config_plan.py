"""Plans of valid configurations: values, ROLL's defaults, overrides, composition, immutability."""

import dataclasses
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from config_assets import set_key, write_config, write_model

from roll_opd.base.failures import ConfigError
from roll_opd.config.plan import Layout, MicroBatchLimits, RunPlan

Plan = Callable[..., RunPlan]


def test_the_base_configuration_gives_this_plan(plan: Plan, root: Any) -> None:
    run = plan()
    assert (run.mode, run.pipeline, run.exp_name, run.max_steps) == ("pure", "rlvr", "tiny", 10)
    assert run.student.name == "student_train"
    assert run.student.layout == Layout(dp=2)
    assert run.student.model.path == str(root / "student")
    assert run.student.mini_batch_sequences == 4 * 2 * 2
    assert run.student.train_limits == MicroBatchLimits(sequences=4)
    assert run.student.forward_limits == MicroBatchLimits(sequences=16)  # ROLL's default infer_batch_size
    assert run.rollout.engines == 2
    assert run.rollout.max_model_len == 80
    assert run.rollout.sampling.n == 2
    assert run.rollout.sampling.max_new_tokens == 48
    teacher = run.teachers[0]
    assert (teacher.name, teacher.source.name, teacher.opd_kl_coef, teacher.tags) == (
        "teacher",
        "teacher",
        1.0,
        None,
    )
    assert teacher.source.layout == Layout(tp=2)
    assert run.objective.adv_estimator == "on_policy_distill"
    assert run.objective.policy_loss == "importance_sampling"
    assert run.objective.dual_clip is None
    assert run.eval_steps == 0  # nothing to validate on
    assert run.rewards[0].terms[0].worker == "math_rule"
    assert run.warnings == ()
    assert set(run.memory) == {"student_train", "student_infer", "teacher"}


def test_plan_is_immutable_and_picklable(plan: Plan) -> None:
    run = plan({"system_envs": {"A": "1"}})
    assert pickle.loads(pickle.dumps(run)) == run
    assert hash(run.student.layout) == hash(pickle.loads(pickle.dumps(run.student.layout)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.seed = 1  # type: ignore[misc]
    with pytest.raises(TypeError, match="immutable"):
        run.env["A"] = "2"


def test_nothing_heavy_is_imported(root: Any, values: dict[str, Any]) -> None:
    """Planning must work on a machine without the engines, and refuse quickly."""
    code = (
        "import sys; from roll_opd.planner.load_plan import load_plan;"
        f"load_plan({write_config(root, values)!r}, 'run', pure=True);"
        "heavy = {'torch', 'vllm', 'megatron', 'transformers', 'ray'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr == ""


@pytest.mark.parametrize(
    ("override", "read", "expected"),
    [
        ("max_steps=7", lambda run: run.max_steps, 7),
        ("seed=7", lambda run: run.seed, 7),  # not in the file
        ("+seed=8", lambda run: run.seed, 8),
        ("++max_steps=9", lambda run: run.max_steps, 9),
        ("~rewards", lambda run: run.rewards, ()),
        (
            "student_train.training_args.learning_rate=1e-6",
            lambda run: run.student.optimizer.learning_rate,
            1e-6,
        ),
        (
            "student_train.training_args.learning_rate='1e-6'",
            lambda run: run.student.optimizer.learning_rate,
            1e-6,
        ),
        ("teacher.device_mapping=list(range(0,4))", lambda run: run.teachers[0].source.layout.dp, 2),
        ("teacher.device_mapping=[0,1]", lambda run: run.teachers[0].source.devices, (0, 1)),
        ("response_length=16", lambda run: run.rollout.sampling.max_new_tokens, 16),  # through interpolation
        ("track_with=[stdout,tensorboard]", lambda run: run.trackers, ("stdout", "tensorboard")),
        ("student_infer.generating_args.stop_strings=x", lambda run: run.rollout.sampling.stop, ("x",)),
        ("dual_clip_loss=true", lambda run: run.objective.dual_clip, 1.4),
        ("dual_clip_loss=3", lambda run: run.objective.dual_clip, 3.0),
    ],
)
def test_overrides_change_the_plan(plan: Plan, override: str, read: Callable[[RunPlan], Any], expected: Any) -> None:
    assert read(plan(overrides=(override,))) == expected


def test_composes_from_the_repository_groups(plan: Plan) -> None:
    run = plan(
        {
            "defaults": [{"parallel@teacher.strategy_args.strategy_config": "single"}, "_self_"],
            "teacher.strategy_args.strategy_config": ...,
        }
    )
    assert run.teachers[0].source.layout == Layout(dp=2)
    chosen = plan(overrides=("parallel@teacher.strategy_args.strategy_config=tp2",))
    assert chosen.teachers[0].source.layout == Layout(tp=2)


def test_composes_from_a_file_beside_it(plan: Plan, root: Any) -> None:
    (root / "config").mkdir()
    (root / "config" / "common.yaml").write_text("max_steps: 5\nseed: 3\n")
    run = plan({"defaults": ["common", "_self_"]})
    assert (run.seed, run.max_steps) == (3, 10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = plan({"defaults": ["common"]})
    assert (run.seed, run.max_steps) == (3, 10)


def test_top_level_coefficient_counts_and_a_teachers_own_wins(plan: Plan, values: dict[str, Any], root: Any) -> None:
    assert plan({"opd_kl_coef": 0.5}).teachers[0].opd_kl_coef == 0.5
    single = values.pop("teacher")
    write_model(root / "other", seed=9)
    other = {**single, "model_args": {"model_name_or_path": str(root / "other")}, "opd_kl_coef": 0.25}
    rows = "".join(f'{{"prompt": "ab", "tag": "{tag}"}}\n' for tag in ("math", "code"))
    (root / "train.jsonl").write_text(rows)
    run = plan({"teacher": {"m": {**single, "tag_included": ["math"]}, "c": {**other, "tag_included": "code"}}})
    assert [(t.name, t.source.name, t.opd_kl_coef, t.tags) for t in run.teachers] == [
        ("m", "teacher.m", 0.5, ("math",)),
        ("c", "teacher.c", 0.25, ("code",)),
    ]


def test_student_infer_takes_the_students_path_and_pretrain_fills_students_only(plan: Plan, root: Any) -> None:
    run = plan({"student_infer.model_args": ..., "student_train.model_args": ..., "pretrain": str(root / "student")})
    assert run.rollout.model.path == run.student.model.path == str(root / "student")
    assert run.student.model.dtype == "bf16"  # ROLL's default


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, False),
        ({"ppo_epochs": 2}, True),
        ({"student_train.training_args.gradient_accumulation_steps": 1}, True),
        ({"enable_old_logprobs_recompute": True}, True),
    ],
)
def test_old_logprobs_are_recomputed_where_weights_move(plan: Plan, changes: dict[str, Any], expected: bool) -> None:
    run = plan(changes)
    assert run.objective.recompute_old_logprobs is expected
    updates = run.objective.ppo_epochs * run.sequences_per_step // run.student.mini_batch_sequences
    assert run.student.optimizer.total_steps == 10 * updates


def test_warmup_ratio_becomes_updates(plan: Plan) -> None:
    run = plan({"student_train.training_args.warmup_ratio": 0.25})
    assert run.student.optimizer.warmup_steps == 3


def test_token_limits_of_micro_batches_are_read_for_each_role(plan: Plan) -> None:
    run = plan(
        {
            "student_train.use_dynamic_batching_in_train": True,
            "student_train.max_tokens_per_microbatch_in_train": 160,
            "teacher.use_sequence_packing": True,
            "teacher.sequence_packing_args": {"algorithm": "none", "max_packed_sequence_length_forward": 320},
        }
    )
    assert run.student.train_limits == MicroBatchLimits(tokens=160)
    assert run.teachers[0].source.forward_limits == MicroBatchLimits(tokens=320)


def test_megatron_settings_reach_the_layout_and_the_rest_passes_through(plan: Plan) -> None:
    config = {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "use_distributed_optimizer": False,
        "recompute_granularity": "full",
    }
    run = plan({"student_train.strategy_args.strategy_config": config, "rollout_batch_size": 4})
    assert run.student.layout == Layout(tp=2, sequence_parallel=True)
    every_layer = {"recompute_method": "uniform", "recompute_num_layers": 1}  # as ROLL fills it in
    assert run.student.megatron_args == {"recompute_granularity": "full"} | every_layer
    assert run.student.optimizer.use_distributed_optimizer is False


def test_overlaps_are_megatrons(plan: Plan) -> None:
    place = "student_train.strategy_args.strategy_config"
    assert not plan().student.optimizer.overlap_grad_reduce
    with pytest.raises(ConfigError, match=r"overlap_param_gather: true needs use_distributed_optimizer and overlap_g"):
        plan({f"{place}.overlap_param_gather": True})
    both = plan({f"{place}.overlap_grad_reduce": True, f"{place}.overlap_param_gather": True}).student.optimizer
    assert both.overlap_grad_reduce and both.overlap_param_gather


def test_experts_have_sizes_of_their_own(plan: Plan, root: Any) -> None:
    write_model(root / "teacher", seed=2, model_type="qwen3_moe", num_experts=4, moe_intermediate_size=8)
    config = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    changes = {"teacher.strategy_args.strategy_config": config, "teacher.device_mapping": [0, 1, 2, 3]}
    layout = plan(changes).teachers[0].source.layout
    assert layout == Layout(tp=2, ep=2, dp=2, etp=1)


REPLAY = {"student_train.router_replay.mode": "R3", "student_infer.router_replay.mode": "R3"}


def test_routes_are_returned_and_replayed(plan: Plan, root: Any) -> None:
    write_model(root / "student", seed=1, model_type="qwen3_moe", num_experts=4, moe_intermediate_size=8)
    assert not plan().rollout.returns_routes and plan().student.router_replay == "disable"
    run = plan(REPLAY)
    assert run.rollout.returns_routes and run.student.router_replay == "R3"
    measured = plan(dict.fromkeys(REPLAY, "measure"))
    assert measured.rollout.returns_routes and measured.student.router_replay == "measure"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (REPLAY, "student has no experts to replay"),
        (
            {"student_train.router_replay.mode": "R3"},
            "is R3, student_infer.router_replay.mode disable; use",
        ),
        ({"teacher.router_replay.mode": "R3"}, "only a student that samples has recorded routes"),
        ({"student_train.router_replay.mode": "R2"}, "student_train.router_replay.mode"),
        (REPLAY | {"workflow": "single_turn"}, "the routing in workflows and environments is not recorded yet"),
    ],
)
def test_router_replay_without_recorded_routes_is_refused(plan: Plan, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan(changes)


def test_vllm_settings_pass_through(plan: Plan) -> None:
    config = {"tensor_parallel_size": 2, "block_size": 16, "load_format": "dummy", "sleep_level": 1}
    run = plan({"student_infer.strategy_args.strategy_config": config})
    assert run.rollout.sleep_level == 1
    assert (run.rollout.tp, run.rollout.engines) == (2, 1)
    assert run.rollout.engine_args == {"block_size": 16, "load_format": "dummy"}


@pytest.mark.parametrize("level", [0, 3, True, "2"])
def test_engines_sleep_at_levels_of_vllms(plan: Plan, level: object) -> None:
    with pytest.raises(ConfigError, match=r"sleep_level.*should be 1 .* or 2"):
        plan({"student_infer.strategy_args.strategy_config.sleep_level": level})


def test_environments_merge(plan: Plan) -> None:
    run = plan({"system_envs": {"A": 1, "B": "b"}, "teacher.system_envs": {"B": "c"}})
    assert run.env == {"A": "1", "B": "b"}
    assert run.teachers[0].source.env == {"A": "1", "B": "c"}


def test_reward_worker_names(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dotted = "roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker"
    run = plan({"rewards": {"math_rule": {"worker_cls": dotted, "format_pattern": "x", "infer_batch_size": 1}}})
    assert (run.rewards[0].terms[0].worker, run.rewards[0].terms[0].args) == ("math_rule", {})  # it takes no arguments
    assert "of rewards: format_pattern" in run.warnings[0]
    (tmp_path / "package_of_rewards").mkdir()
    source = "class Mine:\n    def __init__(self, strict): ...\n    def score(self, samples): ...\n"
    (tmp_path / "package_of_rewards" / "own.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    worker = "package_of_rewards.own.Mine"
    own = plan({"rewards": {"math_rule": {"worker_cls": worker, "strict": True}}})
    assert (own.rewards[0].terms[0].worker, own.rewards[0].terms[0].args) == (worker, {"strict": True})
    (tmp_path / "package_of_rewards" / "fork.py").write_text(source.replace("Mine", "MathRuleRewardWorker"))
    fork = "package_of_rewards.fork.MathRuleRewardWorker"  # the name of a class of ROLL, in another package
    named = plan({"rewards": {"math_rule": {"worker_cls": fork, "strict": True}}})
    assert named.rewards[0].terms[0].worker == fork


def test_the_validation_section_is_read(plan: Plan, root: Any) -> None:
    section = {
        "data_args": {"file_name": str(root / "train.jsonl"), "limit": 2},
        "generating_args": {"temperature": 0, "max_new_tokens": 64},
        "evaluate_teacher": True,
    }
    run = plan({"validation": section})
    assert run.validation is not None
    assert run.validation.sampling.max_new_tokens == 64
    assert run.validation.data.limit == 2
    assert run.rollout.max_model_len == 32 + 64
    assert run.eval_steps == 10


def test_an_engine_may_cut_sequences(plan: Plan) -> None:
    key = "student_infer.strategy_args.strategy_config.max_model_len"
    run = plan({key: 79})
    assert run.rollout.max_model_len == 79
    [warning] = run.warnings
    assert warning.startswith(f"{key}: cuts sequences of up to 80 tokens at 79, as in ROLL")


def test_mode_follows_the_entry_and_the_configuration(plan: Plan, values: dict[str, Any]) -> None:
    assert plan(pure=None).mode == "pure"
    assert plan({"is_pure_opd": True}, pure=False).mode == "pure"
    values["actor_train"] = values.pop("student_train")
    values["actor_infer"] = values.pop("student_infer")
    set_key(values, "is_pure_opd", False)
    run = plan({"use_opd": True, "adv_estimator": "grpo"}, pure=None)
    assert (run.mode, run.student.name, run.objective.policy_loss) == ("mixed", "actor_train", "ppo")
    assert plan({"use_opd": False, "teacher": ...}, pure=False).mode == "rl"
