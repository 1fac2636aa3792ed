"""Reads `track_with` and `tracker_kwargs`: which trackers a run has, and what each is given.

ROLL's form is one tracker and its arguments. Several trackers take a mapping of tracker name to arguments.
"""

from typing import Any

from roll_opd.config.errors import Diagnostics
from roll_opd.config.legacy_roll import DOTTED
from roll_opd.config.schema import Run
from roll_opd.extensions import argument_problems, arguments
from roll_opd.tracking.registry import TRACKERS
from roll_opd.tracking.secrets import is_secret

TRACKERS_OF_ROLL = ("trackio", "ml_tracker")  # and some of ours
GIVEN_BY_US = 2  # first arguments of a tracker: the run directory and the step resumed from


def names_of_trackers() -> tuple[str, ...]:
    """Return the names that `track_with` may have, dotted paths aside."""
    return (*TRACKERS.builtin, *TRACKERS.elsewhere)


def read_trackers(top: Run, diagnostics: Diagnostics) -> dict[str, dict[str, Any]]:
    """Return the arguments of each tracker in `track_with`, in its order; tell what is wrong with them."""
    names = [name for name in dict.fromkeys(top.track_with) if _known(name, diagnostics)]
    return {
        name: _check(name, args, key, diagnostics) for name, (args, key) in _by_tracker(names, top, diagnostics).items()
    }


def _known(name: str, diagnostics: Diagnostics) -> bool:
    if name in names_of_trackers() or _users_own(name):
        return True
    reason = "is not available here" if name in TRACKERS_OF_ROLL else "is not a known tracker"
    diagnostics.problem(
        "track_with",
        f"{name!r} {reason}; use one or more of {', '.join(names_of_trackers())}, or the dotted path of your own class",
    )
    return False


def _users_own(name: str) -> bool:
    return DOTTED.fullmatch(name) is not None


def _by_tracker(names: list[str], top: Run, diagnostics: Diagnostics) -> dict[str, tuple[dict[str, Any], str]]:
    """Return tracker -> (its arguments, the key under which they are written)."""
    kwargs = top.tracker_kwargs
    found: dict[str, tuple[dict[str, Any], str]] = {name: ({}, "tracker_kwargs") for name in names}
    if not kwargs or not names:
        return found
    if all(key in names_of_trackers() or _users_own(key) for key in kwargs):
        for name, args in kwargs.items():
            key = f"tracker_kwargs.{name}"
            if args is not None and not isinstance(args, dict):
                diagnostics.problem(key, f"expected the arguments of tracker {name}, got {args!r}")
            elif name in found:
                found[name] = ({key: value for key, value in (args or {}).items() if value is not None}, key)
            else:
                diagnostics.warn(f"{key} has no effect: track_with does not name {name}")
        return found
    taking = [name for name in names if _takes_arguments(name)]
    if len(taking) > 1:
        diagnostics.problem(
            "tracker_kwargs",
            f"with several trackers it maps each to its arguments, such as {taking[0]}: {{...}};"
            f" {', '.join(map(repr, kwargs))} could be meant for any of {', '.join(taking)}",
        )
    elif taking:
        found[taking[0]] = ({key: value for key, value in kwargs.items() if value is not None}, "tracker_kwargs")
    else:
        diagnostics.warn(f"tracker_kwargs has no effect: {', '.join(names)} takes no arguments")
    return found


def _check(name: str, args: dict[str, Any], path: str, diagnostics: Diagnostics) -> dict[str, Any]:
    """Return the arguments of a tracker, checked; those of a user's own class are its own business."""
    if name in TRACKERS.builtin:
        for argument, problem in argument_problems(TRACKERS.find(name), args, GIVEN_BY_US):
            told = problem.partition(", got ")[0] if is_secret(argument) else problem  # a message may be shown around
            diagnostics.problem(f"{path}.{argument}", told.replace("argument;", f"argument of tracker {name};"))
    for argument in args if name in TRACKERS.elsewhere else ():
        diagnostics.problem(f"{path}.{argument}", f"unknown argument; {name} takes none")
    return args


def _takes_arguments(name: str) -> bool:
    return _users_own(name) or (name in TRACKERS.builtin and bool(arguments(TRACKERS.find(name), GIVEN_BY_US)))
