"""Workflows in real processes: results of a run, failures, kills, and their effect on other runs."""

import asyncio
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from roll_opd.base.failures import RunError
from roll_opd.base.frozen import FrozenDict
from roll_opd.config.plan import (
    AuxiliaryPlan,
    Layout,
    MegatronPlan,
    MicroBatchLimits,
    ModelPlan,
    RolloutPlan,
    SamplingPlan,
    TeacherPlan,
    WorkflowPlan,
)
from roll_opd.data.dataset import Prompt
from roll_opd.rollout.workflow_protocol import Task
from roll_opd.samples.sample import Sample
from roll_opd.workers import outage
from roll_opd.workers.actor_group import ActorGroup
from roll_opd.workers.sampler import Sampler
from roll_opd.workers.workflow_actor import Job, WorkflowWorker
from roll_opd.workers.workflow_pool import WorkflowPool, near_engines
from roll_opd.workflows.plugins import find_workflow, load_plugins
from roll_opd.workflows.workflow_experience import WorkflowError
from roll_opd.workflows.workflow_interface import Workflow
from tests.rewards.scripted_server import ScriptedServer

MODEL = os.path.join(os.path.dirname(__file__), "..", "..", "examples", "demo", "models", "student")
SAMPLING = SamplingPlan(max_new_tokens=8)
Start = Callable[..., WorkflowPool]


@pytest.fixture
def start(warm_options: dict[str, Any], loop: asyncio.AbstractEventLoop) -> Iterator[Start]:
    """Starts processes of a workflow of `my_workflows`; they end with the test."""
    pools = []

    def begin(name: str, repeats: bool = False, **settings) -> WorkflowPool:
        others = settings.get("auxiliary_models", ())
        plan = WorkflowPlan(workflow=f"my_workflows.{name}", **settings)
        rollout = RolloutPlan("infer", ModelPlan(MODEL), (0,), 1, 1, SAMPLING, 64)
        worker = MegatronPlan("teacher", ModelPlan(MODEL), (0,), Layout(), MicroBatchLimits())
        teachers = [TeacherPlan("teacher", worker, 1.0)]
        spawn = WorkflowWorker.options(**warm_options).remote
        pools.append(WorkflowPool(plan, spawn, rollout, teachers, 7, repeats=repeats))
        loop.run_until_complete(pools[-1].start(Sampler(ActorGroup([])), [None] * len(others)))
        return pools[-1]

    yield begin
    for pool in pools:
        loop.run_until_complete(pool.end())


def task(number: int, run: int = 0, runs: int = 1, **row) -> Task:
    extra = FrozenDict({"number": number, **row})
    return Task(Prompt(f"p{number}", number, "t", np.array([1]), "truth", extra), number, run, runs)


def run_all(
    loop: asyncio.AbstractEventLoop, pool: WorkflowPool, tasks: Sequence[Task]
) -> list[Sequence[Sample] | BaseException]:
    model = SimpleNamespace(group=0, sampling=SAMPLING)

    async def together() -> list:
        return await asyncio.wait_for(
            asyncio.gather(*[pool.run(one, model) for one in tasks], return_exceptions=True), 90
        )

    return loop.run_until_complete(together())


def test_a_run_makes_none_one_or_many(start: Start, loop) -> None:
    pool = start("Plain")
    for number, made in enumerate(run_all(loop, pool, [task(number) for number in range(40)])):
        assert [(e.id, e.group_id, e.step) for e in made] == [
            (f"p{number}#{number}/0" + (f".{place}" if place else ""), f"p{number}#{number}", place)
            for place in range(number % 3)
        ]
        for place, experience in enumerate(made):
            assert experience.tokens.tolist() == [1, 2, 3, number] and experience.prompt_length == 2
            assert experience.action_mask.tolist() == [True, True]
            assert experience.rollout_logprobs.tolist() == [-0.5, -1.5] and experience.reward == 0.5
            assert experience.metrics == {"place": place} and experience.ground_truth == "truth"
    metrics = pool.drain_metrics()
    assert metrics["workflow/runs"] == 40 and metrics["workflow/restarts"] == 0
    assert not [name for name in metrics if "failed" in name]


@pytest.mark.parametrize(("engines", "workers"), [(2, 2), (2, 3), (4, 2), (1, 2)])
def test_runs_for_an_engine_come_from_one_process_while_that_is_fair(engines: int, workers: int) -> None:
    loads = dict.fromkeys(range(workers), 0)

    def placed(groups: int, runs: int) -> list[tuple[int, int]]:
        """The engine of each run, and the process that has it."""
        jobs = [Job(None, 0, (run,), group, 0, SAMPLING, False, runs) for group in range(groups) for run in range(runs)]
        numbers = list(near_engines(jobs, loads, 40, engines, workers))
        for number in numbers:
            loads[number] += 1
        return [(job.group % engines, number) for job, number in zip(jobs, numbers, strict=True)]

    places = placed(16, 4)
    assert max(loads.values()) - min(loads.values()) <= 8
    if engines == workers:
        assert all(engine == number for engine, number in places)
    placed(1, 40 * workers - sum(loads.values()))  # to the last place
    assert set(loads.values()) == {40}


