"""ROLL's keys with ROLL's meaning: values read from its dataclasses and functions (alibaba/ROLL 8eb27cc2)."""

from collections.abc import Callable
from typing import Any

import pytest

from roll_opd.config.plan import Layout, RunPlan

Plan = Callable[..., RunPlan]
Problems = Callable[..., list[str]]
PG = "roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker"
AGENTIC_PG = "roll.pipeline.agentic.agentic_actor_pg_worker.ActorWorker"
ACTOR = "roll.pipeline.rlvr.actor_worker.ActorWorker"


@pytest.fixture
def rl(values: dict[str, Any]) -> dict[str, Any]:
    """The base configuration without its teacher, with ROLL's reinforce."""
    values["actor_train"], values["actor_infer"] = values.pop("student_train"), values.pop("student_infer")
    del values["teacher"]
    values["adv_estimator"] = "reinforce"
    return values


def test_an_unwritten_schedule_is_linear_to_zero(plan: Plan) -> None:
    optimizer = plan({"student_train.training_args.lr_scheduler_type": ...}).student.optimizer
    assert (optimizer.lr_scheduler_type, optimizer.min_learning_rate) == ("linear", 0.0)


@pytest.mark.parametrize(
    ("name", "kwargs", "expected"),
    [
        ("inverse_sqrt", None, {"lr_scheduler_type": "inverse-square-root"}),
        ("cosine_warmup_with_min_lr", {"min_lr": 1e-6}, {"lr_scheduler_type": "cosine", "min_learning_rate": 1e-6}),
        ("linear", {"max_lr": 3e-4, "init_lr": 1e-5}, {"learning_rate": 3e-4, "initial_learning_rate": 1e-5}),
        ("cosine", {"lr_decay_steps": 7}, {"decay_steps": 7}),
        (
            "warmup_stable_decay",
            {"wsd_decay_steps": 4, "lr_wsd_decay_style": "linear"},
            {"lr_scheduler_type": "WSD", "wsd_decay_steps": 4, "wsd_decay_style": "linear"},
        ),
    ],
)
def test_rolls_learning_rate_schedules_are_read(
    plan: Plan, name: str, kwargs: dict[str, Any] | None, expected: dict[str, Any]
) -> None:
    args = "student_train.training_args"
    optimizer = plan({f"{args}.lr_scheduler_type": name, f"{args}.lr_scheduler_kwargs": kwargs}).student.optimizer
    assert {key: getattr(optimizer, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("warmup_stable_decay", None, "wsd_decay_steps: is missing"),
        ("linear", {"min_lr": 1.0}, "min_lr: 1 is above "),
        ("linear", {"init_lr": 1.0}, "init_lr: 1 is above "),
    ],
)
def test_schedules_that_cannot_be(problems: Problems, name: str, kwargs: dict[str, Any] | None, message: str) -> None:
    args = "student_train.training_args"
    (found,) = problems({f"{args}.lr_scheduler_type": name, f"{args}.lr_scheduler_kwargs": kwargs})
    assert message in found


@pytest.mark.extras
@pytest.mark.parametrize(
    ("role", "top", "loss", "said"),
    [
        ({"worker_cls": PG, "pg_variant": "cispo"}, None, "cispo", None),
        ({"worker_cls": AGENTIC_PG, "pg_variant": "topr"}, "topr", "topr", None),
        ({"worker_cls": PG, "pg_variant": "cispo"}, "ppo", "cispo", "pg_variant: ppo has no effect, as in ROLL"),
        ({"pg_variant": "cispo"}, None, "ppo", "actor_train.pg_variant: cispo has no effect, as in ROLL"),
        ({"worker_cls": ACTOR}, "topr", "ppo", "pg_variant: topr has no effect, as in ROLL"),
        ({}, "topr", "topr", "pg_variant: topr is the policy loss; ROLL reads"),
    ],
)
def test_pg_variant_is_read_where_roll_reads_it(
    rl: dict[str, Any], plan: Plan, role: dict[str, Any], top: str | None, loss: str, said: str | None
) -> None:
    rl["actor_train"] |= role
    run = plan({"pg_variant": top} if top else {}, pure=False)
    assert run.objective.policy_loss == loss
    found = [text for text in run.warnings if "pg_variant" in text]
    assert len(found) == bool(said) and all(text.startswith(said or "") for text in found)


@pytest.mark.extras
def test_pg_variant_brings_its_arguments(rl: dict[str, Any], plan: Plan, problems: Problems) -> None:
    rl["actor_train"] |= {"worker_cls": PG, "pg_variant": "topr", "topr_positive_weight": 2.0}
    arguments = plan({}, pure=False).objective.policy_loss_args
    assert (arguments["positive_weight"], arguments["negative_weight"]) == (2.0, 1.0)
    run = plan({"actor_train.pg_variant": "ppo", "importance_sampling": "seq"}, pure=False)
    assert "ratio_type" not in run.objective.policy_loss_args
    assert any(text.startswith("importance_sampling: seq has no effect") for text in run.warnings)
    assert "ActorPGWorker needs one of vanilla" in problems({"actor_train.pg_variant": ...}, pure=False)[0]


