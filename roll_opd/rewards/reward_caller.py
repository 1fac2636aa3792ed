"""Call a reward so that a sample that fails harms no other: with a time limit, and one by one where a batch fails.

A function that is not a coroutine runs in a thread, which nothing can end from outside: one that runs out of time is
counted in `hung`, and the owner of the process replaces it. Exceptions that an event loop would act on itself
(SystemExit, CancelledError, StopIteration) are failures of the sample like any other.
"""

import asyncio
import inspect
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

from roll_opd.base.failures import place_of
from roll_opd.base.frozen import FrozenDict
from roll_opd.rewards.interface import (
    TIMEOUT,
    Failure,
    Reward,
    RewardError,
    RewardSample,
    Score,
    Scored,
    Scores,
    read_scores,
)


class Caller:
    """One reward, called from an event loop; in `executor` if it is not a coroutine function."""

    def __init__(
        self, name: str, reward: Reward, executor: Executor, timeout: float | None = None, most_calls: int = 256
    ) -> None:
        """`timeout`: seconds a sample may take; None: the reward limits itself. `most_calls`: calls at a time."""
        self._name, self._reward, self._executor, self._timeout = name, reward, executor, timeout
        self._calls = asyncio.Semaphore(most_calls)
        self._is_async = inspect.iscoroutinefunction(reward)
        self.hung = 0

    async def score(self, samples: Sequence[RewardSample]) -> list[Scored]:
        """Return a score or a failure for each sample, in order. Raises `RewardError` for a malformed answer."""
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
        call = asyncio.get_running_loop().run_in_executor(self._executor, _called, self._reward, samples)
        done, _ = await asyncio.wait([call], timeout=limit)
        if not done:
            self.hung += 1
            raise TimeoutError
        answer = call.result()
        return await _awaited(answer, limit) if inspect.isawaitable(answer) else answer

    def _failure(self, error: Exception) -> Failure:
        if isinstance(error, TimeoutError):
            allowed = (
                "" if self._timeout is None else f" after {self._timeout:g} s; raise its timeout, or make it faster"
            )
            return Failure(TIMEOUT, f"reward {self._name} ran out of time{allowed}")
        raised = error.error if isinstance(error, _Raised) else error
        kind = type(raised).__name__
        return Failure(kind, f"reward {self._name} raised {kind}: {raised} ({place_of(raised)})")


class _Raised(Exception):
    """Carries an `error` that an event loop would not hand to the caller."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


def _called(reward: Reward, samples: Sequence[RewardSample]) -> Scores | Awaitable[Scores]:
    try:
        return reward(samples)
    except StopIteration as error:  # a future cannot hold it, and would never be done
        raise _Raised(error) from error
    except Exception:
        raise
    except BaseException as error:  # such as SystemExit, which would end the event loop
        raise _Raised(error) from error


async def _awaited(answer: Awaitable[Scores], limit: float | None) -> Scores:
    """Wait as `asyncio.wait_for` does, but not for a task that ignores its cancellation, nor be cancelled by one."""
    task = asyncio.ensure_future(_guarded(answer))
    try:
        done, _ = await asyncio.wait([task], timeout=limit)
    finally:
        task.cancel()
    if not done:
        raise TimeoutError
    if task.cancelled():
        raise _Raised(asyncio.CancelledError("by itself"))
    return task.result()


async def _guarded(answer: Awaitable[Scores]) -> Scores:
    try:
        return await answer
    except (SystemExit, KeyboardInterrupt) as error:
        raise _Raised(error) from error


def weighted(scores: Mapping[str, Scored], weights: Mapping[str, float]) -> Scored:
    """Return the weighted sum of several rewards' scores of one sample; each score is a part, named after its reward.

    If one failed, the sum has failed; if one has no value, the sum has none.
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
