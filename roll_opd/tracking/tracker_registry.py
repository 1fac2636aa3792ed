"""The registry of trackers. Each entry of `track_with` is the name of a registered tracker or a dotted path."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

from roll_opd.base.installed import is_installed
from roll_opd.base.registry import Registry
from roll_opd.tracking.run_directory import RunDirectory


class TrackerError(Exception):
    """Error for an unknown tracker in `track_with`. The message lists the known names."""


class Tracker(Protocol):
    """Receives the metrics of every step. All methods are called from one thread.

    A tracker is made by a class or function that is called with (run, step of the resumed checkpoint or None,
    **tracker_kwargs). Built-in trackers import their packages when they are created.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of `step`. If this method raises an error, it is called again with the same step."""

    def close(self) -> None:
        """Write all pending data. Called once, after the last `log`."""


@dataclass(frozen=True)
class TrackerFacts:
    """Properties of a tracker, besides its arguments, that are needed to check a configuration."""

    packages: tuple[str, ...] = ()  # modules to install; the extra of this package has the tracker's name


JSONL = "jsonl"  # in `track_with`: metrics.jsonl, which every run writes

TRACKERS: Registry[TrackerFacts] = Registry(
    kind="tracker",
    made_of="class",
    example="mypackage.MyTracker",
    error=TrackerError,
    package="roll_opd.tracking.builtin",
    facts_type=TrackerFacts,
    elsewhere=(JSONL,),
    group="trackers",
)
register, find = TRACKERS.register, TRACKERS.find


def run_id(run: RunDirectory, tracker: str, new: Callable[[], str]) -> str:
    """Return the id of this run at a tracking service. The first call creates the id by calling `new`.

    The id is stored in the run directory, so that a resumed run continues the same run of the service.
    """
    file = run.path / "tracker_ids" / tracker
    if file.exists():
        return file.read_text(encoding="utf-8").strip()
    made = new()
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"{made}\n", encoding="utf-8")
    return made


def as_list(texts: Sequence[str] | str) -> list[str]:
    """Return `texts` as a list. A single text becomes a list with one element."""
    return [texts] if isinstance(texts, str) else list(texts)


def lacking(names: Iterable[str]) -> list[str]:
    """Return an error message for each tracker whose packages are not installed."""
    sentences = []
    for name in names:
        builtin = name in TRACKERS.builtin
        modules = TRACKERS.facts(name).packages if builtin else (name.partition(".")[0],) if "." in name else ()
        # a user's tracker may be in a folder of the user, the packages of other trackers may not
        absent = [module for module in modules if not (is_installed(module) or (not builtin and find_spec(module)))]
        if not absent:
            continue
        remedy = f"run `pip install 'roll_opd[{name}]'`" if builtin else "put it on PYTHONPATH"
        sentences.append(f"track_with: {name} needs {', '.join(absent)}, which is not installed; {remedy}")
    return sentences