@pytest.mark.parametrize(
    ("written", "expected", "reported"),
    [
        ({"pg_clip_high": 0.28}, (0.3, 0.3), True),
        ({"pg_clip_high": 0.28, "use_pg_clip_range": False}, (0.3, 0.3), True),
        ({"pg_clip_high": 0.28, "use_pg_clip_range": True}, (0.2, 0.28), False),  # the other is ROLL's own default
        ({"pg_clip_high": 0.28, "policy_loss_fn": "ppo"}, (0.3, 0.28), False),  # no configuration of ROLL's
        ({"pg_clip_low": 0.3, "pg_clip_high": 0.3}, (0.3, 0.3), False),
    ],
)
def test_clip_ranges_of_any_key_are_read(
    rl: dict[str, Any], plan: Plan, written: dict[str, Any], expected: tuple[float, float], reported: bool
) -> None:
    run = plan({"pg_clip": 0.3, **written}, pure=False)
    arguments = run.objective.policy_loss_args
    assert (arguments["clip_low"], arguments["clip_high"]) == expected
    assert any("without use_pg_clip_range: true," in text for text in run.warnings) == reported


@pytest.mark.parametrize(("ulysses", "layout"), [(1, Layout(dp=4)), (2, Layout(tp=2, dp=2, sequence_parallel=True))])
def test_ulysses_counts_in_the_batch_arithmetic(rl: dict[str, Any], plan: Plan, ulysses: int, layout: Layout) -> None:
    rl["actor_train"] |= {
        "strategy_args": {"strategy_name": "fsdp2_train", "strategy_config": {"fsdp_size": 4}},
        "device_mapping": "list(range(0,4))",
    }
    rl["actor_train"]["model_args"]["ulysses_size"] = ulysses
    rl["actor_train"]["training_args"] |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    run = plan({}, pure=False)
    assert run.student.layout == layout
    assert run.student.mini_batch_sequences == 2 * 4 // ulysses  # ROLL's dp is devices / ulysses


def test_an_engine_of_sglang_keeps_its_size_and_memory(rl: dict[str, Any], plan: Plan) -> None:
    config = {"mem_fraction_static": 0.7, "load_format": "dummy"}
    rl["actor_infer"] |= {
        "strategy_args": {"strategy_name": "sglang", "strategy_config": config},
        "num_gpus_per_worker": 2,
        "device_mapping": "list(range(0,4))",
    }
    run = plan({}, pure=False)
    assert (run.rollout.tp, run.rollout.engines) == (2, 2)
    assert run.rollout.engine_args == {"gpu_memory_utilization": 0.7}
    (said,) = [text for text in run.warnings if "'sglang' does not exist" in text]
    assert "tensor_parallel_size 2, gpu_memory_utilization 0.7" in said and "dropped: load_format" in said


def test_lengths_of_validation(values: dict[str, Any], plan: Plan, problems: Problems, root: Any) -> None:
    held_out = {"data_args": {"file_name": str(root / "train.jsonl")}, "generating_args": {"max_new_tokens": 20}}
    values["validation"] = held_out
    assert plan({}).validation.sampling.max_new_tokens == 20
    run = plan({"val_prompt_length": 32, "val_sequence_length": 72})
    assert (run.validation.sampling.max_new_tokens, run.validation.data.prompt_length) == (40, 32)
    assert any("20 has no effect: as in ROLL, val_sequence_length" in text for text in run.warnings)
    assert "val_sequence_length: 72 leaves no room" in problems({"val_prompt_length": 72})[0]
    assert "val_prompt_length: is missing" in problems({"val_prompt_length": ...})[0]


def test_masks_that_leave_nothing_or_have_nothing_to_go_by(rl: dict[str, Any], plan: Plan, problems: Problems) -> None:
    found = problems({"difficulty_mask": True, "difficulty_low_threshold": 1.0}, pure=False)
    assert "1 and difficulty_high_threshold 1 leave no prompt" in found[0]
    run = plan({"difficulty_mask": ..., "error_max_len_threshold": 5}, pure=False)
    assert "error_max_len_threshold" in run.warnings[0] and "difficulty_low_threshold" in run.warnings[0]


