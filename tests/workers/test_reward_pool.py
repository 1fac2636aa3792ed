"""Reward workers in real processes: distribution of samples, failures, kills, and their effect on other samples."""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import ray

from roll_opd.base.failures import RunError
from roll_opd.base.frozen import FrozenDict
from roll_opd.config.plan import RewardTerm
from roll_opd.samples.sample import Sample, as_columns
from roll_opd.workers import reward_pool as module
from roll_opd.workers.reward_pool import RewardPool, RewardResult


def sample(number: int, **extra: str) -> Sample:
    return Sample(
        id=str(number),
        group_id=f"g{number // 4}",
        tag="t",
        tokens=np.array([1, 2, 3]),
        prompt_length=1,
        finish_reason="stop",
        extra=FrozenDict(extra),
        columns=as_columns(action_mask=np.ones(2, bool), rollout_logprobs=np.zeros(2, np.float32)),
    )


def results(
    loop: asyncio.AbstractEventLoop, pool: RewardPool, samples: Sequence[Sample]
) -> list[RewardResult | Exception]:
    async def ask() -> list[RewardResult | Exception]:
        asked = [pool.submit(one) for one in samples]
        return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 60)

    return loop.run_until_complete(ask())


def rewards(found: Sequence[RewardResult | Exception]) -> list[float | None]:
    return [result.reward for result in found]


def test_functions_classes_and_coroutines(start, loop) -> None:
    samples = [sample(number) for number in range(37)]
    numbers = [float(number) for number in range(37)]
    assert rewards(results(loop, start("plain", world_size=2, batch_size=3), samples)) == numbers
    assert rewards(results(loop, start("Scaled", args={"factor": 2}), samples)) == [2 * x for x in numbers]
    pool = start("awaited", timeout=None)
    found = results(loop, pool, samples)
    assert rewards(found) == numbers and found[3].parts == {"half": 1.5} and found[3].reason == "odd"
    assert found[3].added_to(samples[3]).reward_parts == {"half": 1.5}
    metrics = pool.drain_metrics()
    assert metrics["reward/code/errors"] == 0 and metrics["time/reward/code/queue/max"] == 0
    assert 0.2 <= metrics["time/reward/code/latency/p50"] <= metrics["time/reward/code/latency/p95"]
    assert "time/reward/code/latency/p50" not in pool.drain_metrics()


def test_several_rewards_are_a_weighted_sum(start, loop) -> None:
    terms = (
        RewardTerm("plain", "my_rewards.plain", weight=2.0),
        RewardTerm("form", "my_rewards.awaited", weight=-0.5),
    )
    found = results(loop, start("plain", terms=terms), [sample(number) for number in range(8)])
    assert rewards(found) == [1.5 * number for number in range(8)]
    assert found[5].parts == {"plain": 5.0, "form": 5.0, "form.half": 2.5} and found[5].reason == "odd"


def test_a_slow_reward_works_on_many_samples_at_once(start, loop) -> None:
    """128 samples of 0.2 s each: 26 s one after another."""
    pool = start("sleepy")
    began = time.monotonic()
    assert rewards(results(loop, pool, [sample(number) for number in range(128)])) == [float(n) for n in range(128)]
    assert time.monotonic() - began < 4


def test_a_brief_reward_works_on_many_samples_at_once(start, loop) -> None:
    """256 samples of 15 ms each: 3.8 s one after another."""
    pool = start("brief")
    began = time.monotonic()
    assert rewards(results(loop, pool, [sample(number) for number in range(256)])) == [float(n) for n in range(256)]
    assert time.monotonic() - began < 2


def test_a_quick_reward_is_given_large_calls(start, loop) -> None:
    """As soon as the machine is idle: on a busy machine, a quick call is sometimes slow."""
    pool, samples = start("busy"), [sample(number) for number in range(256)]
    until, mean_size = time.monotonic() + 60, 0.0
    while mean_size <= 8 and time.monotonic() < until:  # of 16, the batch_size, where nothing comes between
        mean_size = np.mean(rewards(results(loop, pool, samples)))
    assert mean_size > 8


