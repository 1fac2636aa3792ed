"""Checks of a configured workflow: arguments of built-in workflows, and names that exist only in Trinity-RFT."""

from collections.abc import Iterator, Mapping
from typing import Any

from roll_opd.base.declared import declarations
from roll_opd.base.hints import nearest
from roll_opd.workflows import compat_advice

BOXED = ("math_boxed_workflow", "async_math_boxed_workflow")


def name_problem(name: str, plugin_dir: str | None) -> str | None:
    """Return the problem of a workflow name that exists only in Trinity-RFT and that `plugin_dir` does not register."""
    declared = declarations("roll_opd.workflows.builtin", "WORKFLOWS.register_module")
    if name in declared or (plugin_dir and compat_advice.is_written_in(name, plugin_dir)):
        return None
    return compat_advice.advice(name)


def argument_problems(name: str, given: Mapping[str, Any], reward: str | None) -> Iterator[tuple[str, str]]:
    """Yield (argument, problem) for the arguments of a built-in workflow with the reward function `reward`."""
    declared = declarations("roll_opd.workflows.builtin", "WORKFLOWS.register_module").get(name)
    if declared is None:
        return
    known = declared.facts.get("arguments", ())
    for argument in given:
        if argument in known:
            continue
        near = nearest(argument, known)
        others = f"known are {', '.join(known)}" if known else f"{name} has none; remove it"
        yield argument, f"unknown argument of {name}; " + (f"did you mean {near!r}?" if near else others)
    if name in BOXED and reward is None and "format_score_coef" in given:
        yield "format_score_coef", "is read by a reward function; write workflow_reward: math_boxed_reward"
