"""Monitor the start of a run: print what the start waits for, apply the timeout, and report why a part has failed."""

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
from roll_opd.cluster.lost_processes import ClusterError, NotSetUp, ProcessDied

T = TypeVar("T")
STATUS_INTERVAL_S = 10.0
MAX_REASON_LINES = 3


def process_died(who: str, error: ray.exceptions.RayError, last_words: str = "") -> ProcessDied:
    """Return the error for a process that has ended. `last_words` is the cause that it has stated itself, if any."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, NotSetUp):
        detail = str(cause)
    else:  # vLLM's error of a dead engine core
        detail = _detail(error) if cause is None else "its engine core has ended"
    return ProcessDied(f"{who} has died: {last_words or detail}")


class StartupProgress:
    """Progress of the start of a run.

    A thread prints the parts for which the start waits, even during blocking calls.
    """

    def __init__(self, seconds: float = math.inf, say: Callable[[str], None] = print) -> None:
        """Begin to monitor a start.

        Args:
            seconds: timeout of each part of the start.
            say: function that prints a line.
        """
        self.seconds, self._say = seconds, say
        self.logs: Path | None = None  # directory with the logs of Ray's processes on this machine
        self.parts: dict[str, float] = {}  # part -> seconds waited; parts may overlap
        self._waiting: dict[object, tuple[str, float]] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """Context manager: show that the start waits for `what`, and record the duration of the block."""
        entry = object()
        with self._lock:
            self._waiting[entry] = (what, time.monotonic())
            if self._thread is None:
                self._thread = threading.Thread(target=self._print_status, name="start-up", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                _, since = self._waiting.pop(entry)
                self.parts[what] = self.parts.get(what, 0.0) + time.monotonic() - since

    async def of(self, what: str, coming: Awaitable[T]) -> T:
        """Await `coming` and return its result. While it is awaited, it is shown as `what`.

        Raises ClusterError with the reason if it fails or times out.
        """
        with self.waiting_for(what):
            try:
                async with asyncio.timeout(None if math.isinf(self.seconds) else self.seconds):
                    return await coming
            except (ray.exceptions.RayError, ProcessDied) as error:
                cause = error.__cause__ if isinstance(error, ProcessDied) else error
                assert isinstance(cause, ray.exceptions.RayError)
                raise ClusterError(f"{what}: does not start: {self._reason(cause)}") from error
            except TimeoutError:
                raise ClusterError(f"{what}: {self.timeout_message()}") from None

    def timeout_message(self) -> str:
        """Return the message about a timeout.

        It includes the last exception in the logs of the processes on this machine.
        """
        error = self._last_error("*")
        reason = (
            f"; one of its processes reports: {error}" if error else f"; {DEBUG}=1 shows the output of its processes"
        )
        return f"has not started after {self.seconds:g} s (startup_timeout_s){reason}"

    def _print_status(self) -> None:
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
            own = type(cause).__module__.startswith("roll_opd")  # with a complete message
            return _lines(str(cause) if own and str(cause) else f"{type(cause).__name__}: {cause}")
        pid = re.search(r"pid: (\d+)", str(error))
        logged = self._last_error(pid[1]) if pid else None
        return _lines(logged or f"its process has ended: {_detail(error)}")

    def _last_error(self, pid: str) -> str | None:
        """Return the last exception in the logs of the Ray worker `pid`, or None if there is none.

        If several log files have an exception, the newest file is used.
        """
        if self.logs is None:
            return None
        found = [*self.logs.glob(f"worker-*-{pid}.err"), *self.logs.glob(f"worker-*-{pid}.out")]
        for file in sorted(found, key=lambda file: file.stat().st_mtime, reverse=True):
            if error := last_raised(file.read_text(encoding="utf-8", errors="replace")):
                return error
        return None


def _detail(error: ray.exceptions.RayError) -> str:
    """Return the reason for a process's end from Ray's exception."""
    return exit_detail(str(error))


def exit_detail(text: str) -> str:
    """Return the reason for a process's end from the text of Ray's exception.

    The text also has a list of general causes, which is left out.
    """
    if "temporarily unavailable" in text:  # Ray starts the process again, and does not say why it has ended
        return "its process has ended unexpectedly"
    detail = re.search(r"Worker exit detail: (.*)", text, re.DOTALL)
    return _lines(re.split(r" There are some potential| Some common causes", detail[1] if detail else text)[0])


def _lines(text: str) -> str:
    lines = [re.sub(r" \[type=\w+, input.*", "", line.strip()) for line in text.splitlines()]  # pydantic's dumps
    return shortened(" ".join([line for line in lines if line][:MAX_REASON_LINES]))
