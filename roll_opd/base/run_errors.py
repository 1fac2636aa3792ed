"""What ends a run whose configuration was right."""

from collections.abc import Sequence
from typing import Any


class RunError(RuntimeError):
    """The run cannot go on; the message says why and what to look at."""


class SkippedUpdates(RunError):
    """Too many updates in a row were skipped. `samples` are what the last of them was to learn from."""

    def __init__(self, message: str, samples: Sequence[Any]) -> None:
        super().__init__(message)
        self.samples = samples


class Interrupted(KeyboardInterrupt):
    """Ctrl-C has ended the run; the message says how to go on."""


class Terminated(RunError):
    """SIGTERM has ended the run; the message says what was saved and how to go on."""
