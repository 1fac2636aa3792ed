"""No order of events of producer, engines, scorer, rewards, learner, weight sync and validation is a deadlock.

The loop of the pipeline and its asyncio objects are real; `scripted_run` has the rest. A run can also be interrupted
(Ctrl-C), and a part can be lost, at any of its events.
"""

import asyncio
import gc
import random
import warnings
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from typing import Any

import pytest
from scripted_loop import Deadlock, LostPart, ScriptedLoop
from scripted_run import Case, Records, trained

from roll_opd.base.failures import RunError
from roll_opd.cluster.stall_watchdog import WAITS
from roll_opd.rollout import producer

MODES = ("continue", "wait")
RUNS, RUNS_NIGHTLY = 20, 10_000


def case_of(seed: int) -> Case:
    rng = random.Random(seed)
    # a queue of one group: groups 1, bound 1
    bound, depth = rng.choice([(0, None), (1, None), (1, None), (2, None), (2, 1), (4, 1), (4, 2)])
    in_rounds = rng.random() < 0.15
    return Case(
        bound,
        depth,
        rng.choice((1, 1, 2, 3)),
        rng.choice((1, 2, 3)),
        rng.choice(("none", "some")),
        "wait" if in_rounds else rng.choice(MODES),
        rng.choice((1, 2)),
        in_rounds,
        rng.random() < 0.7,
        rng.random() < 0.7,
        rng.choice((0, 1, 2)),
        bool(bound) and rng.random() < 0.4,
        rng.choice((1, 2, 3)),
    )


def result_of(make_source: Any, case: Case, seed: int, **interruption: Any) -> tuple[ScriptedLoop, Records]:
    loop = ScriptedLoop(seed, **interruption)
    with pytest.MonkeyPatch.context() as patch:
        return loop, loop.run(trained(loop, case, make_source(), patch))


def check(case: Case, records: Records) -> None:
    """Each drawn prompt is trained once or filtered, within the bound; every validation has happened."""
    batches = records.batches
    assert len(batches) == case.steps
    drawn = [draw for batch in batches for draw in (*batch.draws, *batch.filtered_draws)]
    assert len(drawn) == len(set(drawn))
    if case.filters == "none" and case.pace.window == 1:
        assert drawn == list(range(case.steps * case.groups))
    ages = {batch.version - version for batch in batches for version in batch.versions}
    assert min(ages) >= 0 and max(ages) <= case.pace.max_age
    every = case.eval_steps
    due = [step for step in range(1, case.steps + 1) if every and (step % every == 0 or step == case.steps)]
    assert records.validated == [0, *due]


def interleavings(make_source: Any, seeds: range) -> int:
    events = 0
    for seed in seeds:
        case = case_of(seed)
        try:
            loop, records = result_of(make_source, case, seed)
            check(case, records)
        except BaseException as error:
            error.add_note(f"seed {seed}: {case}")
            raise
        assert not loop.problems, loop.problems
        events += loop.events
    return events


def test_no_interleaving_of_the_actors_is_a_deadlock(make_source: Any) -> None:
    assert interleavings(make_source, range(RUNS)) > 40 * RUNS


@pytest.mark.nightly
def test_ten_thousand_interleavings_of_the_actors_have_no_deadlock(make_source: Any) -> None:
    print(f"{interleavings(make_source, range(RUNS, RUNS + RUNS_NIGHTLY))} events")


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_a_run_whose_groups_are_all_filtered_ends_with_an_error(
    make_source: Any, monkeypatch: pytest.MonkeyPatch, bound: int
) -> None:
    monkeypatch.setattr(producer, "MIN_REJECTED", 4)
    monkeypatch.setattr(producer, "MAX_REJECTED", 2)
    for seed in range(6):
        case = Case(bound, filters="all", on_update=MODES[seed % 2], eval_steps=0)
        with pytest.raises(RunError, match="the filters rejected the samples of"):
            result_of(make_source, case, seed)


SHAPES = [
    Case(bound, groups=groups, filters=filters, on_update=mode, engines=2, scores_beside=beside, eval_steps=1)
    for (bound, groups), filters, mode, beside in product(
        ((0, 1), (1, 1), (2, 2)), ("none", "some"), MODES, (True, False)
    )
]

SHAPES += [Case(1, steps=4, on_update=mode, eval_steps=1, is_reserved=True, save_steps=3) for mode in MODES]


def interrupted(make_source: Any, case: Case, seed: int, every: int, interrupt: Callable, wanted: tuple) -> int:
    """Interrupt a run at each `every`-th of its events, and check its end; return the number of these runs."""
    whole, _ = result_of(make_source, case, seed)
    events = range(1 + seed % every, whole.events + 1, every)
    gc.collect()  # objects that earlier tests left may warn when they are freed
    for event in events:
        loop = ScriptedLoop(seed, event, interrupt)
        try:
            with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                with suppress(*wanted):
                    records = loop.run(trained(loop, case, make_source(), patch))
                    # only a call for an extra group whose batch is complete may fail without ending the run
                    assert interrupt is lose and case.bound == 0 and case.filters == "some"
                    check(case, records)
            assert not warned, [str(one.message) for one in warned]  # coroutines that were never awaited
            assert not (loop.left and interrupt is cancel), loop.left
            assert not WAITS.text()
        except BaseException as error:
            error.add_note(f"event {event} of {whole.events}, seed {seed}: {case}")
            raise
    return len(events)


def cancel(loop: ScriptedLoop, _: Any) -> None:
    loop.main.cancel()


def lose(_: ScriptedLoop, event: "asyncio.Future[None]") -> None:
    event.set_exception(LostPart("lost"))


ON_PUSH = [(SHAPES[6], 40), (SHAPES[21], 60), (SHAPES[-1], 40)]  # every 40th and 60th event
NIGHTLY = [pytest.param(shape, 1, marks=pytest.mark.nightly) for shape in SHAPES]


@pytest.mark.parametrize(("case", "every"), [*ON_PUSH, *NIGHTLY])
def test_an_interrupted_run_ends_without_tasks_and_waits(make_source: Any, case: Case, every: int) -> None:
    """Ctrl-C at each event."""
    print(f"{interrupted(make_source, case, 0, every, cancel, (asyncio.CancelledError,))} interrupted runs")


@pytest.mark.parametrize(("case", "every"), [*ON_PUSH, *NIGHTLY])
def test_a_run_with_a_lost_part_ends_with_its_error(make_source: Any, case: Case, every: int) -> None:
    """A call to an actor fails, at each event. Calls to other actors may still run then.

    A failed call for an extra group (`filters`) whose batch is complete does not end the run.
    """
    print(f"{interrupted(make_source, case, 0, every, lose, (LostPart, RunError))} runs with a lost part")


def test_a_deadlock_is_found(make_source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a gate that does not wake the producer."""
    monkeypatch.setattr(producer.Gate, "notify", lambda self: None)
    with pytest.raises(Deadlock, match="the producer waits for"):
        result_of(make_source, Case(), 0)
