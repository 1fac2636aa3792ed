"""Check the name and the arguments of a configured workflow."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from roll_opd.base.entry_points import entries, load
from roll_opd.base.failures import nearest
from roll_opd.base.registry import Declared, declarations, of_entry


def declared_workflows(of: str = "WORKFLOWS") -> Mapping[str, Declared]:
    """Return the workflows of the package by name, without importing torch. `of` may also be "REWARD_FUNCTIONS"."""
    decorator = f"{of}.register_module"
    elsewhere = {name: of_entry(entry, decorator) for name, entry in entries(of.lower()).items()}
    return {**declarations("roll_opd.workflows.builtin", decorator), **elsewhere}


def advice(name: str) -> str | None:
    """Return advice on a name of another project, from the entry points in the group `roll_opd.advice`, or None."""
    return next((text for entry in entries("advice").values() if (text := load(entry)(name))), None)


def is_written_in(name: str, directory: str) -> bool:
    """Return whether a module of a plugin directory contains `name` in quotes.

    Code that registers a class as `name` contains it in quotes.
    """
    quoted = re.compile(f"[\"']{re.escape(name)}[\"']")
    try:
        files = [file.read_text(encoding="utf-8", errors="replace") for file in Path(directory).glob("[!.]*.py")]
    except OSError:
        return True  # reported when the plugins are imported
    return any(quoted.search(text) for text in files)


BOXED = ("math_boxed_workflow", "async_math_boxed_workflow")


def name_problem(name: str, plugin_dir: str | None) -> str | None:
    """Return the problem of a workflow's name, or None.

    The name has a problem if only Trinity-RFT has such a workflow and no module in `plugin_dir` registers it.
    """
    if name in declared_workflows() or (plugin_dir and is_written_in(name, plugin_dir)):
        return None
    return advice(name)


def argument_problems(name: str, given: Mapping[str, Any], reward: str | None) -> Iterator[tuple[str, str]]:
    """Yield (argument, problem) for each wrong argument of a built-in workflow.

    Args:
        name: name of the workflow.
        given: arguments in the configuration.
        reward: name of the workflow's reward function, or None.
    """
    declared = declared_workflows().get(name)
    if declared is None:
        return
    known = (declared.facts or {}).get("arguments", ())
    for argument in given:
        if argument in known:
            continue
        near = nearest(argument, known)
        others = f"known are {', '.join(known)}" if known else f"{name} has none; remove it"
        yield argument, f"unknown argument of {name}; " + (f"did you mean {near!r}?" if near else others)
    if name in BOXED and reward is None and "format_score_coef" in given:
        yield "format_score_coef", "is read by a reward function; write workflow_reward: math_boxed_reward"
