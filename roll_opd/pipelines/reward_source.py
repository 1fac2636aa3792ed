"""Find out where the rewards of a workflow come from: its class, its reward function, or the configuration.

The `rewards` of the configuration score only samples to which the workflow gives no reward.
"""

import dis
import itertools
from typing import Literal

from roll_opd.config.plan import RunPlan, WorkflowPlan
from roll_opd.workflows.builtin.environment import EnvironmentWorkflow
from roll_opd.workflows.builtin.single_turn import BaseSimpleWorkflow, OnPolicyDistillWorkflow
from roll_opd.workflows.hooks import PACKAGE, codes_of, names_in
from roll_opd.workflows.plugins import find_workflow
from roll_opd.workflows.workflow_bases import RewardPropagationWorkflow, StepWiseRewardWorkflow

# the rewards come from the workflow's code, the function workflow_reward, or `rewards` of the configuration; either:
# this depends on the sample
Source = Literal["workflow", "function", "configuration", "either"]
RUN = ("run", "run_async")
REWARD_NAMES = {"reward", "rewards", "reward_fn", "take_reward", "update_reward", "score", "scored"}


def reward_source(kind: type, *, has_function: bool, is_scored: bool) -> Source:
    """Return where the rewards of a workflow's samples come from.

    Args:
        kind: class of the workflow.
        has_function: whether the configuration has a `workflow_reward`.
        is_scored: whether the configuration has `rewards`.
    """
    if issubclass(kind, BaseSimpleWorkflow):
        return _of_one_turn(kind, has_function=has_function, is_scored=is_scored)
    if not _are_ours(kind, *RUN, "experiences_of"):
        return "either"
    if issubclass(kind, StepWiseRewardWorkflow | RewardPropagationWorkflow):
        return "either" if any(_may_be_none(kind, name) for name in ("reward", "reward_async")) else "workflow"
    return "workflow" if issubclass(kind, EnvironmentWorkflow) else "either"


def _of_one_turn(kind: type, *, has_function: bool, is_scored: bool) -> Source:
    if not _are_ours(kind, *RUN, "experiences_of", "scored", "score"):
        return "either"
    if issubclass(kind, OnPolicyDistillWorkflow):
        is_written = not _are_ours(kind, "compute_reward")
        is_placeholder = _written_by(kind, "compute_reward") is OnPolicyDistillWorkflow
        if is_written or not (is_placeholder or has_function or is_scored):
            return "either" if _may_be_none(kind, "compute_reward") else "workflow"
    own = [base for base in kind.__mro__ if not base.__module__.startswith((PACKAGE, "builtins"))]
    parts = [part for base in own for part in vars(base).values()]
    if REWARD_NAMES & {name for part in parts for code in codes_of(part) for name in names_in(code)}:
        return "either"
    return "function" if has_function else "configuration"


def _written_by(kind: type, name: str) -> type | None:
    return next((base for base in kind.__mro__ if name in vars(base)), None)


def _are_ours(kind: type, *names: str) -> bool:
    """Return whether a class inherits all of the methods in `names` from classes of this package."""
    found = [_written_by(kind, name) for name in names]
    return all(base is None or base.__module__.startswith(PACKAGE) for base in found)


def _may_be_none(kind: type, name: str) -> bool:
    """Return whether a method can return None, explicitly or by reaching its end."""
    base = _written_by(kind, name)
    for code in codes_of(vars(base)[name] if base else None):
        instructions = list(dis.get_instructions(code))
        for before, each in itertools.pairwise(instructions):
            if each.opname == "RETURN_VALUE" and before.opname == "LOAD_CONST" and before.argval is None:
                return True
        if any(each.opname == "RETURN_CONST" and each.argval is None for each in instructions):
            return True
    return False


def rewards_from(workflow: WorkflowPlan) -> Source:
    """Return where the rewards of a workflow's samples come from. This function imports the workflow's class."""
    kind = find_workflow(workflow.workflow or "", workflow.plugin_dir)
    return reward_source(kind, has_function=bool(workflow.workflow_reward), is_scored=workflow.is_scored)


def uncalled_rewards(plan: RunPlan) -> tuple[str, ...]:
    """Return a warning if a workflow's rewards replace the configured rewards.

    This function imports the workflow's class.
    """
    if plan.workflow is None or not plan.rewards or plan.is_agentic:
        return ()
    source = rewards_from(plan.workflow)
    if source not in ("workflow", "function"):
        return ()
    names = ", ".join(f"rewards.{reward.domain}" for reward in plan.rewards)
    by = f" by workflow_reward {plan.workflow.workflow_reward}" if source == "function" else ""
    verb = "is" if len(plan.rewards) == 1 else "are"
    return (
        f"{names} {verb} never called: workflow {plan.workflow.workflow} sets the reward of every sample{by}; remove"
        f" {names}, or use another workflow",
    )
