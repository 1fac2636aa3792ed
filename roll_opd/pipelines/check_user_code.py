"""Import and check the user's functions and classes in a plan, before a run and in `roll-opd plan`."""

from typing import Any

from roll_opd.base.failures import ConfigError, WorkflowError
from roll_opd.base.frozen import thaw
from roll_opd.base.installed import is_installed
from roll_opd.base.registry import argument_problems
from roll_opd.base.user_modules import users_module
from roll_opd.config.plan import RunPlan, ScorerPlan
from roll_opd.objective.registry import advantage, opd_advantage, policy_loss
from roll_opd.pipelines.user_code import pipeline_module, task_keys
from roll_opd.planner.tracker_sections import GIVEN_BY_US
from roll_opd.rewards import reward_registry as rewards
from roll_opd.teachers.teacher_registry import TEACHERS
from roll_opd.tracking import tracker_registry
from roll_opd.tracking.tracker_registry import JSONL
from roll_opd.workflows import workflow_checks


def check_user_code(plan: RunPlan) -> None:
    """Import every function and class in the plan, and check their configured arguments.

    Raises AlgorithmError, ConfigError, RewardError, TrackerError or WorkflowError.
    """
    for term in (term for reward in plan.rewards for term in reward.terms):
        rewards.check(term.worker, dict(term.args))
    if pipeline_module(plan.pipeline) == plan.pipeline:
        loop_of(plan.pipeline)
    _check_objective(plan)
    for source in (teacher.source for teacher in plan.teachers if isinstance(teacher.source, ScorerPlan)):
        for argument, problem in argument_problems(TEACHERS.find(source.kind), source.arguments, given_by_us=1):
            raise ConfigError([f"{source.name}.scorer.args.{argument}: {problem.partition(', got ')[0]}"])
    workflow = plan.workflow
    if workflow and workflow.workflow:
        from roll_opd.workflows.plugins import find_reward, find_workflow  # imports torch

        found = find_workflow(workflow.workflow, workflow.plugin_dir)
        given, reward = thaw(workflow.workflow_args), workflow.workflow_reward
        for argument, problem in workflow_checks.argument_problems(workflow.workflow, given, reward):
            raise WorkflowError(f"workflow_args.{argument}: {problem}")
        if check_arguments := getattr(found, "check_arguments", None):
            check_arguments(thaw(workflow.workflow_args))
        if workflow.workflow_reward:
            find_reward(workflow.workflow_reward, workflow.plugin_dir, thaw(workflow.workflow_reward_args))
        if problems := list(task_keys(plan).check_code(plan)):
            raise ConfigError(problems)
    for tracker in plan.trackers:
        if tracker != JSONL:
            made = tracker_registry.TRACKERS.find(tracker)
            for name, problem in argument_problems(made, plan.tracker_args.get(tracker, {}), GIVEN_BY_US):
                raise tracker_registry.TrackerError(f"tracker {tracker}: {name}: {problem.partition(', got ')[0]}")


def _check_objective(plan: RunPlan) -> None:
    """Check the functions of the objective. Without torch, only the user's; the planner has checked the others."""
    objective = plan.objective

    def is_checked(name: str) -> bool:
        return "." in name or is_installed("torch")

    if is_checked(objective.policy_loss):
        policy_loss(objective.policy_loss, objective.policy_loss_args)
    if is_checked(objective.opd_advantage_fn):
        opd_advantage(objective.opd_advantage_fn, objective.opd_advantage_fn_args)
    if plan.rollout and not plan.rewards_are_monitored and is_checked(objective.adv_estimator):
        advantage(objective.adv_estimator, objective.advantage_args)


def loop_of(pipeline: str) -> Any:
    """Return the function `train` of a pipeline. Raises ConfigError if its module has none."""
    name = pipeline_module(pipeline)
    try:
        found = vars(users_module(name)).get("train")
    except ImportError as error:
        raise ConfigError([f"pipeline {pipeline}: {error}"]) from error
    if not callable(found):
        raise ConfigError([f"pipeline {pipeline}: the module {name} has no `async def train(run, workers)`; write it"])
    return found