def test_coroutines_run_side_by_side(start: Start, loop) -> None:
    pool = start("Awaited", workflow_workers=1)
    begun = loop.time()
    assert all(len(made) == 1 for made in run_all(loop, pool, [task(number) for number in range(100)]))
    assert loop.time() - begun < 10  # 20 s one after another


def test_an_instance_that_can_be_reset_serves_many_tasks(start: Start, loop) -> None:
    pool = start("Heavy", workflow_workers=1, workflow_concurrency=2)
    rewards = [made[0].reward for made in run_all(loop, pool, [task(number) for number in range(60)])]
    assert max(rewards) <= 2


def test_one_call_makes_all_runs_of_a_workflow_that_repeats(start: Start, loop) -> None:
    pool = start("Repeated", repeats=True)
    tasks = [task(number, run, 4) for number in range(10) for run in range(4)]
    found = run_all(loop, pool, tasks)
    assert [[(e.run, e.id) for e in made] for made in found] == [
        [(run, f"p{number}#{number}/{run}")] for number in range(10) for run in range(4)
    ]
    processes = [[made[0].reward for made in found[start : start + 4]] for start in range(0, 40, 4)]
    assert all(len(set(of_prompt)) == 1 for of_prompt in processes)


def test_without_auxiliary_models_there_is_none(start: Start, loop) -> None:
    """Workflows ask `if self.auxiliary_models is not None`, as Trinity-RFT has it."""
    ((made,),) = run_all(loop, start("Alone", workflow_workers=1), [task(0)])
    assert made.reward == 4


def test_runs_that_a_call_leaves_out_are_counted(start: Start, loop, capfd) -> None:
    pool = start("Forgetful", repeats=True)
    made = [4, 1, 0, 3, 4]
    found = run_all(loop, pool, [task(number, run, 4, made=made[number]) for number in range(5) for run in range(4)])
    assert [len(one) for one in found] == [int(run < made[number]) for number in range(5) for run in range(4)]
    assert pool.drain_metrics()["workflow/missing_runs"] == 3 + 1  # and none where nothing was made on purpose
    assert pool.drain_metrics()["workflow/missing_runs"] == 0
    reported = capfd.readouterr().err
    assert reported.count("a call should make 4 runs but made") == 1 and "can_repeat = False" in reported


INVALID = ("none", "text", "number", "short", "nan", "prompt", "unsampled", "floats")
INVALID += ("twice", "taught")
INVALID += ("foreign", "negative", "endless", "infinite")


def disturbed(loop, pool: WorkflowPool, what: str) -> dict[str, float]:
    """Return counts of failures of 20 runs, two of which are `what`; the others are not affected."""
    tasks = [task(number, what=what if number in (5, 17) else "work") for number in range(20)]
    found = run_all(loop, pool, tasks)
    assert [made is None for made in found] == [number in (5, 17) for number in range(20)]
    assert all(len(made) == 1 for made in found if made is not None)
    metrics = pool.drain_metrics()
    assert metrics["workflow/runs"] == 20
    return {name.rpartition("/")[2]: count for name, count in metrics.items() if "failed" in name}


def test_what_a_run_returns_or_raises_is_its_own_failure(start: Start, loop, capfd) -> None:
    pool = start("Faulty", workflow_workers=1)
    for what in ("raise", "leave", "panic", *INVALID):
        assert disturbed(loop, pool, what) == {"invalid" if what in INVALID else "raised": 2}
    reported = capfd.readouterr().err
    assert reported.count("a run failed") == 2  # the first of each kind
    assert "my_workflows.py" in reported and "ValueError: no idea" in reported and "workflow/failed/raised" in reported


def test_what_a_coroutine_does_to_its_loop_costs_the_others_nothing(start: Start, loop) -> None:
    pool = start("FaultyLoop", workflow_workers=1, workflow_timeout=20)
    for what in ("lost", "leaving", "panic"):
        assert disturbed(loop, pool, what) == {"raised": 2}


@pytest.mark.parametrize(
    ("what", "kind"),
    [pytest.param("exit", "worker_died", marks=pytest.mark.nightly), ("leak", "worker_died"), ("hang", "timeout")],
)
def test_what_a_run_does_to_its_process_costs_the_others_nothing(start: Start, loop, what: str, kind: str) -> None:
    pool = start("Faulty", workflow_timeout=2.0 if what == "hang" else 60.0, workflow_memory_gb=1.2)
    assert disturbed(loop, pool, what) == {kind: 2}
    assert all(len(made) == 1 for made in run_all(loop, pool, [task(number) for number in range(8)]))


