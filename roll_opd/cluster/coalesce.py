"""Coalesce items of an asynchronous stream into lists, to send fewer messages between processes."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

Item = TypeVar("Item")

BURST_SECONDS = 0.1


@dataclass(frozen=True)
class Answers:
    """Results of some jobs of a call, in one message from the process that ran them."""

    results: list[tuple[int, Any]]  # (index in the call, result)
    hung: bool  # the process still runs code that cannot be stopped: it should be replaced


async def coalesced(
    items: AsyncGenerator[Item, None], seconds: float = BURST_SECONDS, chunk: int | None = None
) -> AsyncGenerator[list[Item], None]:
    """Yield the items in order, in lists: each within `seconds` of its arrival, each full `chunk` immediately.

    An exception of `items` is raised after all earlier items.
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
