"""Find out whether the actors and processes of a run are alive."""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray._private.state import actors

from roll_opd.cluster.runtime import ended_processes
from roll_opd.cluster.startup_progress import exit_detail

POLL_INTERVAL_S = 2.0
# running actors -> names in messages
NAMES_OF_ACTORS: "weakref.WeakKeyDictionary[Any, str]" = weakref.WeakKeyDictionary()


def dead_actor() -> str | None:
    """Return a message if an actor of a running group is dead, else None.

    If Ray does not respond, the result is None too.
    """
    try:
        names = {actor._actor_id.hex(): name for actor, name in NAMES_OF_ACTORS.items()}
        job = ray.get_runtime_context().get_job_id()
        found = actors(job_id=ray.JobID.from_hex(job), actor_state_name="DEAD") if names else {}
    except Exception:  # Ray is stopping or has lost its GCS, or a group was added concurrently
        return None
    ended = ((names[key], each) for key, each in found.items() if key in names)
    return next((f"{name} has died: {exit_detail(str(each.get('DeathCause') or ''))}" for name, each in ended), None)


def ended_of_ray() -> str | None:
    """Return a message if a process of Ray that this process started has ended, else None."""
    worker: Any = ray._private.worker
    node = worker._global_node  # None in a joined cluster
    ended = ended_processes(node) if node else None
    return f"{ended} on this host" if ended else None


def is_death(error: ray.exceptions.RayError) -> bool:
    """Return whether an error means that an actor or its engine core has died.

    vLLM reports a dead engine core with EngineDeadError.
    """
    if isinstance(error, ray.exceptions.RayTaskError):  # the actor lives, but may have called a dead actor
        return type(getattr(error, "cause", None)).__name__ == "EngineDeadError"
    return isinstance(error, ray.exceptions.RayActorError)


@contextmanager
def watched(lost: Callable[[str], None]) -> Iterator[None]:
    """Poll for dead actors and dead Ray processes, in a thread that runs inside the block.

    When the thread finds a dead process, it calls `lost` with a message about this process, and stops.
    """
    over = threading.Event()
    thread = threading.Thread(target=_watch, args=(lost, over), name="watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()


def _watch(lost: Callable[[str], None], over: threading.Event) -> None:
    before = None
    while not over.wait(POLL_INTERVAL_S):
        message = ended_of_ray() or dead_actor()
        if message and message == before and not over.is_set():  # at the second poll: a failing call may report first
            lost(message)
            return
        before = message
