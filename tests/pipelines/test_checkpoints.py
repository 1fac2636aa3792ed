"""When a directory of files is a checkpoint."""

import asyncio
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from runs import REPOSITORY
from states import write_state

from roll_opd.base.failures import RunError
from roll_opd.config.plan import CheckpointPlan
from roll_opd.pipelines.checkpoints import Checkpoint, CheckpointError, Checkpoints, damage, find
from roll_opd.pipelines.run_pipeline import own_directory
from roll_opd.pipelines.settings_history import History, begun
from roll_opd.planner.load_plan import load_plan
from roll_opd.tracking.run_directory import STATE_FILE, RunDirectory, complete_checkpoints
from roll_opd.workers.worker_progress import Writing


class Said(Writing):
    """Lists of files that ranks have written, some of them on a disk that this process may not see."""

    def __init__(self, files: list[Path]) -> None:
        super().__init__(())
        self._files = files

    async def files(self, *, wait: bool) -> list[Path]:
        return self._files


@pytest.mark.parametrize("lost", ["state/__1_0.distcp", "state/.metadata", "hf/model.safetensors"])
@pytest.mark.parametrize("later", [False, True])
def test_a_file_that_a_rank_has_written_and_nobody_sees(tmp_path: Path, lost: str, later: bool) -> None:
    run = RunDirectory.create(tmp_path, "run")
    checkpoints = Checkpoints(run, CheckpointPlan(save_steps=1, async_save=later), last_step=2)
    names = ("state/__0_0.distcp", "state/__1_0.distcp", "state/.metadata", "hf/model.safetensors")

    async def save(directory: Path, missing: str | None = None) -> Writing:
        for name in names:
            (directory / name).parent.mkdir(exist_ok=True)
            if name != missing:
                (directory / name).write_bytes(b"0")
        return Said([directory / name for name in names])

    async def steps() -> None:
        await checkpoints.write(1, save, {})
        checkpoints.mark_logged()
        await checkpoints.commit(wait=True)
        assert [path.name for path in complete_checkpoints(run.path)] == ["step_1"]
        await checkpoints.write(2, lambda directory: save(directory, lost), {})
        checkpoints.mark_logged()
        await checkpoints.commit(wait=True)

    with pytest.raises(CheckpointError, match=f"step 2 .*{Path(lost).name} and 0 more files .* another node"):
        asyncio.run(steps())
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_1"]


def saved(run: Path, step: int) -> Path:
    checkpoint = run / "checkpoints" / f"step_{step}"
    write_state(checkpoint / "state")
    (checkpoint / STATE_FILE).write_text(json.dumps({"step": step, "source": {}}))
    return checkpoint


def test_an_incomplete_checkpoint_is_reported(tmp_path: Path) -> None:
    whole = saved(tmp_path, 1)
    assert damage(whole) is None
    (stored,) = (whole / "state").glob("*.distcp")
    for name, reported in (
        (stored.name, "is cut off: 100 of"),
        ("common.pt", "cannot be read"),
        (".metadata", "cannot be"),
    ):
        half = saved(tmp_path / "half" / name, 1)
        file = half / "state" / name
        file.write_bytes(file.read_bytes()[:100])
        assert reported in str(damage(half)) and str(half / "state") in str(damage(half))
        file.unlink()
        assert str(half / "state") in str(damage(half))


def test_a_run_that_goes_on_while_another_driver_looks_at_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last checkpoint is not moved."""
    monkeypatch.chdir(REPOSITORY)
    run = RunDirectory.create(tmp_path, "demo").path
    saved(run, 4)
    plan = load_plan("demo", "onpolicy_distill", [f"output_dir={tmp_path}", "resume_from_checkpoint=true"], pure=True)
    resumed = find(plan.checkpoint, plan.output_dir, plan.exp_name)
    assert resumed and resumed.step == 4
    later = saved(run, 6)
    with (
        pytest.raises(RunError, match=r"has saved a later checkpoint since this run read .*step_4"),
        own_directory(plan, resumed, begun(plan)),
    ):
        pass
    assert complete_checkpoints(run) == [later, later.with_name("step_4")]
    resumed = find(plan.checkpoint, plan.output_dir, plan.exp_name)
    with own_directory(plan, resumed, begun(plan)) as directory:
        assert directory.path == run and not directory.set_aside


def test_a_run_interrupted_while_its_directory_is_made_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(History):
        def as_facts(self) -> list[dict[str, Any]]:
            assert list(tmp_path.glob("runs/*/*/config.yaml"))
            raise KeyboardInterrupt

    monkeypatch.chdir(REPOSITORY)
    plan = load_plan("demo", "onpolicy_distill", [f"output_dir={tmp_path / 'runs'}"], pure=True)
    history = Interrupted(**vars(begun(plan)))
    with pytest.raises(KeyboardInterrupt), own_directory(plan, None, history):
        pass
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_keeps_the_date_of_its_run(tmp_path: Path) -> None:
    run, began = RunDirectory.create(tmp_path, "run"), datetime(2026, 2, 28, 23, 59, 58)

    async def save(directory: Path) -> Writing:
        (directory / "state").mkdir()
        return Said([])

    async def step() -> None:
        checkpoints = Checkpoints(run, CheckpointPlan(save_steps=1), last_step=1, began=began)
        await checkpoints.write(1, save, {})
        checkpoints.mark_logged()
        await checkpoints.commit(wait=True)

    asyncio.run(step())
    (path,) = complete_checkpoints(run.path)
    assert Checkpoint.read(path).began == began


def test_what_was_set_aside_is_resumed_from_a_directory_of_its_own(tmp_path: Path) -> None:
    aside = RunDirectory.resume(saved(tmp_path / "run", 4).parent.parent, step=2).set_aside[0]
    with pytest.raises(CheckpointError, match=r"move it to checkpoints/step_4 of a new directory and name that"):
        find(CheckpointPlan(resume=str(aside)), "output", "demo")
    moved = tmp_path / "new" / "checkpoints" / "step_4"
    moved.parent.mkdir(parents=True)
    aside.rename(moved)
    found = find(CheckpointPlan(resume=str(tmp_path / "new")), "output", "demo")
    assert found and found.path == moved and found.step == 4
