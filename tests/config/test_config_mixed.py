"""Mixed mode and reinforcement learning: the plan of their keys, ROLL's defaults, and contradictions."""

import pickle
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from config_assets import write_model, write_tokenizer

from roll_opd.base.frozen import FrozenDict
from roll_opd.config.plan import EngineCheckPlan, FilterPlan, Layout, MegatronPlan, ObjectivePlan, RunPlan

Plan = Callable[..., RunPlan]
Problems = Callable[..., list[str]]


@pytest.fixture
def mixed(values: dict[str, Any], root: Path) -> dict[str, Any]:
    """The base configuration in mixed mode; `plan` and `problems` see it."""
    values["actor_train"] = values.pop("student_train")
    values["actor_infer"] = values.pop("student_infer")
    values |= {"use_opd": True, "adv_estimator": "grpo", "opd_kl_coef": 0.5}
    return values


REFERENCE = {
    "strategy_args": {"strategy_name": "megatron_infer", "strategy_config": {"tensor_model_parallel_size": 2}},
    "device_mapping": "[0,1]",
}


def test_objective_has_rolls_defaults(mixed: dict[str, Any], plan: Plan) -> None:
    del mixed["adv_estimator"]
    mixed["critic"] = {"model_args": {"dtype": "fp32"}, "training_args": {"per_device_train_batch_size": 4}}
    run = plan(pure=False)
    assert run.mode == "mixed"
    assert run.objective == ObjectivePlan(
        adv_estimator="gae",
        engine_check=EngineCheckPlan(),
        gamma=1.0,
        lambd=0.95,
        whiten_rewards=False,
        whiten_advantages=False,
        norm_mean_type=None,
        norm_std_type=None,
        reward_clip=None,
        advantage_clip=None,
        kl_loss_coef=0.0,
        kl_penalty="kl",
        entropy_loss_coef=0.0,
        init_kl_coef=0.0,  # the plan says what is done: without token-level KL it counts nothing
        policy_loss="ppo",
        dual_clip=None,
        loss_agg_mode="seq-mean-token-mean",
        loss_normaliser=48.0,
        # what the functions are called with, from the keys above
        advantage_args=FrozenDict({"mean_cal_level": None, "std_cal_level": None}),
        policy_loss_args=FrozenDict({"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}),
    )


def test_every_key_reaches_the_plan(mixed: dict[str, Any], plan: Plan) -> None:
    written = {
        "gamma": 0.5,
        "lambd": 0.9,
        "whiten_rewards": True,
        "whiten_advantages": True,
        "norm_mean_type": "group",
        "norm_std_type": "batch",
        "reward_clip": 10.0,
        "advantage_clip": 2.0,
        "use_kl_loss": True,
        "kl_loss_coef": 0.001,
        "kl_penalty": "low_var_kl",
        "add_token_level_kl": True,
        "init_kl_coef": 0.1,
    }
    run = plan({**written, "reference": REFERENCE}, pure=False)
    switches = {"use_kl_loss", "add_token_level_kl"}  # their coefficients say as much
    assert {key: vars(run.objective)[key] for key in written.keys() - switches} == {
        key: value for key, value in written.items() if key not in switches
    }
    ignored, *others = run.warnings
    assert ignored.endswith(" have no effect here: lambd")  # of gae alone
    assert [text.partition(":")[0] for text in others] == ["whiten_advantages", "kl_penalty", "norm_std_type"]
    assert pickle.loads(pickle.dumps(run)) == run


def test_pure_distillation_switches_all_of_it_off(plan: Plan) -> None:
    run = plan({"whiten_advantages": True, "reward_clip": 10, "kl_loss_coef": 0.1, "norm_mean_type": "batch"})
    assert run.objective == ObjectivePlan(
        gamma=0.0,
        dual_clip=None,
        loss_agg_mode="seq-mean-token-mean",
        loss_normaliser=48.0,
        engine_check=EngineCheckPlan(),
    )
    ignored, whitening = run.warnings
    assert ignored == "these keys are accepted but have no effect here: kl_loss_coef, norm_mean_type, reward_clip"
    assert whitening.startswith("whiten_advantages: true has no effect in pure distillation; ROLL also whitens")


def test_reference_and_teacher_coexist_on_their_own_layouts(mixed: dict[str, Any], plan: Plan, root: Path) -> None:
    run = plan({"use_kl_loss": True, "kl_loss_coef": 0.1, "reference": REFERENCE}, pure=False)
    assert type(run.reference) is MegatronPlan
    assert (run.reference.name, run.reference.devices, run.reference.layout) == ("reference", (0, 1), Layout(tp=2))
    assert run.reference.model.path == str(root / "student")  # the student before training
    assert run.teachers[0].source.devices == (2, 3)
    assert set(run.memory) == {"actor_train", "actor_infer", "teacher", "reference"}
    other = str(write_model(root / "older", seed=7))
    reference = {**REFERENCE, "model_args": {"model_name_or_path": other, "dtype": "fp32"}}
    assert plan({"reference": reference}, pure=False).reference.model.path == other


@pytest.mark.parametrize("switch", ["use_kl_loss", "add_token_level_kl"])
def test_reference_is_required_where_something_compares_with_it(
    mixed: dict[str, Any], problems: Problems, switch: str
) -> None:
    (found,) = problems({switch: True}, pure=False)
    assert found.startswith(f"{switch}: true needs a reference policy; write a reference section")


def test_unused_reference_is_not_loaded(mixed: dict[str, Any], plan: Plan) -> None:
    run = plan({"reference": {**REFERENCE, "model_args": {"model_name_or_path": "not/there"}}}, pure=False)
    assert run.reference is None
    assert run.warnings[0].startswith("reference: is written but not used")


def test_reference_is_checked_like_any_role(mixed: dict[str, Any], problems: Problems, root: Path) -> None:
    write_tokenizer(write_model(root / "older", seed=7), end="<|stop|>")
    reference = {
        **REFERENCE,
        "model_args": {"model_name_or_path": str(root / "older")},
        "device_mapping": [1, 2],
        "infer_batch_siz": 3,
    }
    found = "\n".join(problems({"use_kl_loss": True, "reference": reference}, pure=False))
    for part in ("reference.infer_batch_siz: unknown key", "reference.device_mapping: ", "'<|stop|>'"):
        assert part in found


def test_each_teacher_has_its_own_or_the_common_coefficient(mixed: dict[str, Any], plan: Plan, root: Path) -> None:
    assert plan(pure=False).teachers[0].opd_kl_coef == 0.5
    single = mixed["teacher"]
    assert plan({"teacher": {**single, "opd_kl_coef": 0}}, pure=False).teachers[0].opd_kl_coef == 0.0
    write_model(root / "other", seed=9)
    other = {**single, "model_args": {"model_name_or_path": str(root / "other")}, "opd_kl_coef": 0.25}
    run = plan({"teacher": {"a": single, "b": other}}, pure=False)
    assert [(teacher.name, teacher.opd_kl_coef) for teacher in run.teachers] == [("a", 0.5), ("b", 0.25)]


def test_rl_needs_no_teacher(mixed: dict[str, Any], plan: Plan) -> None:
    run = plan({"use_opd": ..., "teacher": ..., "adv_estimator": "reinforce"}, pure=False)
    assert (run.mode, run.teachers, run.objective.adv_estimator) == ("rl", (), "reinforce")
    assert run.warnings == ("these keys are accepted but have no effect here: opd_kl_coef",)


@pytest.mark.parametrize("mode", ["mixed", "rl"])
def test_rewards_are_required(mixed: dict[str, Any], problems: Problems, mode: str) -> None:
    (found,) = problems({"rewards": ..., "use_opd": mode == "mixed"}, pure=False)
    assert found.startswith("rewards: is missing")
    (found,) = problems({"rewards": {"math_rule": {"tag_included": ["code"]}}}, pure=False)
    assert "no reward accepts tag 'math' of the training data" in found


UNPAID = {"rewards.math_rule.weight": 0}
LENGTH = {"length_penalty": {"coef": 0.1}}


@pytest.mark.parametrize(
    ("keys", "reported"),
    [
        ({"opd_kl_coef": 0}, "(as opd_kl_coef 0 removes the teachers' part), and no other signal trains"),
        ({"use_opd": ..., "teacher": ...}, "0 removes the rewards' part of the loss, and no other signal trains"),
    ],
)
def test_a_run_whose_signals_all_have_no_weight_is_refused(
    mixed: dict[str, Any], problems: Problems, plan: Plan, keys: dict[str, Any], reported: str
) -> None:
    (found,) = problems({**UNPAID, **keys}, pure=False)
    assert found.startswith("rewards.math_rule.weight: 0 removes") and reported in found
    plan({"rewards.math_rule.weight": -1}, pure=False)


@pytest.mark.extras
@pytest.mark.parametrize(
    "signal",
    [
        {"use_opd": True, "opd_kl_coef": 0.1},
        {"entropy_loss_coef": 0.01},
        {"rewards.math_rule.terms": LENGTH},
        {"reference": REFERENCE, "use_kl_loss": True, "kl_loss_coef": 0.1},
        {"reference": REFERENCE, "add_token_level_kl": True},
        {"workflow": "simple_workflow"},
        {"policy_loss": "sft", "opd_objective": "full"},  # reads no advantages
    ],
    ids=lambda keys: next(iter(keys)),
)
def test_one_signal_with_a_weight_is_enough(mixed: dict[str, Any], signal: dict[str, Any], plan: Plan) -> None:
    plan({**UNPAID, "opd_kl_coef": 0, **signal}, pure=False)


def test_a_kl_without_a_coefficient_is_no_signal(mixed: dict[str, Any], problems: Problems) -> None:
    keys = {"reference": REFERENCE, "use_kl_loss": True, "add_token_level_kl": True, "init_kl_coef": 0}
    (found,) = problems({**UNPAID, "opd_kl_coef": 0, **keys}, pure=False)
    assert found.startswith("rewards.math_rule.weight: 0 removes")


def test_query_and_response_filters_are_read(mixed: dict[str, Any], plan: Plan, problems: Problems) -> None:
    keys = "rewards.math_rule.query_filter_config"
    mean = {"type": "mean_filter", "filter_args": {"threshold_up": 0.9, "threshold_down": 0.1}}
    spread = {"type": "std_filter", "filter_args": {"std_threshold": 0.05}}
    response_keys = "rewards.math_rule.response_filter_config"
    reward = plan({keys: spread, response_keys: mean}, pure=False).rewards[0]
    assert reward.query_filter == FilterPlan("std_filter", {"std_threshold": 0.05})
    assert reward.response_filter == FilterPlan("mean_filter", {"threshold_up": 0.9, "threshold_down": 0.1})
    assert plan({keys: {"type": "no_filter"}}, pure=False).rewards[0].query_filter is None
    assert (
        "threshold_down: is missing"
        in problems({keys: {"type": "mean_filter", "filter_args": {"threshold_up": 1}}}, pure=False)[0]
    )
    crossed = {"type": "mean_filter", "filter_args": {"threshold_up": 0.1, "threshold_down": 0.9}}
    assert "0.1 is not above threshold_down 0.9" in problems({keys: crossed}, pure=False)[0]
    assert "'no_filter', 'mean_filter' or 'std_filter'" in problems({keys: {"type": "median"}}, pure=False)[0]


def test_the_spread_of_one_reward(mixed: dict[str, Any], plan: Plan, problems: Problems) -> None:
    """A std_filter rejects all groups of one reward, and GRPO cannot compare a single response."""
    mixed["num_return_sequences_in_group"] = 1
    mixed["actor_train"]["training_args"]["gradient_accumulation_steps"] = 1
    (warning,) = plan(pure=False).warnings
    assert "grpo has no baseline with one response" in warning
    assert plan({"adv_estimator": "reinforce"}, pure=False).warnings == ()
    spread = {"type": "std_filter", "filter_args": {"std_threshold": 0.05}}
    mixed["rewards"]["math_rule"]["query_filter_config"] = spread
    (found,) = problems(pure=False)
    assert found.startswith("rewards.math_rule.query_filter_config.type: std_filter")
    assert "set num_return_sequences_in_group to 2 or more" in found
    mixed["num_return_sequences_in_group"] = 2
    assert plan(pure=False).warnings == ()
    (found,) = problems({"rewards.math_rule.response_filter_config": spread}, pure=False)
    assert found.startswith("rewards.math_rule.response_filter_config.type: std_filter")
    assert "use mean_filter" in found


def test_rollout_control(mixed: dict[str, Any], plan: Plan) -> None:
    run = plan(pure=False)
    assert (run.extra_prompts, run.rollout.max_running_requests) == (0, None)
    assert plan({"max_additional_running_prompts": 5}, pure=False).extra_prompts == 0
    run = plan({"is_use_additional_prompts": True, "max_running_requests": 64}, pure=False)
    assert (run.extra_prompts, run.rollout.max_running_requests) == (5, 64)


WEIGHTS = {"is_weight": {"enabled": True}}


def test_stale_rewards_need_a_named_correction(mixed: dict[str, Any], plan: Plan, problems: Problems) -> None:
    """Otherwise their importance ratio would be 1 without a warning."""
    (found,) = problems({"async_generation_ratio": 1}, pure=False)
    assert found.startswith("async_generation_ratio: 1 trains the reward's part on samples of older weights")
    assert "write train_infer_correction: {is_weight: {enabled: true}}" in found
    (found,) = problems({"async_generation_ratio": 1, "train_infer_correction": {"negatives_delta": 0.1}}, pure=False)
    assert "samples of older weights" in found
    run = plan({"async_generation_ratio": 2.0, "train_infer_correction": WEIGHTS}, pure=False)
    assert run.objective.max_age == 2 and run.objective.recompute_old_logprobs
    assert run.rollout.on_weight_update == "continue"


@pytest.mark.parametrize("mode", ["keep_kv", "restart", "Continue"])
def test_other_treatments_of_running_answers_are_refused(problems: Problems, mode: str) -> None:
    (found,) = problems({"on_weight_update": mode})
    assert found.startswith("on_weight_update: ") and "'continue'" in found and mode in found


def test_deterministic_updates_wait_for_running_answers(mixed: dict[str, Any], problems: Problems) -> None:
    changes = {"async_generation_ratio": 1, "train_infer_correction": WEIGHTS, "deterministic": True}
    (found,) = problems({**changes, "on_weight_update": "continue"}, pure=False)
    assert found.startswith("on_weight_update: continue makes samples depend on timing")


def test_generation_ahead_needs_separate_devices(mixed: dict[str, Any], problems: Problems) -> None:
    mixed["is_offload_states"] = True
    mixed["actor_infer"]["device_mapping"] = mixed["actor_train"]["device_mapping"]
    (found,) = problems({"async_generation_ratio": 1, "train_infer_correction": WEIGHTS}, pure=False)
    assert found.startswith("async_generation_ratio: 1 lets generation and training run at the same time")
    assert "give the engines separate devices, or set async_generation_ratio to 0" in found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"async_generation_ratio": 0}, "1: async_generation_ratio is 0, so training waits for each validation; raise"),
        ({"eval_steps": 0}, "1: the run has no validation; write validation and eval_steps, or remove"),
        ({"validation_engines": 2}, "2: all 2 engines would be reserved, and none would generate for training; add"),
    ],
)
def test_reserved_engines_need_validation_beside_training(
    mixed: dict[str, Any], root: Path, plan: Plan, problems: Problems, changes: dict[str, Any], message: str
) -> None:
    mixed["actor_infer"]["device_mapping"] = "[0,1]"
    mixed["validation"] = {"data_args": {"file_name": str(root / "train.jsonl")}}
    whole = {"async_generation_ratio": 1, "train_infer_correction": WEIGHTS, "validation_engines": 1}
    run = plan(whole, pure=False)
    assert (run.rollout.engines, run.training_engines, run.validation_engines) == (2, 1, 1)
    (found,) = problems({**whole, **changes}, pure=False)
    assert found.startswith(f"validation_engines: {message}")


