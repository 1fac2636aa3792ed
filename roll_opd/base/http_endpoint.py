"""JSON client of one URL, with retries, rate limits and detection of outages.

Teachers, rewards and judges on HTTP servers use the client `Endpoint`.

Transient failures are retried for `retry_seconds`: 429, 5xx, timeouts, lost connections and unreadable answers. Each
failed attempt is counted. Permanent failures such as 401 and 404 end the request immediately.

After several consecutive failures, the endpoint counts as down. Then one request at a time probes the server, and all
other requests wait.
"""

import asyncio
import contextlib
import email.utils
import json
import logging
import math
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from roll_opd.base.addresses import address_fault, proxy_of
from roll_opd.base.failures import EndpointError, excerpt, is_passing

if TYPE_CHECKING:
    import httpx  # imported lazily: importing takes 0.5 s, which planning need not spend


FIRST_DELAY, MAX_DELAY = 0.5, 5.0  # seconds before a retry
MAX_PAUSE = 60.0  # maximum seconds of a Retry-After header that are respected
CONNECT_SECONDS = 10.0
DOWN_AFTER = 8  # consecutive failures over all requests

ADVICE = {
    "connect": "check that the server runs and the URL is right",
    "timeout": "raise request_seconds, or lower concurrency",
    "http_429": "lower concurrency, or set requests_per_minute",
}

Answer = TypeVar("Answer")
_log = logging.getLogger(__name__)


class GaveUp(Exception):
    """A request has failed, and it is not retried any more.

    Failures are counted by their `kind`. The message contains the URL and a remedy. `of_a_service` is False if the
    server refused the request permanently, so that another attempt is useless.
    """

    def __init__(self, kind: str, message: str, of_a_service: bool = True) -> None:
        super().__init__(message)
        self.kind, self.of_a_service = kind, of_a_service


@dataclass(frozen=True)
class RequestLimits:
    """Rate limits and timeouts of an endpoint.

    Raises `EndpointError` for a wrong value.
    """

    request_seconds: float = 120  # timeout of a request, from its first byte to the last byte of the response
    retry_seconds: float = 300  # time limit of retries, per request and per outage
    concurrency: int = 16  # maximum concurrent requests
    requests_per_minute: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name == "requests_per_minute" and value is None:
                continue
            fits = isinstance(value, int if name == "concurrency" else int | float) and not isinstance(value, bool)
            if not fits or not math.isfinite(value) or value < 0 or (value == 0 and name != "retry_seconds"):
                raise EndpointError(
                    f"{name}: {value!r} is not a positive {'integer' if name == 'concurrency' else 'number'}"
                )


class AttemptFailed(Exception):
    """One attempt failed.

    If `again` is True, another attempt may succeed. It should wait for at least `pause` seconds.
    """

    def __init__(self, kind: str, detail: str, again: bool = True, pause: float = 0.0) -> None:
        super().__init__(excerpt(detail))
        self.kind, self.again, self.pause = kind, again, pause


