"""Read the trackers of a run and their arguments from `track_with` and `tracker_kwargs`.

If the run has one tracker, `tracker_kwargs` are its arguments, as in ROLL. If the run has several trackers,
`tracker_kwargs` maps the name of each tracker to its arguments.
"""

from typing import Any

from roll_opd.base.paths import PathError
from roll_opd.base.registry import argument_problems, arguments
from roll_opd.base.user_modules import dotted_path
from roll_opd.config.diagnostics import Diagnostics
from roll_opd.config.roll_keys import DOTTED
from roll_opd.config.schema import Run
from roll_opd.tracking.secrets import is_secret
from roll_opd.tracking.tracker_registry import TRACKERS

TRACKERS_OF_ROLL = ("ml_tracker",)  # trackers that ROLL has and this package does not
GIVEN_BY_US = 2  # first arguments of a tracker: the run directory and the step resumed from


def read_trackers(top: Run) -> dict[str, dict[str, Any]]:
    """Return a map from each tracker to its arguments, in the order of `track_with`.

    Problems are reported.
    """
    written = []
    for name in dict.fromkeys(top.track_with):
        with top.diag.catching("track_with", PathError):
            written.append(dotted_path(name))
    named = [name for name in written if _check_name(top, name)]
    found: dict[str, dict[str, Any]] = {name: {} for name in named}
    kwargs, diag = top.tracker_kwargs, top.diag.below("tracker_kwargs")
    if not kwargs or not named:
        return found
    taking = [name for name in named if _takes_arguments(name)]
    if all(_is_name(name) for name in kwargs):
        for name, args in kwargs.items():
            if args is not None and not isinstance(args, dict):
                diag.error(name, f"expected the arguments of tracker {name}, got {args!r}")
            elif name in found:
                found[name] = _checked(name, args or {}, diag.below(name))
            else:
                diag.add_warning(f"{diag.at(name)} has no effect: track_with does not name {name}")
    elif len(taking) > 1:
        diag.error(
            "",
            f"with several trackers, each has a section, such as {taking[0]}: {{...}}; {', '.join(map(repr, kwargs))}"
            f" could belong to any of {', '.join(taking)}",
        )
    elif taking:
        found[taking[0]] = _checked(taking[0], kwargs, diag)
    else:
        diag.add_warning(f"{diag.path} has no effect: {', '.join(named)} takes no arguments")
    return found


def _is_name(name: str) -> bool:
    """Return whether a text can be the name of a tracker: a known name, or the dotted path of a user's class."""
    return name in TRACKERS.builtin or name in TRACKERS.elsewhere or DOTTED.fullmatch(name) is not None


def _check_name(top: Run, name: str) -> bool:
    if not _is_name(name):
        reason = "is not available here" if name in TRACKERS_OF_ROLL else "is not a known tracker"
        known = ", ".join((*TRACKERS.builtin, *TRACKERS.elsewhere))
        top.diag.error(
            "track_with", f"{name!r} {reason}; use one or more of {known}, or the dotted path of your own class"
        )
    return _is_name(name)


def _checked(name: str, written: dict[str, Any], diag: Diagnostics) -> dict[str, Any]:
    """Return the arguments of a tracker that are not None; report wrong arguments.

    The arguments of a user's class are not checked.
    """
    args = {argument: value for argument, value in written.items() if value is not None}
    if name in TRACKERS.builtin:
        for argument, problem in argument_problems(TRACKERS.find(name), args, GIVEN_BY_US):
            shown = problem.partition(", got ")[0] if is_secret(argument) else problem
            diag.error(argument, shown.replace("argument;", f"argument of tracker {name};"))
    for argument in args if name in TRACKERS.elsewhere else ():
        diag.error(argument, f"unknown argument; {name} takes none")
    return args


def _takes_arguments(name: str) -> bool:
    return "." in name or (name in TRACKERS.builtin and bool(arguments(TRACKERS.find(name), GIVEN_BY_US)))
