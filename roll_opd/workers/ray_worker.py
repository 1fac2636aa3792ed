"""Use a Ray actor as a worker of a `JobPool`, and detect a process that died or is stuck."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any

import ray

from roll_opd.base.failures import RunError
from roll_opd.samples.transport import Compact
from roll_opd.workers.batched_calls import Answers
from roll_opd.workers.job_pool import WorkerLost

DIED, STUCK = "worker_died", "timeout"  # kinds of failures in metrics


class RayWorker:
    """A Ray actor as a `Worker` of a pool.

    The actor needs the methods `setup` and `run`. It also needs `alive` if `patience` is finite.
    """

    def __init__(
        self, name: str, actor: Any, settings: Sequence[Any], patience: float = math.inf, limit: float = math.inf
    ) -> None:
        """Create the worker.

        Args:
            name: name of the pool, for error messages.
            settings: arguments of the actor's `setup`.
            patience: seconds without an answer after which `alive` is called. The actor must reply within the same
                time.
            limit: seconds within which all jobs of a call must be answered.
        """
        self._name, self.actor, self._settings, self._patience, self._limit = name, actor, settings, patience, limit

    async def setup(self) -> None:
        """Call the actor's `setup`."""
        try:
            await self.actor.setup.remote(*self._settings)
        except ray.exceptions.RayTaskError as error:
            raise RunError(f"{self._name}: a worker failed to start: {error.cause}") from error
        except ray.exceptions.RayActorError as error:
            raise WorkerLost(DIED, str(error)) from error

    async def run(self, items: Sequence[Any]) -> AsyncGenerator[Answers, None]:
        """Yield the answers of the actor's `run`.

        Use `aclosing`, so that the call is cancelled if the caller leaves the loop early.
        """
        until = time.monotonic() + self._limit
        stream = self.actor.run.options(num_returns="streaming").remote(Compact(items))
        is_open = True
        try:
            while answers := await next_answer(_received(stream), self._alive, self._patience, until):
                yield answers
            is_open = False
        except ray.exceptions.RayTaskError as error:
            raise RunError(f"{self._name}: {error.cause}") from error
        except ray.exceptions.RayActorError as error:
            raise WorkerLost(DIED, "died") from error
        finally:
            if is_open:
                ray.cancel(stream)

    def kill(self) -> None:
        """Kill the actor's process."""
        ray.kill(self.actor)

    def _alive(self) -> "asyncio.Future[None]":
        return asyncio.wrap_future(self.actor.alive.remote().future())


async def next_answer(
    receive: Coroutine[Any, Any, Answers | None],
    alive: Callable[[], "asyncio.Future[None]"],
    patience: float,
    until: float,
) -> Answers | None:
    """Return the result of `receive`.

    Raises WorkerLost if there is no result in time, or if the worker is stuck.

    Args:
        alive: asks the worker whether it is alive.
        patience: seconds without a result after which `alive` is called. The worker must answer within the same time.
        until: time at which the result must have arrived.
    """
    answer = asyncio.ensure_future(receive)
    reply: asyncio.Future[None] | None = None
    try:
        while not (await asyncio.wait([answer], timeout=min(patience, until - time.monotonic())))[0]:
            if time.monotonic() >= until or (reply and not reply.done()):
                raise WorkerLost(STUCK, "is stuck")
            reply = alive()
        return answer.result()
    finally:
        answer.cancel()


async def _received(stream: ray.ObjectRefGenerator) -> Answers | None:
    try:
        return await (await anext(stream))
    except StopAsyncIteration:
        return None
