"""An environment behind HTTP: `POST {url}/reset` and `POST {url}/step`, JSON both ways; `serve` is the other end.

- /reset takes {seed, episode} and answers {observation, info}, with `repeats: true` where repeated steps are known;
- /step takes {episode, step, action}, `step` counting from 1, and answers {observation, reward, terminated, truncated,
  info};
- /close takes {episode}; a server need not know it.

A request that failed on its way is sent again where that is safe: a reset has the episode's id, by which a server knows
it again; a step is repeated only where the server said that it knows steps by their numbers, or where nothing was sent.
"""

import contextlib
import json
import random
import time
import uuid
from collections.abc import Mapping
from typing import Any

import httpx

from roll_opd.environments.contract import read_reset, read_step
from roll_opd.environments.game import at_least, checked_seed
from roll_opd.environments.interface import ENVIRONMENTS, Environment, EnvironmentFailure, Reset, Step

BUSY = (408, 425, 429)  # statuses after which a request may come through later, as after those from 500
FIRST_WAIT, LONGEST_WAIT = 0.2, 10.0  # s between tries; doubled each time
CLOSE_SECONDS = 2.0
LONGEST_QUOTE = 300  # characters of an answer in a message
HOW_TO_SERVE = "start one with `python -m roll_opd.environments.serve`, or correct the url"


@ENVIRONMENTS.register("http")
class RemoteEnvironment(Environment):
    """Plays an environment that another process or machine serves."""

    def __init__(
        self, url: str, timeout: float = 60.0, retries: int = 3, headers: Mapping[str, str] | None = None
    ) -> None:
        """`timeout`: seconds for an answer; `retries`: of a request that may be sent again. Connects at `reset`."""
        at_least("retries", retries, 0)
        if not 0 < timeout < 10**6:
            raise EnvironmentFailure(f"timeout is {timeout}; give seconds above 0")
        if not url.startswith(("http://", "https://")):
            raise EnvironmentFailure(f"url is {url!r}; give the server's address, such as http://127.0.0.1:8000")
        self._url, self._retries = url.rstrip("/"), retries
        own = {"Content-Type": "application/json", **(headers or {})}
        # certificates are read where they are needed alone: that takes longer than all else
        self._client = httpx.Client(timeout=timeout, headers=own, verify=url.startswith("https://"))
        self._episode: str | None = None
        self._step, self._repeats = 0, False

    def reset(self, seed: int | None = None) -> Reset:
        """Begin an episode on the server; `EnvironmentFailure` with the address where that fails."""
        self._leave()
        self._episode, self._step = uuid.uuid4().hex, 0
        found = self._post("reset", {"seed": checked_seed(seed), "episode": self._episode}, again=True)
        self._repeats = found.get("repeats") is True
        return read_reset((found.get("observation"), found.get("info")), f"{self._url}/reset")

    def step(self, action: str) -> Step:
        """Play on the server; `EnvironmentFailure` with the address where that fails; then `reset`."""
        if self._episode is None:
            raise EnvironmentFailure(f"{self._url}: no episode is under way; call reset")
        self._step += 1
        request = {"episode": self._episode, "step": self._step, "action": action if isinstance(action, str) else ""}
        found = self._post("step", request, again=self._repeats)
        names = ("observation", "reward", "terminated", "truncated", "info")
        return read_step(tuple(found.get(name) for name in names), f"{self._url}/step")

    def close(self) -> None:
        """Give the server's environment back."""
        self._leave()
        self._client.close()

    def _leave(self) -> None:
        """Tell the server that the episode is over; a server that does not hear it has limits of its own."""
        if self._episode is not None:
            with contextlib.suppress(httpx.HTTPError):
                self._client.post(f"{self._url}/close", json={"episode": self._episode}, timeout=CLOSE_SECONDS)
        self._episode = None

    def _post(self, path: str, request: dict[str, Any], again: bool) -> dict[str, Any]:
        """Return the answer to a request; with `again`, it is sent once more where an answer did not come."""
        address, wait = f"{self._url}/{path}", FIRST_WAIT
        body = json.dumps(request)  # in ASCII: a model's text may hold half a surrogate pair
        for left in range(self._retries, -1, -1):
            try:
                answer = self._client.post(address, content=body)
            except httpx.HTTPError as error:
                unsent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
                what = f"{type(error).__name__}: {error}".rstrip(": ")
                if not left or not (again or unsent):
                    advice = HOW_TO_SERVE if unsent else "look at the server, or raise timeout"
                    raise EnvironmentFailure(f"{address}: {what}; {advice}") from error
            else:
                passing = answer.status_code in BUSY or answer.status_code >= 500
                if not left or not (again and passing):
                    return _object(answer, address)
            time.sleep(wait * random.uniform(0.5, 1.0))  # not all clients at the same moment
            wait = min(2 * wait, LONGEST_WAIT)
        raise AssertionError("the last try returns or raises")


def _object(answer: httpx.Response, address: str) -> dict[str, Any]:
    """Return the JSON object in an answer; `EnvironmentFailure` with the server's words where it is a refusal."""
    try:
        found = answer.json()
    except (ValueError, RecursionError):
        found = None
    if answer.status_code == 200 and isinstance(found, dict):
        return found
    words = found["error"] if isinstance(found, dict) and "error" in found else answer.text
    said = str(words).strip()[:LONGEST_QUOTE] or "nothing"
    if answer.status_code == 200:
        raise EnvironmentFailure(f"{address}: the answer is no JSON object: {said}; {HOW_TO_SERVE}")
    raise EnvironmentFailure(f"{address}: HTTP {answer.status_code}: {said}; look at the server, or correct the url")
