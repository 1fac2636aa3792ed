"""The rewards of a run's workflow: where they come from, and a warning of configured ones that are never called."""

from roll_opd.config.plan import RunPlan, WorkflowPlan
from roll_opd.pipelines.reward_source import Source, reward_source
from roll_opd.workflows.plugins import find_workflow


def rewards_from(workflow: WorkflowPlan) -> Source:
    """Return where the rewards of a workflow's samples come from; imports its class."""
    kind = find_workflow(workflow.workflow or "", workflow.plugin_dir)
    return reward_source(kind, has_function=bool(workflow.workflow_reward), is_scored=workflow.is_scored)


def uncalled_rewards(plan: RunPlan) -> tuple[str, ...]:
    """Return a warning where a workflow's own rewards replace those of the configuration; imports its class."""
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
        " one of the two",
    )
