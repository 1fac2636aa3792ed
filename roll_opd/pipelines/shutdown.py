"""End a run before its last step: on SIGTERM, on Ctrl-C, or after the loss of a host."""

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from roll_opd.base.command_line import FAILED, TERMINATED
from roll_opd.base.failures import Interrupted, RunError, Terminated
from roll_opd.base.terminal import echo
from roll_opd.cluster.process_reaper import announce_end
from roll_opd.pipelines.checkpoints import Checkpoints

LOST_SECONDS = 15.0  # time limit for ending a run that has lost a part of its cluster
START_UP_SECONDS = (
    5.0  # time limit for ending a start-up after SIGTERM, as Ray's C code may wait longer for ended processes
)
SIGTERM_DEDUP_S = 10.0  # time within which all hosts of a run send the same SIGTERM


class Ending:
    """Ends a run on SIGTERM, after the current step and a checkpoint.

    If the step takes longer than a grace period, the run ends without waiting for it.
    """

    def __init__(self, checkpoints: Checkpoints, shutdown_timeout_s: float, say: Callable[[str], None]) -> None:
        """Create the object. Signals are handled only inside `before_the_loop` and `of_the_loop`.

        Args:
            shutdown_timeout_s: grace period for the current step.
            say: function that prints a line.
        """
        self._checkpoints, self._grace, self._say = checkpoints, shutdown_timeout_s, say
        self.is_asked_for = self._is_asked_again = False
        self._asked_at = 0.0
        self._comes_from_all = False  # whether every host of the run forwards its SIGTERM
        self.is_training = False  # whether training has started; the current step is then finished
        self._lost: str | None = None  # why the run cannot continue, set before any call has failed
        self._is_over = False
        self._is_interrupted = False
        self._is_starting = False

    @contextmanager
    def before_the_loop(self) -> Iterator[None]:
        """Handle SIGTERM and Ctrl-C inside the block.

        SIGTERM is handled here except during `of_the_loop`. Ctrl-C is handled here until `start_up_is_over`.
        """
        if threading.current_thread() is not threading.main_thread():  # Python handles signals only in the main thread
            yield
            return
        before = signal.getsignal(signal.SIGTERM)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # ignored in background processes
            signal.signal(signal.SIGINT, self._interrupt)
        self.listen()
        self._is_starting = True
        try:
            with self._ends_in_time():
                yield
        except Exception as error:
            if isinstance(error, SystemError) and error.__cause__ is not None:
                raise error.__cause__ from None  # raised by the handler inside Ray's C code, which swallowed it
            if self._is_starting and self.is_asked_for and not isinstance(error, RunError):
                raise self._terminated() from error  # a process of Ray has received the same signal
            raise
        finally:
            signal.signal(signal.SIGTERM, before)
            self._leave_interrupts_to_python()

    def start_up_is_over(self) -> None:
        """Install the handlers again after Ray has started.

        If a signal arrived during the start and Ray's code swallowed the exception of its handler, the exception is
        raised here.
        """
        self._is_starting = False
        self._leave_interrupts_to_python()  # asyncio replaces only Python's default handler
        self.listen()
        if self._is_interrupted:
            raise KeyboardInterrupt
        if self.is_asked_for:
            raise self._terminated()

    def hear_all_hosts(self) -> None:
        """From now on, ignore a second SIGTERM within `SIGTERM_DEDUP_S`, because every host sends the same signal."""
        self._comes_from_all = True

    def listen(self) -> None:
        """Install the handler of SIGTERM. This must be called again after a library has replaced the handler."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._stop)

    @contextmanager
    def of_the_loop(self) -> Iterator[None]:
        """Handle SIGTERM inside the block. Raises Terminated if SIGTERM has cancelled the current task."""
        task, events = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: events.call_soon_threadsafe(self._ask, task))
        try:
            yield
        except asyncio.CancelledError:
            if self._lost and not self.is_asked_for:
                raise self._without_a_part() from None
            if not self.is_asked_for:
                raise
            if self._is_asked_again:
                late = ", and by a second signal before the end of the step"
            else:
                late = f", and the step did not end within {self._grace:g} s" if self.is_training else ""
            raise Terminated(f"ended by SIGTERM{late}{self.how_to_go_on()}") from None
        finally:
            self._is_over = True
            self.listen()

    def lose(self, why: str) -> None:
        """End the run because a part of its cluster was lost.

        `why` becomes part of the error. Any thread may call this method.
        """
        if self._lost is None and not self._is_over:
            self._lost = why
            last_resort = threading.Timer(LOST_SECONDS, self._give_up)
            last_resort.daemon = True
            last_resort.start()
            os.kill(os.getpid(), signal.SIGTERM)

    def saved(self, step: int) -> Terminated:
        """Return the error for a run that has ended early with a checkpoint after `step`."""
        return Terminated(f"ended by SIGTERM after step {step}{self.how_to_go_on()}")

    def interrupted(self) -> Interrupted:
        """Return the error for a run that Ctrl-C has ended."""
        return Interrupted(f"interrupted{self.how_to_go_on()}")

    def how_to_go_on(self) -> str:
        """Return the end of an error message: "; " and advice about how to resume the run."""
        newest = self._checkpoints.newest()
        if newest is None:
            return "; no checkpoint was written, so there is nothing to resume from"
        return f"; resume after step {newest[0]} with resume_from_checkpoint=true ({newest[1]})"

    def _without_a_part(self) -> RunError:
        return RunError(f"{self._lost}{self.how_to_go_on()}")

    @contextmanager
    def _ends_in_time(self) -> Iterator[None]:
        """End the process if the block takes longer than `START_UP_SECONDS` after a SIGTERM during start-up.

        Python calls its signal handlers only in the main thread, and not while C code runs. The number of the signal is
        always written to a pipe, from which a thread reads it.
        """
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        over = threading.Event()

        def watch() -> None:
            while number := os.read(reading, 1):
                if number[0] == signal.SIGTERM and self._is_starting:
                    if not over.wait(START_UP_SECONDS):
                        echo(f"roll-opd: {self._terminated()}", sys.stderr)
                        announce_end()
                        os._exit(TERMINATED)
                    return

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            signal.set_wakeup_fd(before)
            os.close(writing)
            watcher.join()
            os.close(reading)

    def _give_up(self) -> None:
        echo(f"roll-opd: {self._without_a_part()}", sys.stderr)
        announce_end()
        os._exit(FAILED)

    def _ask(self, task: "asyncio.Task[Any]") -> None:
        if self._lost:
            task.cancel()
            return
        if self.is_asked_for and self._comes_from_all and time.monotonic() - self._asked_at < SIGTERM_DEDUP_S:
            return
        if self.is_asked_for or not self.is_training:
            self._is_asked_again, self.is_asked_for = self.is_asked_for, True
            task.cancel()
            return
        self.is_asked_for, self._asked_at = True, time.monotonic()
        self._say(
            f"SIGTERM: the run ends after this step and a checkpoint, at the latest in {self._grace:g} s"
            " (shutdown_timeout_s)"
        )
        asyncio.get_running_loop().call_later(self._grace, task.cancel)

    def _stop(self, *_: object) -> None:
        if self.is_asked_for:
            return  # the run is already ending
        if self._lost:
            if self._is_over:
                return
            self._is_over = True
            raise self._without_a_part()
        self.is_asked_for = True
        raise self._terminated()

    def _leave_interrupts_to_python(self) -> None:
        if signal.getsignal(signal.SIGINT) == self._interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _interrupt(self, *_: object) -> None:
        self._is_interrupted = True
        raise KeyboardInterrupt

    def _terminated(self) -> Terminated:
        return Terminated(f"ended by SIGTERM{self.how_to_go_on()}")
