"""Messages between processes have a price each: what comes shortly after one another travels together."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import TypeVar

Item = TypeVar("Item")

BURST_SECONDS = 0.1


async def bursts(items: AsyncGenerator[Item, None], seconds: float = BURST_SECONDS) -> AsyncIterator[list[Item]]:
    """Yield what comes, in order, and no item later than `seconds` after it came. What `items` raises is raised after
    what it had yielded.
    """
    come: list[Item] = []
    something = asyncio.Event()

    async def collect() -> None:
        async with aclosing(items):
            async for item in items:
                come.append(item)
                something.set()

    collecting = asyncio.create_task(collect())
    collecting.add_done_callback(lambda _: something.set())
    try:
        while not collecting.done() or come:
            await something.wait()
            await asyncio.wait([collecting], timeout=seconds)
            something.clear()
            if come:
                burst = come.copy()
                come.clear()
                yield burst
        collecting.result()
    finally:
        collecting.cancel()
        await asyncio.gather(collecting, return_exceptions=True)
