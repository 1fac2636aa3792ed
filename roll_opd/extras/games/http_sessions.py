"""Episodes of an environment server. Each episode has an environment from a pool.

Requests are idempotent: each episode keeps its last response, so a repeated request does not take a second step.
"""

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from roll_opd.extras.games.environment_interface import STEP, EnvironmentFailure, read_reset, read_step


class Refused(Exception):
    """Raised if a request is rejected. `status` is the HTTP status of the response."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


@dataclass
class Episode:
    """An environment in use, with its last response."""

    seed: int | None
    environment: Any = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    steps: int = -1  # steps played; -1 before the reset
    last: dict[str, Any] | Refused | None = None
    ended: bool = False


class Episodes:
    """Thread-safe table of the active episodes."""

    def __init__(self, name: str, make: Callable[[], Any], most: int) -> None:
        """Create a table for at most `most` environments.

        If all environments are in use, a new episode ends the least recently used idle episode.
        """
        self._name, self._make, self._most = name, make, most
        self._episodes: OrderedDict[str, Episode] = OrderedDict()
        self._free: list[Any] = []
        self._lock = threading.Lock()

    def reset(self, identifier: str, seed: int | None) -> dict[str, Any]:
        """Start an episode. Raises `Refused` if the episode cannot start.

        A repeated request does not start a second episode.
        """
        episode = self._open(identifier, seed)
        with episode.lock:
            if episode.ended or episode.seed != seed or episode.steps > 0:
                raise Refused(409, f"episode {identifier} has been used before; use a new id per episode")
            return self._answer(episode, 0, lambda: self._first(episode))

    def step(self, identifier: str, number: int | None, action: str) -> dict[str, Any]:
        """Play a step and return the response.

        `number` is the number of the step, counted from 1. None means the next step. A repeated request gets the last
        response again. Raises `Refused` if the episode is unknown, or if the step is neither the last nor the next one.
        """
        with self._lock:
            episode = self._episodes.get(identifier)
            if episode is None:
                raise Refused(
                    404,
                    f"episode {identifier} is not active; start it with reset (if there are too many episodes, the"
                    " server ends the least recently used one)",
                )
            self._episodes.move_to_end(identifier)
        with episode.lock:
            wanted = episode.steps + 1 if number is None else number
            if episode.ended or episode.steps < 0 or wanted not in (episode.steps, episode.steps + 1) or wanted < 1:
                raise Refused(409, f"step {wanted} of episode {identifier} cannot follow step {episode.steps}; reset")
            return self._answer(episode, wanted, lambda: self._next(episode.environment, action))

    def close(self, identifier: str) -> dict[str, Any]:
        """End an episode. An unknown episode is ignored."""
        with self._lock:
            episode = self._episodes.pop(identifier, None)
        if episode is not None:
            with episode.lock:
                self._release(episode)
        return {}

    def close_all(self) -> None:
        """End all episodes and close their environments."""
        for identifier in list(self._episodes):
            self.close(identifier)
        while self._free:
            _close(self._free.pop())

    def _open(self, identifier: str, seed: int | None) -> Episode:
        with self._lock:
            if identifier in self._episodes:
                return self._episodes[identifier]
            if len(self._episodes) >= self._most:
                self._evict_one()
            episode = self._episodes[identifier] = Episode(seed)
            return episode

    def _evict_one(self) -> None:
        """End the least recently used idle episode."""
        for identifier, episode in self._episodes.items():
            if episode.lock.acquire(blocking=False):
                self._release(episode)
                episode.lock.release()
                del self._episodes[identifier]
                return
        raise Refused(503, f"all {self._most} environments are busy; retry, or raise --episodes")

    def _release(self, episode: Episode) -> None:
        was_over, episode.ended = episode.ended, True
        if was_over or episode.environment is None:
            return
        if isinstance(episode.last, Refused):  # a failed environment is not reused
            _close(episode.environment)
        else:
            self._free.append(episode.environment)

    def _answer(self, episode: Episode, number: int, play: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if episode.steps != number:
            try:
                episode.last = play()
            except (
                Exception
            ) as error:  # a user's environment may raise anything; a repeated step returns the same error
                words = str(error) if isinstance(error, EnvironmentFailure) else f"{type(error).__name__}: {error}"
                episode.last = Refused(422, f"{self._name}: {words}")
            episode.steps = number
        if isinstance(episode.last, Refused):
            raise episode.last
        return episode.last or {}

    def _first(self, episode: Episode) -> dict[str, Any]:
        try:
            episode.environment = self._free.pop()
        except IndexError:
            episode.environment = self._make()
        observation, info = read_reset(episode.environment.reset(seed=episode.seed), self._name)
        return {"observation": observation, "info": info, "repeats": True}

    def _next(self, environment: Any, action: str) -> dict[str, Any]:
        return dict(zip(STEP, read_step(environment.step(action), self._name), strict=True))


def _close(environment: Any) -> None:
    """Close an environment. A missing `close` method and errors are ignored."""
    with contextlib.suppress(Exception):
        getattr(environment, "close", lambda: None)()
