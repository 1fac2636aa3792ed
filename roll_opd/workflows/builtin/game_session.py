"""A game while a trajectory is played on it: its calls run in threads, for a limited time, and its faults have names.

Whatever a game does ends its own trajectory alone. A game that came to its end is kept, and begins the next trajectory.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from roll_opd.environments import EnvironmentFailure, make
from roll_opd.environments.contract import read_reset, read_step
from roll_opd.workflows.model import RUN
from roll_opd.workflows.workflow_errors import RunFailure

Value = TypeVar("Value")

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
        return self._held(read_reset, found)

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Act; return observation, reward, whether it is terminated or truncated, and what else there is to know."""
        made: Any = self._environment
        return self._held(read_step, await self._called("step", lambda: made.step(action)))

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

    def _held(self, read: Callable[[Any, str], Value], returned: Any) -> Value:
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
