"""Clean up after killed processes: exit with the parent process, and unlink shared memory.

A parent that is killed by SIGKILL cannot stop its children. Therefore a daemon thread in the child watches the parent
process. When the kernel has assigned a different parent to the child, the thread exits the child.
`cluster.process_reaper` kills the processes that a killed driver leaves.

On a busy machine, vLLM kills ranks that do not exit within seconds. Ray then kills the engine's process group,
including Python's resource tracker. Without the tracker, 160 MiB or more would remain in /dev/shm.
"""

import os
import threading
import time
from contextlib import suppress
from multiprocessing import resource_tracker
from typing import Any

ORPHAN_EXIT_CODE = 70  # EX_SOFTWARE of sysexits.h
TRACKER_TIMEOUT_S = 5.0  # the tracker exits after the last process connected to it
_THREAD_NAME = "roll_opd-die-with-parent"


def die_with_parent(poll_seconds: float = 0.5) -> None:
    """Start a thread that exits this process (`os._exit`) within about `poll_seconds` of its parent's death.

    The parent is the parent process at the time of the call. A second call has no effect.
    """
    if any(thread.name == _THREAD_NAME for thread in threading.enumerate()):
        return
    watcher = threading.Thread(target=_watch, args=(os.getppid(), poll_seconds), name=_THREAD_NAME, daemon=True)
    watcher.start()


def _watch(parent_pid: int, poll_seconds: float) -> None:
    # not PR_SET_PDEATHSIG, which fires at the end of the parent *thread*: too early for a pool or an actor
    while os.getppid() == parent_pid:
        time.sleep(poll_seconds)
    os._exit(ORPHAN_EXIT_CODE)


def unlink_shared_memory() -> None:
    """Close this process's resource tracker, and wait until it has unlinked all shared memory.

    The child processes must have exited before this call.
    """
    tracker: Any = resource_tracker._resource_tracker
    if tracker._fd is None or tracker._pid is None:  # this process has started no tracker
        return
    os.close(tracker._fd)
    deadline = time.monotonic() + TRACKER_TIMEOUT_S
    with suppress(ChildProcessError):
        while os.waitpid(tracker._pid, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.02)
    tracker._fd = tracker._pid = None
