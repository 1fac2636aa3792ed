"""What a long step is doing: counts of what is under way, and a thread that has them shown."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LIVE_AFTER, LIVE_EVERY = 5.0, 1.0  # seconds, of a line that is updated in place
LAST_SECONDS = 1.0  # for the thread to end: what it asks may never answer, where Ray is on its way out
FIRST_LINE, LONGEST_PAUSE = 15.0, 600.0  # seconds of a step until its first line; between lines, which get rarer


class Count:
    """How many of something are done."""

    def __init__(self, what: str, total: int = 0) -> None:
        self.what, self.total, self.done = what, total, 0

    def begin(self, total: int) -> None:
        """Start again, with `total` to do."""
        self.total, self.done = total, 0

    def one(self, *_: object) -> None:
        """Count one as done; may be a callback."""
        self.done += 1


class Progress:
    """The counts of what is under way."""

    def __init__(self) -> None:
        self._shown: list[Count] = []

    @contextmanager
    def showing(self, *counts: Count) -> Iterator[None]:
        """Have `counts` under way inside the block."""
        self._shown += counts
        try:
            yield
        finally:
            for count in counts:
                self._shown.remove(count)

    def text(self) -> str:
        """Return what is neither done nor a single thing, such as `generated 3/8, scored 1/8`."""
        counts = dict.fromkeys(self._shown)
        return ", ".join(f"{count.what} {count.done}/{count.total}" for count in counts if count.done < count.total > 1)


# what is under way: seconds since it began, and the line that says how far it is
UnderWay = Callable[[], tuple[float, str] | None]


@contextmanager
def shown_while_long(
    under_way: UnderWay, line: Callable[[str], None], live: Callable[[str], None] | None
) -> Iterator[None]:
    """Show what is under way inside the block, where it takes long, from a thread of its own.

    Args:
        line: prints a line; called rarely, and ever more rarely.
        live: replaces the line that it showed before; None where that cannot be.
    """
    done = threading.Event()

    def work() -> None:
        due = FIRST_LINE
        before = 0.0
        while not done.wait(LIVE_EVERY):
            now = under_way()
            if now is None:
                continue
            seconds, text = now
            if seconds < before:  # the next one has begun
                due = FIRST_LINE
            before = seconds
            if live:
                if seconds >= LIVE_AFTER:
                    live(text)
            elif seconds >= due:
                line(text)
                due = seconds + min(seconds, LONGEST_PAUSE)

    thread = threading.Thread(target=work, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(LAST_SECONDS)
