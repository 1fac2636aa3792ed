"""What ends a run whose configuration was right."""


class RunError(RuntimeError):
    """The run cannot go on; the message says why and what to look at."""
