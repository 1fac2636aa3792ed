"""Send fewer messages between processes.

Calls to another process are batched, and the items of an asynchronous stream are collected in lists.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Hashable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from roll_opd.base.failures import RunError

Item = TypeVar("Item")

BURST_SECONDS = 0.1


@dataclass(frozen=True)
class Answers:
    """Results of some of the jobs of a call, sent in one message by the process that ran the jobs."""

    results: list[tuple[int, Any]]  # (index in the call, result)
    hung: bool  # the process runs code that cannot be stopped, so it should be replaced


async def coalesced(
    items: AsyncGenerator[Item, None], seconds: float = BURST_SECONDS, chunk: int | None = None
) -> AsyncGenerator[list[Item], None]:
    """Yield the items in lists, in order.

    A list is yielded at most `seconds` after its first item has arrived. If `chunk` items arrive earlier, they are
    yielded immediately. If `items` raises an exception, all earlier items are yielded before the exception is raised.
    """
    arrived: list[Item] = []
    some_arrived, flush = asyncio.Event(), asyncio.Event()

    async def collect() -> None:
        count = 0
        async with aclosing(items):
            async for item in items:
                arrived.append(item)
                count += 1
                some_arrived.set()
                if chunk and count % chunk == 0:
                    flush.set()

    def ended(_: asyncio.Task) -> None:
        some_arrived.set()
        flush.set()

    collecting = asyncio.create_task(collect())
    collecting.add_done_callback(ended)
    try:
        while not collecting.done() or arrived:
            await some_arrived.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):  # not wait_for, which may swallow a cancellation
                    await flush.wait()
            if not collecting.done():
                some_arrived.clear()
                flush.clear()
            if arrived:
                burst = arrived.copy()
                arrived.clear()
                yield burst
        collecting.result()
    finally:
        collecting.cancel()
        await asyncio.gather(collecting, return_exceptions=True)


Key = TypeVar("Key", bound=Hashable)
Call = TypeVar("Call")


class BatchedCalls(Generic[Key, Call]):
    """Calls that are running, in batches of calls with the same key."""

    def __init__(self, send: Callable[[Key, list[Call]], AsyncGenerator[list[tuple[int, Any]], None]]) -> None:
        """Send each batch with `send`, an asynchronous generator function.

        The generator yields lists of (index in the batch, result) as the results arrive. It is closed if all callers
        cancel.
        """
        self._send = send
        self._pending: dict[Key, list[tuple[Call, asyncio.Future[Any]]]] = {}
        self._followers: dict[asyncio.Task[None], list[tuple[Call, asyncio.Future[Any]]]] = {}

    def ask(self, key: Key, call: Call) -> "asyncio.Future[Any]":
        """Add a call to the next batch; return a future of its result.

        The future raises the exceptions of `send`.
        """
        loop = asyncio.get_running_loop()
        if key not in self._pending:
            self._pending[key] = []
            loop.call_soon(self._begin, key)  # runs after all tasks that are ready have added their calls
        answer: asyncio.Future[Any] = loop.create_future()
        self._pending[key].append((call, answer))
        return answer

    async def end(self) -> None:
        """Cancel all unanswered calls. A batch whose calls are all answered ends with its last answer."""
        for follower, batch in self._followers.items():
            if not all(answer.done() and not answer.cancelled() for _, answer in batch):
                follower.cancel()
        await asyncio.gather(*self._followers, return_exceptions=True)

    def _begin(self, key: Key) -> None:
        batch = self._pending.pop(key)
        follower = asyncio.create_task(self._follow(key, batch))
        self._followers[follower] = batch
        follower.add_done_callback(self._followers.pop)

        def cancel_if_unused(answer: asyncio.Future[Any]) -> None:
            if answer.cancelled() and all(other.done() for _, other in batch):
                follower.cancel()

        for _, answer in batch:
            answer.add_done_callback(cancel_if_unused)

    async def _follow(self, key: Key, batch: list[tuple[Call, "asyncio.Future[Any]"]]) -> None:
        left = len(batch)
        try:
            async with aclosing(self._send(key, [call for call, _ in batch])) as stream:
                async for finished in stream:
                    left -= len(finished)
                    for place, answer in finished:
                        if not batch[place][1].done():  # not cancelled
                            batch[place][1].set_result(answer)
            if left:
                raise RunError(f"{left} of {len(batch)} calls were left unanswered")
        except Exception as error:  # raised where each answer is awaited
            for unanswered in (answer for _, answer in batch if not answer.done()):
                unanswered.set_exception(error)
