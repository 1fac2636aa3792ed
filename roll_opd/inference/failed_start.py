"""Report why an engine does not start, and clean up after killed processes.

If a process of vLLM fails, vLLM itself reports only that the process has ended. `start_errors` therefore creates a file
and stores its path in an environment variable. In vLLM's processes, our plugin calls `record_errors`, which makes
vLLM's logger write the first exception to this file. If a signal such as SIGILL ends a process, Python's faulthandler
writes the stack to the same file.

A parent that is killed by SIGKILL cannot stop its children. Therefore a daemon thread in the child waits for the end
of the parent process, and then exits the child.
`cluster.process_reaper` kills the processes that a killed driver leaves.

On a busy machine, vLLM kills ranks that do not exit within seconds. Ray then kills the engine's process group,
including Python's resource tracker. Without the tracker, 160 MiB or more would remain in /dev/shm.
"""

import faulthandler
import logging
import multiprocessing
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from typing import Any

FILE = "ROLL_OPD_FAILURE_FILE"
PORT_TAKEN = "ddress already in use"


class EngineStartError(RuntimeError):
    """Raised if an engine fails to start. The message has the reason."""


@contextmanager
def start_errors() -> Iterator[None]:
    """Convert errors inside the block to EngineStartError.

    The message of the new error is the reason that the failed process reports.
    """
    descriptor, name = tempfile.mkstemp(prefix="roll_opd-failure-")
    os.close(descriptor)
    os.environ[FILE] = name
    try:
        yield
    except Exception as error:
        with open(name, encoding="utf-8") as file:
            reason = file.read().strip()
        raise EngineStartError(_crash(reason) or reason or _exit_reason(error)) from error
    finally:
        del os.environ[FILE]
        os.unlink(name)


def record_errors() -> None:
    """Write the first exception that vLLM logs in this process to the file of `start_errors`, or the stack of a crash.

    If no environment variable names a file, nothing is written.
    """
    name = os.environ.get(FILE)
    logger = logging.getLogger("vllm")
    if name and not any(isinstance(handler, _FirstError) for handler in logger.handlers):
        logger.addHandler(_FirstError(name))
        if multiprocessing.parent_process() is not None:  # not the front end, whose dumps go to Ray's log
            with suppress(OSError):  # the process that started the engine no longer needs the reason
                faulthandler.enable(os.open(name, os.O_WRONLY | os.O_APPEND), all_threads=False)


class _FirstError(logging.Handler):
    """Log handler that writes the first exception to the file.

    It writes nothing if another process has already written an exception.
    """

    def __init__(self, name: str) -> None:
        super().__init__(logging.ERROR)
        self._name = name

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        try:
            if error is not None and not os.path.getsize(self._name):
                with open(self._name, "a", encoding="utf-8", errors="backslashreplace") as file:
                    file.write(f"{type(error).__name__}: {error}")
        except OSError:
            pass  # the process that started the engine no longer needs the reason


def _crash(dump: str) -> str | None:
    """Return a sentence about the crash that faulthandler has dumped, or None if the text is no dump."""
    crash = re.match(r"Fatal Python error: (.+)", dump)
    if not crash:
        return None
    frames = re.findall(r'File "(?:.*site-packages/)?(.+)", line (\d+) in (\S+)', dump)
    called = next((frame for frame in frames if not frame[0].startswith("torch/_ops")), None)
    place = f" in {called[2]} ({called[0]}:{called[1]})" if called else ""
    remedy = {
        "Illegal instruction": "; this CPU does not execute an instruction of the kernel. On CPUs that list AMX, bf16"
        " uses it: write dtype: fp32",
        "Bus error": "; /dev/shm or the memory may be full",
    }
    return f"a process of vLLM crashed with {crash[1].lower()}{place}{remedy.get(crash[1], '')}"


def _exit_reason(error: Exception) -> str:
    """Return vLLM's error message. If a signal killed a process of vLLM, the message also names the signal."""
    message = f"{type(error).__name__}: {error}".replace("See root cause above. ", "")
    killed = re.search(r"proc\(s\): \{[^}]*?: -(\d+)", message)
    if not killed:
        return message
    number = int(killed[1])
    name = signal.Signals(number).name if number in {each.value for each in signal.Signals} else str(number)
    hint = "; the kernel kills processes when memory runs out" if name == "SIGKILL" else ""
    return f"{message}: killed by {name}{hint}"


ORPHAN_EXIT_CODE = 70  # EX_SOFTWARE of sysexits.h
POLL_SECONDS = 0.5
TRACKER_TIMEOUT_S = 5.0  # the tracker exits after the last process connected to it
_THREAD_NAME = "roll_opd-die-with-parent"


def die_with_parent() -> None:
    """Start a thread that exits this process (`os._exit`) after its parent has died. A second call has no effect.

    The parent is the process that started this one: with multiprocessing not the fork server, and otherwise the parent
    process at the time of the call.
    """
    if any(thread.name == _THREAD_NAME for thread in threading.enumerate()):
        return
    own, of_system = multiprocessing.parent_process(), os.getppid()
    threading.Thread(target=_exit_after, args=(own, of_system), name=_THREAD_NAME, daemon=True).start()


def _exit_after(parent: Any, parent_pid: int) -> None:
    # not PR_SET_PDEATHSIG, which fires at the end of the parent *thread*: too early for a pool or an actor
    if parent is not None:
        parent.join()
    while parent is None and os.getppid() == parent_pid:
        time.sleep(POLL_SECONDS)
    os._exit(ORPHAN_EXIT_CODE)


def unlink_shared_memory() -> None:
    """Close this process's resource tracker, and wait until it has unlinked all shared memory.

    The child processes must have exited before this call.
    """
    tracker: Any = resource_tracker._resource_tracker
    if tracker._fd is None or tracker._pid is None:  # this process has started no tracker
        return
    os.close(tracker._fd)
    deadline = time.monotonic() + TRACKER_TIMEOUT_S
    with suppress(ChildProcessError):
        while os.waitpid(tracker._pid, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.02)
    tracker._fd = tracker._pid = None