def test_a_reward_that_was_quick_may_be_slow(start, loop) -> None:
    """128 samples of 0.2 s each, after as many that take no time."""
    pool = start("moody")
    numbers = [float(number) for number in range(128)]
    for trouble in ("", "nap", "", "nap"):
        began = time.monotonic()
        assert rewards(results(loop, pool, [sample(number, trouble=trouble) for number in range(128)])) == numbers
        assert time.monotonic() - began < 2


@pytest.mark.parametrize(
    ("on_error", "reward", "excluded"), [("zero", 0.0, False), ("drop", None, True), ("replace", None, True)]
)
def test_a_sample_that_fails_harms_no_other(start, loop, on_error, reward, excluded) -> None:
    """In one call with its neighbours, which are scored without it."""
    pool = start("troubled", on_error=on_error, max_concurrency=1, batch_size=8)
    samples = [sample(n, trouble={3: "raise", 5: "nan"}.get(n, "")) for n in range(8)]
    found = results(loop, pool, samples)
    assert rewards(found) == [reward if n in (3, 5) else float(n) for n in range(8)]
    assert [result.excluded for result in found] == [excluded and n in (3, 5) for n in range(8)]
    assert (found[3].reason, found[5].reason) == ("KeyError", "not_finite")
    metrics = pool.drain_metrics()
    assert {key.rpartition("errors/")[2]: value for key, value in metrics.items() if "errors/" in key} == {
        "KeyError": 1,
        "not_finite": 1,
    }


