"""The progress of a long step: counted, and shown rarely or in place."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from roll_opd.tracking import console
from roll_opd.tracking.console import Count, Progress, show_progress


def test_text_shows_unfinished_counts_only() -> None:
    counts, generated, updates = Progress(), Count("generated", 3), Count("updates", 1)
    assert counts.text() == ""
    with counts.showing(generated, updates):
        generated.one()
        with counts.showing(generated):
            assert counts.text() == "generated 1/3"  # once, and not the single update
        updates.begin(2)
        generated.one(), generated.one(), updates.one()
        assert counts.text() == "updates 1/2"
    assert counts.text() == ""


@contextmanager
def seconds_of(times: Iterator[float], shown: list[float], *, live: bool) -> Iterator[None]:
    def under_way() -> tuple[float, str] | None:
        now = next(times, None)
        return None if now is None else (now, str(now))

    def show(text: str) -> None:
        shown.append(float(text))

    with show_progress(under_way, show, show if live else None):
        yield


@pytest.mark.parametrize("live", [False, True])
def test_line_intervals_grow_within_a_step_and_reset_with_the_next(live: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "LIVE_INTERVAL_S", 0.0001)
    first, second = [float(second) for second in range(0, 3000)], [float(second) for second in range(0, 20)]
    shown: list[float] = []
    times = iter([*first, *second])
    with seconds_of(times, shown, live=live):
        while next_left(times):
            time.sleep(0.001)  # this thread awake would keep the other one from its work
    if live:
        assert shown == [*first[5:], *second[5:]]
    else:
        assert shown == [15, 30, 60, 120, 240, 480, 960, 1560, 2160, 2760, 15]


def test_a_status_call_that_blocks_does_not_delay_the_end() -> None:
    """As where Ray has been ended before the run has."""
    asked, never = threading.Event(), threading.Event()

    def under_way() -> None:
        asked.set()
        never.wait(60)

    with show_progress(under_way, print, None):
        assert asked.wait(10)
        left = time.monotonic()
    assert time.monotonic() - left < 20
    never.set()


def next_left(times: Iterator[float]) -> bool:
    return times.__length_hint__() > 0  # type: ignore[attr-defined]
