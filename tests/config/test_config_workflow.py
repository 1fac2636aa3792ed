"""Configurations of workflows, and of the models that workflows call."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roll_opd.commands.describe import to_json
from roll_opd.config.plan import RunPlan
from roll_opd.workflows import WORKFLOWS, WorkflowError
from roll_opd.workflows.workflow_checks import advice

pytestmark = pytest.mark.extras

Plan = Callable[..., RunPlan]
Problems = Callable[..., list[str]]
HERE = {"strategy_args": {"strategy_name": "vllm"}, "device_mapping": "[0]"}
ELSEWHERE = {"base_url": "https://models.example.com/v1/", "model_name": "large", "api_key": "sk-hidden"}


def engine(root: Any, **more: Any) -> dict[str, Any]:
    return {**HERE, "model_args": {"model_name_or_path": str(root / "student")}, **more}


def test_auxiliary_models_are_planned_in_their_order(plan: Plan, root: Any) -> None:
    models = {"judge": engine(root, generating_args={"max_new_tokens": 9}), "user": ELSEWHERE}
    run = plan({"workflow": "simple_workflow", "auxiliary_models": models, "endpoint_api_key": "sk-house"})
    judge, user = run.workflow.auxiliary_models
    assert (judge.name, user.name, user.base_url, user.model_name) == (
        "judge",
        "user",
        "https://models.example.com/v1",
        "large",
    )
    assert judge.engine.name == "auxiliary_models.judge" and judge.engine.sampling.max_new_tokens == 9
    assert judge.engine.sampling.temperature == 0 and judge.engine.devices == (0,)
    assert "auxiliary_models.judge" in run.roles() and user.api_key == "sk-hidden"
    reported = json.dumps(to_json(run)) + run.config_yaml + repr(run)
    assert "large" in reported and "sk-hidden" not in reported


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ({"user": {"base_url": "http://x/v1"}}, "auxiliary_models.user.model_name: is missing"),
        ({"user": {"model_name": "large"}}, "auxiliary_models.user.base_url: is missing"),
        ({"user": {**ELSEWHERE, "model_nam": 1}}, "did you mean 'model_name'"),
        ({"judge": {"strategy_args": {"strategy_name": "vllm"}}}, "auxiliary_models.judge"),
        (["judge"], "auxiliary_models: expected a mapping of names to sections"),
    ],
)
def test_auxiliary_models_that_cannot_be(problems: Problems, models: Any, message: str) -> None:
    assert any(message in text for text in problems({"workflow": "simple_workflow", "auxiliary_models": models}))


def test_without_a_workflow_nobody_asks_them(plan: Plan) -> None:
    run = plan({"auxiliary_models": {"user": ELSEWHERE}})
    assert run.workflow is None and any("auxiliary_models" in text for text in run.warnings)


@pytest.mark.parametrize(
    ("workflow", "args", "message"),
    [
        ("simple_workflow", {"use_base": True}, "workflow_args.use_base: unknown argument of simple_workflow; "),
        ("math_boxed_workflow", {"with_thnk": True}, "did you mean 'with_think'?"),
        ("async_math_boxed_workflow", {"steps": 3}, "known are use_base, with_think, format_score_coef"),
        ("try_again_workflow", {"steps": 3}, "known are max_steps, enough, feedback"),
        ("math_boxed_workflow", {"format_score_coef": 0.2}, "write workflow_reward: math_boxed_reward"),
    ],
)
def test_arguments_of_built_in_workflows(problems: Problems, workflow: str, args: dict, message: str) -> None:
    (text,) = problems({"workflow": workflow, "workflow_args": args})
    assert message in text


def test_arguments_of_ones_own_workflows_are_ones_own(plan: Plan) -> None:
    for more in ({"workflow": "my.Mine"}, {"workflow": "simple_workflow", "plugin_dir": "."}):
        assert plan({**more, "workflow_args": {"steps": 3}}).workflow.workflow_args == {"steps": 3}
    args = {"use_base": True, "with_think": True}
    assert plan({"workflow": "math_boxed_workflow", "workflow_args": args}).workflow.workflow_args == args


def test_a_name_of_trinitys_own_workflows_says_where_it_is(plan: Plan, problems: Problems, tmp_path: Path) -> None:
    """Already to the planner, unless a plugin may have registered it."""
    for name, reported in (
        ("frozen_lake_workflow", "trinity/common/workflows/envs/frozen_lake/workflow.py"),
        ("rubric_judge_workflow", "write workflow=rubric_judge_workflow.RubricJudgeWorkflow"),
    ):
        (tmp_path / "mine.py").write_text(f"# no {name} here\n")
        for more in ({}, {"plugin_dir": str(tmp_path)}):
            (problem,) = problems({"workflow": name, **more})
            assert reported in problem and "part of Trinity-RFT and not of this package" in problem
        with pytest.raises(WorkflowError, match="part of Trinity-RFT and not of this package"):
            WORKFLOWS.find(name)
        (tmp_path / "mine.py").write_text(f"@WORKFLOWS.register_module('{name}')\nclass Mine: ...\n")
        assert plan({"workflow": name, "plugin_dir": str(tmp_path)}).workflow.workflow == name
    with pytest.raises(WorkflowError, match="unknown workflow 'frozen_lake'; known are"):
        WORKFLOWS.find("frozen_lake")


def test_names_of_trinitys_own_are_none_of_ours() -> None:
    assert not [name for name in WORKFLOWS.builtin if advice(name)]
