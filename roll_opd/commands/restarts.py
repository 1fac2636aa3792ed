"""The supervisor of a run: start the command in a separate process, and restart the command after a failure.

Every attempt is a new process with the same command and the checkpoint from which to resume, so that no state (Ray,
partly transferred weights) of a failed attempt remains. The supervisor notices every end of an attempt, even if SIGKILL
has ended the attempt.
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

LEFT = "ROLL_OPD_RESTARTS_LEFT"  # environment variable that marks an attempt
_LEFT = os.environ.pop(LEFT, None)  # removed, as a run that an attempt starts (in a workflow) is not an attempt
# exit code of an attempt that a signal ended before its handlers were installed
OF_SIGNALS = {-signal.SIGTERM: TERMINATED, -signal.SIGINT: INTERRUPTED}


def is_attempt() -> bool:
    """Return whether `restarted` started this process."""
    return _LEFT is not None


def restarts_left() -> int:
    """Return how many restarts remain after this attempt."""
    return int(_LEFT or "0")


def restarted(restarts: int) -> int:
    """Run this process's command in a new process, with up to `restarts` restarts; return the last exit code.

    An attempt resumes from the last checkpoint of the run. If there is no checkpoint, the attempt starts from the
    beginning. There is no restart after a user error or a requested end (SIGTERM, SIGINT).
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
    """The attempts of one run; forwards signals to the current attempt."""

    def __init__(self, announced: Path) -> None:
        self._announced, self._outer = announced, os.environ.get(RUN_DIRECTORY_FILE)
        self._run = uuid.uuid4().hex
        self.end_requested = False
        self._process: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._pass_on)

    def run(self, left: int) -> int:
        """Run the command once, and return its exit code, or -n if signal n ended it.

        `left` is the number of restarts that remain after this attempt.
        """
        environment = os.environ | {RUN_DIRECTORY_FILE: str(self._announced), LEFT: str(left), RUN: self._run}
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
        """Return the override with which an attempt resumes from the last checkpoint; [] without a checkpoint."""
        if not self._announced.exists():
            return []
        directory = self._announced.read_text(encoding="utf-8")
        if not complete(Path(directory)):
            return []
        from hydra.core.override_parser.types import Quote, QuotedString

        return [f"resume_from_checkpoint={QuotedString(directory, Quote.single).with_quotes()}"]

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        self.end_requested = True
        if self._process and self._process.poll() is None:
            self._process.send_signal(number)
