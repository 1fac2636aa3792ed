"""Call a reward with a timeout, and return one result per sample.

If the call for a batch fails, the reward is called again for each single sample.

A plain function runs in a thread, and a thread cannot be stopped. A call that times out is therefore counted in `hung`,
and the owner of the process replaces the process. Exceptions that would affect the event loop become failures of the
sample: SystemExit, CancelledError and StopIteration.
"""

import asyncio
import inspect
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

from roll_opd.base.failures import of_a_service, place_of
from roll_opd.base.frozen import FrozenDict
from roll_opd.rewards.interface import (
    TIMEOUT,
    Failure,
    RewardError,
    RewardFunction,
    RewardSample,
    Score,
    Scored,
    Scores,
    read_scores,
)


class Caller:
    """Calls one reward from an event loop.

    Plain functions run in `executor`.
    """

    def __init__(
        self, name: str, reward: RewardFunction, executor: Executor, timeout: float | None = None, most_calls: int = 256
    ) -> None:
        """Create a caller.

        Args:
            timeout: seconds per sample; None if the reward limits its time itself.
            most_calls: maximum number of concurrent calls.
        """
        self._name, self._reward, self._executor, self._timeout = name, reward, executor, timeout
        self._calls = asyncio.Semaphore(most_calls)
        self._is_async = inspect.iscoroutinefunction(reward)
        self.hung = 0

    async def score(self, samples: Sequence[RewardSample]) -> list[Scored]:
        """Return a score or a failure for each sample, in order.

        Raises `RewardError` if the result of the reward violates the interface.
        """
        try:
            async with self._calls:
                scores = await self._answer(samples)
        except RewardError:
            raise
        except Exception as error:
            if len(samples) == 1:
                return [self._failure(error)]
            alone = await asyncio.gather(*[self.score([sample]) for sample in samples])
            return [scored for one in alone for scored in one]
        return read_scores(scores, samples, self._name)

    async def _answer(self, samples: Sequence[RewardSample]) -> Scores:
        limit = None if self._timeout is None else self._timeout * len(samples)
        if self._is_async:
            coroutine: Any = self._reward(samples)
            return await _awaited(coroutine, limit)
        call = asyncio.get_running_loop().run_in_executor(self._executor, _call, self._reward, samples)
        done, _ = await asyncio.wait([call], timeout=limit)
        if not done:
            self.hung += 1
            raise _OutOfTime
        answer = call.result()
        return await _awaited(answer, limit) if inspect.isawaitable(answer) else answer

    def _failure(self, error: Exception) -> Failure:
        if isinstance(error, TimeoutError):
            allowed = (
                ""
                if self._timeout is None
                else f" after {self._timeout:g} s; raise the timeout, or make the reward faster"
            )
            message = f"reward {self._name} ran out of time{allowed}"
            return Failure(TIMEOUT, message, of_a_service=of_a_service(error))
        raised = error.error if isinstance(error, _Raised) else error
        kind = type(raised).__name__
        message = f"reward {self._name} raised {kind}: {raised} ({place_of(raised)})"
        return Failure(kind, message, of_a_service=of_a_service(raised))


class _OutOfTime(TimeoutError):
    """A call has exceeded the time limit of its reward, whatever it does."""

    of_a_service = False


class _Raised(Exception):
    """Wrapper of an exception that would affect the event loop."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


def _call(reward: RewardFunction, samples: Sequence[RewardSample]) -> Scores | Awaitable[Scores]:
    try:
        return reward(samples)
    except StopIteration as error:  # a future cannot store this exception and would never finish
        raise _Raised(error) from error
    except Exception:
        raise
    except BaseException as error:  # such as SystemExit, which would end the event loop
        raise _Raised(error) from error


async def _awaited(answer: Awaitable[Scores], limit: float | None) -> Scores:
    """Await a coroutine with a timeout, as `asyncio.wait_for` does.

    Unlike `asyncio.wait_for`, this function does not wait for a task that ignores its cancellation.
    """
    task = asyncio.ensure_future(_guarded(answer))
    try:
        done, _ = await asyncio.wait([task], timeout=limit)
    finally:
        task.cancel()
    if not done:
        raise _OutOfTime
    if task.cancelled():
        raise _Raised(asyncio.CancelledError("cancelled its own task"))
    return task.result()


async def _guarded(answer: Awaitable[Scores]) -> Scores:
    try:
        return await answer
    except (SystemExit, KeyboardInterrupt) as error:
        raise _Raised(error) from error


def weighted(scores: Mapping[str, Scored], weights: Mapping[str, float]) -> Scored:
    """Return the weighted sum of the scores that several rewards give to one sample.

    Each score is a part of the sum, named after its reward. If one reward failed, the result is its failure. If the
    value of one score is None, the value of the sum is None.
    """
    errors: Counter[str] = Counter()
    for scored in scores.values():
        errors.update(scored.errors)
    found: dict[str, Score] = {}
    for name, scored in scores.items():
        if isinstance(scored, Failure):
            return replace(scored, errors=FrozenDict(errors))
        found[name] = scored
    values: dict[str, float] = {}
    parts: dict[str, float] = {}
    for name, score in found.items():
        if score.value is None:
            return Score(None, reason=score.reason, errors=FrozenDict(errors))
        values[name] = score.value
        parts |= {name: score.value, **{f"{name}.{part}": number for part, number in score.parts.items()}}
    total = sum(weights[name] * value for name, value in values.items())
    reason = next((score.reason for score in found.values() if score.reason), "")
    return Score(total, FrozenDict(parts), reason, FrozenDict(errors))