def test_a_model_elsewhere_that_fails_costs_no_run_unless_it_refuses_one(start: Start, loop) -> None:
    """OpenAI's client tries three times; a run that still fails begins again, and a refused one is counted."""
    # a failed run begins again after a control, and once more after a pause
    faults = ["500", "reset", None, "500", "reset", "429 after 0", None, "503", "503", "503"]
    faults += [None, "503", "500", "reset", None, "reset", "503", "503", None, "400", None, "400"]

    def reply(asked: dict) -> dict:
        message = {"role": "assistant", "content": asked["messages"][-1]["content"]}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return {"id": "1", "object": "chat.completion", "created": 0, "model": asked["model"], "choices": [choice]}

    server = ScriptedServer(reply, faults)
    elsewhere = AuxiliaryPlan("judge", None, f"{server.url}/v1", "secret", "large")
    pool = start("Judged", auxiliary_models=(elsewhere,), workflow_workers=1)
    made = [run_all(loop, pool, [task(number)])[0] for number in range(5)]
    assert [found and [one.reward for one in found] for found in made] == [[0], [1], [2], None, [4]]
    metrics = pool.drain_metrics()
    assert (
        metrics["workflow/failed/raised"] == 1 and metrics["workflow/runs"] == 5 and metrics["workflow/restarts"] == 0
    )
    assert {body["model"] for body in server.bodies} == {"large"}
    assert {headers["authorization"] for headers in server.headers} == {"Bearer secret"}


def test_a_time_limit_of_a_workflow_of_its_own_is_its_error(
    start: Start, loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outage, "DOUBT_S", 1.0)  # seconds in which a time limit may be an outage
    pool = start("Waits", workflow_workers=1)
    ((experience,), *failed) = run_all(loop, pool, [task(2), task(0), task(1)])
    assert experience and failed == [None, None]
    metrics = pool.drain_metrics()
    assert metrics["workflow/failed/raised"] == 2 and "workflow/failed/timeout" not in metrics


def test_a_model_elsewhere_that_is_slow_costs_its_runs_alone(start: Start, loop) -> None:
    server = ScriptedServer(lambda asked: {}, seconds=30)
    elsewhere = AuxiliaryPlan("judge", None, f"{server.url}/v1", "secret", "large")
    pool = start("Judged", auxiliary_models=(elsewhere,), workflow_workers=1, workflow_timeout=1)
    assert run_all(loop, pool, [task(0), task(1)]) == [None, None]
    metrics = pool.drain_metrics()
    assert metrics["workflow/failed/timeout"] == 2 and metrics["workflow/restarts"] == 0


def test_a_failure_ends_the_run_where_that_is_wanted(start: Start, loop) -> None:
    pool = start("Faulty", on_workflow_error="stop")
    good, bad = run_all(loop, pool, [task(1), task(2, what="raise")])
    assert len(good) == 1 and isinstance(bad, RunError)
    assert "ValueError: no idea" in str(bad) and "on_workflow_error" in str(bad)


def test_a_plugin_that_cannot_be_imported_is_reported_with_its_traceback(tmp_path) -> None:
    (tmp_path / "broken_plugin.py").write_text("def half():\n    return 1 / 0\n\nhalf()\n")
    with pytest.raises(WorkflowError, match=r"(?s)broken_plugin.py.*line 4.*half\(\).*ZeroDivisionError"):
        load_plugins(str(tmp_path))
    (tmp_path / "broken_plugin.py").unlink()
    (tmp_path / "json.py").write_text("")
    with pytest.raises(WorkflowError, match="the name of another module"):
        load_plugins(str(tmp_path))
    with pytest.raises(WorkflowError, match="not a directory"):
        load_plugins(str(tmp_path / "nowhere"))


def test_a_name_that_means_no_workflow_is_reported() -> None:
    with pytest.raises(WorkflowError, match="unknown workflow 'nothing'"):
        find_workflow("nothing", None)
    with pytest.raises(WorkflowError, match="expected a class with a method run"):
        find_workflow("pathlib.Path", None)
    with pytest.raises(WorkflowError, match="expected a class such as"):
        find_workflow("os.getcwd", None)


@pytest.mark.parametrize(
    ("flags", "method"), [({}, "run"), ({"is_async": True}, "run_async"), ({"can_reset": True, "run": print}, "reset")]
)
def test_a_missing_method_is_reported_before_anything_starts(monkeypatch, flags: dict, method: str) -> None:
    module = ModuleType("unfinished_workflows")
    vars(module)["Unfinished"] = type("Unfinished", (Workflow,), flags)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(WorkflowError, match=f"expected a class with a method {method}; write it"):
        find_workflow("unfinished_workflows.Unfinished", None)
