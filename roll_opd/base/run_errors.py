"""Exceptions that end a run with a valid configuration."""

from collections.abc import Sequence
from typing import Any


class RunError(RuntimeError):
    """The run cannot continue; the message says why and what to check."""


class SkippedUpdates(RunError):
    """Too many consecutive updates were skipped. `samples` are those of the last one."""

    def __init__(self, message: str, samples: Sequence[Any]) -> None:
        super().__init__(message)
        self.samples = samples


class Interrupted(KeyboardInterrupt):
    """Ctrl-C ended the run; the message says how to resume."""


class Terminated(RunError):
    """SIGTERM ended the run; the message says what was saved and how to resume."""
