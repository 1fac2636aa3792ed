"""Progress display of long steps: counters of running work, and a thread that prints them."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LIVE_DELAY_S, LIVE_INTERVAL_S = 5.0, 1.0  # of a line that is updated in place
JOIN_TIMEOUT_S = 1.0  # the status call may block for ever while Ray shuts down
FIRST_LINE_S, MAX_INTERVAL_S = 15.0, 600.0  # of a step until its first line; between lines, which double


class Count:
    """Counter of finished items out of a total; `what` is the verb shown, such as `generated`."""

    def __init__(self, what: str, total: int = 0) -> None:
        self.what, self.total, self.done = what, total, 0

    def begin(self, total: int) -> None:
        """Reset the counter to 0 of `total`."""
        self.total, self.done = total, 0

    def one(self, *_: object) -> None:
        """Count one item as finished; usable as a callback."""
        self.done += 1


class Progress:
    """Counters of running work."""

    def __init__(self) -> None:
        self._shown: list[Count] = []

    @contextmanager
    def showing(self, *counts: Count) -> Iterator[None]:
        """Show `counts` inside the block."""
        self._shown += counts
        try:
            yield
        finally:
            for count in counts:
                self._shown.remove(count)

    def text(self) -> str:
        """Return the unfinished counters with a total above 1, such as `generated 3/8, scored 1/8`."""
        counts = dict.fromkeys(self._shown)
        return ", ".join(f"{count.what} {count.done}/{count.total}" for count in counts if count.done < count.total > 1)


# returns seconds since the start of the running step, and its status line; None between steps
StepStatus = Callable[[], tuple[float, str] | None]


@contextmanager
def show_progress(
    status: StepStatus, line: Callable[[str], None], live: Callable[[str], None] | None
) -> Iterator[None]:
    """Print the status of long steps from a separate thread while the block runs.

    Args:
        status: returns the current status.
        line: prints a line; called at increasing intervals.
        live: replaces the line it printed before; None on output that is no terminal.
    """
    done = threading.Event()

    def work() -> None:
        due = FIRST_LINE_S
        before = 0.0
        while not done.wait(LIVE_INTERVAL_S):
            now = status()
            if now is None:
                continue
            seconds, text = now
            if seconds < before:  # a new step
                due = FIRST_LINE_S
            before = seconds
            if live:
                if seconds >= LIVE_DELAY_S:
                    live(text)
            elif seconds >= due:
                line(text)
                due = seconds + min(seconds, MAX_INTERVAL_S)

    thread = threading.Thread(target=work, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(JOIN_TIMEOUT_S)
