"""Registry of trackers: find the class for a name in `track_with`, registered or a dotted path."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

from roll_opd.base.registry import Registry
from roll_opd.tracking.run_directory import RunDirectory


class TrackerError(Exception):
    """Unknown tracker in `track_with`; the message lists the known names."""


class Tracker(Protocol):
    """Receiver of the metrics of every step, called from one thread."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of `step`. Called again with the same step if it raised."""

    def close(self) -> None:
        """Write all pending data. Called once, after the last `log`."""


# (run, step resumed from or None, **tracker_kwargs) -> tracker: a class; built-in ones import their packages when made
TrackerFactory = Callable[..., Tracker]


@dataclass(frozen=True)
class TrackerFacts:
    """Properties of a tracker for the configuration check, in addition to its arguments."""

    packages: tuple[str, ...] = ()  # additional modules; the package extra has the tracker's name


TRACKERS: Registry[TrackerFacts] = Registry(
    kind="tracker",
    made_of="class",
    example="mypackage.MyTracker",
    error=TrackerError,
    package="roll_opd.tracking.builtin",
    facts_type=TrackerFacts,
    elsewhere=("jsonl",),  # the run itself writes it
)
register, find = TRACKERS.register, TRACKERS.find


def run_id(run: RunDirectory, tracker: str, new: Callable[[], str]) -> str:
    """Return the id of this run at a tracking service; the first call makes it with `new`.

    It is stored in the run directory, so that a resumed run continues the service's run.
    """
    file = run.path / "tracker_ids" / tracker
    if file.exists():
        return file.read_text(encoding="utf-8").strip()
    made = new()
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"{made}\n", encoding="utf-8")
    return made


def as_list(texts: Sequence[str] | str) -> list[str]:
    """Return `texts` as a list; a single text becomes a list of one."""
    return [texts] if isinstance(texts, str) else list(texts)


def lacking(names: Iterable[str]) -> list[str]:
    """Return an error message for each tracker with packages that are not installed."""
    sentences = []
    for name in names:
        builtin = name in TRACKERS.builtin
        modules = TRACKERS.facts(name).packages if builtin else (name.partition(".")[0],) if "." in name else ()
        absent = [module for module in modules if sys.modules.get(module) is None and find_spec(module) is None]
        if not absent:
            continue
        remedy = f"run `pip install 'roll_opd[{name}]'`" if builtin else "put it on PYTHONPATH"
        sentences.append(f"track_with: {name} needs {', '.join(absent)}, which is not installed; {remedy}")
    return sentences
