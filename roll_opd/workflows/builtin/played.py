"""A game while a trajectory is played on it: its calls run in threads, for a limited time, and its faults have names.

Whatever a game does ends its own trajectory alone. A game that came to its end is kept, and begins the next trajectory.
"""

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from roll_opd.environments import make
from roll_opd.workflows.errors import RunFailure
from roll_opd.workflows.model import RUN

RAISED, TIMEOUT, INVALID = "environment_raised", "environment_timeout", "environment_invalid"
_THREADS = ThreadPoolExecutor(10_000, thread_name_prefix="environment")
_idle: dict[str, list[Any]] = defaultdict(list)  # by tag
_turns: dict[str, asyncio.Semaphore] = {}  # by tag


class Game:
    """One environment. Every method raises RunFailure for what the environment does wrong."""

    def __init__(self, tag: str, settings: Mapping[str, Any]) -> None:
        """`settings` are those of `EnvironmentKeys`."""
        self.seconds = 0.0  # spent in the environment
        self._tag, self._settings, self._environment = tag, settings, None
        self._last: Future[Any] | None = None
        most = settings["max_env_step_concurrent"]
        self._turn = _turns.setdefault(tag, asyncio.Semaphore(most or 10**6))

    async def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Begin anew; return the first observation, and what else there is to know."""
        if _idle[self._tag]:
            self._environment = _idle[self._tag].pop()
        else:
            arguments = self._settings["env_config"]
            self._environment = await self._called("its making", lambda: make(self._settings["env_type"], **arguments))
        made: Any = self._environment
        found = await self._called("reset", lambda: made.reset(seed=seed))
        if not (isinstance(found, tuple) and len(found) == 2):
            raise self._failed(INVALID, f"reset returned {_shown(found)}, expected an observation and a dict")
        return self._text(found[0], "reset"), self._facts(found[1], "reset")

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Act; return observation, reward, whether it is terminated or truncated, and what else there is to know."""
        made: Any = self._environment
        found = await self._called("step", lambda: made.step(action))
        if not (isinstance(found, tuple) and len(found) == 5):
            text = "expected observation, reward, terminated, truncated and a dict"
            raise self._failed(INVALID, f"step returned {_shown(found)}, {text}")
        observation, reward, terminated, truncated, info = found
        try:
            number = float(reward)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise self._failed(INVALID, f"step returned the reward {_shown(reward)}, expected a number")
        ended = bool(terminated), bool(truncated)
        return self._text(observation, "step"), number, *ended, self._facts(info, "step")

    def put_back(self) -> None:
        """Keep the environment for the next trajectory."""
        if self._environment is not None:
            _idle[self._tag].append(self._environment)

    def give_up(self) -> None:
        """Let go of the environment; where it is still busy, its process is told to be replaced."""
        made, self._environment = self._environment, None
        if self._last is not None and not self._last.done():
            RUN.get().stuck = True
        elif close := getattr(made, "close", None):
            _THREADS.submit(close)

    async def _called(self, what: str, call: Callable[[], Any]) -> Any:
        limit = self._settings["step_timeout"]
        async with self._turn:
            begun = time.monotonic()
            self._last = _THREADS.submit(_guarded, call)
            try:
                async with asyncio.timeout(limit):
                    found, error = await asyncio.wrap_future(self._last)
            except TimeoutError:
                raise self._failed(TIMEOUT, f"{what} is not done after step_timeout, {limit:g} s") from None
            finally:
                self.seconds += time.monotonic() - begun
        if error is not None:
            raise self._failed(RAISED, f"{what} raised {type(error).__name__}: {error}") from error
        return found

    def _text(self, observation: Any, what: str) -> str:
        if not isinstance(observation, str):
            raise self._failed(INVALID, f"{what} returned the observation {_shown(observation)}, expected a text")
        return observation

    def _facts(self, info: Any, what: str) -> dict[str, Any]:
        if not isinstance(info, Mapping | None):
            raise self._failed(INVALID, f"{what} returned {_shown(info)} beside the observation, expected a dict")
        return dict(info or {})

    def _failed(self, kind: str, what: str) -> RunFailure:
        return RunFailure(kind, f"environment {self._tag} ({self._settings['env_type']}): {what}")


@asynccontextmanager
async def played(tag: str, settings: Mapping[str, Any]) -> AsyncIterator[Game]:
    """Lend a game for one trajectory."""
    game = Game(tag, settings)
    try:
        yield game
    except BaseException:
        game.give_up()
        raise
    game.put_back()


def _guarded(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return call(), None
    except BaseException as error:  # a game may call for the end of its process, too
        return None, error


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:60]!r}"
