"""Tells a run of what has died beside it: a role that nobody asks anything just now, or a part of Ray on this host.

A call to a dead process fails by itself, but a teacher may be called minutes after its end, and a dead GCS is missed by
Ray after one minute.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray

from roll_opd.cluster.group import dead
from roll_opd.cluster.runtime import what_has_ended

LOOK_SECONDS = 2.0


@contextmanager
def watched(lost: Callable[[str], None]) -> Iterator[None]:
    """Have `lost` told, from a thread, of the first such end inside the block."""
    over = threading.Event()
    thread = threading.Thread(target=_watch, args=(lost, over), name="watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()


def _watch(lost: Callable[[str], None], over: threading.Event) -> None:
    worker: Any = ray._private.worker
    node = worker._global_node  # what this process has started of Ray: nothing, where a cluster was joined
    before = None
    while not over.wait(LOOK_SECONDS):
        ended = what_has_ended(node) if node else None
        said = f"{ended} on this host" if ended else dead()
        if said and said == before and not over.is_set():  # at the first look, the call to it may be failing just now
            lost(said)
            return
        before = said
