"""SIGTERM ends a run after its step or a grace period; both messages state how to continue. Starts no run."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from roll_opd.base.command_line import TERMINATED
from roll_opd.base.failures import Terminated
from roll_opd.pipelines.shutdown import Ending


def ending(newest: tuple[int, str] | None = (4, "runs/a/step_4"), grace: float = 9.0) -> Ending:
    checkpoints: Any = SimpleNamespace(newest=lambda: newest)
    return Ending(checkpoints, grace, lambda text: None)


def run(it: Ending, steps: Callable[[], Any]) -> None:
    async def task() -> None:
        with it.of_the_loop():
            await steps()

    with it.before_the_loop():
        asyncio.run(task())


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_lets_the_step_end() -> None:
    it, done = ending(), []

    async def steps() -> None:
        it.is_training = True
        terminate()
        await asyncio.sleep(0.05)
        done.append(it.is_asked_for)
        raise it.saved(7)

    with pytest.raises(
        Terminated, match=r"after step 7; resume after step 4 with resume_from_checkpoint=true .*step_4"
    ):
        run(it, steps)
    assert done == [True]


@pytest.mark.parametrize(("training", "times"), [(True, 1), (True, 2), (False, 1)])
def test_what_takes_too_long_is_given_up(training: bool, times: int) -> None:
    it = ending(None, grace=0.05 if times == 1 else 9.0)  # a second signal does not wait

    async def steps() -> None:
        it.is_training = training
        for _ in range(times):
            terminate()
            await asyncio.sleep(0)
        await asyncio.sleep(5)

    with pytest.raises(Terminated, match="no checkpoint was written") as ended:
        run(it, steps)
    assert ("0.05 s" in str(ended.value)) == (training and times == 1) and "9 s" not in str(ended.value)


def test_before_the_loop_there_is_nothing_to_save() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated), ending(None).before_the_loop():
        terminate()
        signal.sigtimedwait([], 1)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_cancellation_that_is_no_signal_stays_one() -> None:
    async def steps() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        run(ending(), steps)


def test_an_interruption_says_how_to_go_on() -> None:
    assert str(ending().interrupted()) == (
        "interrupted; resume after step 4 with resume_from_checkpoint=true (runs/a/step_4)"
    )


def test_what_the_handler_raises_inside_of_rays_code_is_raised_as_itself() -> None:
    """Ray's code raises a SystemError with it as the cause; a SystemError with another cause is not changed."""
    with pytest.raises(Terminated, match="ended by SIGTERM"), ending().before_the_loop():
        try:
            terminate()
        except Terminated as raised:
            raise SystemError("returned a result with an exception set") from raised
    with pytest.raises(SystemError), ending().before_the_loop():
        raise SystemError("a bug")


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C as in a terminal: a background process, which these tests may be, ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number, raised", [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_a_signal_that_is_swallowed_while_ray_starts_ends_the_run(
    number: signal.Signals, raised: type[BaseException], ctrl_c: None
) -> None:
    before, it = signal.getsignal(signal.SIGINT), ending(None)
    with pytest.raises(raised), it.before_the_loop():
        with suppress(BaseException):
            os.kill(os.getpid(), number)
        it.start_up_is_over()
    assert signal.getsignal(signal.SIGINT) is before


IN_C_CODE = """
import hashlib, sys, threading, time
from types import SimpleNamespace
from roll_opd.pipelines import shutdown
shutdown.START_UP_SECONDS = 0.2
it = shutdown.Ending(SimpleNamespace(newest=lambda: None), 9.0, print)
sys.setswitchinterval(1000)  # another thread runs only while the C code has given the lock away
with it.before_the_loop():
    threading.Thread(target=lambda: (time.sleep(0.2), print("begun", flush=True)), daemon=True).start()
    hashlib.pbkdf2_hmac("sha256", b"a", b"b", 10**9)  # minutes without the interpreter's lock
"""


@pytest.mark.slow  # imports the package in a process of its own
def test_a_signal_ends_a_start_up_that_is_in_c_code() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", IN_C_CODE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "begun\n"
        process.terminate()
        try:
            assert process.wait(20) == TERMINATED
        finally:
            process.kill()
        assert process.stderr.read().startswith("roll-opd: ended by SIGTERM; no checkpoint was written")


def test_an_error_of_ray_after_the_signal_is_the_signal() -> None:
    """A SIGTERM to the process group also ends Ray's processes; after the start-up, errors are not changed."""
    for over, raised in ((False, Terminated), (True, RuntimeError)):
        it = ending()
        with pytest.raises(raised), it.before_the_loop():
            if over:
                it.start_up_is_over()
            with suppress(Terminated):
                terminate()
            raise RuntimeError("Ray does not start")


def test_ctrl_c_stays_ignored_where_it_was() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with ending().before_the_loop():
            os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
