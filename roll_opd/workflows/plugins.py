"""Load the configured workflow or reward function from a plugin directory, from a module, or from this package."""

import importlib
import importlib.util
import inspect
import itertools
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roll_opd.base.registry import argument_problems
from roll_opd.workflows.workflow_checks import TWINS, flag, hook_problems
from roll_opd.workflows.workflow_experience import WorkflowError
from roll_opd.workflows.workflow_interface import REWARD_FUNCTIONS, WORKFLOWS, Workflow, WorkflowWithRecording

# arguments that a workflow's constructor gets
PASSED = ("task", "model", "auxiliary_models", "auxiliary_model_wrappers")
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def load_plugins(directory: str) -> None:
    """Import every module of a directory in this process. The name of a module is its file name without the suffix.

    Raises WorkflowError with the traceback if an import fails. Raises WorkflowError if another module already has the
    name.
    """
    path = Path(directory).resolve()
    if not path.is_dir():
        raise WorkflowError(f"plugin_dir: {directory} is not a directory; set it to the directory of your modules")
    if str(path) not in sys.path:
        sys.path.append(str(path))
        importlib.invalidate_caches()
    for file in sorted(path.glob("*.py")):
        if not file.stem.isidentifier() or file.stem == "__init__":  # also hidden files, such as `._x.py`
            continue
        found = importlib.util.find_spec(file.stem)
        if found is None or found.origin is None or Path(found.origin).resolve() != file:
            raise WorkflowError(
                f"plugin_dir: {file} has the name of another module, {found and found.origin}; rename the file"
            )
        try:
            importlib.import_module(file.stem)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a module may raise anything, including SystemExit
            advice = ""
            if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "trinity":
                advice = f"\nWrite `from roll_opd.workflows import ...` for `from {error.name} import ...`"
            if isinstance(error, ImportError) and "relative import" in str(error):
                advice = (
                    "\nA file of plugin_dir is a top-level module: write `from other import ...` for `from .other"
                    " import ...`, and `from roll_opd.workflows import ...` for Trinity-RFT's names"
                )
            raise WorkflowError(f"plugin_dir: {file} cannot be imported:\n{own_traceback(error)}{advice}") from error


def find_workflow(name: str, plugin_dir: str | None) -> Any:
    """Return the workflow class with the name `name`.

    Raises WorkflowError if the class does not exist, or if it is incomplete.
    """
    if plugin_dir:
        load_plugins(plugin_dir)
    found: Any = WORKFLOWS.find(name)
    if not isinstance(found, type):
        raise WorkflowError(f"workflow {name}: expected a class such as roll_opd.workflows.Workflow")
    run = "run_async" if flag(found, "is_async") else "run"
    for method in [run, *(["reset"] if flag(found, "can_reset") else [])]:
        if not _has(found, method):
            twin = TWINS.get(method, "")
            flagged = f", or is_async = {not flag(found, 'is_async')} for its {twin}" if _has(found, twin) else ""
            raise WorkflowError(f"workflow {name}: expected a class with a method {method}; write it{flagged}")
    for parameter in inspect.signature(found).parameters.values():
        if parameter.default is parameter.empty and parameter.name not in PASSED and parameter.kind not in VARIADIC:
            raise WorkflowError(
                f"workflow {name}: its __init__ requires {parameter.name}, but only {', '.join(PASSED)} are"
                " passed; read other settings from task.workflow_args"
            )
    for method, problem in hook_problems(found):
        raise WorkflowError(f"workflow {name}: {method} {problem}")
    return found


def _has(kind: type, method: str) -> bool:
    """Return whether a workflow class overrides a method of the base class."""
    own = getattr(kind, method, None)
    return callable(own) and own not in (getattr(Workflow, method), getattr(WorkflowWithRecording, method))


def find_reward(name: str, plugin_dir: str | None, arguments: Mapping[str, Any]) -> Any:
    """Return the reward function class with the name `name`.

    Raises WorkflowError if the class does not exist, or if it does not accept `arguments`.
    """
    if plugin_dir:
        load_plugins(plugin_dir)
    found: Any = REWARD_FUNCTIONS.find(name)
    if not isinstance(found, type) or not any("__call__" in vars(kind) for kind in found.__mro__):
        raise WorkflowError(f"workflow_reward {name}: expected a class with a method __call__; write it")
    for argument, problem in argument_problems(found, arguments, given_by_us=0):
        raise WorkflowError(f"workflow_reward_args.{argument}: {problem} (of {name})")
    return found


def own_traceback(error: BaseException) -> str:
    """Return the traceback of an error from the first frame of user code on."""
    # an `exit()` is re-raised as another error, so the user's frame is in the traceback of the cause
    shown = error.__cause__ if isinstance(error.__cause__, SystemExit | KeyboardInterrupt) else error
    frames = traceback.extract_tb(shown.__traceback__)
    own = itertools.dropwhile(lambda frame: _is_library_frame(frame.filename), frames)
    return "".join([*traceback.format_list(list(own)), *traceback.format_exception_only(error)]).rstrip()


def _is_library_frame(file: str) -> bool:
    """Return whether a file belongs to this package, to Ray or to the standard library.

    The frames of such files come before the frames of user code in a traceback.
    """
    package, library = str(Path(__file__).parents[1]), str(Path(traceback.__file__).parent)
    if "site-packages" in file:
        return f"{os.sep}ray{os.sep}" in file
    return file.startswith((package, library, "<frozen"))
