"""Detect dead actors of a run and dead Ray processes on this host, also without a call to them.

A call to a dead process fails, but a teacher may be called only minutes after its death, and Ray notices a dead GCS
after one minute.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray

from roll_opd.cluster.group import dead_actor
from roll_opd.cluster.runtime import ended_processes

POLL_INTERVAL_S = 2.0


@contextmanager
def watched(lost: Callable[[str], None]) -> Iterator[None]:
    """Call `lost` from a thread with a message about the first dead process inside the block."""
    over = threading.Event()
    thread = threading.Thread(target=_watch, args=(lost, over), name="watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()


def _watch(lost: Callable[[str], None], over: threading.Event) -> None:
    worker: Any = ray._private.worker
    node = worker._global_node  # Ray processes started by this one; None in a joined cluster
    before = None
    while not over.wait(POLL_INTERVAL_S):
        ended = ended_processes(node) if node else None
        message = f"{ended} on this host" if ended else dead_actor()
        if message and message == before and not over.is_set():  # second poll: a failing call reports it first
            lost(message)
            return
        before = message
