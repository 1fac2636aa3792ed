"""A checkpoint is valid only if the driver sees every file that the ranks have written."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from roll_opd.config.plan import CheckpointPlan
from roll_opd.pipelines.checkpoints import GROUPS, Checkpoint, CheckpointError, Checkpoints, damage
from roll_opd.rollout.workflow_runs import FinishedGroup
from roll_opd.tracking.run_directory import RunDirectory, complete_checkpoints
from roll_opd.workers.worker_progress import Writing


class Rank:
    """A rank that has written a file, where `place` is the file system of its host."""

    def __init__(self, place: Path, name: str) -> None:
        self._place, self._name = place, name

    async def save(self, directory: Path) -> None:
        written = self._place / directory.relative_to("/") / self._name
        written.parent.mkdir(parents=True, exist_ok=True)
        written.write_text("weights")
        self._file = directory / self._name

    async def call(self, method: str, *, wait: bool) -> list[Any]:
        assert method == "written"
        return [[self._file]]


def test_finished_groups_are_part_of_a_checkpoint_and_checked(tmp_path: Path) -> None:
    run = RunDirectory.create(str(tmp_path / "out"), "test")
    run.checkpoints.mkdir()
    checkpoints = Checkpoints(run, CheckpointPlan(save_steps=1, max_ckpt_to_keep=0, async_save=False, resume=False), 9)

    async def save(directory: Path) -> None:
        (directory / "state").mkdir()

    async def saved() -> None:
        await checkpoints.write(1, save, {}, groups=[FinishedGroup(3, False, [])])
        checkpoints.mark_logged()
        await checkpoints.commit(wait=True)

    asyncio.run(saved())
    checkpoint = Checkpoint.read(run.checkpoint(1))
    assert checkpoint.finished_groups() == [FinishedGroup(3, False, [])]
    file = run.checkpoint(1) / GROUPS
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"has changed since it was saved.*start a new run"):
        checkpoint.finished_groups()
    assert str(file) in (damage(run.checkpoint(1)) or "")


@pytest.mark.parametrize("shared", [True, False])
def test_what_another_host_has_written_elsewhere_is_missed(tmp_path: Path, shared: bool) -> None:
    run = RunDirectory.create(str(tmp_path / "out"), "test")
    run.checkpoints.mkdir()
    checkpoints = Checkpoints(run, CheckpointPlan(save_steps=1, max_ckpt_to_keep=0, async_save=False, resume=False), 9)
    ranks = [Rank(Path("/"), "rank_0"), Rank(Path("/") if shared else tmp_path / "other", "rank_1")]

    async def save(directory: Path) -> Writing:
        for rank in ranks:
            await rank.save(directory / "state")
        return Writing(ranks)  # type: ignore[arg-type]

    async def write() -> None:
        await checkpoints.write(1, save, {})
        checkpoints.mark_logged()
        await checkpoints.commit(wait=True)

    if shared:
        asyncio.run(write())
        assert [path.name for path in complete_checkpoints(run.path)] == ["step_1"]
    else:
        with pytest.raises(CheckpointError, match=r"rank_1 and 0 more files were written on another node"):
            asyncio.run(write())
        assert complete_checkpoints(run.path) == [] and not list(run.checkpoints.iterdir())
