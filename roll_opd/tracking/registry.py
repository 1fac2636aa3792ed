"""From what `track_with` names to a tracker's class: a registered name, or a dotted path of the user's own."""

from collections.abc import Callable, Mapping
from typing import Protocol

from roll_opd.extensions import Registry
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

TRACKERS = Registry(
    kind="tracker",
    made_of="class",
    example="mypackage.MyTracker",
    error=TrackerError,
    package="roll_opd.tracking.builtin",
    facts_type=dict,
    one_per_module=True,
    elsewhere=("jsonl",),  # the run itself writes it
)
register = TRACKERS.register


def find(name: str) -> TrackerFactory:
    """The class that `name` means: a registered name, or the dotted path of a class.

    It is called with the `RunDirectory`, the step resumed from (None in a new run) and, by name, the tracker's
    arguments in `tracker_kwargs`. Raises `TrackerError`; packages of a tracker are imported only by its class.
    """
    return TRACKERS.find(name)


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
