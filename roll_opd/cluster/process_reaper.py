"""A process that cleans up after a driver which had no chance to: SIGKILL must leave nothing running.

Ray's own processes follow a killed driver, but its agents first spend a minute on reporting the death to a server that
is dead as well. The guardian keeps a list of the driver's descendants and ends whoever is left when the driver is gone.
"""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

LOOK_SECONDS = 1.0  # between looks at who descends from the driver
GRACE_SECONDS = 1.0  # for those that leave by themselves


@contextmanager
def guarded() -> Iterator[None]:
    """Have a guardian watch this process inside the `with` block."""
    driver = psutil.Process()
    strangers = [str(child.pid) for child in driver.children(recursive=True)]  # here before: none of its business
    guardian = subprocess.Popen(
        [sys.executable, "-m", "roll_opd.cluster.process_reaper", str(driver.pid), *strangers],
        stdin=subprocess.PIPE,  # closes with this process, however it ends
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C in the terminal is not meant for it
    )
    try:
        yield
    finally:
        guardian.stdin.close()
        guardian.wait()


def watch(driver: int, strangers: set[int]) -> None:
    """Wait for the end of standard input, then end what `driver` started, but for itself and `strangers`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gone = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), gone.set()), daemon=True).start()
    strangers = strangers | {psutil.Process().pid}
    family: set[psutil.Process] = set()
    while not gone.wait(LOOK_SECONDS):
        family = {member for member in family | _descendants(driver) if member.is_running()}
    orphans = [member for member in family if member.pid not in strangers]
    _, alive = psutil.wait_procs(orphans, timeout=GRACE_SECONDS)
    for orphan in alive:  # psutil checks that the number still means the same process
        try:
            orphan.kill()
        except psutil.NoSuchProcess:
            continue


def _descendants(driver: int) -> set[psutil.Process]:
    try:
        return set(psutil.Process(driver).children(recursive=True))
    except psutil.NoSuchProcess:
        return set()


if __name__ == "__main__":
    watch(int(sys.argv[1]), {int(pid) for pid in sys.argv[2:]})
