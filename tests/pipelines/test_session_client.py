"""The client's side of a session's connection: each call gets its own answer, whatever interrupts it.

A thread at the other end of a socket takes the place of the run.
"""

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from roll_opd import RunFailed
from roll_opd.api import Session
from roll_opd.base.command_line import SESSION_INTERRUPT


class Client(Session):
    """A session whose run is `answer`, a function of (name, arguments). None: it is still at work."""

    def __init__(self, answer: Callable[[str, dict[str, Any]], Any], path: Path) -> None:
        self._connection, self.run_end = Pipe()
        self.id, self._calling, self._is_idle = "session", threading.Lock(), True
        self._process = subprocess.Popen(["true"])
        self._announced, self._output = path / "none", ""
        self._listener = self._scratch = SimpleNamespace(close=lambda: None, cleanup=lambda: None)  # type: ignore[assignment]
        self._shown = threading.Thread(target=lambda: None)
        self._shown.start()
        self.got: list[Any] = []
        self.thread = threading.Thread(target=self._serve, args=(self.run_end, answer), daemon=True)
        self.thread.start()

    def _serve(self, end: Connection, answer: Callable[[str, dict[str, Any]], Any]) -> None:
        try:
            while True:
                message = end.recv()
                self.got.append(message[0] if isinstance(message, tuple) else message)
                found = "interrupted" if message == SESSION_INTERRUPT else answer(*message)
                if found is not None:
                    end.send(found)
        except (EOFError, OSError):
            end.close()


class Slow:
    """Reading it takes 0.4 s."""

    def __setstate__(self, seconds: float) -> None:
        time.sleep(seconds)

    def __getstate__(self) -> float:
        return 0.4


@contextmanager
def signalled(number: int, handler: Any, *after: float) -> Iterator[None]:
    """Send signals to this process, each some seconds after the start of the block."""
    before = signal.signal(number, handler)
    timers = [threading.Timer(seconds, signal.pthread_kill, [threading.get_ident(), number]) for seconds in after]
    for timer in timers:
        timer.start()
    try:
        yield
    finally:
        for timer in timers:
            timer.join()
        signal.signal(number, before)


def times_out(*_: object) -> None:
    raise TimeoutError("of the user")


@pytest.mark.parametrize(
    ("number", "handler", "error"),
    [(signal.SIGINT, signal.default_int_handler, KeyboardInterrupt), (signal.SIGALRM, times_out, TimeoutError)],
)
def test_a_call_after_an_interrupted_one_gets_its_own_answer(
    tmp_path: Path, number: int, handler: Any, error: type[BaseException]
) -> None:
    client = Client(lambda name, given: None if name == "sample" else name, tmp_path)
    with signalled(number, handler, 0.2), pytest.raises(error):
        client.call("sample")
    assert client.call("score") == "score" and client.got == ["sample", SESSION_INTERRUPT, "score"]
    client.close()


def test_an_interrupt_cuts_no_message(tmp_path: Path) -> None:
    """The other end takes the call and sends its answer slowly."""

    client = Client(lambda name, given: given.get("value", name), tmp_path)
    with signalled(signal.SIGINT, signal.default_int_handler, 0.6), pytest.raises(KeyboardInterrupt):
        client.call("score", value=Slow())  # 0.4 s at the other end, and as long at this end
    assert client.call("next") == "next" and client.got == ["score", "next"]
    with signalled(signal.SIGINT, signal.default_int_handler, 0.5, 0.7), pytest.raises(KeyboardInterrupt):
        client.call("score", value=Slow())
    with pytest.raises(ValueError, match="closed"):  # by the second interrupt
        client.call("next")


def test_a_run_that_has_ended_and_a_session_that_was_closed_are_no_errors_of_the_call(tmp_path: Path) -> None:
    client = Client(lambda name, given: name, tmp_path)
    assert client.call("score") == "score"
    client._connection.close()  # type: ignore[union-attr]
    with pytest.raises(RunFailed):
        client.call("score")

    client = Client(lambda name, given: None, tmp_path)
    closing = threading.Timer(0.2, client.close)
    closing.start()
    with pytest.raises(RunFailed):
        client.call("score")
    closing.join()
    client.thread.join(5)
    assert not client.thread.is_alive()  # it has read the end
