"""Errors of runs in environments that the plan reports: managers, templates, names, teachers, unread keys."""

from collections.abc import Callable
from typing import Any

import pytest

from roll_opd.config.plan import RunPlan

pytestmark = pytest.mark.extras

Plan = Callable[..., RunPlan]
Problems = Callable[..., list[str]]
MANAGERS = "roll.pipeline.agentic.env_manager"
BY_STEP = f"{MANAGERS}.step_env_manager.StepEnvManager"


def games(more: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    """Return changes of the base configuration for a run in one game with the tag Lake."""
    lake = {"env_type": "frozen_lake", "max_steps": 4, **settings}
    return {
        "custom_envs": {"Lake": lake},
        "train_env_manager": {"tags": ["Lake"], "num_env_groups": 4, "group_size": 4},
        "sequence_length": 96,
        "rollout_batch_size": 16,
        "rewards": ...,
        "num_return_sequences_in_group": ...,
        "student_train.data_args": ...,
        "validation": ...,
        **(more or {}),
    }


def of(words: str, sentences: Any) -> list[str]:
    return [text for text in sentences if words in text]


@pytest.mark.parametrize(
    ("manager", "words"),
    [
        ("my_pkg.managers.MyEnvManager", "custom managers are not supported; remove the key"),
        ("my_pkg.managers.StepEnvManager", "custom managers are not supported; remove the key"),
        ("my.StepEnvManger", "did you mean 'StepEnvManager'?"),
        (f"{MANAGERS}.vl_traj_env_manager.VLTrajEnvManager", "did you mean 'TrajEnvManager'?"),
    ],
)
def test_a_manager_that_would_not_be_played_is_refused(problems: Problems, manager: str, words: str) -> None:
    (problem,) = problems(games(env_manager_cls=manager))
    assert (
        f"custom_envs.Lake.env_manager_cls: {manager} is not a supported ROLL manager" in problem and words in problem
    )
    assert f"Supported in {MANAGERS}: TrajEnvManager, StepEnvManager," in problem


def test_managers_that_are_played(plan: Plan) -> None:
    for manager in (None, f"{MANAGERS}.traj_env_manager.TrajEnvManager", "TrajEnvManager"):
        assert plan(games(env_manager_cls=manager)).is_agentic
    assert plan(games(env_manager_cls=BY_STEP, agent_template="{current_observation}")).is_agentic


@pytest.mark.parametrize(
    ("settings", "key", "words"),
    [
        ({"agent_template": "{foo}"}, "agent_template", "{foo} is not a field of a turn; write literal braces"),
        ({"agent_template": "{observaton}"}, "agent_template", "did you mean 'observation'?"),
        ({"agent_template": '{"a": 1} {observation}'}, "agent_template", "write literal braces as {{ }}"),
        ({"agent_template": "{observation"}, "agent_template", "cannot be rendered: ValueError"),
        ({"agent_template": "{observation:d}"}, "agent_template", "cannot be rendered: ValueError"),
        ({"agent_template": "{} {observation}"}, "agent_template", "{} is not a field of a turn"),
        ({"env_manager_cls": BY_STEP}, "agent_template", "{current_observation}"),
        ({"pre_step_template": "{foo}"}, "pre_step_template", "{foo} is not a field"),
        ({"next_step_template": "{turn_idx} {foo}"}, "next_step_template", "{foo} is not a field"),
    ],
)
def test_templates_that_cannot_be_filled_in(problems: Problems, settings: dict[str, Any], key: str, words: str) -> None:
    (problem,) = problems(games(**settings))
    assert problem.startswith(f"custom_envs.Lake.{key}: ") and words in problem


def test_a_template_that_hides_the_game_is_warned_of(plan: Plan) -> None:
    words = "so the model never sees the game"
    (warning,) = of(words, plan(games(agent_template="Turn {turn_idx}")).warnings)
    assert warning.startswith("custom_envs.Lake.agent_template: has no {observation}, ")
    (warning,) = of(words, plan(games(env_manager_cls=BY_STEP, agent_template="{history}")).warnings)
    assert "{current_observation}" in warning
    for settings in (
        {},
        {"agent_template": "{{x}} {observation!s}"},
        {"agent_template": "x", "pre_step_template": ">"},
    ):
        assert not of(words, plan(games(**settings)).warnings)


def test_a_game_that_is_played_needs_a_teacher(plan: Plan, problems: Problems) -> None:
    boxes = {"env_type": "sokoban", "max_steps": 4}
    (problem,) = problems(games({"teacher.tag_included": ["Boxes"], "custom_envs.Boxes": boxes}))
    assert problem.startswith("teacher: no teacher accepts tag 'Lake'")
    assert plan(games({"teacher.tag_included": ["Lake"], "custom_envs.Boxes": boxes})).teachers[0].tags == ("Lake",)
    found = plan(
        games(
            {
                "teacher.tag_included": ["Lake", "Boxes"],
                "val_env_manager": {"tags": ["Boxes"]},
                "custom_envs.Boxes": boxes,
            }
        )
    )
    assert not of("tag_included", found.warnings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"env_type": "sokobann"}, "unknown environment 'sokobann'; did you mean 'sokoban'?"),
        ({"env_config": {"sizes": 4}}, "env_config.sizes: unknown argument; did you mean 'size'?"),
        ({"env_type": "webshop"}, "env_type webshop: needs the package"),
    ],
)
def test_a_game_that_cannot_be_made_is_reported_by_a_plan_and_refused_by_a_run(
    plan: Plan, problems: Problems, settings: dict[str, Any], words: str
) -> None:
    (warning,) = of("custom_envs.Lake: ", plan(games(**settings), runnable=False).warnings)
    assert words in warning
    assert of(words, problems(games(**settings)))