def test_the_bound_is_a_whole_number(plan: Plan, problems: Problems) -> None:
    """ROLL's files may have it as a float."""
    for written, bound in ((0, 0), (1.0, 1), ("2", 2), ("1e0", 1), (None, 0)):
        run = plan({"async_generation_ratio": written})
        assert run.async_generation_ratio == run.objective.max_age == bound
        assert type(run.async_generation_ratio) is int
    wrong = (0.5, 1.5, "0.5", -1, "one", True, [1])
    for key, value in (("async_depth", 0), *product(("async_generation_ratio", "async_depth"), wrong)):
        (found,) = problems({"async_generation_ratio": 4, "async_depth": 1, key: value})
        assert found.startswith(f"{key}: ")


def test_a_depth_is_within_the_bound(mixed: dict[str, Any], plan: Plan, problems: Problems) -> None:
    changes = {"async_generation_ratio": 1, "async_depth": 2, "train_infer_correction": WEIGHTS}
    (found,) = problems(changes, pure=False)
    assert found.startswith("async_depth: 2 is more than async_generation_ratio 1")
    (warning,) = (text for text in plan({"async_generation_ratio": 0}, pure=False).warnings if "async" in text)
    assert "async_depth" in warning


@pytest.mark.extras
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"adv_estimator": "skip_obs_gae"},
            "adv_estimator: 'skip_obs_gae' is not available yet; use agentic_reinforce or asymre or gae or gigpo or",
        ),
        (
            {"kl_penalty": "full", "use_kl_loss": True, "kl_loss_coef": 1, "reference": REFERENCE},
            "kl_penalty: 'full' is not available yet; use one of kl, abs, mse, low_var_kl",
        ),
        ({"norm_mean_type": "running"}, "norm_mean_type: 'running' is not available yet; use batch or group"),
        ({"importance_sampling": "manual_on_policy"}, "importance_sampling: manual_on_policy is not available yet"),
        (
            {"actor_train.model_args.model_config_kwargs": {"a": 1}},
            "model_config_kwargs: is not applied; change",
        ),
        ({"actor_train.worker_cls": "my.Worker"}, "my.Worker is not a class of ROLL"),
        (
            {"rewards.math_rule.worker_cls": "roll.pipeline.rlvr.rewards.fancy.FancyRewardWorker"},
            "'roll.pipeline.rlvr.rewards.fancy.FancyRewardWorker' is not available",
        ),
        ({"actor_train.model_args.freeze_module_prefix": "vision"}, "freeze_module_prefix: is not available yet"),
    ],
)
def test_planned_but_not_available_yet(
    mixed: dict[str, Any], plan: Plan, problems: Problems, changes: dict[str, Any], message: str
) -> None:
    assert any(message in text for text in plan(changes, pure=False, runnable=False).warnings)
    (found,) = problems({}, pure=False)
    assert message in found


