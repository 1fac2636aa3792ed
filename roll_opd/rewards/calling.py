"""Calls a reward so that one sample's trouble stays its own: within a time limit, and alone where a batch fails.

A function that is not a coroutine runs in a thread, which nothing can end from outside: one that runs out of time is
counted in `hung`, and whoever owns the process replaces it.
"""

import asyncio
import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace

from roll_opd.config.frozen import FrozenDict
from roll_opd.rewards.interface import (
    TIMEOUT,
    Failure,
    Reward,
    RewardError,
    RewardSample,
    Score,
    Scored,
    read_scores,
)


class Caller:
    """One reward, as it is called in an event loop; `executor` is where it runs if it is not a coroutine function."""

    def __init__(self, name: str, reward: Reward, executor: Executor, timeout: float | None = None) -> None:
        """`timeout`: seconds a sample may take; None: the reward limits itself."""
        self._name, self._reward, self._executor, self._timeout = name, reward, executor, timeout
        self._is_async = inspect.iscoroutinefunction(reward)
        self.hung = 0

    async def score(self, samples: Sequence[RewardSample]) -> list[Scored]:
        """A score or a failure each, in order. Raises `RewardError` where the reward did not keep to the interface."""
        try:
            scores = await self._answer(samples)
        except RewardError:
            raise
        except Exception as error:
            if len(samples) == 1:
                return [self._failure(error)]
            alone = await asyncio.gather(*[self.score([sample]) for sample in samples])
            return [scored for one in alone for scored in one]
        return read_scores(scores, samples, self._name)

    async def _answer(self, samples: Sequence[RewardSample]):
        limit = None if self._timeout is None else self._timeout * len(samples)
        if self._is_async:
            return await asyncio.wait_for(self._reward(samples), limit)
        call = asyncio.get_running_loop().run_in_executor(self._executor, self._reward, samples)
        done, _ = await asyncio.wait([call], timeout=limit)
        if not done:
            self.hung += 1
            raise TimeoutError
        answer = call.result()
        return await asyncio.wait_for(answer, limit) if inspect.isawaitable(answer) else answer

    def _failure(self, error: Exception) -> Failure:
        if isinstance(error, TimeoutError):
            allowed = (
                "" if self._timeout is None else f" after {self._timeout:g} s; raise its timeout, or make it faster"
            )
            return Failure(TIMEOUT, f"reward {self._name} ran out of time{allowed}")
        kind = type(error).__name__
        return Failure(kind, f"reward {self._name} raised {kind}: {error}")


def weighted(scores: Mapping[str, Scored], weights: Mapping[str, float]) -> Scored:
    """The sum of several rewards' scores of one sample, each times its weight; each is a part by its name.

    A failure of one is the failure of all, and so is one that cannot judge.
    """
    errors: Counter[str] = Counter()
    for scored in scores.values():
        errors.update(scored.errors)
    for scored in scores.values():
        if isinstance(scored, Failure):
            return replace(scored, errors=FrozenDict(errors))
    parts: dict[str, float] = {}
    for name, score in scores.items():
        if score.value is None:
            return Score(None, reason=score.reason, errors=FrozenDict(errors))
        parts |= {name: score.value, **{f"{name}.{part}": number for part, number in score.parts.items()}}
    total = sum(weights[name] * score.value for name, score in scores.items())
    reason = next((score.reason for score in scores.values() if score.reason), "")
    return Score(total, FrozenDict(parts), reason, FrozenDict(errors))
