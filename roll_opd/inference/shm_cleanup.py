"""Unlink the shared memory of killed processes through Python's resource tracker.

vLLM kills ranks that do not exit within seconds, as on a busy machine. Ray then kills the engine's process group with
the tracker, which would leave 160 MiB or more in /dev/shm.
"""

import os
import time
from contextlib import suppress
from multiprocessing import resource_tracker
from typing import Any

TRACKER_TIMEOUT_S = 5.0  # it exits after the last process connected to it


def unlink_shared_memory() -> None:
    """Close the resource tracker of this process and wait while it unlinks; all children must have exited."""
    tracker: Any = resource_tracker._resource_tracker
    if tracker._fd is None or tracker._pid is None:  # no tracker, or another process's
        return
    os.close(tracker._fd)
    deadline = time.monotonic() + TRACKER_TIMEOUT_S
    with suppress(ChildProcessError):
        while os.waitpid(tracker._pid, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.02)
    tracker._fd = tracker._pid = None
