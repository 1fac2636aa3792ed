"""A process that ends what a killed driver has started: SIGKILL must leave nothing running.

Ray's own processes follow a killed driver, but its agents first spend a minute on reporting the death to a server that
is dead as well. The reaper keeps a list of the driver's descendants and ends those that are left when it is gone.

`inference.parent_watchdog` serves the same purpose one level below: it ends an engine core whose parent is gone. Both
are needed, for the engine core may run on another node than the driver.
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

LOOK_SECONDS = 1.0  # between looks at which processes descend from the driver
GRACE_SECONDS = 1.0  # for those that leave by themselves
LEAVING_SECONDS = 0.05  # between looks at them
# of Python's own processes that remove the shared memory and the semaphores of those that were killed
TRACKER, TRACKER_SECONDS = "multiprocessing.resource_tracker", 5.0
REMOVE, KEEP, IF_EMPTY = "+", "-", "?"  # the first letter of a line
REAPER, REAPER_SECONDS = "roll_opd.cluster.process_reaper", 15.0


class Reaper:
    """The process that watches, as the one that it watches sees it."""

    def __init__(self, told: IO[bytes]) -> None:
        self._told = told

    def remove_at_the_end(self, directory: Path, within: str = "") -> None:
        """Have `directory` removed when every process is gone, or what matches a glob pattern `within` it."""
        self._tell(REMOVE, directory, within)

    def keep_after_all(self, directory: Path, within: str = "") -> None:
        """Take back what `remove_at_the_end` was told."""
        self._tell(KEEP, directory, within)

    def remove_if_empty(self, directory: Path) -> None:
        """Register `directory` for removal at the end if it is empty."""
        self._tell(IF_EMPTY, directory, "")

    def _tell(self, what: str, directory: Path, within: str) -> None:
        self._told.write(f"{what}{os.path.join(glob.escape(str(directory)), within)}\n".encode())
        self._told.flush()


@contextmanager
def guarded() -> Iterator[Reaper]:
    """Have a reaper watch this process inside the `with` block."""
    driver = psutil.Process()
    preexisting = [str(child.pid) for child in driver.children(recursive=True)]  # not started inside the block
    reaper = subprocess.Popen(
        [sys.executable, "-m", REAPER, str(driver.pid), *preexisting],
        stdin=subprocess.PIPE,  # closes with this process, however it ends
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C in the terminal is not meant for it
    )
    assert reaper.stdin is not None
    try:
        yield Reaper(reaper.stdin)
    finally:
        reaper.stdin.close()
        reaper.wait()


def watch(driver: int, preexisting: set[int]) -> None:
    """Wait for the end of standard input, then end what `driver` started, except itself and `preexisting`.

    Each line of the input is a glob pattern of directories to remove afterwards, to keep, or to remove if empty.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gone = threading.Event()
    patterns: set[str] = set()
    if_empty: set[str] = set()
    threading.Thread(target=_read_input, args=(patterns, if_empty, gone), daemon=True).start()
    spared = preexisting | {psutil.Process().pid}
    descendants: set[psutil.Process] = set()
    shared: set[str] = set()
    while not gone.wait(LOOK_SECONDS):
        descendants = {process for process in descendants | _descendants(driver) if process.is_running()}
        ours = (process for process in descendants if process.pid not in spared)
        shared |= {path for process in ours for path in _shared_memory(process)}
    descendants |= _descendants(driver)  # started since the last look, by a driver that waits for this process
    started = [process for process in descendants if process.pid not in spared]
    trackers = [process for process in started if _is_tracker(process)]
    reapers = [process for process in started if _is_reaper(process)]
    _end([process for process in started if process not in (*trackers, *reapers)], GRACE_SECONDS)
    _end(trackers, TRACKER_SECONDS)
    _end(reapers, REAPER_SECONDS)
    for directory in itertools.chain.from_iterable(map(glob.iglob, patterns)):
        _remove(Path(directory))
    for path in shared:
        Path(path).unlink(missing_ok=True)
    for directory in itertools.chain.from_iterable(map(glob.iglob, if_empty)):
        with suppress(OSError):
            os.rmdir(directory)


def _end(processes: list[psutil.Process], grace: float) -> None:
    """Kill the `processes` that run after `grace` seconds, and wait until they are gone."""
    deadline = time.monotonic() + grace
    while (alive := [process for process in processes if _computes(process)]) and time.monotonic() < deadline:
        time.sleep(LEAVING_SECONDS)
    for process in alive:  # psutil checks that the number still means the same process
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    deadline = time.monotonic() + GRACE_SECONDS
    while any(map(_computes, alive)) and time.monotonic() < deadline:  # until then they may still write files
        time.sleep(LEAVING_SECONDS)


def _shared_memory(process: psutil.Process) -> list[str]:
    """Return the files through which the ranks of a vLLM engine talk on a CPU, and which stay when they are killed."""
    try:
        if not process.name().startswith("VLLM"):
            return []
        return re.findall(r"/dev/shm/vllm_dist_\S+", Path(f"/proc/{process.pid}/maps").read_text(errors="replace"))
    except (OSError, psutil.Error):
        return []


def _computes(process: psutil.Process) -> bool:
    """Whether it has not ended; of one that has, an entry may stay until its parent, or the system's init, reads it."""
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
    """Whether it is another one's, which has its own work to end."""
    try:
        return REAPER in process.cmdline()
    except psutil.Error:
        return False


def _remove(directory: Path) -> None:
    """Remove a session directory of Ray's, and the link to it, which is named after the newest."""
    shutil.rmtree(directory, ignore_errors=True)
    latest = directory.parent / "session_latest"
    if latest.is_symlink() and not latest.exists():
        latest.unlink(missing_ok=True)


def _read_input(patterns: set[str], if_empty: set[str], gone: threading.Event) -> None:
    for line in sys.stdin:
        what, pattern = line[0], line[1:].rstrip("\n")
        if what == KEEP:
            patterns.discard(pattern)
        else:
            (patterns if what == REMOVE else if_empty).add(pattern)
    gone.set()


def _descendants(driver: int) -> set[psutil.Process]:
    try:
        return set(psutil.Process(driver).children(recursive=True))
    except psutil.NoSuchProcess:
        return set()


if __name__ == "__main__":
    watch(int(sys.argv[1]), {int(pid) for pid in sys.argv[2:]})
