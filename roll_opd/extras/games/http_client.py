"""`http` environment: client of an environment server. The module `serve` is such a server.

The client sends three kinds of POST requests with JSON:

- {url}/reset takes {seed, episode} and returns {observation, info}. The response also has `repeats: true` if repeated
  steps are idempotent.
- {url}/step takes {episode, step, action} and returns {observation, reward, terminated, truncated, info}. Steps are
  counted from 1.
- {url}/close takes {episode}. A server may omit this path.

A failed request is retried if this is safe. A reset is always safe to retry, because the request has the episode's id.
A step is retried only if the server announced `repeats`, or if the request was not sent.
"""

import contextlib
import json
import random
import re
import time
import uuid
from collections.abc import Mapping
from typing import Any

import httpx

from roll_opd.base.addresses import address_fault, proxy_of
from roll_opd.base.failures import excerpt, is_passing
from roll_opd.extras.games.environment_interface import (
    ENVIRONMENTS,
    STEP,
    Environment,
    EnvironmentFailure,
    Reset,
    Step,
    read_reset,
    read_step,
)
from roll_opd.extras.games.game import at_least, checked_seed

FIRST_WAIT, MAX_WAIT = 0.2, 10.0  # seconds between attempts, doubled each time
CLOSE_SECONDS = 2.0
HOW_TO_SERVE = "start a server with `python -m roll_opd.extras.games.serve`, or correct the url"


@ENVIRONMENTS.register("http")
class RemoteEnvironment(Environment):
    """An environment served by another process or machine."""

    def __init__(
        self, url: str, timeout: float = 60.0, retries: int = 3, headers: Mapping[str, str] | None = None
    ) -> None:
        """Create a client. It connects to the server at `reset`.

        - `timeout`: seconds per request.
        - `retries`: maximum number of times that a request is retried.
        """
        at_least("retries", retries, 0)
        if not 0 < timeout < 10**6:
            raise EnvironmentFailure(f"timeout is {timeout}; set seconds above 0")
        if fault := address_fault(url):
            raise EnvironmentFailure(f"url is {url!r}, which {fault}")
        self._url, self._retries = re.sub(r"/(reset|step|close)$", "", url.rstrip("/")), retries
        try:
            proxy = proxy_of(url)
        except ValueError as error:
            raise EnvironmentFailure(f"url {url}: {error}") from None
        self._via = f" (through the proxy {proxy}; NO_PROXY lists hosts without a proxy)" if proxy else ""
        own = {"Content-Type": "application/json", **(headers or {})}
        # certificates are loaded only for https, as loading takes most of the constructor's time
        transport = httpx.HTTPTransport(verify=url.startswith("https://"), proxy=proxy.url if proxy else None)
        self._client = httpx.Client(timeout=timeout, headers=own, transport=transport)
        self._episode: str | None = None
        self._step, self._repeats = 0, False

    def reset(self, seed: int | None = None) -> Reset:
        """Start an episode on the server. Raises `EnvironmentFailure` with the server's address."""
        self._end_episode()
        self._episode, self._step = uuid.uuid4().hex, 0
        found = self._post("reset", {"seed": checked_seed(seed), "episode": self._episode}, again=True)
        self._repeats = found.get("repeats") is True
        return read_reset((found.get("observation"), found.get("info")), f"{self._url}/reset")

    def step(self, action: str) -> Step:
        """Take a step on the server. After an `EnvironmentFailure`, only `reset` may be called."""
        if self._episode is None:
            raise EnvironmentFailure(f"{self._url}: no episode is active; call reset")
        self._step += 1
        request = {"episode": self._episode, "step": self._step, "action": action if isinstance(action, str) else ""}
        found = self._post("step", request, again=self._repeats)
        return read_step(tuple(found.get(name) for name in STEP), f"{self._url}/step")

    def close(self) -> None:
        """Close the episode and the connection."""
        self._end_episode()
        self._client.close()

    def _end_episode(self) -> None:
        """Notify the server that the episode has ended. Errors are ignored, because servers limit episodes anyway."""
        if self._episode is not None:
            with contextlib.suppress(httpx.HTTPError):
                self._client.post(f"{self._url}/close", json={"episode": self._episode}, timeout=CLOSE_SECONDS)
        self._episode = None

    def _post(self, path: str, request: dict[str, Any], again: bool) -> dict[str, Any]:
        """Send a request and return the response.

        A request that did not reach the server is retried. If `again` is set, the request is also retried if the
        response is lost or the server reports an error.
        """
        address, wait = f"{self._url}/{path}", FIRST_WAIT
        body = json.dumps(request)  # ASCII, because a model's text may have a lone surrogate
        for left in range(self._retries, -1, -1):
            try:
                answer = self._client.post(address, content=body)
            except httpx.HTTPError as error:
                unsent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
                what = f"{type(error).__name__}: {error}".rstrip(": ")
                if not left or not (again or unsent):
                    advice = HOW_TO_SERVE if unsent else "check the server, or raise timeout"
                    raise EnvironmentFailure(f"{address}{self._via}: {what}; {advice}") from error
            else:
                if not left or not (again and is_passing(answer.status_code)):
                    return _object(answer, f"{address}{self._via}")
            time.sleep(wait * random.uniform(0.5, 1.0))  # jitter
            wait = min(2 * wait, MAX_WAIT)
        raise AssertionError("the last try returns or raises")


def _object(answer: httpx.Response, address: str) -> dict[str, Any]:
    """Return the JSON object of a response. Raises `EnvironmentFailure` with the server's error message."""
    try:
        found = answer.json()
    except (ValueError, RecursionError):
        found = None
    if answer.status_code == 200 and isinstance(found, dict):
        return found
    error = found["error"] if isinstance(found, dict) and "error" in found else answer.text
    message = excerpt(str(error)) or "nothing"
    if answer.status_code == 200:
        raise _Unanswered(f"{address}: the response is not a JSON object: {message}; {HOW_TO_SERVE}", True)
    raise _Unanswered(
        f"{address}: HTTP {answer.status_code}: {message}; check the server, or correct the url",
        is_passing(answer.status_code),
    )


class _Unanswered(EnvironmentFailure):
    """A server gave another response than a result."""

    def __init__(self, message: str, of_a_service: bool) -> None:
        super().__init__(message)
        self.of_a_service = of_a_service