def test_a_mask_by_rewards_needs_them_in_pure_distillation(plan: Plan, problems: Problems) -> None:
    assert plan({"difficulty_mask": True, "max_len_mask": True}).update_reads_rewards
    assert not plan({"difficulty_mask": ...}).update_reads_rewards
    assert "error_max_len_clip: true needs rewards" in problems({"error_max_len_clip": True, "rewards": ...})[0]


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"whiten_advantages": True}, "whiten_advantages: true has no effect in pure distillation"),
        ({"kl_penalty": "mse"}, "kl_penalty: mse is not applied to the teachers"),
        ({"opsd_mode": True}, "opsd_mode: true has no effect, as ROLL does not read it either"),
        ({"use_topr_loss": True}, "use_topr_loss: true has no effect, as ROLL"),
        ({"postive_loss_coef": 0.5}, "postive_loss_coef: 0.5 has no effect, as ROLL"),
        ({"student_train.model_update_frequency": 2}, "student_train.model_update_frequency: 2 has no effect: engines"),
        ({"student_infer.generating_args.num_beams": 4}, "num_beams: 4 has no effect: responses are sampled"),
        ({"student_train.mtp_training_mode": "joint"}, "mtp_training_mode: joint has no effect: layers of"),
        ({"student_train.training_args.learning_rate": 0}, "learning_rate: 0 changes no weights"),
        ({"student_train.training_args.learning_rate": "1e-400"}, "learning_rate: 0 changes no weights"),
        ({"rl_loss_coef": 0}, "rl_loss_coef: 0 removes the policy loss"),
    ],
)
def test_a_change_of_what_is_learned_is_reported_separately(plan: Plan, written: dict[str, Any], said: str) -> None:
    (warning,) = plan(written).warnings
    assert said in warning


@pytest.mark.parametrize(
    "written",
    [
        {"opsd_mode": False, "postive_loss_coef": 0.0, "reward_scale": False, "use_policy_loss_type": "PPO"},
        {"student_train.router_replay": {"mode": "disable"}, "student_train.mtp_training_mode": "disabled"},
        {"rollout_mock": {"enable": True, "mode": "dump"}, "student_infer.generating_args.do_sample": True},
        {"advantage_clip": 2.0, "entropy_loss_coef": 0.01},
    ],
)
def test_a_key_that_changes_nothing_is_not_reported(plan: Plan, written: dict[str, Any]) -> None:
    assert plan(written).warnings == ()


def test_fields_of_rolls_that_mean_nothing_here(plan: Plan, root: Any) -> None:
    """Of TrainingArguments, of BaseConfig, and those that validation has as a WorkerConfig."""
    held_out = {
        "data_args": {"file_name": str(root / "train.jsonl")},
        "name": "val",
        "worker_cls": "x",
        "tag_included": [],
    }
    changes = {"student_train.training_args.data_seed": 1, "student_train.training_args.tf32": True}
    changes |= {"student_train.training_args.save_hf_model": True, "otlp_output_dir": "x", "validation": held_out}
    (warning,) = plan(changes).warnings
    assert all(name in warning for name in ("data_seed", "tf32", "save_hf_model", "otlp_output_dir", "worker_cls"))


@pytest.mark.extras
def test_a_judge_of_the_shared_reward_model(rl: dict[str, Any], plan: Plan, problems: Problems, root: Any) -> None:
    """`judge_model_type: cluster`: the section reward_model describes the engine."""
    model = {"model_name_or_path": str(root / "student"), "dtype": "fp32"}
    engine = {"model_args": model, "device_mapping": "[2, 3]", "strategy_args": {"strategy_name": "vllm"}}
    rl["rewards"] = {"llm_judge": {"judge_model_type": "cluster"}}
    rl["reward_model"] = engine | {"name": "judge", "generating_args": {"max_new_tokens": 7}}
    (reward,) = plan({}, pure=False).rewards
    assert (reward.engine.engines, reward.engine.sampling.max_new_tokens) == (2, 7)
    assert "'cluster' uses the engine of section reward_model" in problems({"reward_model": ...}, pure=False)[0]


@pytest.mark.extras
def test_keys_of_the_shared_reward_model_are_checked(
    rl: dict[str, Any], plan: Plan, problems: Problems, root: Any
) -> None:
    model = {"model_name_or_path": str(root / "student"), "dtype": "fp32"}
    rl["rewards"] = {"llm_judge": {"judge_model_type": "cluster"}}
    rl["reward_model"] = {"model_args": model, "device_mapping": "[2, 3]", "strategy_args": {"strategy_name": "vllm"}}
    rl["rewards"]["llm_judge"]["model_args"] = model  # ROLL's files have it; it is of no effect here
    plan({}, pure=False)
    texts = problems({"reward_model.bogus": 1, "reward_model.device_maping": "[0]"}, pure=False)
    assert any(text.startswith("reward_model.bogus: ") for text in texts), texts
    assert any("did you mean 'device_mapping'" in text for text in texts), texts


@pytest.mark.extras
def test_arguments_of_rewards_are_checked_by_the_plan(rl: dict[str, Any], plan: Plan, problems: Problems) -> None:
    changes = {"rewards.math_rule": {"worker_cls": "llm_judge", "judge_prompt": "no such", "judge_api_url": "http://x"}}
    assert any(
        "judge_prompt: 'no such' is not known" in text for text in plan(changes, pure=False, runnable=False).warnings
    )
    assert "judge_prompt: 'no such' is not known" in problems({}, pure=False)[0]
