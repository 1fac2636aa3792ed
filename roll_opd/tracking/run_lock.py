"""Lock a run's directory for one driver: a second one would truncate the files of the first."""

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from roll_opd.base.failures import ConfigError

LOCK = ".driver"
# errors of file systems without locks, on which other drivers cannot be detected
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextmanager
def lock_run(run: Path) -> Iterator[None]:
    """Hold the lock of `run` inside the block; raises `ConfigError` if another process holds it.

    The kernel releases the lock at any end of the process.
    """
    with open(run / LOCK, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            who = file.read().strip() or "a process"
            raise ConfigError(
                [f"{run} is the directory of a run that is still running ({who}): wait for its end, or stop it"]
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        else:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        yield
