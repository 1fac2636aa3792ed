"""Calls that go to another process together: each message has a price."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Hashable
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from roll_opd.base.run_errors import RunError

Key = TypeVar("Key", bound=Hashable)
Call = TypeVar("Call")


class BatchedCalls(Generic[Key, Call]):
    """Calls under way. Those of one key that are made one right after another are one batch."""

    def __init__(self, send: Callable[[Key, list[Call]], AsyncGenerator[list[tuple[int, Any]], None]]) -> None:
        """`send` yields answers, each with its place in the batch, as they come; it is closed where nobody waits."""
        self._send = send
        self._asked: dict[Key, list[tuple[Call, asyncio.Future[Any]]]] = {}
        self._followers: set[asyncio.Task[None]] = set()

    def ask(self, key: Key, call: Call) -> "asyncio.Future[Any]":
        """Return the answer to come. It raises what `send` does, and RunError where that ends without it."""
        loop = asyncio.get_running_loop()
        if key not in self._asked:
            self._asked[key] = []
            loop.call_soon(self._begin, key)  # when all that can go on now have asked
        answer: asyncio.Future[Any] = loop.create_future()
        self._asked[key].append((call, answer))
        return answer

    async def end(self) -> None:
        """Stop waiting for what has not been answered."""
        for follower in self._followers:
            follower.cancel()
        await asyncio.gather(*self._followers, return_exceptions=True)

    def _begin(self, key: Key) -> None:
        batch = self._asked.pop(key)
        follower = asyncio.create_task(self._follow(key, batch))
        self._followers.add(follower)
        follower.add_done_callback(self._followers.discard)

        def nobody_waits(answer: asyncio.Future[Any]) -> None:
            if answer.cancelled() and all(other.done() for _, other in batch):
                follower.cancel()

        for _, answer in batch:
            answer.add_done_callback(nobody_waits)

    async def _follow(self, key: Key, batch: list[tuple[Call, "asyncio.Future[Any]"]]) -> None:
        left = len(batch)
        try:
            async with aclosing(self._send(key, [call for call, _ in batch])) as stream:
                async for finished in stream:
                    left -= len(finished)
                    for place, answer in finished:
                        if not batch[place][1].done():  # cancelled: it is not awaited any more
                            batch[place][1].set_result(answer)
            if left:
                raise RunError(f"{left} of {len(batch)} calls were left unanswered")
        except Exception as error:  # raised where each answer is awaited
            for unanswered in (answer for _, answer in batch if not answer.done()):
                unanswered.set_exception(error)