@pytest.mark.extras
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adv_estimator": "on_policy_distill"}, "adv_estimator: 'on_policy_distill' is set by pure distillation"),
        (
            {"adv_estimator": "gigpo"},
            "adv_estimator: gigpo compares actions from the same state of an environment, but",
        ),
        ({"adv_estimator": "grpoo"}, "adv_estimator: should be 'agentic_reinforce', 'asymre',"),
        ({"kl_penalty": "k9"}, "kl_penalty: should be 'kl', 'k1'"),
        ({"gamma": 1.5}, "gamma: should be less than or equal to 1"),
        ({"reward_clip": 0}, "reward_clip: should be greater than 0"),
        ({"rewards.math_rule.judge_model_type": "inference"}, "math_rule uses no judge"),
        (
            {"rewards.math_rule.terms": {"j": {"worker_cls": "llm_judge", "judge_model_type": "inference"}}},
            "rewards.math_rule.terms.j.judge_model_type: a term cannot have engines",
        ),
        (
            {"rewards.judge": {"worker_cls": "llm_judge", "args": {"judge_model_type": "inference"}}},
            "rewards.judge.device_mapping: is missing",
        ),
        ({"is_pure_opd": True}, "use_opd: use_opd and pure distillation (is_pure_opd) exclude each other"),
    ],
)
def test_contradicting_settings_of_mixed_mode_are_refused(
    mixed: dict[str, Any], problems: Problems, changes: dict[str, Any], message: str
) -> None:
    assert any(message in text for text in problems(changes, pure=False))


