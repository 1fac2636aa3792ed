"""Why an engine does not start: said by its processes in a file, since vLLM itself only says that they have ended.

`awaited` makes the file and names it in the environment; `listen`, which vLLM's processes call through our plugin,
writes the first error that vLLM logs with an exception there.
"""

import logging
import os
import re
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

FILE = "ROLL_OPD_FAILURE_FILE"
PORT_TAKEN = "ddress already in use"


class EngineStartError(RuntimeError):
    """An engine does not start; the message says why."""


@contextmanager
def awaited() -> Iterator[None]:
    """Raise what goes wrong inside the block as EngineStartError, with the reason of the process it went wrong in."""
    descriptor, name = tempfile.mkstemp(prefix="roll_opd-failure-")
    os.close(descriptor)
    os.environ[FILE] = name
    try:
        yield
    except Exception as error:
        with open(name, encoding="utf-8") as file:
            said = file.read().strip()
        raise EngineStartError(said or _ended(error)) from error
    finally:
        del os.environ[FILE]
        os.unlink(name)


def listen() -> None:
    """Have this process write why it fails into the file that its environment names, if it does."""
    name = os.environ.get(FILE)
    logger = logging.getLogger("vllm")
    if name and not any(isinstance(handler, _FirstError) for handler in logger.handlers):
        logger.addHandler(_FirstError(name))


class _FirstError(logging.Handler):
    """Writes the first exception that is logged as an error, unless another process has written one."""

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
            pass  # the starting process no longer waits for it


def _ended(error: Exception) -> str:
    """Return what vLLM says, and what the exit code of a process means that has ended without a word."""
    said = f"{type(error).__name__}: {error}".replace("See root cause above. ", "")
    ended = re.search(r"proc\(s\): \{[^}]*?: -(\d+)", said)
    if not ended:
        return said
    number = int(ended[1])
    name = signal.Signals(number).name if number in {each.value for each in signal.Signals} else str(number)
    hint = "; the system ends a process so when memory runs out" if name == "SIGKILL" else ""
    return f"{said}: ended by {name}{hint}"
