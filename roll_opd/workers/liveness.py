"""Find out whether the processes of a run are alive.

Ray starts a lost process of a model again, with the same handle but without its state. A thread of the driver therefore
polls Ray for processes that have ended or were started again. It also reads the beats of the processes: each process
stores a new beat every few seconds, and one without beats is killed, so that a process that hangs counts as lost.
"""

import asyncio
import math
import os
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray._private.state import actors
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from roll_opd.cluster.lost_processes import NotServing, NotSetUp, ProcessDied
from roll_opd.cluster.ray_runtime import ended_processes
from roll_opd.cluster.startup_progress import exit_detail

POLL_INTERVAL_S = 2.0
BEAT_INTERVAL_S = 5.0
UNKNOWN = "its process has ended unexpectedly"
LAST_WORDS = b"ended: "  # prefix of the value that a process stores before it ends itself


@dataclass
class Life:
    """What the driver knows of a running actor.

    `lost` is called with a message when the process of the actor was lost. Without `lost`, a loss ends the run.
    """

    name: str
    lost: Callable[[str], None] | None = None
    restarts: int = 0  # number of Ray's restarts before the process that was set up
    reported: int = 0  # number of restarts that were reported to `lost`
    beat: bytes | None = None
    beaten_at: float = math.inf  # time of the last new beat, or of the end of set-up; inf: in set-up

    def start(self, restarts: int, beat: bytes | None) -> None:
        """Expect a new process, whose set-up may take long. `beat` is the last beat of the lost process."""
        self.restarts = self.reported = restarts
        self.beat, self.beaten_at = beat, math.inf

    def is_set_up(self) -> None:
        """Expect beats from now on."""
        self.beaten_at = min(self.beaten_at, time.monotonic())


LIVES: "weakref.WeakKeyDictionary[Any, Life]" = weakref.WeakKeyDictionary()  # of the running actors


def _running() -> list[tuple[Any, Life]]:
    """Return the running actors. Other threads may change `LIVES` meanwhile."""
    found = [(actor, LIVES.get(actor)) for reference in LIVES.keyrefs() if (actor := reference()) is not None]
    return [(actor, life) for actor, life in found if life is not None]


def starts_of(handles: list[Any]) -> dict[Any, tuple[str, int, str]]:
    """Return (state, number of restarts, cause of death) of actors, as Ray reports them.

    Actors that Ray does not know are left out. If Ray does not respond, the result is empty.
    """
    try:
        by_id = {actor._actor_id.hex(): actor for actor in handles}
        job = ray.get_runtime_context().get_job_id()
        found = actors(job_id=ray.JobID.from_hex(job)) if by_id else {}
    except Exception:  # Ray is stopping or has lost its GCS, or a group was added concurrently
        return {}
    return {
        by_id[key]: (each["State"], int(each["NumRestarts"]), str(each.get("DeathCause") or ""))
        for key, each in found.items()
        if key in by_id
    }


def lost_actors() -> list[tuple[Life, str]]:
    """Return the actors whose process was lost since the last call, each with a message."""
    found = []
    for actor, (state, restarts, cause) in starts_of([actor for actor, _ in _running()]).items():
        life = LIVES.get(actor)
        if life is None or (state != "DEAD" and restarts <= life.reported):
            continue
        life.reported = restarts
        found.append((life, f"{life.name} has died: {last_words(actor) or exit_detail(cause) or UNKNOWN}"))
    return found


def ended_of_ray() -> str | None:
    """Return a message if a process of Ray that this process started has ended, else None."""
    worker: Any = ray._private.worker
    node = worker._global_node  # None in a joined cluster
    ended = ended_processes(node) if node else None
    return f"{ended} on this host" if ended else None


def is_death(error: BaseException) -> bool:
    """Return whether an error means that an actor or its engine core has died.

    vLLM reports a dead engine core with EngineDeadError.
    """
    if isinstance(error, ray.exceptions.RayTaskError):  # the actor lives, but may have called a dead actor
        return type(getattr(error, "cause", None)).__name__ in ("EngineDeadError", NotSetUp.__name__)
    return isinstance(error, ray.exceptions.RayActorError)


