"""The environment session of one trajectory. Calls of the environment run in threads with a timeout.

A failure ends only the trajectory in which it occurs. After an episode has ended, its environment returns to a pool for
later trajectories.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from roll_opd.extras.games import EnvironmentFailure, make
from roll_opd.extras.games.environment_interface import read_reset, read_step
from roll_opd.workflows.run_state import RUN
from roll_opd.workflows.workflow_experience import RunFailure

Value = TypeVar("Value")

RAISED, TIMEOUT, INVALID = "environment_raised", "environment_timeout", "environment_invalid"
_THREADS = ThreadPoolExecutor(10_000, thread_name_prefix="environment")
_idle: dict[str, list[Any]] = defaultdict(list)  # tag -> reusable environments
_limits: dict[str, asyncio.Semaphore] = {}  # tag -> limit of concurrent calls


class GameSession:
    """The session of one environment. Methods that call the environment raise RunFailure if the environment fails."""

    def __init__(self, tag: str, settings: Mapping[str, Any]) -> None:
        """Create a session.

        Args:
            tag: tag of the environment.
            settings: settings of the environment. The keys are the fields of `EnvironmentKeys`.
        """
        self.seconds = 0.0  # seconds spent in the environment
        self._tag, self._settings, self._environment = tag, settings, None
        self._last: Future[Any] | None = None
        most = settings["max_env_step_concurrent"]
        self._limit = _limits.setdefault(tag, asyncio.Semaphore(most or 10**6))

    async def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Reset the environment. Return (first observation, info)."""
        if _idle[self._tag]:
            self._environment = _idle[self._tag].pop()
        else:
            arguments = self._settings["env_config"]
            self._environment = await self._timed_call(
                "creation", lambda: make(self._settings["env_type"], **arguments)
            )
        made: Any = self._environment
        found = await self._timed_call("reset", lambda: made.reset(seed=seed))
        return self._validated(read_reset, found)

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Execute an action. Return (observation, reward, terminated, truncated, info)."""
        made: Any = self._environment
        return self._validated(read_step, await self._timed_call("step", lambda: made.step(action)))

    def release(self) -> None:
        """Return the environment to the pool."""
        if self._environment is not None:
            _idle[self._tag].append(self._environment)

    def discard(self) -> None:
        """Close the environment.

        If a call of the environment is still running, the environment is not closed. Instead, this worker process is
        marked for replacement.
        """
        made, self._environment = self._environment, None
        if self._last is not None and not self._last.done():
            RUN.get().stuck = True
        elif close := getattr(made, "close", None):
            _THREADS.submit(close)

    async def _timed_call(self, what: str, call: Callable[[], Any]) -> Any:
        limit = self._settings["step_timeout"]
        async with self._limit:
            start = time.monotonic()
            self._last = _THREADS.submit(_caught, call)
            try:
                async with asyncio.timeout(limit):
                    found, error = await asyncio.wrap_future(self._last)
            except TimeoutError:
                raise self._failed(TIMEOUT, f"{what} did not finish within step_timeout, {limit:g} s") from None
            finally:
                self.seconds += time.monotonic() - start
        if error is not None:
            raise self._failed(RAISED, f"{what} raised {type(error).__name__}: {error}") from error
        return found

    def _validated(self, read: Callable[[Any, str], Value], returned: Any) -> Value:
        try:
            return read(returned, self._name)
        except EnvironmentFailure as error:
            raise RunFailure(INVALID, str(error)) from None

    @property
    def _name(self) -> str:
        return f"environment {self._tag} ({self._settings['env_type']})"

    def _failed(self, kind: str, what: str) -> RunFailure:
        return RunFailure(kind, f"{self._name}: {what}")


@asynccontextmanager
async def lent_game(tag: str, settings: Mapping[str, Any]) -> AsyncIterator[GameSession]:
    """Yield a session for one trajectory.

    On success, the environment of the session returns to the pool. On failure, the environment is discarded.
    """
    game = GameSession(tag, settings)
    try:
        yield game
    except BaseException:
        game.discard()
        raise
    game.release()


def _caught(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return call(), None
    except BaseException as error:  # including SystemExit
        return None, error