@pytest.mark.parametrize(("is_learned", "first"), [(True, "raise"), (True, ""), (False, "raise")])
def test_a_reward_that_always_fails_ends_a_run_that_learns_from_it(
    start, loop, is_learned: bool, first: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the first failure is reported; one sample with a reward shows that it is not the reward."""
    pool = start("troubled", on_error="zero", is_learned=is_learned)
    results(loop, pool, [sample(0, trouble=first)])
    found = results(loop, pool, [sample(number, trouble="raise") for number in range(1, 40)])
    failed = [result for result in found if isinstance(result, RunError)]
    assert len(failed) == (1 if is_learned and first else 0)
    assert all("the first 32 samples have all failed; the last one: rewards.code: sample" in str(one) for one in failed)
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("reward troubled raised KeyError") == 1
    assert "Such samples have the reward 0, and are counted as reward/code/errors/KeyError" in said


def test_a_reward_that_stops_working_ends_a_run_after_three_steps(start, loop) -> None:
    pool = start("troubled", on_error="drop")
    for troubles in (["", "raise"], ["raise"], ["raise"], ["", "raise"], ["raise"], ["raise"]):
        results(loop, pool, [sample(number, trouble=trouble) for number, trouble in enumerate(troubles)])
        assert pool.drain_metrics()["reward/code/errors/KeyError"] == 1
    pool.drain_metrics()  # of a step in which nothing was scored
    results(loop, pool, [sample(0, trouble="raise")])
    with pytest.raises(RunError, match=r"rewards.code gave no reward in 3 steps; .*reward/code/errors"):
        pool.drain_metrics()


@pytest.mark.parametrize(("on_error", "is_learned", "excluded"), [("drop", True, True), ("drop", False, False)])
def test_a_sample_that_its_reward_cannot_judge(start, loop, on_error: str, is_learned: bool, excluded: bool) -> None:
    pool = start("undecided", on_error=on_error, is_learned=is_learned)
    found = results(loop, pool, [sample(number, trouble="none" if number == 2 else "") for number in range(4)])
    assert rewards(found) == [0.0, 1.0, None, 3.0]
    assert [result.excluded for result in found] == [False, False, excluded, False]
    assert pool.drain_metrics().get("reward/code/errors/none", 0) == excluded


@pytest.mark.parametrize(
    ("worker", "kinds"),
    [
        ("troubled", {"exit": "SystemExit", "empty": "StopIteration"}),
        pytest.param(
            "leaves_early",
            {"exit": "SystemExit", "cancel": "CancelledError", "stay": "timeout"},
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_what_would_end_an_event_loop_ends_a_sample_alone(start, loop, worker: str, kinds: dict[str, str]) -> None:
    pool = start(worker, on_error="zero", timeout=2)
    found = results(loop, pool, [sample(n, trouble=trouble) for n, trouble in enumerate(("", *kinds, ""), 1)])
    assert [result.reason for result in found] == ["", *kinds.values(), ""]
    assert [found[0].reward, found[-1].reward] == [1.0, len(kinds) + 2.0]
    assert pool.drain_metrics()["reward/code/errors"] == len(kinds)


def test_a_reward_may_ask_for_one_call_at_a_time(start, loop) -> None:
    """When a batch is repeated sample by sample, too."""
    pool = start("one_at_a_time", max_concurrency=1, batch_size=8, on_error="drop")
    samples = [sample(n, trouble="raise" if n == 3 else "") for n in range(24)]
    assert rewards(results(loop, pool, samples)) == [None if n == 3 else float(n) for n in range(24)]


def test_what_was_tried_again_is_counted(start, loop) -> None:
    pool = start("failing", on_error="zero")
    assert rewards(results(loop, pool, [sample(n) for n in range(4)])) == [1.0, 0.0, 1.0, 0.0]
    metrics = pool.drain_metrics()
    assert metrics["reward/code/errors/http_500"] == 8 and metrics["reward/code/errors/http_429"] == 4
    assert metrics["reward/code/errors/connect"] == 2 and metrics["reward/code/errors"] == 14


def test_an_error_that_is_to_stop_the_run_says_which_sample_and_what_to_do(start, loop) -> None:
    found = results(loop, start("troubled"), [sample(0), sample(1, trouble="raise")])
    assert found[0].reward == 0.0 and isinstance(found[1], RunError)
    message = str(found[1])
    assert "rewards.code: sample 1: reward troubled raised KeyError: '1'" in message and "on_error" in message
    found = results(loop, start("too_few", on_error="zero"), [sample(0), sample(1)])
    assert all("returned 0 scores for 1 samples" in str(error) for error in found)  # no reward: nothing can go on


@pytest.mark.parametrize("worker", ["troubled", pytest.param("slow_to_await", marks=pytest.mark.nightly)])
def test_samples_that_hang_fail_alone_within_their_time(start, loop, worker: str) -> None:
    """Hung samples fail, the others do not wait, and the worker can be used afterwards."""
    pool = start(worker, timeout=0.7, on_error="drop", max_concurrency=2, batch_size=2)
    for _ in range(2):
        samples = [sample(n, trouble="hang" if n in (2, 6) else "") for n in range(8)]
        began = time.monotonic()
        found = results(loop, pool, samples)
        assert rewards(found) == [None if n in (2, 6) else float(n) for n in range(8)]
        assert time.monotonic() - began < 60  # two workers begin anew; they would hang for 1000 s
        assert pool.drain_metrics()["reward/code/timeouts"] == 2
    assert rewards(results(loop, pool, [sample(9)])) == [9.0]


def test_a_killed_worker_is_replaced_and_its_batch_scored_once(start, loop, tmp_path: Path) -> None:
    pool, log = start("troubled", max_concurrency=4, batch_size=2), tmp_path / "log"

    async def kill() -> None:
        while not log.exists() or len(log.read_text().splitlines()) < 12:
            await asyncio.sleep(0.02)
        os.kill(int(log.read_text().split()[0]), signal.SIGKILL)

    async def both() -> list[RewardResult]:
        asked = [pool.submit(sample(n, trouble="nap", log=str(log))) for n in range(24)]
        await kill()
        return await asyncio.wait_for(asyncio.gather(*asked), 60)

    assert rewards(loop.run_until_complete(both())) == [float(n) for n in range(24)]
    lines = [line.split() for line in log.read_text().splitlines()]
    first, *others = dict.fromkeys(process for process, _ in lines)
    assert len(others) == 1
    again = Counter(number for process, number in lines if process != first)
    assert set(again.values()) == {1} and len(again) < 24  # a score from before the end is not computed again
    assert pool.drain_metrics()["reward/code/errors"] == 0


@pytest.mark.nightly
def test_a_sample_that_kills_every_worker_is_found_out(start, loop) -> None:
    pool = start("troubled", on_error="zero", max_concurrency=2)
    found = results(loop, pool, [sample(n, trouble="die" if n == 5 else "") for n in range(12)])
    assert rewards(found) == [0.0 if n == 5 else float(n) for n in range(12)] and found[5].reason == "worker_died"
    metrics = pool.drain_metrics()
    assert metrics["reward/code/errors/worker_died"] == 1 and metrics["time/reward/code/restarts"] == 3


@pytest.mark.nightly
def test_a_suspect_is_alone_with_a_worker(start, loop, tmp_path: Path) -> None:
    """A sample that shared a worker with a fatal sample twice is not blamed, although more fatal samples arrive."""
    pool, log = start("troubled", on_error="zero", max_concurrency=8), tmp_path / "log"

    async def ask() -> list[RewardResult]:
        asked = [pool.submit(sample(1, trouble="nap and die")), pool.submit(sample(2, trouble="sleep", log=str(log)))]
        while not log.exists() or len(log.read_text().splitlines()) < 3:
            await asyncio.sleep(0.02)
        asked += [pool.submit(sample(3, trouble="die")), pool.submit(sample(4))]
        return await asyncio.wait_for(asyncio.gather(*asked), 60)

    assert rewards(loop.run_until_complete(ask())) == [0.0, 2.0, 0.0, 4.0]


def test_a_worker_that_dies_while_it_starts_is_started_again(start, loop) -> None:
    pool = start("troubled")
    spawn, died = pool._spawn, []

    def spawn_badly():
        actor = spawn()
        if not died:
            died.append(actor)
            ray.kill(actor)
        return actor

    pool._spawn = spawn_badly
    found = results(loop, pool, [sample(0, trouble="die"), sample(1)])
    assert died and isinstance(found[0], RunError) and found[1].reward == 1.0


def test_a_worker_that_says_nothing_is_stuck(start, loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ALIVE_SECONDS", 0.5)
    pool, log = start("troubled", timeout=0.5), tmp_path / "log"

    async def both() -> RewardResult:
        asked = pool.submit(sample(1, trouble="nap", log=str(log)))
        while not (log.exists() and log.read_text().split()):
            await asyncio.sleep(0.01)
        os.kill(int(log.read_text().split()[0]), signal.SIGSTOP)
        return await asyncio.wait_for(asked, 60)

    assert loop.run_until_complete(both()).reward == 1.0


def test_a_worker_whose_event_loop_stands_still_is_stuck(start, loop, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "ALIVE_SECONDS", 1.0)  # time for a worker to answer on a busy machine
    pool = start("deaf", timeout=None)
    assert rewards(results(loop, pool, [sample(1, log=str(tmp_path / "log"))])) == [1.0]
    assert pool.drain_metrics()["time/reward/code/restarts"] == 1
    patient = start("unhurried", timeout=None)  # it is there, and takes its time
    assert rewards(results(loop, patient, [sample(1)])) == [1.0]
    assert patient.drain_metrics()["time/reward/code/restarts"] == 0


def test_nobody_is_asked_for_what_nobody_waits_for(start, loop, tmp_path: Path) -> None:
    pool, log = start("troubled", max_concurrency=1, batch_size=1), tmp_path / "log"

    async def ask() -> None:
        asked = [pool.submit(sample(n, trouble="nap", log=str(log))) for n in range(9)]
        await asked[0]
        for one in asked[2:]:
            one.cancel()
        await asked[1]
        await pool.submit(sample(9, log=str(log)))

    loop.run_until_complete(ask())
    assert [line.split()[1] for line in log.read_text().splitlines()] == ["0", "1", "9"]
