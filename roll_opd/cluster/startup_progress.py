"""What a run waits for while it starts: said every few seconds, given up in the end, and told why where it fails."""

import asyncio
import math
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import ray

from roll_opd.base.failures import DEBUG, last_raised, shortened

T = TypeVar("T")
STATUS_INTERVAL_S = 10.0  # between two lines
MOST_SAID = 3  # lines of a reason


class ClusterError(RuntimeError):
    """The cluster cannot hold the run, or a part of it does not start; the message says what to do."""


class ProcessDied(ClusterError):
    """A process of a role has ended; the message says which one, where, and what is known of it."""

    def __init__(self, who: str, error: ray.exceptions.RayError) -> None:
        is_actors = isinstance(error, ray.exceptions.RayActorError)
        super().__init__(f"{who} has died: {_detail(error) if is_actors else 'its engine core has ended'}")


class StartUp:
    """Says what is waited for, from a thread, so that a call that blocks is told of like any other."""

    def __init__(self, seconds: float = math.inf, say: Callable[[str], None] = print) -> None:
        """`seconds`: how long one thing may take; `say` prints a line."""
        self.seconds, self._say = seconds, say
        self.logs: Path | None = None  # of Ray's processes, on this machine
        self.parts: dict[str, float] = {}  # what was waited for, in seconds; some of it at the same time
        self._waiting: dict[object, tuple[str, float]] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """Have `what` among the things that are waited for inside the block."""
        entry = object()
        with self._lock:
            self._waiting[entry] = (what, time.monotonic())
            if self._thread is None:
                self._thread = threading.Thread(target=self._tell, name="start-up", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                _, since = self._waiting.pop(entry)
                self.parts[what] = self.parts.get(what, 0.0) + time.monotonic() - since

    async def of(self, what: str, coming: Awaitable[T]) -> T:
        """Return what `coming` gives. ClusterError, with the reason, where that fails or takes too long."""
        with self.waiting_for(what):
            try:
                async with asyncio.timeout(None if math.isinf(self.seconds) else self.seconds):
                    return await coming
            except (ray.exceptions.RayError, ProcessDied) as error:
                cause = error.__cause__ if isinstance(error, ProcessDied) else error
                assert isinstance(cause, ray.exceptions.RayError)
                raise ClusterError(f"{what}: does not start: {self._reason(cause)}") from error
            except TimeoutError:
                raise ClusterError(f"{what}: {self.too_late()}") from None

    def too_late(self) -> str:
        """Return a sentence for what is not up after all this time, with what a process on this machine last said."""
        words = self._last_words("*")
        because = f"; one of its processes said: {words}" if words else f"; {DEBUG}=1 shows what its processes say"
        return f"has not started after {self.seconds:g} s (startup_seconds){because}"

    def _tell(self) -> None:
        while True:
            time.sleep(STATUS_INTERVAL_S)
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                longest = time.monotonic() - min(since for _, since in self._waiting.values())
                names = ", ".join(dict.fromkeys(what for what, _ in self._waiting.values()))
            self._say(f"  {longest:3.0f}s: waiting for {names}")

    def _reason(self, error: ray.exceptions.RayError) -> str:
        cause = getattr(error, "cause", None)
        if isinstance(cause, BaseException):
            own = type(cause).__module__.startswith("roll_opd")  # its message is a sentence
            return _lines(str(cause) if own and str(cause) else f"{type(cause).__name__}: {cause}")
        pid = re.search(r"pid: (\d+)", str(error))
        words = self._last_words(pid[1]) if pid else None
        return _lines(words or f"its process has ended: {_detail(error)}")

    def _last_words(self, pid: str) -> str | None:
        """Return the exception that a process of Ray's has written; of several, the latest to write has the word."""
        if self.logs is None:
            return None
        found = [*self.logs.glob(f"worker-*-{pid}.err"), *self.logs.glob(f"worker-*-{pid}.out")]
        for file in sorted(found, key=lambda file: file.stat().st_mtime, reverse=True):
            if words := last_raised(file.read_text(encoding="utf-8", errors="replace")):
                return words
        return None


def _detail(error: ray.exceptions.RayError) -> str:
    """Return what Ray says of the end of a process."""
    return exit_detail(str(error))


def exit_detail(said: str) -> str:
    """Return what Ray says of the end of a process, without what may be the cause in general."""
    detail = re.search(r"Worker exit detail: (.*)", said, re.DOTALL)
    return _lines(re.split(r" There are some potential| Some common causes", detail[1] if detail else said)[0])


def _lines(text: str) -> str:
    lines = [re.sub(r" \[type=\w+, input.*", "", line.strip()) for line in text.splitlines()]  # pydantic's dumps
    return shortened(" ".join([line for line in lines if line][:MOST_SAID]))