@pytest.mark.extras
def test_steps_of_a_workflow_that_are_compared_with_nothing_are_reported(mixed: dict[str, Any], plan: Plan) -> None:
    def reported(**more: Any) -> bool:
        run = plan({"adv_estimator": "gigpo", "workflow": "simple_workflow", **more}, pure=False)
        return any("gigpo compares nothing" in text and "write norm_mean_type: group" in text for text in run.warnings)

    assert reported() and not reported(norm_mean_type="group")


def test_coefficients_without_effect_are_reported(mixed: dict[str, Any], plan: Plan) -> None:
    run = plan({"use_kl_loss": True, "add_token_level_kl": True, "init_kl_coef": 0, "reference": REFERENCE}, pure=False)
    assert [text.split(":")[0] for text in run.warnings] == ["use_kl_loss", "add_token_level_kl"]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"pure_opd_pipeline_type": "rlvr_vlm"}, "pure_opd_pipeline_type"),
        ({"student_train.data_args.image": "images", "student_train.model_args.freeze_it": 1}, "image"),
        ({"student_train.model_args.model_name_or_path": "Qwen/Qwen2.5-VL-7B-Instruct"}, "model_name_or_path"),
        ({"student_train.strategy_args.strategy_name": "diffusion_deepspeed_train"}, "strategy_name"),
    ],
)
def test_vision_is_one_sentence(problems: Problems, changes: dict[str, Any], key: str) -> None:
    (found,) = problems({**changes, "no_such_key": 1})
    assert found.split(":")[0].endswith(key)
    assert "only text models" in found
    assert "vision" in found


