"""`Sandbox`: start one sandbox process, run cases in it, and close it."""

import json
import os
import platform
import select
import struct
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO

from roll_opd.extras.graders.sandbox.bubblewrap import (
    ENVIRONMENT,
    HOW_TO_ALLOW_IT,
    MEBI,
    CaseLimits,
    SandboxError,
    bare_command,
    isolated_command,
)
from roll_opd.extras.graders.sandbox.inside.supervisor import READY
from roll_opd.extras.graders.sandbox.inside.watch import PATIENCE
from roll_opd.extras.graders.sandbox.seccomp import ARCHITECTURES, filter_program

START_SECONDS = 30.0
GRACE_SECONDS = 5.0  # from the end of a case's wall time on a busy machine until the sandbox is killed
MAX_FRAME_BYTES = 64 * MEBI
CLOSE_SECONDS = 2.0


@dataclass(frozen=True)
class CaseOutcome:
    """Outcome of one case.

    Only `ended` and `exit_code` are trusted, because the program may have forged the other fields.
    """

    ended: str  # "ended" or the exceeded limit
    exit_code: int | None  # negative: the signal; None: killed for exceeding a limit
    stdout: bytes
    report: bytes


class Sandbox:
    """A sandbox for one program.

    `close` kills all its processes.
    """

    def __init__(self, limits: CaseLimits, unsafe: bool = False, packages: Sequence[Path] = ()) -> None:
        """Start the sandbox; raise `SandboxError` if that fails.

        The calling thread must live longer than the sandbox, because the kernel kills the sandbox when this thread
        ends. No process is therefore left if the worker is killed.
        """
        self._limits = limits
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        try:
            start = _start_bare if unsafe else partial(_start_isolated, limits)
            self._process = start(packages, self._errors)
        except BaseException:
            self._errors.close()
            raise
        assert self._process.stdin is not None and self._process.stdout is not None  # both are pipes
        self._requests, self._replies = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._requests, False)

    def wait_until_ready(self) -> None:
        """Wait until the sandbox is ready; raise `SandboxError` if it did not start."""
        if self._frame(time.monotonic() + START_SECONDS) != READY or self._process.poll() is not None:
            self._errors.seek(0)
            words = self._errors.read(2000).decode("utf-8", "replace").strip() or "no message"
            raise SandboxError(f"code_sandbox: the sandbox does not start: {words}; {HOW_TO_ALLOW_IT}")

    def run(self, program: str, stdin: str, check: str | None, before: str = "") -> CaseOutcome | None:
        """Run one case and return its outcome.

        The result is None if the sandbox died or hangs. The sandbox must then not be reused.

        Args:
            check: code that runs after the program, or None.
            before: code that runs before the program.
        """
        request = {"before": before, "program": program, "stdin": stdin, "check": check, "limits": asdict(self._limits)}
        data = json.dumps(request).encode()
        deadline = time.monotonic() + PATIENCE * self._limits.wall_seconds + GRACE_SECONDS
        if not self._send(struct.pack(">I", len(data)) + data, deadline):
            return None
        frames = []
        for _ in range(3):
            frame = self._frame(deadline)
            if frame is None:
                return None
            frames.append(frame)
        status, ended = json.loads(frames[0])
        code = None if status is None else os.waitstatus_to_exitcode(status)
        return CaseOutcome(ended, code, frames[1], frames[2])

    def close(self) -> None:
        """Kill all processes of the sandbox; do nothing if it is already closed."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(CLOSE_SECONDS)  # exits when its request pipe closes
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _send(self, data: bytes, deadline: float) -> bool:
        view = memoryview(data)
        while view:
            left = deadline - time.monotonic()
            if left <= 0 or not _is_ready(self._requests, select.POLLOUT, left):
                return False
            try:
                view = view[os.write(self._requests, view[:65536]) :]
            except BlockingIOError:
                continue
            except OSError:
                return False
        return True

    def _frame(self, deadline: float) -> bytes | None:
        head = self._read(4, deadline)
        if head is None:
            return None
        size = struct.unpack(">I", head)[0]
        return self._read(size, deadline) if size <= MAX_FRAME_BYTES else None

    def _read(self, count: int, deadline: float) -> bytes | None:
        got = bytearray()
        while len(got) < count:
            left = deadline - time.monotonic()
            if left <= 0 or not _is_ready(self._replies, select.POLLIN, left):
                return None
            part = os.read(self._replies, min(count - len(got), MEBI))
            if not part:
                return None
            got += part
        return bytes(got)


def _is_ready(end: int, event: int, seconds: float) -> bool:
    poll = select.poll()  # select.select supports only the first 1024 descriptors
    poll.register(end, event)
    return bool(poll.poll(seconds * 1000))


def _start_isolated(limits: CaseLimits, packages: Sequence[Path], errors: IO[bytes]) -> "subprocess.Popen[bytes]":
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise SandboxError(f"code_sandbox: no system call filter for {machine}; known: {known}")
    with tempfile.TemporaryFile() as rules:
        rules.write(filter_program(machine))
        rules.seek(0)
        return _popen(isolated_command(limits, packages, rules.fileno()), errors, "/", {}, (rules.fileno(),))


def _start_bare(packages: Sequence[Path], errors: IO[bytes]) -> "subprocess.Popen[bytes]":
    directory = tempfile.mkdtemp(prefix="code_sandbox-")  # the supervisor removes it
    environment = {**ENVIRONMENT, "HOME": directory, "TMPDIR": directory}
    return _popen(bare_command(directory, packages), errors, directory, environment)


def _popen(
    command: list[str], errors: IO[bytes], directory: str, environment: dict[str, str], fds: tuple[int, ...] = ()
) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        pass_fds=fds,
        cwd=directory,
        env=environment,
        bufsize=0,
    )
