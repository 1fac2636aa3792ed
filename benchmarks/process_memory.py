"""Peak resident memory of every process of a run, and the roles of the processes. Linux only."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

TITLES = {"ray::TrainWorker": "student", "ray::LogprobWorker": "teacher", "ray::RolloutWorker": "rollout"}
ENGINE, DRIVER = "engine", "driver"


@dataclass
class Seen:
    """The last sampled data of a process."""

    parent: int
    title: str
    peak: int  # bytes; the high-water mark that the kernel records


class PeakMemory:
    """Samples a run's processes repeatedly; processes that have ended are kept."""

    def __init__(self) -> None:
        self._root = 0
        self.seen: dict[int, Seen] = {}

    def look(self, root: int) -> None:
        """Record `root` and the processes that it has started."""
        self._root = root
        try:
            process = psutil.Process(root)
            found = [process, *process.children(recursive=True)]
        except psutil.Error:
            return
        for one in found:
            try:
                title = Path(f"/proc/{one.pid}/cmdline").read_text().replace("\0", " ").strip()
                peak = high_water(Path(f"/proc/{one.pid}/status").read_text())
                seen = self.seen.setdefault(one.pid, Seen(one.ppid(), title, 0))
            except (OSError, psutil.Error):
                continue  # it has ended meanwhile
            seen.peak = max(seen.peak, peak)
            if title.startswith(tuple(TITLES)):  # a worker has its actor's title only while the actor lives
                seen.title = title

    def roles(self) -> dict[int, str]:
        """Return the role of every process that has one."""
        return role_of(self.seen, self._root)

    def by_role(self) -> dict[str, int]:
        """Return the peak of the largest process of every role, in bytes."""
        roles = self.roles()
        names = [DRIVER, *TITLES.values(), ENGINE]
        peaks = {name: [self.seen[pid].peak for pid, role in roles.items() if role == name] for name in names}
        return {name: max(found) for name, found in peaks.items() if found}


def high_water(status: str) -> int:
    """Return VmHWM of /proc/PID/status in bytes; 0 if the process has ended."""
    line = next((line for line in status.splitlines() if line.startswith("VmHWM:")), "VmHWM: 0 kB")
    return int(line.split()[1]) * 1024


def role_of(seen: Mapping[int, Seen], root: int) -> dict[int, str]:
    """Return the role of a process.

    An engine core is a child of a rollout worker. If a preloaded server forks both, it is the worker's sibling without
    a title.
    """
    titled = {pid: role for pid, one in seen.items() for title, role in TITLES.items() if one.title.startswith(title)}
    workers = {pid for pid, role in titled.items() if role == "rollout"}
    servers = {seen[pid].parent for pid in workers}
    roles = {root: DRIVER, **titled}
    for pid, one in seen.items():
        untitled = "ray::" not in one.title and not _has_actors(pid, seen)
        if pid not in roles and (one.parent in workers or (one.parent in servers and untitled)):
            roles[pid] = ENGINE
    return roles


def _has_actors(pid: int, seen: Mapping[int, Seen]) -> bool:
    return any(one.parent == pid for one in _actors(seen.values()))


def _actors(seen: Iterable[Seen]) -> list[Seen]:
    return [one for one in seen if one.title.startswith("ray::")]
