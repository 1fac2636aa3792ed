"""A process that must not outlive the one which started it.

SIGKILL gives a parent no chance to stop its children, so the child watches: a daemon thread ends the process
as soon as the kernel has handed it to another parent. For vLLM's engine core and other helper processes.

`cluster.process_reaper` serves the same purpose one level above: it ends what a killed driver has started on its node.
"""

import os
import threading
import time

ORPHAN_EXIT_CODE = 70  # EX_SOFTWARE of sysexits.h: seen only by whoever adopted the process


def die_with_parent(poll_seconds: float = 0.5) -> None:
    """End this process (`os._exit`) within about `poll_seconds` of its parent's death.

    The parent is whoever it is at the time of the call. Returns at once; calling twice is harmless.
    """
    if any(thread.name == _THREAD_NAME for thread in threading.enumerate()):
        return
    watcher = threading.Thread(target=_watch, args=(os.getppid(), poll_seconds), name=_THREAD_NAME, daemon=True)
    watcher.start()


_THREAD_NAME = "roll_opd-die-with-parent"


def _watch(parent_pid: int, poll_seconds: float) -> None:
    # not PR_SET_PDEATHSIG: that fires when the parent *thread* ends, which for a pool or an actor is too
    # early
    while os.getppid() == parent_pid:
        time.sleep(poll_seconds)
    os._exit(ORPHAN_EXIT_CODE)
