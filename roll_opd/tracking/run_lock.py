"""Keeps a run's directory to one driver: a second one would cut back what the first is writing."""

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from roll_opd.base.failures import ConfigError

LOCK = ".driver"
# of file systems that have no locks: then nothing is known of other drivers
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextmanager
def only_driver(run: Path) -> Iterator[None]:
    """Have `run` to this process inside the block. ConfigError where another one has it.

    The kernel takes the lock back with the process, however that ends.
    """
    with open(run / LOCK, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            who = file.read().strip() or "a process"
            raise ConfigError(
                [f"{run} is the directory of a run that is still going on ({who}): wait until it has ended, or end it"]
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        else:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        yield
