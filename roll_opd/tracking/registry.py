"""From what `track_with` names to a tracker's class: a registered name, or a dotted path of the user's own."""

import importlib
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from roll_opd.tracking.run_directory import RunDirectory


class TrackerError(Exception):
    """`track_with` names what is no tracker; the message says what was looked for and what is known."""


class Tracker(Protocol):
    """What receives the metrics of every step, from one thread of its own."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of `step`. Called again with the same step where it raised."""

    def close(self) -> None:
        """Write what is not written yet. Called once, after the last `log`."""


# (run, step resumed from or None, **arguments of tracker_kwargs) -> tracker; a class is one
TrackerFactory = Callable[..., Tracker]

_REGISTERED: dict[str, TrackerFactory] = {}

# Modules that register the trackers of this package, by the name they register
_OURS = {
    "tensorboard": "roll_opd.tracking.local",
    "stdout": "roll_opd.tracking.local",
    "wandb": "roll_opd.tracking.wandb",
    "swanlab": "roll_opd.tracking.swanlab",
    "mlflow": "roll_opd.tracking.mlflow",
}

Registered = TypeVar("Registered", bound=TrackerFactory)


def register(name: str) -> Callable[[Registered], Registered]:
    """Make a class known as `name`; `TrackerError` where another one has the name."""

    def decorate(tracker: Registered) -> Registered:
        known = _REGISTERED.setdefault(name, tracker)
        if (known.__module__, known.__qualname__) != (tracker.__module__, tracker.__qualname__):
            raise TrackerError(
                f"a tracker named {name!r} is already registered: {known.__module__}.{known.__qualname__}"
            )
        _REGISTERED[name] = tracker
        return tracker

    return decorate


def find(name: str) -> TrackerFactory:
    """The class that `name` means: a registered name, or the dotted path of a class.

    It is called with the `RunDirectory`, the step resumed from (None in a new run) and, by name, the tracker's
    arguments in `tracker_kwargs`. Raises `TrackerError`; packages of a tracker are imported only by its class.
    """
    if name in _OURS:
        importlib.import_module(_OURS[name])
    if name in _REGISTERED:
        return _REGISTERED[name]
    module_name, _, attribute = name.rpartition(".")
    if not module_name:
        known = ", ".join(sorted({"jsonl", *_OURS, *_REGISTERED}))
        raise TrackerError(f"unknown tracker {name!r}; known are {known}, or a dotted path such as mypackage.MyTracker")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise TrackerError(f"tracker {name}: the module {module_name} cannot be imported: {error}") from error
    found = vars(module).get(attribute)
    if not callable(found):
        raise TrackerError(f"tracker {name}: {module_name} has no class named {attribute}")
    return found


def run_id(run: RunDirectory, tracker: str, new: Callable[[], str]) -> str:
    """The id under which a service knows this run: kept in the run directory, so that a resumed run goes on in it.

    `new` makes one where there is none yet.
    """
    file = run.path / "tracker_ids" / tracker
    if file.exists():
        return file.read_text(encoding="utf-8").strip()
    made = new()
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"{made}\n", encoding="utf-8")
    return made
