"""Runs in a process of their own: one that starts the command, and again where it has failed, and outlives it.

Every attempt is a process of its own, the same command with the checkpoint to go on from as one more word, so that
nothing of a failed one is left: no Ray, no half-moved weights. Whatever ends it, SIGKILL included, this process sees.
"""

import os
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from types import FrameType

from roll_opd.base.command_line import FAILED, INTERRUPTED, RUN_DIRECTORY_FILE, TERMINATED
from roll_opd.base.terminal import echo
from roll_opd.cluster.multihost.hosts import RUN
from roll_opd.cluster.process_reaper import guarded
from roll_opd.pipelines.checkpoints import complete

LEFT = "ROLL_OPD_RESTARTS_LEFT"  # in the environment of an attempt
_LEFT = os.environ.pop(LEFT, None)  # a run that an attempt starts, in a workflow say, is not one of its attempts
OF_SIGNALS = {-signal.SIGTERM: TERMINATED, -signal.SIGINT: INTERRUPTED}  # of an attempt that had not begun to listen


def is_attempt() -> bool:
    """Whether this process is one of those that `restarted` starts."""
    return _LEFT is not None


def restarts_left() -> int:
    """Return how often the run may be started again after this attempt."""
    return int(_LEFT or "0")


def restarted(restarts: int) -> int:
    """Run this process's command in another one, and at most `restarts` times again where that fails.

    Each goes on from the last checkpoint that the run has written, and begins afresh where there is none yet. Return
    the exit code of the last. What cannot work is not tried again, and a run that was asked to end has ended.
    """
    with tempfile.TemporaryDirectory(prefix="roll_opd-") as scratch, guarded() as reaper:
        reaper.remove_at_the_end(Path(scratch))
        attempts = _Attempts(Path(scratch, "run_directory"))
        for left in reversed(range(restarts + 1)):
            code = attempts.run(left)
            if code not in (FAILED, -signal.SIGKILL, *_CRASHES) or attempts.asked:
                return OF_SIGNALS.get(code, code if code >= 0 else FAILED)
            how = f"was ended by signal {-code}" if code < 0 else "has failed"
            if left:
                how += f"; it goes on by itself, restart {restarts - left + 1} of max_restarts {restarts}"
            elif restarts:
                how += f"; max_restarts {restarts} are used up"
            if restarts or code < 0:
                echo(f"roll-opd: the run {how}", sys.stderr)
        return FAILED


_CRASHES = tuple(-number for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE))


class _Attempts:
    def __init__(self, told: Path) -> None:
        self._told, self._outer = told, os.environ.get(RUN_DIRECTORY_FILE)
        self._run = uuid.uuid4().hex
        self.asked = False  # to end
        self._process: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._pass_on)

    def run(self, left: int) -> int:
        """Run the command once, with so many restarts `left` after it; return its exit code, -n for signal n."""
        environment = os.environ | {RUN_DIRECTORY_FILE: str(self._told), LEFT: str(left), RUN: self._run}
        self._process = subprocess.Popen(
            [sys.executable, *sys.orig_argv[1:], *self._resumed()],
            env=environment,
            start_new_session=True,  # a signal from the terminal reaches it through this process, once
        )
        if self.asked:
            self._process.terminate()
        code = self._process.wait()
        if self._outer and self._told.exists():
            Path(self._outer).write_text(self._told.read_text(encoding="utf-8"), encoding="utf-8")
        return code

    def _resumed(self) -> list[str]:
        """Return what an attempt that follows on another is told: where to go on from."""
        if not self._told.exists():
            return []
        directory = self._told.read_text(encoding="utf-8")
        if not complete(Path(directory)):
            return []
        from hydra.core.override_parser.types import Quote, QuotedString

        return [f"resume_from_checkpoint={QuotedString(directory, Quote.single).with_quotes()}"]

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        self.asked = True
        if self._process and self._process.poll() is None:
            self._process.send_signal(number)
