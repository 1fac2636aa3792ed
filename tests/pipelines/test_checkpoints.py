"""When a directory of files counts as a checkpoint."""

import asyncio
from pathlib import Path

import pytest

from roll_opd.pipelines.checkpoints import CheckpointError, Checkpoints, complete
from roll_opd.plan import CheckpointPlan
from roll_opd.tracking.run_directory import RunDirectory
from roll_opd.workers.writing import Writing


class Said(Writing):
    """What ranks say that they have written, some of them perhaps on a disk that this process does not see."""

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
        checkpoints.put_on_record()
        await checkpoints.settle(wait=True)
        assert [path.name for path in complete(run.path)] == ["step_1"]
        await checkpoints.write(2, lambda directory: save(directory, lost), {})
        checkpoints.put_on_record()
        await checkpoints.settle(wait=True)

    with pytest.raises(CheckpointError, match=f"step 2 .*{Path(lost).name} and 0 more files .* another node"):
        asyncio.run(steps())
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_1"]