def test_games_of_the_users_are_not_looked_up_by_a_plan(plan: Plan, root: Any) -> None:
    assert plan(games(env_type="my_games.Sums")).is_agentic
    assert plan(games({"plugin_dir": str(root)}, env_type="sums")).is_agentic


@pytest.mark.parametrize("key", ["system_prompt", "global_template", "reply_prefix", "tag_to_template", "rewards"])
def test_keys_without_effect_in_environments_are_reported(plan: Plan, key: str) -> None:
    values = {"tag_to_template": {"Lake": "native"}, "rewards": {"math_rule": {}}}
    run = plan(games({key: values.get(key, "native")}))
    assert of(f"{key}: has no effect in environments", run.warnings)
    assert not of("has no effect in environments", plan(games({key: ...})).warnings)


def test_data_of_rows_are_among_the_keys_without_effect(plan: Plan) -> None:
    run = plan(games({"student_train.data_args": {"file_name": "rows.jsonl"}}))
    assert of("data_args", of("have no effect here", run.warnings))
    assert not of("data_args", plan(games()).warnings)
    reported = (
        "teacher.data_args: has no effect, as this role reads no rows; remove it"  # there is no role to write it in
    )
    assert reported in plan(games({"teacher.data_args.file_name": "rows.jsonl"})).warnings


def test_sampling_that_the_rollout_overrides_is_reported(plan: Plan) -> None:
    own, key = {"temperature": 0.3, "top_p": 1.0}, "train_env_manager.generating_args"
    run = plan(games({key: own, "student_infer.generating_args": {"temperature": 0.7, "max_new_tokens": 8}}))
    assert run.rollout.sampling.temperature == 0.7
    assert of(key, run.warnings) == [
        f"{key}.temperature: 0.3 has no effect; student_infer.generating_args.temperature 0.7 overrides it, so write"
        " the value there"
    ]
    run = plan(games({key: {**own, "max_new_tokens": 8}, "student_infer.generating_args": ...}))
    assert run.rollout.sampling.temperature == 0.3 and not of(key, run.warnings)
