"""The phase clock: exclusive phases whose sum is the step, with nested and overlapping phases."""

import asyncio
import threading

import pytest

from roll_opd.tracking.phase_clock import PHASES, PhaseClock, time_metrics


class Time:
    """Seconds that pass on request."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_phases_and_other_sum_to_the_step() -> None:
    time = Time()
    clock = PhaseClock(time)
    with clock.phase("generate"):
        time.now += 2
    time.now += 1
    with clock.phase("train"):
        time.now += 3
    with clock.phase("generate"):
        time.now += 4
    lap = clock.lap()
    assert (lap["generate"], lap["train"], lap["other"], lap["step"]) == (6, 3, 1, 10)
    assert set(lap) == {*PHASES, "other", "step"}
    assert time_metrics(lap)["time/train"] == 3
    assert clock.lap()["step"] == 0


def test_overlapping_time_belongs_to_the_phase_opened_first() -> None:
    time = Time()
    clock = PhaseClock(time)
    generate, teacher = clock.phase("generate"), clock.phase("teacher")
    generate.__enter__()
    time.now += 1
    teacher.__enter__()
    time.now += 2  # both
    generate.__exit__(None, None, None)
    time.now += 4  # the teacher alone
    teacher.__exit__(None, None, None)
    lap = clock.lap()
    assert (lap["generate"], lap["teacher"], lap["other"]) == (3, 4, 0)


def test_nested_time_belongs_to_the_outer_phase() -> None:
    time = Time()
    clock = PhaseClock(time)
    with clock.phase("validate"):
        with clock.phase("generate"), clock.phase("generate"):
            time.now += 5
    lap = clock.lap()
    assert (lap["validate"], lap["generate"]) == (5, 0)


def test_a_phase_open_over_a_lap_is_split_and_an_error_closes_it() -> None:
    time = Time()
    clock = PhaseClock(time)
    with pytest.raises(RuntimeError):
        with clock.phase("train"):
            time.now += 1
            assert clock.lap()["train"] == 1
            time.now += 2
            raise RuntimeError
    time.now += 4
    lap = clock.lap()
    assert (lap["train"], lap["other"]) == (2, 4)
    with pytest.raises(ValueError, match="unknown phase 'lunch'"):
        with clock.phase("lunch"):
            pass


def test_real_time_from_several_threads_still_sums() -> None:
    clock = PhaseClock()

    def work(name: str) -> None:
        for _ in range(200):
            with clock.phase(name):
                pass

    threads = [threading.Thread(target=work, args=(name,)) for name in ("teacher", "reward", "generate")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lap = clock.lap()
    assert sum(lap[name] for name in (*PHASES, "other")) == pytest.approx(lap["step"])


def test_concurrent_tasks_have_phases_of_their_own() -> None:
    """The next batch is sampled while this batch is trained on: both phases count in full, the step counts once."""
    time = Time()
    clock = PhaseClock(time)

    async def sampling() -> None:
        with clock.track("rollout"), clock.phase("generate"):
            with clock.phase("teacher"):
                started.set()
                await ended.wait()

    async def main() -> None:
        task = asyncio.create_task(sampling())
        await started.wait()
        with clock.phase("train"):
            time.now += 5
            ended.set()
            await task
            time.now += 2
        time.now += 1

    started, ended = asyncio.Event(), asyncio.Event()
    asyncio.run(main())
    lap = clock.lap()
    assert (lap["generate"], lap["teacher"], lap["train"], lap["other"], lap["step"]) == (5, 0, 7, 1, 8)


def test_tracks_in_turns_sum_to_the_step() -> None:
    time = Time()
    clock = PhaseClock(time)
    for seconds in (2.0, 3.0):
        with clock.track("rollout"), clock.phase("generate"):
            time.now += seconds
        with clock.phase("train"):
            time.now += 1
        time.now += 0.5
    lap = clock.lap()
    assert (lap["generate"], lap["train"], lap["other"]) == (5, 2, 1)
    assert sum(lap[name] for name in (*PHASES, "other")) == lap["step"]


def test_a_failure_belongs_to_the_phase_that_it_ended() -> None:
    clock = PhaseClock()
    with clock.phase("generate"):
        assert clock.phase_of_failure() == "generate"
    assert clock.phase_of_failure() is None
    with pytest.raises(ValueError), clock.phase("train"):
        raise ValueError
    assert clock.phase_of_failure() == "train" and clock.moment().phase is None
    with clock.phase("teacher"):
        pass
    assert clock.phase_of_failure() is None
