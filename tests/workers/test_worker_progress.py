"""The progress of a worker's call, as the driver reads it."""

from typing import Any

import pytest
import ray

from roll_opd.workers import worker_progress
from roll_opd.workers.worker_progress import MicroBatches, running_calls


@ray.remote
class Worker:
    """Makes micro-batches on request."""

    def __init__(self, role: str, seconds: float) -> None:
        worker_progress.INTERVAL_S = seconds
        self.report = MicroBatches(role)

    def work(self, begun: int, total: int) -> None:
        for number in range(begun + 1):
            self.report(number, total)


def test_a_call_that_takes_long_is_seen_until_it_ends(warm_options: dict[str, Any]) -> None:
    start = Worker.options(**warm_options).remote
    student, quick = start("student", 0.0), start("quick", 60.0)
    assert running_calls() == {}
    for begun, seen in ((0, {}), (3, {"student": (3, 8)}), (8, {})):
        ray.get([worker.work.remote(begun, 8) for worker in (student, quick)])
        assert running_calls() == seen


def test_a_ray_that_does_not_answer_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object, **__: object) -> None:
        raise ConnectionError

    monkeypatch.setattr(worker_progress, "_prefix", lambda: "job/")
    monkeypatch.setattr(worker_progress, "INTERVAL_S", 0.0)
    for name in ("_internal_kv_put", "_internal_kv_del", "_internal_kv_list"):
        monkeypatch.setattr(worker_progress, name, gone)
    report = MicroBatches("student")
    for begun in range(4):
        report(begun, 3)
    assert running_calls() == {}
