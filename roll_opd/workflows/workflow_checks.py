"""Check the name and the arguments of a configured workflow, and that its runs call the hooks that its class overrides.

The base classes of this package call the hooks that they declare. If a user's class has its own `run` or `run_async`,
this method may call every other hook. If only a base class calls a hook, the hook must accept the arguments of this
call.
"""

import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

from roll_opd.base.entry_points import entries, load
from roll_opd.base.failures import did_you_mean
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
        others = f"known are {', '.join(known)}" if known else f"{name} has none; remove it"
        yield argument, f"unknown argument of {name}; {did_you_mean(argument, known, others)}"
    if name in BOXED and reward is None and "format_score_coef" in given:
        yield "format_score_coef", "is read by a reward function; write workflow_reward: math_boxed_reward"


def flag(workflow: Any, name: str) -> bool:
    """Return the value of a workflow's flag. In older workflows, a flag is a method."""
    value = getattr(workflow, name, False)
    return bool(value() if callable(value) else value)


PACKAGE = "roll_opd."
TWINS = {"run": "run_async", "step": "step_async", "reward": "reward_async"}
TWINS |= {value: name for name, value in TWINS.items()}
RUN = ("run", "run_async", "execute", "set_repeat_times")  # methods that only the runner calls
BY_KEYWORD = ("step_num",)  # arguments of hooks that are passed by keyword; all others are positional
# hook of Trinity-RFT's classes -> remedy if nothing calls it
HOOKS = {
    "format_messages": "derive from SimpleWorkflow or OnPolicyDistillWorkflow, whose runs call it",
    "format_prompt": "derive from MathBoxedWorkflow, whose run calls it with workflow_args use_base",
    "compute_reward": "derive from OnPolicyDistillWorkflow, whose run calls it, or call it in your own run",
    "calculate_reward": "call it in your own run, or name it compute_reward in an OnPolicyDistillWorkflow",
    "step": "derive from StepWiseRewardWorkflow or RewardPropagationWorkflow, or write step_async",
    "step_async": "derive from AsyncStepWiseRewardWorkflow or AsyncRewardPropagationWorkflow, or write step",
    "reward": "derive from StepWiseRewardWorkflow or RewardPropagationWorkflow, or write reward_async",
    "reward_async": "derive from AsyncStepWiseRewardWorkflow or AsyncRewardPropagationWorkflow, or write reward",
    "run": "the class is asynchronous (is_async): write run_async, or is_async = False",
    "run_async": "write is_async = True in the class, or name it run",
    "execute": "write run or run_async; their return value is collected",
    "set_repeat_times": "write can_repeat = True if one call makes all runs of a row, else remove the method",
}


def hook_problems(kind: type) -> Iterator[tuple[str, str]]:
    """Yield (class and method, problem) for each hook of a user's class that has a problem.

    Two problems are reported: no run calls the hook, or a run calls it in a way that the hook does not support.
    """
    own = [base for base in kind.__mro__ if not base.__module__.startswith((PACKAGE, "builtins"))]
    written = {name: base for base in reversed(own) for name in HOOKS.keys() & vars(base).keys()}
    runs_itself = not written.keys().isdisjoint(("run", "run_async"))
    for name, instead in HOOKS.items():
        if name not in written or not isinstance(hook := vars(written[name])[name], FunctionType | staticmethod):
            continue
        called = f"{written[name].__name__}.{name}"
        if runs_itself and name not in RUN:
            continue
        if not _may_be_called(kind, name, written.keys()):
            yield called, f"is never called; {instead}"
        elif problem := _async_problem(name, hook) or _call_problem(kind, name):
            yield called, problem


def _may_be_called(kind: type, name: str, written: Any) -> bool:
    """Return whether the runner or a class of this package may call a hook."""
    if name in TWINS and TWINS[name] not in written:  # a class may have a synchronous and an asynchronous form
        is_async = getattr(kind, "is_async", False)
        if not isinstance(is_async, property) and flag(kind, "is_async") != name.endswith("_async"):
            return False
    if name == "set_repeat_times" and not flag(kind, "can_repeat"):
        return False
    return _declared(kind, name) is not None


def _declared(kind: type, name: str) -> Any:
    """Return the method of the nearest base class of this package that declares a hook, or None."""
    ours = [base for base in kind.__mro__ if base.__module__.startswith(PACKAGE)]
    return next((vars(base)[name] for base in ours if name in vars(base)), None)


def _async_problem(name: str, hook: Any) -> str | None:
    """Return a problem if a hook is a coroutine function and its caller does not await it, else None."""
    if not inspect.iscoroutinefunction(hook) or name.endswith("_async") or name == "run":
        return None
    other = f" or name it {TWINS[name]} in an asynchronous base" if name in TWINS else ""
    return f"is called without `await`; write it without `async`{other}"


def _call_problem(kind: type, name: str) -> str | None:
    """Return a problem if a hook does not accept the arguments of its calls, else None.

    The expected arguments are those of the base class that declares the hook. If the hook has a decorator, the
    signature after decoration is checked, because a decorator may change the arguments.
    """
    try:
        _, *expected = inspect.signature(_declared(kind, name)).parameters
        signature = inspect.signature(getattr(kind, name), follow_wrapped=False)
    except (TypeError, ValueError):
        return None
    is_bound = not isinstance(inspect.getattr_static(kind, name), staticmethod)
    positional = [*(["self"] if is_bound else []), *(one for one in expected if one not in BY_KEYWORD)]
    try:
        signature.bind(*positional, **{one: one for one in expected if one in BY_KEYWORD})
    except TypeError as error:
        passed = ", ".join(f"{one}={one}" if one in BY_KEYWORD else one for one in expected)
        return f"takes {signature} but is called as {name}({passed}) ({error}); declare the parameters of this call"
    return None
