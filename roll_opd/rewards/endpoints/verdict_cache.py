"""Answers by question, for asyncio: the least recently used are forgotten, and a question under way is not asked
again.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Answer = TypeVar("Answer")


@dataclass
class _SharedCall(Generic[Answer]):
    task: "asyncio.Task[Answer]"
    waiting: int = 0


class VerdictCache(Generic[Answer]):
    """At most `size` answers; with 0 every question is asked."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._known: OrderedDict[str, Answer] = OrderedDict()
        self._asked: dict[str, _SharedCall[Answer]] = {}

    async def get(self, question: str, ask: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer:
        """Return the answer to `question`, from `ask()` if it is not known; all who wait get what that raises."""
        if not self._size:
            return await ask()
        if question in self._known:
            self._known.move_to_end(question)
            return self._known[question]
        asked = self._asked.get(question)
        if asked is None:
            asked = self._asked[question] = _SharedCall(asyncio.ensure_future(ask()))
            asked.task.add_done_callback(lambda task: self._keep(question, task))
        asked.waiting += 1
        try:
            return await asyncio.shield(asked.task)
        finally:
            asked.waiting -= 1
            if not asked.waiting and not asked.task.done():  # all who waited were cancelled
                self._asked.pop(question, None)
                asked.task.cancel()

    def _keep(self, question: str, task: "asyncio.Task[Answer]") -> None:
        asked = self._asked.get(question)
        if asked is not None and asked.task is task:
            del self._asked[question]
        if not task.cancelled() and task.exception() is None:
            self._known[question] = task.result()
            if len(self._known) > self._size:
                self._known.popitem(last=False)
