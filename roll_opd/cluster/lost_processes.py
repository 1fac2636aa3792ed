"""Lost processes of a run: the errors that report them, their limit per role and hour, and their record.

Does not import Ray, because `roll-opd plan` reads the errors.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from roll_opd.base.failures import RunError

HOUR = 3600.0
MAX_DEATHS = 3  # losses during one call, attempts of one start, or restarts without progress, after which a run ends


class ClusterError(RuntimeError):
    """The cluster is too small, or a part of the run does not start. The message includes the remedy."""


class ProcessDied(ClusterError):
    """A process of a role has ended. The message includes the process, its device and, if known, the cause."""


class RayLost(ClusterError):
    """A process of Ray has ended, which ends the processes of all roles."""


class NotSetUp(RuntimeError):
    """Raised by a process that was started again and was not set up yet."""


class NotServing(RuntimeError):
    """Raised by an engine that was started again and has not received the student's weights yet."""


class Starting(NotServing):
    """Raised by an engine whose process was started again, while the engine core starts."""


@dataclass(frozen=True)
class Loss:
    """Lost processes, and how the run went on."""

    what: str  # the processes
    why: str
    phase: str | None  # of the step, when the run noticed
    seconds: float  # until new processes were ready
    remedy: str


class LossLimit:
    """Counts the lost processes of a role within an hour."""

    def __init__(self, role: str, most: int | None) -> None:
        """`most` is the number of losses that the role may have within an hour; None: no limit."""
        self._role, self._most = role, most
        self._lost: dict[int, float] = {}  # number of the loss -> time

    def add(self, number: int) -> None:
        """Count the loss `number`."""
        self._lost[number] = time.monotonic()

    def forgive(self, numbers: set[int]) -> None:
        """Count some losses no longer."""
        for number in numbers:
            self._lost.pop(number, None)

    def exceeded(self, last: str) -> RunError | None:
        """Return the error that ends the run if there are too many losses. `last` describes the last one."""
        recent = sum(at > time.monotonic() - HOUR for at in self._lost.values())
        if self._most is None or recent <= self._most:
            return None
        return RunError(
            f"{self._role}: {recent} processes were lost within an hour, and max_lost_workers is {self._most}; the last"
            f" one: {last}; correct the cause, or raise max_lost_workers"
        )


class Losses:
    """The lost processes of a run's models."""

    def __init__(
        self,
        most: int | None = None,
        record: Callable[[Loss], None] = lambda loss: None,
        fail: Callable[[Exception], None] = lambda error: None,
        phase: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Create the record.

        Args:
            most: number of processes that a role may lose within an hour; None: no limit.
            record: called with each loss after new processes were started.
            fail: ends the run with an error.
            phase: returns the current phase of the step.
        """
        self._most, self.record, self.fail, self.phase = most, record, fail, phase
        self._limits: dict[str, LossLimit] = {}
        self._count = 0

    def add(self, role: str, why: str) -> str | None:
        """Count a loss of `role`, and return the phase. Raises RunError if the role has lost too many processes."""
        limit = self._limits.setdefault(role, LossLimit(role, self._most))
        self._count += 1
        limit.add(self._count)
        if error := limit.exceeded(why):
            raise error
        return self.phase()