def is_loss(error: BaseException) -> bool:
    """Return whether an error means that a process was lost, or was started again and cannot answer yet."""
    if isinstance(error, ProcessDied | NotServing):
        return True
    return isinstance(error, ray.exceptions.RayError) and is_death(error)


def _key() -> bytes:
    return f"roll_opd/beat/{ray.get_runtime_context().get_actor_id()}".encode()


def beat_in_thread() -> None:
    """Let a thread of this actor's process store beats until the process ends."""
    key, number = _key(), 0

    def work() -> None:
        nonlocal number
        while True:
            number += 1
            _store(key, _beat(number))
            time.sleep(BEAT_INTERVAL_S)

    threading.Thread(target=work, name="beat", daemon=True).start()


async def beat_while(check: Callable[[], Awaitable[Any]]) -> None:
    """Store a beat after each call of `check`. If `check` fails, the process ends."""
    key, number = _key(), 0
    while True:
        try:
            await check()
        except Exception as error:
            _store(key, LAST_WORDS + (str(error) or type(error).__name__).encode())
            os._exit(1)
        number += 1
        await asyncio.to_thread(_store, key, _beat(number))
        await asyncio.sleep(BEAT_INTERVAL_S)


def _beat(number: int) -> bytes:
    return f"{os.getpid()} {number}".encode()  # differs from the beats of earlier processes


def _store(key: bytes, value: bytes) -> None:
    try:
        _internal_kv_put(key, value, overwrite=True)
    except Exception:
        return  # the run is ending, or its GCS is lost


def beat_of(actor: Any) -> bytes | None:
    try:
        return _internal_kv_get(f"roll_opd/beat/{actor._actor_id.hex()}".encode())
    except Exception:
        return None


def last_words(actor: Any) -> str:
    """Return why a process has ended itself; "" if it has not."""
    stored = beat_of(actor) or b""
    return stored.removeprefix(LAST_WORDS).decode(errors="replace") if stored.startswith(LAST_WORDS) else ""


def end_hung(patience: float) -> list[str]:
    """Kill each actor that has stored beats, but none for `patience` seconds; return messages about them."""
    ended = []
    for actor, life in _running():
        beat, now = beat_of(actor), time.monotonic()
        if life.reported > life.restarts:
            continue  # Ray starts a new process, which has no beats yet
        if beat != life.beat:
            life.beat, life.beaten_at = beat, now
        elif now - life.beaten_at > patience:
            life.beat, life.beaten_at = LAST_WORDS + b"it hung and was killed", now  # killed again if it lives on
            _store(f"roll_opd/beat/{actor._actor_id.hex()}".encode(), life.beat)
            ended.append(f"{life.name} has not reacted for {patience:g} s (hang_timeout_s) and is killed")
            with suppress(Exception):  # Ray is stopping
                ray.kill(actor, no_restart=life.lost is None)
    return ended


@contextmanager
def watched(
    lost: Callable[[str], None], patience: float | None = None, say: Callable[[str], None] = print
) -> Iterator[None]:
    """Poll for lost actors and dead Ray processes, in a thread that runs inside the block.

    Args:
        lost: called with a message when the run cannot continue: a process of Ray has ended, or an actor without an
            own `Life.lost`. The thread then stops.
        patience: seconds without a beat after which a process is killed; None: never.
        say: prints a line.
    """
    over = threading.Event()

    def watch() -> None:
        try:
            _watch(lost, patience, say, over)
        except Exception as error:  # otherwise the run would wait for lost processes for ever
            lost(f"the check of the run's processes has failed: {error!r}")

    threading.Thread(target=watch, name="watch", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _watch(
    lost: Callable[[str], None], patience: float | None, say: Callable[[str], None], over: threading.Event
) -> None:
    fatal = None
    while not over.wait(POLL_INTERVAL_S):
        if fatal := fatal or ended_of_ray():
            if over.wait(POLL_INTERVAL_S):  # a failing call may report first
                return
            lost(fatal)
            return
        for life, message in lost_actors():
            if life.lost:
                life.lost(message)
            else:
                fatal = message
        if patience:
            for line in end_hung(patience):
                say(line)
