"""The episodes that a server plays: one environment each, given back and used again.

Every answer is remembered until the next one, so that a request that comes twice is played once.
"""

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from roll_opd.environments.contract import read_reset, read_step
from roll_opd.environments.interface import EnvironmentFailure


class Refused(Exception):
    """A request that is not played; `status` is HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


@dataclass
class Episode:
    """An environment in use, and the last answer that it gave."""

    seed: int | None
    environment: Any = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    steps: int = -1  # played; -1 before the reset
    last: dict[str, Any] | Refused | None = None
    ended: bool = False


class Episodes:
    """Plays requests, from any thread."""

    def __init__(self, name: str, make: Callable[[], Any], most: int) -> None:
        """At most `most` environments at once; where one more is asked for, the episode that waited longest ends."""
        self._name, self._make, self._most = name, make, most
        self._episodes: OrderedDict[str, Episode] = OrderedDict()
        self._free: list[Any] = []
        self._lock = threading.Lock()

    def reset(self, identifier: str, seed: int | None) -> dict[str, Any]:
        """Begin an episode; the same request again gets the same answer. `Refused` where it cannot begin."""
        episode = self._begun(identifier, seed)
        with episode.lock:
            if episode.ended or episode.seed != seed or episode.steps > 0:
                raise Refused(409, f"episode {identifier} has begun before; give a new episode a new id")
            return self._answer(episode, 0, lambda: self._first(episode))

    def step(self, identifier: str, number: int | None, action: str) -> dict[str, Any]:
        """Play step `number` (from 1; None: the next one); the last one again gets the same answer.

        `Refused` for another number, and for an episode that is not known.
        """
        with self._lock:
            episode = self._episodes.get(identifier)
            if episode is None:
                raise Refused(
                    404, f"no episode {identifier} is under way; reset it (the oldest end when too many begin)"
                )
            self._episodes.move_to_end(identifier)
        with episode.lock:
            wanted = episode.steps + 1 if number is None else number
            if episode.ended or episode.steps < 0 or wanted not in (episode.steps, episode.steps + 1) or wanted < 1:
                raise Refused(409, f"step {wanted} of episode {identifier} cannot follow step {episode.steps}; reset")
            return self._answer(episode, wanted, lambda: self._next(episode.environment, action))

    def close(self, identifier: str) -> dict[str, Any]:
        """End an episode; one that is not known is none to end."""
        with self._lock:
            episode = self._episodes.pop(identifier, None)
        if episode is not None:
            with episode.lock:
                self._give_back(episode)
        return {}

    def close_all(self) -> None:
        """End all episodes and close their environments."""
        for identifier in list(self._episodes):
            self.close(identifier)
        while self._free:
            _close(self._free.pop())

    def _begun(self, identifier: str, seed: int | None) -> Episode:
        with self._lock:
            if identifier in self._episodes:
                return self._episodes[identifier]
            if len(self._episodes) >= self._most:
                self._end_one()
            episode = self._episodes[identifier] = Episode(seed)
            return episode

    def _end_one(self) -> None:
        """End the episode that nobody has asked for the longest time, of those in which nothing is being played."""
        for identifier, episode in self._episodes.items():
            if episode.lock.acquire(blocking=False):
                self._give_back(episode)
                episode.lock.release()
                del self._episodes[identifier]
                return
        raise Refused(503, f"all {self._most} environments are busy; ask again, or serve more")

    def _give_back(self, episode: Episode) -> None:
        was_over, episode.ended = episode.ended, True
        if was_over or episode.environment is None:
            return
        if isinstance(episode.last, Refused):  # one that has failed may go on failing
            _close(episode.environment)
        else:
            self._free.append(episode.environment)

    def _answer(self, episode: Episode, number: int, play: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if episode.steps != number:
            try:
                episode.last = play()
            except Exception as error:  # a user's environment can fail in any way; the same step again fails the same
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
        names = ("observation", "reward", "terminated", "truncated", "info")
        return dict(zip(names, read_step(environment.step(action), self._name), strict=True))


def _close(environment: Any) -> None:
    """Close an environment that may have no `close`, or fail in it: nobody is left to hear of that."""
    with contextlib.suppress(Exception):
        getattr(environment, "close", lambda: None)()
