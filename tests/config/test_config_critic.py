"""The critic: when it is needed, the plan of its section, and contradictions."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from config_assets import write_model, write_tokenizer

from roll_opd.commands.describe import to_json
from roll_opd.commands.plan_text import to_text
from roll_opd.config.plan import CriticPlan, Layout, RunPlan

Plan = Callable[..., RunPlan]
Problems = Callable[..., list[str]]


@pytest.fixture
def ppo(values: dict[str, Any]) -> dict[str, Any]:
    """The base configuration without its teacher and with a critic; `plan` and `problems` see it."""
    values["actor_train"] = values.pop("student_train")
    values["actor_infer"] = values.pop("student_infer")
    del values["teacher"]
    values["critic"] = {
        "model_args": {"dtype": "fp32"},
        "training_args": {
            "learning_rate": 1e-4,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "warmup_steps": 3,
        },
        "strategy_args": {
            "strategy_name": "megatron_train",
            "strategy_config": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        },
        "device_mapping": "[2,3]",
    }
    return values


def test_critic_is_a_role_of_its_own(ppo: dict[str, Any], plan: Plan, root: Path) -> None:
    run = plan({"critic_warmup": 4, "critic_epochs": 3, "value_clip": 0.5}, pure=False)
    critic = run.critic
    assert type(critic) is CriticPlan
    assert run.objective.adv_estimator == "gae"  # ROLL's default
    assert (critic.name, critic.devices, critic.layout) == ("critic", (2, 3), Layout(tp=2, sequence_parallel=True))
    assert critic.model.path == str(root / "student")  # it begins as the student does
    assert (critic.mini_batch_sequences, critic.train_limits.sequences) == (4, 2)
    assert (critic.value_clip, critic.critic_epochs, critic.critic_warmup) == (0.5, 3, 4)
    assert (critic.optimizer.learning_rate, critic.optimizer.warmup_steps) == (1e-4, 3)
    assert critic.optimizer.total_steps == 10 * 3 * (8 * 2 // 4)
    assert run.student.optimizer.total_steps == 10 - 4  # what is left of max_steps, one update each
    assert set(run.memory) == {"actor_train", "actor_infer", "critic"}
    assert run.warnings == ()
    shown = to_json(run)
    assert shown["roles"]["critic"]["strategy"] == "megatron_train"
    assert shown["batch"]["updates_per_step"] == 1
    assert "critic_warmup 4: number of steps at the start of a run that train only the critic" in to_text(run)


def test_its_own_model_and_rolls_defaults(ppo: dict[str, Any], plan: Plan, root: Path) -> None:
    other = str(write_model(root / "reward", seed=7))
    critic = plan({"critic.model_args.model_name_or_path": other}, pure=False).critic
    assert (critic.model.path, critic.value_clip, critic.critic_epochs, critic.critic_warmup) == (other, None, 1, 0)


def test_without_devices_it_takes_turns_with_the_student(ppo: dict[str, Any], plan: Plan) -> None:
    run = plan({"critic.device_mapping": ..., "critic.strategy_args": ...}, pure=False)
    assert (run.critic.devices, run.critic.layout) == ((0, 1), Layout(dp=2))
    assert run.warnings[0].startswith("critic.device_mapping: is not written, so this role shares the student's")


def test_gae_needs_a_critic(ppo: dict[str, Any], problems: Problems) -> None:
    (found,) = problems({"critic": ...}, pure=False)
    assert found.startswith("adv_estimator: gae (ROLL's default) needs a critic; write a critic")


@pytest.mark.parametrize("pure", [False, True])
def test_unused_critic_is_not_loaded(ppo: dict[str, Any], plan: Plan, root: Path, pure: bool) -> None:
    unused = {"critic_warmup": 1, "value_clip": 0.2, "critic_epochs": 2, "adv_estimator": "reinforce"}
    if pure:
        ppo["student_train"], ppo["student_infer"] = ppo.pop("actor_train"), ppo.pop("actor_infer")
        write_model(root / "teacher", seed=2)
        ppo["teacher"] = {
            "model_args": {"model_name_or_path": str(root / "teacher"), "dtype": "fp32"},
            "device_mapping": "[2,3]",
        }
        unused["critic_warmup"] = 0
    run = plan({**unused, "critic.model_args.model_name_or_path": "not/there"}, pure=pure)
    assert run.critic is None
    assert run.student.optimizer.total_steps == 10
    assert any(text.startswith("critic: is written but not used") for text in run.warnings)
    assert any("no effect here: critic_epochs" in text and "value_clip" in text for text in run.warnings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"critic_warmup": 10}, "critic_warmup: 10 steps that train only the critic leave none of max_steps 10"),
        (
            {"critic.training_args.per_device_train_batch_size": 3},
            "16 sequences per step are not a multiple of critic's mini-batch of 6",
        ),
        ({"critic.strategy_args.strategy_config.pipeline_model_parallel_size": 2}, "critic.device_mapping: 2 devices"),
        ({"critic.device_mapping": "[1,2]"}, "equal, nested or disjoint"),
        ({"critic.strategy_args.strategy_name": "vllm"}, "critic.strategy_args.strategy_name: 'vllm' cannot do"),
        ({"critic.training_args.learning_rat": 1}, "critic.training_args.learning_rat: unknown key"),
        ({"value_clip": 0}, "value_clip: should be greater than 0"),
        (
            {"critic.model_args.dtype": "fp16", "strict_strategies": True},
            "critic: training in fp16 is not available",
        ),
    ],
)
def test_wrong_settings_of_a_critic_are_refused(
    ppo: dict[str, Any], problems: Problems, changes: dict[str, Any], message: str
) -> None:
    assert any(message in text for text in problems(changes, pure=False))


def test_it_reads_tokens_as_the_student_does(ppo: dict[str, Any], problems: Problems, root: Path) -> None:
    write_tokenizer(write_model(root / "other", seed=7), end="<|stop|>")
    (found,) = problems({"critic.model_args.model_name_or_path": str(root / "other")}, pure=False)
    assert "tokenizers of student and critic differ" in found
