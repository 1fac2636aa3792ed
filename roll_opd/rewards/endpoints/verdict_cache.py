"""LRU cache of verdicts for asyncio that shares pending requests for equal questions."""

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
    """LRU cache of at most `size` answers; 0 disables it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._known: OrderedDict[str, Answer] = OrderedDict()
        self._pending: dict[str, _SharedCall[Answer]] = {}

    async def get(self, question: str, ask: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer:
        """Return the cached answer to `question`, or that of one shared `ask()`, whose error all waiters get."""
        if not self._size:
            return await ask()
        if question in self._known:
            self._known.move_to_end(question)
            return self._known[question]
        call = self._pending.get(question)
        if call is None:
            call = self._pending[question] = _SharedCall(asyncio.ensure_future(ask()))
            call.task.add_done_callback(lambda task: self._keep(question, task))
        call.waiting += 1
        try:
            return await asyncio.shield(call.task)
        finally:
            call.waiting -= 1
            if not call.waiting and not call.task.done():  # all waiters were cancelled
                self._pending.pop(question, None)
                call.task.cancel()

    def _keep(self, question: str, task: "asyncio.Task[Answer]") -> None:
        call = self._pending.get(question)
        if call is not None and call.task is task:
            del self._pending[question]
        if not task.cancelled() and task.exception() is None:
            self._known[question] = task.result()
            if len(self._known) > self._size:
                self._known.popitem(last=False)
