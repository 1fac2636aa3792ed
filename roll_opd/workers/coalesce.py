"""Messages between processes have a price each: what comes shortly after one another travels together."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from typing import TypeVar

Item = TypeVar("Item")

BURST_SECONDS = 0.1


async def coalesced(
    items: AsyncGenerator[Item, None], seconds: float = BURST_SECONDS, chunk: int | None = None
) -> AsyncIterator[list[Item]]:
    """Yield what comes, in order, no item later than `seconds` after it came, and at once what completes a `chunk`.

    What `items` raises is raised after what it had yielded.
    """
    come: list[Item] = []
    something, now = asyncio.Event(), asyncio.Event()

    async def collect() -> None:
        count = 0
        async with aclosing(items):
            async for item in items:
                come.append(item)
                count += 1
                something.set()
                if chunk and count % chunk == 0:
                    now.set()

    def ended(_: asyncio.Task) -> None:
        something.set()
        now.set()

    collecting = asyncio.create_task(collect())
    collecting.add_done_callback(ended)
    try:
        while not collecting.done() or come:
            await something.wait()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(now.wait(), seconds)
            if not collecting.done():
                something.clear()
                now.clear()
            if come:
                burst = come.copy()
                come.clear()
                yield burst
        collecting.result()
    finally:
        collecting.cancel()
        await asyncio.gather(collecting, return_exceptions=True)
