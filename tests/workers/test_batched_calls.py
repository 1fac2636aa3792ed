"""The end of batched calls."""

import asyncio
from collections.abc import AsyncGenerator

import pytest
from virtual_time import VirtualTime

from roll_opd.workers.batched_calls import LAST_S, BatchedCalls


@pytest.mark.parametrize("answered", [True, False])
def test_an_end_waits_for_the_end_of_a_stream_whose_answers_are_there_but_not_for_ever(answered: bool) -> None:
    """Both streams never end. One that lacks an answer is cancelled at once."""
    closed = []

    async def send(key: int, calls: list[int]) -> AsyncGenerator[list[tuple[int, int]], None]:
        try:
            if answered:
                yield list(enumerate(calls))
            await asyncio.Event().wait()
        finally:
            closed.append(key)

    async def main() -> float:
        calls = BatchedCalls(send)
        answer = calls.ask(1, 2)
        await asyncio.sleep(1)
        assert answer.done() == answered
        began = asyncio.get_running_loop().time()
        await calls.end()
        return asyncio.get_running_loop().time() - began

    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        assert runner.run(main()) == (LAST_S if answered else 0)
    assert closed == [1]
