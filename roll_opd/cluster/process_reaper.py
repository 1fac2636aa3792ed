"""A process that kills the descendants of a driver after the driver has ended, even if SIGKILL ended the driver.

Ray's processes exit when their driver is killed. But Ray's agents first try for a minute to report the driver's death
to a server that no longer runs. The reaper therefore tracks the descendants of the driver, and kills the descendants
that still run after the driver's end. If the driver was killed, it cannot print why the command ended, so the reaper
prints it. Ray also ends the driver without a message if one of Ray's own processes has ended.

An engine core may run on another node, where the driver's reaper cannot kill it. Therefore `inference.failed_start`
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
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import psutil

POLL_INTERVAL_S = 2.0  # seconds between scans of the driver's descendants
EXIT_GRACE_S = 1.0  # seconds for processes to exit without a signal
EXIT_POLL_S = 0.05  # seconds between scans for exited processes
# Python's resource trackers, which remove the shared memory and semaphores of killed processes
TRACKER, TRACKER_GRACE_S = "multiprocessing.resource_tracker", 5.0
REMOVE, KEEP, IF_EMPTY, COPY, END = "+", "-", "?", ">", "."  # first character of an input line
MARK = "ROLL_OPD_GUARD"  # environment variable of the processes that are started inside a block
RAYS_OWN = ("raylet", "gcs_server")  # names of the processes without which Ray ends the driver
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
        """Register a directory that the reaper removes at the end if it is empty."""
        self._send(IF_EMPTY, directory, "")

    def copy_at_the_end(self, directory: Path, to: Path) -> None:
        """Register a directory that the reaper copies to the path `to` at the end, before it removes directories."""
        self._write(f"{COPY}{directory}\0{to}\n")

    def announce_end(self) -> None:
        """Notify the reaper that this process prints the reason of its end, so that the reaper prints none."""
        with suppress(OSError):  # the reaper has been killed
            self._write(f"{END}\n")

    def _send(self, what: str, directory: Path, within: str) -> None:
        self._write(f"{what}{os.path.join(glob.escape(str(directory)), within)}\n")

    def _write(self, line: str) -> None:
        self._commands.write(line.encode())
        self._commands.flush()


_open: list[Reaper] = []  # the reapers of this process


def announce_end() -> None:
    """Call `announce_end` of all open reapers. A process calls this before `os._exit` inside a `guarded` block."""
    for reaper in _open:
        reaper.announce_end()


@contextmanager
def guarded() -> Iterator[Reaper]:
    """Context manager: run a reaper for this process.

    When the block or this process ends, the reaper kills the processes that were started inside the block.
    """
    driver = psutil.Process()
    preexisting = [str(child.pid) for child in driver.children(recursive=True)]  # not started inside the block
    outer, mark = os.environ.get(MARK), uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, "-m", REAPER, mark, str(driver.pid), *preexisting],
        stdin=subprocess.PIPE,  # closes whenever this process ends
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # not interrupted by Ctrl-C in the terminal
    )
    assert process.stdin is not None
    reaper = Reaper(process.stdin)
    _open.append(reaper)
    os.environ[MARK] = mark
    try:
        yield reaper
    finally:
        _open.remove(reaper)
        if outer is None:
            del os.environ[MARK]
        else:
            os.environ[MARK] = outer
        reaper.announce_end()
        with suppress(OSError):
            process.stdin.close()
        process.wait()


def run_guarded(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a program inside a `guarded` block, and return its exit code, or -n if signal n ended it.

    SIGTERM and SIGINT are forwarded to the program. A second signal kills the program. The reaper kills the processes
    that the program has started, even if SIGKILL ends the program or this process.
    """
    asked: list[int] = []

    def forward(number: int, _: object) -> None:
        asked.append(number)
        if process.poll() is None:
            process.send_signal(number if len(asked) == 1 else signal.SIGKILL)

    with guarded():
        # a separate session, so that Ctrl-C in the terminal does not reach the program a second time
        environment = {**environment, MARK: os.environ[MARK]}
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            return process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def watch(driver: int, preexisting: set[int], mark: str) -> None:
    """Wait until standard input closes, then kill the processes that the driver has started.

    `preexisting` has the ids of processes that are older than the `with` block of `guarded`; they are not killed.
    Processes that are started inside the block have the value `mark` of the variable `MARK` in their environment. By
    this value the reaper finds a process whose parent ended between two scans.

    Each input line has an action and a glob pattern of directories. There are five actions: remove the directories at
    the end, cancel an earlier removal, remove the directories at the end if they are empty, copy a directory at the end
    (the line has two paths), and note that the driver itself prints why it ends.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ended = threading.Event()
    patterns: set[str] = set()
    if_empty: set[str] = set()
    copies: set[str] = set()
    announced = threading.Event()
    sets = {REMOVE: patterns, IF_EMPTY: if_empty, COPY: copies}
    threading.Thread(target=_read_input, args=(sets, announced, ended), daemon=True).start()
    spared = preexisting | {psutil.Process().pid}
    descendants: set[psutil.Process] = set()
    shared: set[str] = set()
    rays: dict[psutil.Process, str] = {}  # the processes of `RAYS_OWN`
    while not ended.wait(POLL_INTERVAL_S):
        descendants = {process for process in descendants | _descendants(driver) if process.is_running()}
        ours = (process for process in descendants if process.pid not in spared)
        shared |= {path for process in ours for path in _shared_memory(process)}
        rays |= {process: name for process in descendants if (name := _name(process)) in RAYS_OWN}
    if not announced.is_set():
        _say_why(driver, {name for process, name in rays.items() if not _runs(process)})
    descendants |= _descendants(driver) | _marked(mark)  # started since the last scan
    for process in list(descendants):
        descendants |= _descendants(process.pid)
    started = [process for process in descendants if process.pid not in spared]
    shared |= {path for process in started for path in _shared_memory(process)}
    trackers = [process for process in started if TRACKER in _command(process)]
    # of other runs; they need time to finish
    reapers = [process for process in started if REAPER in _command(process)]
    _end([process for process in started if process not in (*trackers, *reapers)], EXIT_GRACE_S)
    others = (process for process in _marked(mark) if process.pid not in spared)
    _end([process for process in others if process not in (*trackers, *reapers)], 0.0)  # started during the grace
    _end(trackers, TRACKER_GRACE_S)
    _end(reapers, REAPER_GRACE_S)
    for pair in copies:
        _copy(*pair.split("\0"))
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


def _command(process: psutil.Process) -> str:
    """Return the command line of a process; "" if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _copy(directory: str, to: str) -> None:
    try:
        shutil.copytree(directory, to, symlinks=True, dirs_exist_ok=True)
    except OSError as error:  # also shutil.Error, which has the files that could not be copied
        with suppress(OSError):
            print(f"warning: not all files of {directory} were copied to {to}: {error}"[:1000], file=sys.stderr)