class Endpoint:
    """Client of one URL, for any number of tasks in one event loop."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        limits: RequestLimits,
        advice: Mapping[str, str],
        *,
        method: Literal["POST", "GET"] = "POST",
        gives_up: bool = True,
    ) -> None:
        """Check the URL and the headers.

        Error messages never contain the headers or the query of the URL.

        Args:
            advice: the remedy for each kind of failure.
            gives_up: whether retries end after `retry_seconds`. If False, there is no time limit for retries.
        """
        self._method = method
        self._retry_seconds = limits.retry_seconds if gives_up else math.inf
        self._url, self.shown_url = _checked_url(url)
        try:
            self._proxy = proxy_of(url)
        except ValueError as error:
            raise EndpointError(f"{self.shown_url}: {error}") from None
        self._headers = {"Content-Type": "application/json", **_checked_headers(headers)}
        self._secrets = [word for value in headers.values() for word in value.split() if len(word) > 3]
        self._limits, self._advice = limits, {**ADVICE, **advice}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failures = 0  # consecutive failures
        self._failing_since = self._resume_at = self._next_turn = 0.0  # time on the monotonic clock
        self.last_failure = self._last_kind = ""

    async def ask(self, body: Any, read: Callable[[Any], Answer], errors: Counter[str]) -> Answer:
        """Send a request; return the JSON response, parsed by `read`.

        Raises `GaveUp` with the kind of the last failure.

        Args:
            body: content of the request.
            read: parser of the response; raises ValueError for an unusable response.
            errors: counter of the retried failures, by kind.
        """
        self._bind_to_loop()
        content = b"" if self._method == "GET" else json.dumps(body, default=str).encode()
        arrived, began, attempts = time.monotonic(), math.inf, 0
        while True:
            attempts += 1
            try:
                answer = await self._attempt(content, read, arrived)
            except AttemptFailed as failed:
                now = time.monotonic()
                self._note(failed, now)
                began = min(began, now - self._down_for(arrived, now))
                if not failed.again or now - began >= self._retry_seconds:
                    raise GaveUp(failed.kind, self._message(failed, attempts), failed.again) from None
                errors[failed.kind] += 1
                await asyncio.sleep(min(_delay(now - began), began + self._retry_seconds - now))
            else:
                self._note(None, time.monotonic())
                return answer

    def _bind_to_loop(self) -> None:
        """Create the client and the locks when the first request of an event loop is sent."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._connect()
            self._slots, self._probe = asyncio.Semaphore(self._limits.concurrency), asyncio.Lock()

    def _connect(self) -> None:
        import httpx

        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self._limits.concurrency)
        self._client = httpx.AsyncClient(
            headers=self._headers,
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),  # `_exchange` limits the total time
            transport=httpx.AsyncHTTPTransport(limits=limits, proxy=self._proxy.url if self._proxy else None),
        )

    @property
    def _place(self) -> str:
        return f"{self.shown_url} (through the proxy {self._proxy})" if self._proxy else self.shown_url

    @property
    def is_failing(self) -> bool:
        """Whether the last attempt had a transient failure."""
        return self._failures > 0

    @property
    def _down(self) -> bool:
        return self._failures >= DOWN_AFTER

    def _note(self, failed: AttemptFailed | None, now: float) -> None:
        """Count the consecutive failures of all requests; warn when the endpoint goes down or recovers."""
        if failed is None or not failed.again:
            if self._down:
                _log.warning("%s recovered after %.0f s", self.shown_url, now - self._failing_since)
            self._failures = 0
            return
        self.last_failure, self._last_kind = f"{failed.kind}: {failed}", failed.kind
        if self._failures == 0:
            self._failing_since = now
        self._failures += 1
        if self._failures == DOWN_AFTER:
            _log.warning(
                "%s is down, last failure %s; probing it with one request at a time", self._place, self.last_failure
            )
        pause = _delay(now - self._failing_since) if self._down else 0.0
        self._resume_at = max(self._resume_at, now + max(pause, failed.pause))

    def _down_for(self, arrived: float, now: float) -> float:
        """Return the seconds that a request has waited in the current outage; 0 without an outage.

        Args:
            arrived: time at which the request was made.
        """
        return now - max(arrived, self._failing_since) if self._down else 0.0

    async def _attempt(self, content: bytes, read: Callable[[Any], Answer], arrived: float) -> Answer:
        async with self._slots:
            if self._down:
                async with self._probe:
                    if self._down:
                        self._refuse_if_lost(arrived)
                        await self._turn()
                        return await self._exchange(content, read)
            await self._turn()
            return await self._exchange(content, read)

    def _refuse_if_lost(self, arrived: float) -> None:
        """Raise `GaveUp` if a request has waited for `retry_seconds` in the current outage.

        The request then makes no further attempt.
        """
        waited = self._down_for(arrived, time.monotonic())
        if waited >= self._retry_seconds:
            raise GaveUp(
                "down",
                f"{self._place}: requests have failed for {waited:.0f} s, the last with {self.last_failure}; "
                + self._remedy(self._last_kind),
            )

    async def _turn(self) -> None:
        """Wait until a request may be sent.

        A pause after a failure must have ended, and `requests_per_minute` must permit another request.
        """
        while (wait := self._resume_at - time.monotonic()) > 0:
            await asyncio.sleep(wait)
        if self._limits.requests_per_minute is not None:
            now = time.monotonic()
            start = max(now, self._next_turn)
            self._next_turn = start + 60 / self._limits.requests_per_minute
            await asyncio.sleep(start - now)

    async def _exchange(self, content: bytes, read: Callable[[Any], Answer]) -> Answer:
        """Send one request and return the parsed answer; raise AttemptFailed if it fails."""
        import httpx

        seconds = self._limits.request_seconds
        try:
            async with asyncio.timeout(seconds):
                response = await self._client.request(self._method, self._url, content=content or None)
        except (
            httpx.ConnectTimeout,
            httpx.NetworkError,
            httpx.ProtocolError,
            httpx.ProxyError,
            AttributeError,  # anyio reads the address of a connection that was reset while it was made
        ) as error:
            raise AttemptFailed("connect", f"{type(error).__name__} {error}".strip()) from None
        except (TimeoutError, httpx.TimeoutException):
            raise AttemptFailed("timeout", f"no response in {seconds:g} s") from None
        except httpx.DecodingError as error:
            raise AttemptFailed("broken_json", str(error)) from None
        status = response.status_code
        if not response.is_success:
            again = is_passing(status)
            moved = f"moved to {response.headers.get('Location')}" if response.is_redirect else ""
            raise AttemptFailed(f"http_{status}", moved or self._excerpt(response.text), again, _retry_after(response))
        try:
            return read(response.json())
        except (ValueError, RecursionError) as error:
            raise AttemptFailed("broken_json", f"{error} in {self._excerpt(response.text)!r}") from None

    def _excerpt(self, text: str) -> str:
        for secret in self._secrets:  # some servers echo the request headers
            text = text.replace(secret, "***")
        return excerpt(text)

    def _message(self, failed: AttemptFailed, attempts: int) -> str:
        tried = f" ({attempts} attempts)" if attempts > 1 else ""
        return f"{self._place}: {failed.kind}{tried}: {failed}; {self._remedy(failed.kind)}"

    def _remedy(self, kind: str) -> str:
        advice = self._advice.get(kind, "check the server's log")
        return f"{advice}; if the proxy cannot reach {self._url.host}, add it to NO_PROXY" if self._proxy else advice


