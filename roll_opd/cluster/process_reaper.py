"""A process that kills the descendants of a driver after the driver has ended, even if SIGKILL ended the driver.

Ray's processes exit when their driver is killed. But Ray's agents first try for a minute to report the driver's death
to a server that no longer runs. The reaper therefore tracks the descendants of the driver, and kills the descendants
that still run after the driver's end.

An engine core may run on another node, where the driver's reaper cannot kill it. Therefore `inference.process_cleanup`
ends an engine core after the death of its parent.
"""

import glob
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import psutil

POLL_INTERVAL_S = 1.0  # seconds between scans of the driver's descendants
EXIT_GRACE_S = 1.0  # seconds for processes to exit without a signal
EXIT_POLL_S = 0.05  # seconds between scans for exited processes
# Python's resource trackers, which remove the shared memory and semaphores of killed processes
TRACKER, TRACKER_GRACE_S = "multiprocessing.resource_tracker", 5.0
REMOVE, KEEP, IF_EMPTY = "+", "-", "?"  # first character of an input line
REAPER, REAPER_GRACE_S = "roll_opd.cluster.process_reaper", 15.0


class Reaper:
    """The driver's handle of its reaper process."""

    def __init__(self, commands: IO[bytes]) -> None:
        self._commands = commands

    def remove_at_the_end(self, directory: Path, within: str = "") -> None:
        """Register a directory that the reaper removes at the end.

        If `within` is given, only the paths in `directory` that match this glob pattern are removed.
        """
        self._send(REMOVE, directory, within)

    def cancel_removal(self, directory: Path, within: str = "") -> None:
        """Cancel an earlier call of `remove_at_the_end` with the same arguments."""
        self._send(KEEP, directory, within)

    def remove_if_empty(self, directory: Path) -> None:
        """Register a directory. The reaper removes the directory at the end, provided that it is empty then."""
        self._send(IF_EMPTY, directory, "")

    def _send(self, what: str, directory: Path, within: str) -> None:
        self._commands.write(f"{what}{os.path.join(glob.escape(str(directory)), within)}\n".encode())
        self._commands.flush()


@contextmanager
def guarded() -> Iterator[Reaper]:
    """Context manager: run a reaper for this process.

    When the block or this process ends, the reaper kills the processes that were started inside the block.
    """
    driver = psutil.Process()
    preexisting = [str(child.pid) for child in driver.children(recursive=True)]  # not started inside the block
    reaper = subprocess.Popen(
        [sys.executable, "-m", REAPER, str(driver.pid), *preexisting],
        stdin=subprocess.PIPE,  # closes whenever this process ends
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # not interrupted by Ctrl-C in the terminal
    )
    assert reaper.stdin is not None
    try:
        yield Reaper(reaper.stdin)
    finally:
        reaper.stdin.close()
        reaper.wait()


def watch(driver: int, preexisting: set[int]) -> None:
    """Wait until standard input closes, then kill the processes that the driver has started.

    The reaper itself and the processes in `preexisting` are not killed. `preexisting` has the ids of processes that are
    older than the `with` block of `guarded`.

    Each input line has an action and a glob pattern of directories. There are three actions: remove the directories at
    the end, cancel an earlier removal, and remove the directories at the end if they are empty.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ended = threading.Event()
    patterns: set[str] = set()
    if_empty: set[str] = set()
    threading.Thread(target=_read_input, args=(patterns, if_empty, ended), daemon=True).start()
    spared = preexisting | {psutil.Process().pid}
    descendants: set[psutil.Process] = set()
    shared: set[str] = set()
    while not ended.wait(POLL_INTERVAL_S):
        descendants = {process for process in descendants | _descendants(driver) if process.is_running()}
        ours = (process for process in descendants if process.pid not in spared)
        shared |= {path for process in ours for path in _shared_memory(process)}
    descendants |= _descendants(driver)  # started since the last scan
    started = [process for process in descendants if process.pid not in spared]
    trackers = [process for process in started if _is_tracker(process)]
    reapers = [process for process in started if _is_reaper(process)]
    _end([process for process in started if process not in (*trackers, *reapers)], EXIT_GRACE_S)
    _end(trackers, TRACKER_GRACE_S)
    _end(reapers, REAPER_GRACE_S)
    for directory in itertools.chain.from_iterable(map(glob.iglob, patterns)):
        _remove(Path(directory))
    for path in shared:
        Path(path).unlink(missing_ok=True)
    for directory in itertools.chain.from_iterable(map(glob.iglob, if_empty)):
        with suppress(OSError):
            os.rmdir(directory)


def _end(processes: list[psutil.Process], grace: float) -> None:
    """Wait up to `grace` seconds for the processes to exit, then kill the processes that still run."""
    deadline = time.monotonic() + grace
    while (alive := [process for process in processes if _runs(process)]) and time.monotonic() < deadline:
        time.sleep(EXIT_POLL_S)
    for process in alive:  # psutil checks for a reused pid
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    deadline = time.monotonic() + EXIT_GRACE_S
    while any(map(_runs, alive)) and time.monotonic() < deadline:  # they may still write files
        time.sleep(EXIT_POLL_S)


def _shared_memory(process: psutil.Process) -> list[str]:
    """Return the shared-memory files of a vLLM rank on a CPU. They are not removed if the rank is killed."""
    try:
        if not process.name().startswith("VLLM"):
            return []
        return re.findall(r"/dev/shm/vllm_dist_\S+", Path(f"/proc/{process.pid}/maps").read_text(errors="replace"))
    except (OSError, psutil.Error):
        return []


def _runs(process: psutil.Process) -> bool:
    """Return whether a process runs. A zombie does not count as running."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _is_tracker(process: psutil.Process) -> bool:
    try:
        return TRACKER in " ".join(process.cmdline())
    except psutil.Error:
        return False


def _is_reaper(process: psutil.Process) -> bool:
    """Return whether a process is the reaper of another run. Such a process needs time to finish."""
    try:
        return REAPER in process.cmdline()
    except psutil.Error:
        return False


def _remove(directory: Path) -> None:
    """Remove a Ray session's directory. Also remove the link `session_latest` if its target is missing."""
    shutil.rmtree(directory, ignore_errors=True)
    latest = directory.parent / "session_latest"
    if latest.is_symlink() and not latest.exists():
        latest.unlink(missing_ok=True)


def _read_input(patterns: set[str], if_empty: set[str], ended: threading.Event) -> None:
    for line in sys.stdin:
        what, pattern = line[0], line[1:].rstrip("\n")
        if what == KEEP:
            patterns.discard(pattern)
        else:
            (patterns if what == REMOVE else if_empty).add(pattern)
    ended.set()


def _descendants(driver: int) -> set[psutil.Process]:
    try:
        return set(psutil.Process(driver).children(recursive=True))
    except psutil.NoSuchProcess:
        return set()


if __name__ == "__main__":
    watch(int(sys.argv[1]), {int(pid) for pid in sys.argv[2:]})
