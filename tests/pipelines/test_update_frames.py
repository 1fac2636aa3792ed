"""The calls from the loop to the optimizer step, of a real update."""

import asyncio
import traceback
from pathlib import Path
from typing import Any

import pytest
from stage import PURE, SHORT, Stage, optimizer_of

import roll_opd
from roll_opd.workers.actor_group import WorkerGroup

MOST_FRAMES = 6


def test_an_update_passes_few_frames(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's frames below `train`, and the frames on the rank; both end at their last call."""
    scatter, driver, package = WorkerGroup.scatter, [], f"{Path(roll_opd.__file__).parent}/"

    def calls(after: str) -> list[str]:
        found = [frame for frame in traceback.extract_stack() if frame.filename.startswith(package)]
        first = next(place for place, frame in enumerate(found) if frame.filename == package + after)
        return [frame.name for frame in found[first:]]

    async def recorded(group: WorkerGroup, method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "update":
            driver.append([*calls("pipelines/distill.py")[1:], "scatter"])
        return await scatter(group, method, *args, **kwargs)

    def install(rank: Any) -> None:
        optimizer = rank._engine.optimizer
        rank.stacks, step = [], optimizer.step

        def stepped() -> Any:
            rank.stacks.append(calls("workers/student.py"))
            return step()

        optimizer.step = stepped

    def taken(rank: Any) -> list[list[str]]:
        del rank._engine.optimizer.step
        return rank.stacks

    async def on_rank(function: Any) -> Any:
        return await asyncio.gather(*[one.__ray_call__.remote(function) for one in student.group.actors])

    student = stage._workers.student
    stage._events.run_until_complete(on_rank(install))
    monkeypatch.setattr(WorkerGroup, "scatter", recorded)
    assert stage.run(*SHORT, *optimizer_of("student_train"), "max_steps=1", config=PURE, name="frames").code == 0
    ((rank, *_), *_) = stage._events.run_until_complete(on_rank(taken))
    assert rank[0] == "update" and driver[0][-1] == "scatter"
    assert len(driver[0]) + len(rank) <= MOST_FRAMES, (driver[0], rank)
