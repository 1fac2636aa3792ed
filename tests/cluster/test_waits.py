"""The watchdog of waits: if nothing progresses, a report names every open wait; otherwise there is no report."""

import asyncio
import threading
import time

from roll_opd.cluster.stall_watchdog import Waits, watchdog


def test_a_blocked_part_is_named_by_each_that_waits_for_it() -> None:
    """Also where the event loop itself is blocked."""
    waits, reports, ended = Waits(), list[str](), threading.Event()

    async def scored() -> None:
        with waits.of("the scorer", "teacher t"):
            time.sleep(30) if not ended.wait(5) else None

    async def learned() -> None:
        with waits.of("the learner", "the scorer"):
            await asyncio.create_task(scored())

    def end(text: str) -> None:
        reports.append(text)
        ended.set()

    with watchdog(reports.append, end, limit=0.4, waits=waits, patience=0.2):
        asyncio.run(learned())
    first, last = reports
    assert first.startswith("Nothing has moved for 0 s: ") and "(stall_timeout_s)" in last
    for report in reports:
        assert "the learner waits for the scorer, for" in report and "the scorer waits for teacher t, for" in report
    assert waits.idle_seconds() == 0


def test_movement_of_any_kind_is_no_stall() -> None:
    waits, reports = Waits(), list[str]()
    begun = time.monotonic()
    with waits.of("a", "b"), watchdog(reports.append, reports.append, 0.3, time.monotonic, waits=waits, patience=0.3):
        time.sleep(0.4)
    with waits.of("a", "b"), watchdog(reports.append, reports.append, 0.3, waits=waits, patience=0.3):
        while time.monotonic() < begun + 0.8:
            with waits.of("c", "d"):
                time.sleep(0.02)
    assert reports == []


def test_equal_waits_are_counted() -> None:
    now = [0.0]
    waits = Waits(lambda: now[0])
    with waits.of("a", "b"):
        now[0] = 5
        with waits.of("a", "b"), waits.of("c", "d"):
            now[0] = 7
            assert waits.text() == "a waits for b (2 times), for 7 s; c waits for d, for 2 s"
            assert waits.idle_seconds() == 2
