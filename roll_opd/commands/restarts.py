"""The supervisor of a run: it starts the command in a separate process, and starts it again after a failure.

Each attempt is a new process with the same command and the checkpoint from which to resume. So no state of a failed
attempt remains, such as Ray or partly transferred weights. The supervisor also notices that an attempt has ended if
SIGKILL ended it.
"""

import os
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from types import FrameType

from roll_opd.base.command_line import FAILED, INTERRUPTED, RUN_DIRECTORY_FILE, RUN_ID, TERMINATED
from roll_opd.base.terminal import echo
from roll_opd.cluster.process_reaper import guarded
from roll_opd.tracking.run_directory import complete_checkpoints

LEFT = "ROLL_OPD_RESTARTS_LEFT"  # environment variable that marks an attempt
_LEFT = os.environ.pop(LEFT, None)  # removed, as a run that an attempt starts (in a workflow) is not an attempt
# exit code of an attempt that a signal ended before its handlers were installed
OF_SIGNALS = {-signal.SIGTERM: TERMINATED, -signal.SIGINT: INTERRUPTED}


def is_attempt() -> bool:
    """Return whether this process was started by `restarted`."""
    return _LEFT is not None


def restarts_left() -> int:
    """Return the number of restarts that remain after this attempt."""
    return int(_LEFT or "0")


def restarted(restarts: int) -> int:
    """Run this process's command in new processes, and return the exit code of the last attempt.

    After a failure, the command is started again, up to `restarts` times. It is not started again after a user error or
    a requested end (SIGTERM, SIGINT). An attempt resumes from the last checkpoint of the run; if there is none, it
    starts from the beginning.
    """
    with tempfile.TemporaryDirectory(prefix="roll_opd-") as scratch, guarded() as reaper:
        reaper.remove_at_the_end(Path(scratch))
        attempts = _Attempts(Path(scratch, "run_directory"))
        for left in reversed(range(restarts + 1)):
            code = attempts.run(left)
            if code not in (FAILED, -signal.SIGKILL, *_CRASHES) or attempts.end_requested:
                return OF_SIGNALS.get(code, code if code >= 0 else FAILED)
            how = f"was ended by signal {-code}" if code < 0 else "has failed"
            if left:
                how += f"; restarting ({restarts - left + 1} of max_restarts {restarts})"
            elif restarts:
                how += f"; all {restarts} restarts (max_restarts) are used"
            if restarts or code < 0:
                echo(f"roll-opd: the run {how}", sys.stderr)
        return FAILED


_CRASHES = tuple(-number for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE))


class _Attempts:
    """Starts the attempts of a run, and forwards signals to the current attempt."""

    def __init__(self, announced: Path) -> None:
        self._announced, self._outer = announced, os.environ.get(RUN_DIRECTORY_FILE)
        self._run = uuid.uuid4().hex
        self.end_requested = False
        self._process: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._pass_on)

    def run(self, left: int) -> int:
        """Run the command once. Return its exit code, or -n if signal n ended it.

        `left` is the number of restarts that remain after this attempt.
        """
        environment = os.environ | {RUN_DIRECTORY_FILE: str(self._announced), LEFT: str(left), RUN_ID: self._run}
        self._process = subprocess.Popen(
            [sys.executable, *sys.orig_argv[1:], *self._resumed()],
            env=environment,
            start_new_session=True,  # a separate process group: this process forwards signals
        )
        if self.end_requested:
            self._process.terminate()
        code = self._process.wait()
        if self._outer and self._announced.exists():
            Path(self._outer).write_text(self._announced.read_text(encoding="utf-8"), encoding="utf-8")
        return code

    def _resumed(self) -> list[str]:
        """Return the override that resumes from the last checkpoint; [] if there is no checkpoint."""
        if not self._announced.exists():
            return []
        directory = self._announced.read_text(encoding="utf-8")
        if not complete_checkpoints(Path(directory)):
            return []
        from hydra.core.override_parser.types import Quote, QuotedString

        return [f"resume_from_checkpoint={QuotedString(directory, Quote.single).with_quotes()}"]

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        self.end_requested = True
        if self._process and self._process.poll() is None:
            self._process.send_signal(number)