def _remove(directory: Path) -> None:
    """Remove a Ray session's directory. Also remove the link `session_latest` if its target is missing."""
    shutil.rmtree(directory, ignore_errors=True)
    latest = directory.parent / "session_latest"
    if latest.is_symlink() and not latest.exists():
        latest.unlink(missing_ok=True)


def _say_why(driver: int, gone: Collection[str]) -> None:
    """Print why the driver has ended. `gone` has the names of Ray's processes that ended before it."""
    cause = f"Ray ended process {driver}, because these processes of Ray had ended: {', '.join(sorted(gone))}"
    why = cause if gone else f"process {driver} was killed"
    with suppress(OSError):
        print(
            f"roll-opd: {why}; look for a lack of memory (dmesg), and resume a run from its last checkpoint with"
            " resume_from_checkpoint=true",
            file=sys.stderr,
            flush=True,
        )


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return ""


def _marked(mark: str) -> set[psutil.Process]:
    """Return the processes whose environment has this mark."""
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark:
                found.add(process)
    return found


def _read_input(sets: Mapping[str, set[str]], announced: threading.Event, ended: threading.Event) -> None:
    """Read lines of an action and a path, and add each path to the set of its action."""
    for line in sys.stdin:
        what, rest = line[0], line[1:].rstrip("\n")
        if what == END:
            announced.set()
        elif what == KEEP:
            sets[REMOVE].discard(rest)
        else:
            sets[what].add(rest)
    ended.set()


def _descendants(driver: int) -> set[psutil.Process]:
    try:
        return set(psutil.Process(driver).children(recursive=True))
    except psutil.NoSuchProcess:
        return set()


if __name__ == "__main__":
    watch(int(sys.argv[2]), {int(pid) for pid in sys.argv[3:]}, sys.argv[1])
