"""Plan a run whose models and data are names on a hub: download what is missing, and keep the commits on a resume."""

from collections.abc import Callable

from roll_opd.base import hub
from roll_opd.base.failures import ConfigError
from roll_opd.config.plan import RunPlan
from roll_opd.models.hub_models import download_weights
from roll_opd.pipelines.checkpoints import find
from roll_opd.tracking.run_directory import RunDirectory


def with_inputs(planned: Callable[[], RunPlan], say: Callable[[str], None]) -> RunPlan:
    """Return the plan of a run, with all its models and data on this host.

    The plan is first made from the small files of the models and from the data, so that a configuration with a problem
    downloads no weights. A resumed run uses the commits with which its checkpoint was made. Raises ConfigError.

    Args:
        planned: makes the plan.
        say: gets the lines about downloads.
    """
    with hub.downloading(say):
        plan = planned()
        if not plan.hub:
            return plan
        earlier = _recorded(plan)
        changed = [name for name, use in plan.hub.items() if earlier.get(name, use.commit) != use.commit]
        with hub.pinned(earlier):
            for name in changed:
                say(f"{name}: the run continues with commit {earlier[name][:8]}, not {plan.hub[name].commit[:8]}")
            plan = planned() if changed else plan
            if not plan.downloads:
                return plan
            with hub.environment(plan.env), hub.pinned({name: use.commit for name, use in plan.hub.items()}):
                if problems := download_weights(plan.downloads):
                    raise ConfigError(problems)
                return planned()


def _recorded(plan: RunPlan) -> dict[str, str]:
    """Return the commits of names with which the checkpoint was made from which a run resumes."""
    checkpoint = find(plan.checkpoint, plan.output_dir, plan.exp_name)
    if checkpoint is None:
        return {}
    found = RunDirectory(checkpoint.run).read_facts().get("hub")
    return {str(name): str(commit) for name, commit in found.items()} if isinstance(found, dict) else {}
