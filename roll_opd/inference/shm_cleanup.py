"""Shared memory of processes that were killed: Python's resource tracker unlinks it, if it outlives them.

vLLM kills ranks that do not end within seconds, as on a busy machine; Ray then ends their engine's process with all of
its group, the tracker too, and each time 160 MiB and more would stay in /dev/shm.
"""

import os
import time
from contextlib import suppress
from multiprocessing import resource_tracker
from typing import Any

SECONDS = 5.0  # for the tracker: it ends with the last process that could still ask it


def unlink_left_memory() -> None:
    """Have the tracker of this process do its work now. Children of this process are to have ended."""
    tracker: Any = resource_tracker._resource_tracker
    if tracker._fd is None or tracker._pid is None:  # there is none, or it is another process's
        return
    os.close(tracker._fd)
    deadline = time.monotonic() + SECONDS
    with suppress(ChildProcessError):
        while os.waitpid(tracker._pid, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.02)
    tracker._fd = tracker._pid = None
