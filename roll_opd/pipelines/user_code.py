"""Find out whether a plan names code of the user. Planning must import such code."""

from importlib.util import find_spec

from roll_opd.config.plan import RunPlan
from roll_opd.config.schema import PIPELINES, Top
from roll_opd.workflows.workflow_checks import declared_workflows

PACKAGE = "roll_opd.pipelines"


def pipeline_module(name: str) -> str:
    """Return the module path of a pipeline.

    `name` is a module of this package, ROLL's name rlvr of the loop `distill`, or the path of a module of the user.
    """
    if name in PIPELINES and PIPELINES[name].loop:
        return pipeline_module(PIPELINES[name].loop)
    inside = f"{PACKAGE}.{'distill' if name == 'rlvr' else name}"
    return inside if "." not in name and find_spec(inside) else name


def task_keys(plan: RunPlan) -> type[Top]:
    """Return the keys of a plan's pipeline if it has a rollout, else `Top`."""
    keys = PIPELINES.get(plan.pipeline, Top)
    return keys if issubclass(keys, Top) else Top


def uses_user_code(plan: RunPlan) -> bool:
    """Return whether a plan names code of the user.

    Such code is a plugin directory, a module, a dotted path, or a name that the user's code registers.
    """
    if not pipeline_module(plan.pipeline).startswith(f"{PACKAGE}."):
        return True
    workflow = plan.workflow
    objective = plan.objective
    names: list[str | None] = [objective.policy_loss, objective.adv_estimator, objective.opd_advantage_fn]
    names += [*plan.trackers, *(teacher.source.kind for teacher in plan.teachers)]
    names += [term.worker for reward in plan.rewards for term in reward.terms]
    if workflow:
        names += task_keys(plan).named_code(plan)
        names.append(workflow.workflow_args.get("agent"))
        registered = {"WORKFLOWS": workflow.workflow, "REWARD_FUNCTIONS": workflow.workflow_reward}
        if workflow.plugin_dir or any(name and name not in declared_workflows(of) for of, name in registered.items()):
            return True
    return any("." in str(name or "") for name in names)