def test_a_coefficient_without_its_loss_is_reported(mixed: dict[str, Any], plan: Plan) -> None:
    for written, reported in (
        ({"kl_loss_coef": 0.1}, ["kl_loss_coef"]),
        ({"kl_loss_coef": 0.1, "use_kl_loss": True}, []),
    ):
        run = plan({**written, "reference": REFERENCE}, pure=False)
        ignored = [text for text in run.warnings if "have no effect here" in text]
        assert [text.rpartition(": ")[2] for text in ignored] == reported


def test_a_coefficient_that_every_teacher_overrides_is_reported(values: dict[str, Any], plan: Plan) -> None:
    for own, reported in (({}, 0), ({"teacher.opd_kl_coef": 0.5}, 1)):
        run = plan({"opd_kl_coef": 0.3, **own})
        assert run.teachers[0].opd_kl_coef == (0.5 if own else 0.3)
        assert (
            run.warnings.count("opd_kl_coef: has no effect, as every teacher sets this key itself; remove it")
            == reported
        )


def test_keys_of_workflows_without_one_are_reported(mixed: dict[str, Any], plan: Plan) -> None:
    written = {
        "endpoint_port": 8000,
        "on_workflow_error": "stop",
        "plugin_dir": "plugins",
        "prompt_key": "question",
        "reply_prefix": "<think>",
        "response_key": "answer",
        "workflow_args": {"rounds": 2},
        "workflow_reward": "math_reward",
        "workflow_reward_args": {"strict": True},
        "workflow_timeout": 60,
    }
    ignored, *_ = plan(written, pure=False).warnings
    assert ignored == f"these keys are accepted but have no effect here: {', '.join(sorted(written))}"


def test_keys_of_a_role_without_effect_are_reported(mixed: dict[str, Any], plan: Plan) -> None:
    run = plan(
        {
            "actor_train.generating_args.temperature": 0.1,
            "teacher.generating_args.temperature": 0.3,
            "actor_infer.training_args.learning_rate": 1.0,
            "actor_train.data_args.template": "qwen3",
            "actor_infer.data_args.template": "qwen3",  # as ROLL's files repeat it
            "teacher.data_args.template": "chatml",
            "reference": {**REFERENCE, "data_args": {"file_name": "rows.jsonl"}},  # one message for the role
        },
        pure=False,
    )
    generates, learns = (
        "this role generates nothing; write it at actor_infer.generating_args",
        "this role does not learn",
    )
    reported = {
        "actor_train.generating_args": generates,
        "teacher.generating_args": generates,
        "actor_infer.training_args": f"{learns}; write it at actor_train.training_args",
        "teacher.data_args": "this role reads no rows; write it at actor_train.data_args",
    }
    unused, *others = run.warnings
    assert unused.startswith("reference: is written but not used")
    assert sorted(others) == sorted(f"{key}: has no effect, as {why}" for key, why in reported.items())
