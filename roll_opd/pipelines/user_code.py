"""Find out whether a plan names code of the user. Planning must import such code."""

from importlib.util import find_spec

from roll_opd.base.registry import declarations
from roll_opd.config.plan import RunPlan

BUILTIN = "roll_opd.workflows.builtin"
PACKAGE = "roll_opd.pipelines"


def pipeline_module(name: str) -> str:
    """Return the module path of a pipeline.

    `name` is a module of this package, ROLL's name rlvr of the loop `distill`, or the path of a module of the user.
    """
    inside = f"{PACKAGE}.{'distill' if name == 'rlvr' else name}"
    return inside if "." not in name and find_spec(inside) else name


def uses_user_code(plan: RunPlan) -> bool:
    """Return whether a plan names code of the user.

    Such code is a plugin directory, a module, a dotted path, or a name that the user's code registers.
    """
    if not pipeline_module(plan.pipeline).startswith(f"{PACKAGE}."):
        return True
    workflow = plan.workflow
    names: list[str | None] = [plan.objective.policy_loss, plan.objective.adv_estimator, *plan.trackers]
    names += [term.worker for reward in plan.rewards for term in reward.terms]
    if workflow:
        games = workflow.workflow_args.get("environments", {}) if plan.is_agentic else {}
        names += [settings["env_type"] for settings in games.values()]
        names.append(workflow.workflow_args.get("agent"))
        registered = {
            "WORKFLOWS.register_module": workflow.workflow,
            "REWARD_FUNCTIONS.register_module": workflow.workflow_reward,
        }
        if workflow.plugin_dir or any(
            name and name not in declarations(BUILTIN, decorator) for decorator, name in registered.items()
        ):
            return True
    return any("." in str(name or "") for name in names)
