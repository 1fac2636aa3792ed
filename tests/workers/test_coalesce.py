"""Results that are sent together: all of them, in order, without delay."""

import asyncio
import random
from collections.abc import AsyncGenerator

import pytest

from roll_opd.workers.batched_calls import coalesced


async def numbers(count: int, seed: int, fails: bool = False) -> AsyncGenerator[int, None]:
    rng = random.Random(seed)
    for number in range(count):
        if rng.random() < 0.3:
            await asyncio.sleep(rng.random() * 0.01)
        yield number
    if fails:
        raise ValueError("after the last")


@pytest.mark.parametrize("chunk", [None, 1, 7])
def test_everything_comes_once_in_order_and_chunks_at_once(chunk: int | None) -> None:
    async def run(seed: int) -> list[list[int]]:
        return [burst async for burst in coalesced(numbers(60, seed), 60.0 if chunk else 0.005, chunk)]

    for seed in range(8):
        found = asyncio.run(asyncio.wait_for(run(seed), 5))  # nobody waits for a minute where a chunk is complete
        assert [number for burst in found for number in burst] == list(range(60))
        assert all(found)


def test_an_error_comes_after_what_came_before_it() -> None:
    found: list[int] = []

    async def run() -> None:
        async for burst in coalesced(numbers(9, 0, fails=True), 0.001):
            found.extend(burst)

    with pytest.raises(ValueError, match="after the last"):
        asyncio.run(run())
    assert found == list(range(9))
