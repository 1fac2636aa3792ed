"""Cached verdicts, and questions whose callers are cancelled."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from roll_opd.extras.graders.judge_prompts import VerdictCache


class Oracle:
    """Answers when the test releases it, and counts the questions."""

    def __init__(self) -> None:
        self.asked = self.cancelled = 0
        self.may_answer = asyncio.Event()

    async def ask(self) -> str:
        self.asked += 1
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.asked == 1:
            raise ValueError("not today")
        return f"answer {self.asked}"


def run(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scene, 5))


def test_one_who_leaves_takes_the_question_only_with_the_last() -> None:
    async def scene() -> None:
        oracle, remembered = Oracle(), VerdictCache[str](10)
        oracle.asked = 1
        first, second = (asyncio.ensure_future(remembered.get("q", oracle.ask)) for _ in range(2))
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.sleep(0.01)
        assert (oracle.asked, oracle.cancelled) == (2, 0)
        oracle.may_answer.set()
        assert await second == "answer 2" == await remembered.get("q", oracle.ask)

    run(scene())


def test_a_question_that_nobody_waits_for_is_dropped_and_can_be_asked_anew() -> None:
    async def scene() -> None:
        oracle, remembered = Oracle(), VerdictCache[str](10)
        waiting = [asyncio.ensure_future(remembered.get("q", oracle.ask)) for _ in range(2)]
        await asyncio.sleep(0.01)
        for task in waiting:
            task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        oracle.may_answer.set()
        assert await remembered.get("q", oracle.ask) == "answer 2"
        assert (oracle.asked, oracle.cancelled) == (2, 1)
        assert await remembered.get("q", oracle.ask) == "answer 2"

    run(scene())


def test_a_failure_reaches_all_who_wait_and_is_not_remembered() -> None:
    async def scene() -> None:
        oracle, remembered = Oracle(), VerdictCache[str](10)
        oracle.may_answer.set()
        failures = await asyncio.gather(*(remembered.get("q", oracle.ask) for _ in range(3)), return_exceptions=True)
        assert oracle.asked == 1 and {str(failure) for failure in failures} == {"not today"}
        assert await remembered.get("q", oracle.ask) == "answer 2"
        with pytest.raises(KeyError):
            await remembered.get("other", failing)

    async def failing() -> str:
        raise KeyError("q")

    run(scene())