def _delay(failing_for: float) -> float:
    """Return the seconds before the next attempt.

    The delay is the time since the first failure, between `FIRST_DELAY` and `MAX_DELAY`, with jitter. It therefore
    grows exponentially.
    """
    return random.uniform(0.5, 1.0) * min(max(failing_for, FIRST_DELAY), MAX_DELAY)


def _retry_after(response: "httpx.Response") -> float:
    """Return the seconds that the server's Retry-After header asks for; 0 if the header is missing.

    The header has a number of seconds or a date. Long times are cut to `MAX_PAUSE`.
    """
    text = response.headers.get("Retry-After", "").strip()
    seconds = 0.0
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        seconds = (
            float(text) if text[:1].isdigit() else email.utils.parsedate_to_datetime(text).timestamp() - time.time()
        )
    return min(max(seconds, 0.0), MAX_PAUSE)


def _checked_url(text: str) -> "tuple[httpx.URL, str]":
    """Return (URL, text for error messages).

    The text is the URL without user name, password, query and fragment, because these may contain a key.
    """
    import httpx

    fault = address_fault(text) if isinstance(text, str) else "is not an address; write one such as http://host:8000"
    try:
        url = httpx.URL(text if fault is None else "")
    except httpx.InvalidURL as error:
        fault, url = f"is not an address: {error}; write one such as http://host:8000", httpx.URL()
    if fault:
        shown = re.sub(r"//[^/]*@|\?.*", "", str(text))
        raise EndpointError(f"{shown!r} {fault}")
    return url, str(url.copy_with(username=None, password=None, query=None, fragment=None))


def _checked_headers(headers: Mapping[str, str]) -> dict[str, str]:
    for name, value in headers.items():
        if not isinstance(value, str) or not (value.isascii() and value.isprintable()):
            raise EndpointError(
                f"the header {name} (of the key or of headers) is not a line of printable ASCII; correct its value"
            )
    return dict(headers)
