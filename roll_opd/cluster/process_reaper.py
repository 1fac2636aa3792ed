"""A process that ends what a killed driver has started: SIGKILL must leave nothing running.

Ray's own processes follow a killed driver, but its agents first spend a minute on reporting the death to a server that
is dead as well. The reaper keeps a list of the driver's descendants and ends those that are left when it is gone.

`inference.parent_watchdog` serves the same purpose one level below: it ends an engine core whose parent is gone. Both
are needed, for the engine core may run on another node than the driver.
"""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

LOOK_SECONDS = 1.0  # between looks at which processes descend from the driver
GRACE_SECONDS = 1.0  # for those that leave by themselves


@contextmanager
def guarded() -> Iterator[None]:
    """Have a reaper watch this process inside the `with` block."""
    driver = psutil.Process()
    preexisting = [str(child.pid) for child in driver.children(recursive=True)]  # not started inside the block
    reaper = subprocess.Popen(
        [sys.executable, "-m", "roll_opd.cluster.process_reaper", str(driver.pid), *preexisting],
        stdin=subprocess.PIPE,  # closes with this process, however it ends
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C in the terminal is not meant for it
    )
    try:
        yield
    finally:
        assert reaper.stdin is not None
        reaper.stdin.close()
        reaper.wait()


def watch(driver: int, preexisting: set[int]) -> None:
    """Wait for the end of standard input, then end what `driver` started, except itself and `preexisting`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gone = threading.Event()
    threading.Thread(target=_set_at_end_of_input, args=(gone,), daemon=True).start()
    spared = preexisting | {psutil.Process().pid}
    descendants: set[psutil.Process] = set()
    while not gone.wait(LOOK_SECONDS):
        descendants = {process for process in descendants | _descendants(driver) if process.is_running()}
    started = [process for process in descendants if process.pid not in spared]
    _, alive = psutil.wait_procs(started, timeout=GRACE_SECONDS)
    for process in alive:  # psutil checks that the number still means the same process
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def _set_at_end_of_input(gone: threading.Event) -> None:
    sys.stdin.read()
    gone.set()


def _descendants(driver: int) -> set[psutil.Process]:
    try:
        return set(psutil.Process(driver).children(recursive=True))
    except psutil.NoSuchProcess:
        return set()


if __name__ == "__main__":
    watch(int(sys.argv[1]), {int(pid) for pid in sys.argv[2:]})
