"""Write, find, check and remove the checkpoints of a run.

A checkpoint is written to a partial directory, which is renamed once the checkpoint is complete.
"""

import asyncio
import json
import os
import shutil
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_opd.base.failures import full_disk
from roll_opd.base.paths import content
from roll_opd.cluster.lost_processes import ProcessDied
from roll_opd.config.plan import CheckpointPlan
from roll_opd.models.model_info import ModelFilesError, read_model
from roll_opd.pipelines.settings_history import History
from roll_opd.tracking.run_directory import (
    STATE_FILE,
    SUPERSEDED,
    RunDirectory,
    checkpoints_of,
    complete_checkpoints,
    write_atomic,
)

if TYPE_CHECKING:  # these import torch, but the launcher must first start its fork server
    from roll_opd.rollout.workflow_runs import FinishedGroup
    from roll_opd.workers.worker_progress import Writing

CRITIC = "critic"  # the critic's part of a checkpoint
FOLLOWERS = "followers"  # directory with a part for each teacher that follows the student
GROUPS = "finished_groups.pickle"  # finished groups of async rollouts on which no update has trained yet
ADAPTER = "adapter"  # the adapter of a LoRA student, in peft's format
HF = "hf"  # the model in Hugging Face's format
_PARTIAL = ".partial_"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or found.

    The error names the newest valid checkpoint and a remedy.
    """


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int
    source_state: dict[str, Any]  # state of the prompt source
    kl_coef: float | None = None  # KL coefficient of the next step
    began: datetime | None = None  # start of its run, in local time
    # parts of the run up to `step`, as `settings_history.parts_of` reads them; None: it has none
    parts: Any = None
    groups: str | None = None  # digest of the file `GROUPS`; None: there is no finished group

    @property
    def run(self) -> Path:
        """The run directory of the checkpoint."""
        return self.path.parent.parent

    @classmethod
    def read(cls, path: Path) -> "Checkpoint":
        """Read the checkpoint at `path`. Raises CheckpointError if it is missing or incomplete."""
        file = path / STATE_FILE
        try:
            text = content(file)
        except OSError as error:
            raise CheckpointError(
                f"{path} is not a checkpoint ({error}); give the directory of an experiment, a run or a"
                " checkpoints/step_N"
            ) from error
        try:
            state = json.loads(text.decode("utf-8"))
            date = state.get("began") if isinstance(state, dict) else None
            began = datetime.fromisoformat(date) if date else None
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{file} cannot be read ({error}); {instead_of(path)}") from error
        whole = isinstance(state, dict) and type(state.get("step")) is int and isinstance(state.get("source"), dict)
        if not whole or not (path / "state").is_dir():
            raise CheckpointError(f"{path} is not a complete checkpoint; {instead_of(path)}")
        more = state.get("parts"), state.get("groups")
        return cls(path.resolve(), state["step"], state["source"], state.get("kl_coef"), began, *more)

    def finished_groups(self) -> "list[FinishedGroup]":
        """Read the finished groups, in the order of their draws.

        Raises CheckpointError if the file is missing or was changed.
        """
        if self.groups is None:
            return []
        from roll_opd.rollout.saved_groups import read_groups  # imports torch

        try:
            return read_groups(self.path / GROUPS, self.groups)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{error}; {instead_of(self.path)}") from error


Save = Callable[[Path], "Awaitable[Writing | None]"]  # None: all files have been written


@dataclass
class _Pending:
    """A checkpoint that is not valid yet."""

    step: int
    writing: "Writing | None"
    is_on_disk: bool = False
    is_logged: bool = False  # whether its step is in the logs of the run
    model_files: Mapping[str, str] = field(default_factory=dict)  # texts to write next to the model


class Checkpoints:
    """The checkpoints directory of one run."""

    def __init__(
        self,
        run: RunDirectory,
        plan: CheckpointPlan,
        last_step: int,
        began: datetime | None = None,
        history: History | None = None,
    ) -> None:
        """Remove the partial checkpoints that a killed process has left.

        Args:
            began: start time of the run; saved in each checkpoint.
            history: settings of the run's steps; saved in each checkpoint.
        """
        self._run, self._plan, self._last_step, self._began = run, plan, last_step, began
        self._history = history
        self._pending: _Pending | None = None
        self.forget()  # a save that was killed

    @property
    def directory(self) -> RunDirectory:
        """The directory of the run."""
        return self._run

    def newest(self) -> tuple[int, Path] | None:
        """Return (step, path) of the newest complete checkpoint, or None if no checkpoint is complete."""
        found = complete_checkpoints(self._run.path)[:1]
        return (int(found[0].name.removeprefix("step_")), found[0]) if found else None

    def forget(self) -> None:
        """Remove the partial checkpoint, if there is one."""
        self._pending = None
        for leftover in self._run.checkpoints.glob(f"{_PARTIAL}*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def due(self, step: int) -> bool:
        """Return whether to save after `step`."""
        every = self._plan.save_steps
        return step == self._last_step or (every > 0 and step % every == 0)

    async def write(
        self,
        step: int,
        save: Save,
        source_state: dict[str, Any],
        kl_coef: float | None = None,
        groups: "Sequence[FinishedGroup]" = (),
    ) -> None:
        """Write a checkpoint after `step`. An earlier partial checkpoint is completed first.

        With `async_save`, the files are written in the background. After a disk error, this method or a later `commit`
        raises CheckpointError.

        Args:
            save: function that saves the models into a directory.
            source_state: state of the prompt source.
            kl_coef: KL coefficient of the next step.
            groups: finished groups that no batch has used yet.
        """
        from roll_opd.rollout.saved_groups import write_groups  # imports torch

        await self.commit(wait=True)
        partial = self._partial(step)
        with self._failing(step):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            writing = await save(partial)
            if writing is None and self._plan.async_save:
                raise TypeError("the pipeline's save returned None; return the result of the student's save")
            began = self._began and self._began.isoformat()
            parts = self._history.as_json(step) if self._history else None
            digest = await asyncio.to_thread(write_groups, partial / GROUPS, groups) if groups else None
            state = {"step": step, "source": source_state, "kl_coef": kl_coef, "began": began, "parts": parts}
            state |= {"groups": digest} if digest else {}
            (partial / STATE_FILE).write_text(json.dumps(state))
        self._pending = _Pending(step, writing)
        if not self._plan.async_save:
            await self._end(self._pending, wait=True)

    def mark_logged(self, model_files: Mapping[str, str] | None = None) -> None:
        """Record that the step of the partial checkpoint is in the logs, and the texts to write next to its model.

        `commit` may then make the checkpoint valid.
        """
        if self._pending:
            self._pending.is_logged, self._pending.model_files = True, model_files or {}

    async def commit(self, *, wait: bool) -> None:
        """Make the partial checkpoint valid if its step is logged and its files are on the disk.

        If `wait` is True, this method first waits until the files have been written. After the checkpoint has become
        valid, the oldest checkpoints are removed, so that `max_ckpt_to_keep` checkpoints remain.
        """
        pending = self._pending
        if pending is None or not pending.is_logged:
            return
        if not pending.is_on_disk:
            await self._end(pending, wait=wait)
        if not pending.is_on_disk:
            return
        partial = self._partial(pending.step)
        if (partial / HF).is_dir():
            with self._failing(pending.step):
                for name, text in pending.model_files.items():
                    write_atomic(partial / HF / name, text)
        self._pending = None
        target = self._run.checkpoint(pending.step)
        self._remove(target)
        os.replace(partial, target)
        _flush_directory(self._run.checkpoints)
        if self._plan.max_ckpt_to_keep:
            for old in complete_checkpoints(self._run.path)[self._plan.max_ckpt_to_keep :]:
                self._remove(old)

    async def _end(self, pending: _Pending, *, wait: bool) -> None:
        """Flush the files of a partial checkpoint to the disk.

        If `wait` is True, this method first waits until the ranks have written all files. If `wait` is False and some
        files have not been written yet, it does nothing.
        """
        with self._failing(pending.step):
            files = await pending.writing.files(wait=wait) if pending.writing else []
            if files is not None:
                _check_all_there(files)
                await asyncio.to_thread(_flush, self._partial(pending.step))
                pending.is_on_disk = True

    @contextmanager
    def _failing(self, step: int) -> Iterator[None]:
        """Remove the partial checkpoint of `step` if the block raises an error.

        The error is raised as a CheckpointError. A TypeError, AttributeError or NameError is raised unchanged, because
        it is an error of the pipeline and not of the disk.
        """
        try:
            yield
        except ProcessDied:
            self.forget()
            raise
        except Exception as error:
            self._pending = None
            # free space before the partial files are removed
            free = shutil.disk_usage(self._run.path).free
            why = full_disk(error, self._run.path) or f"{_first_line(error)} ({free / 2**20:.0f} MiB free)"
            shutil.rmtree(self._partial(step), ignore_errors=True)
            if isinstance(error, (TypeError, AttributeError, NameError)):
                raise  # the pipeline failed, not the disk
            raise CheckpointError(self._write_failed(step, why)) from error

    def _remove(self, checkpoint: Path) -> None:
        """Remove a checkpoint.

        The directory is renamed before its files are removed. If the process is killed in the meantime, no incomplete
        checkpoint remains under the original name.
        """
        if checkpoint.exists():
            doomed = checkpoint.with_name(f"{_PARTIAL}old_{checkpoint.name}")  # the next checkpoint may be in progress
            os.replace(checkpoint, doomed)
            shutil.rmtree(doomed)

    def _partial(self, step: int) -> Path:
        return self._run.checkpoints / f"{_PARTIAL}step_{step}"

    def _write_failed(self, step: int, why: str) -> str:
        left = complete_checkpoints(self._run.path)
        resume = f"the last good checkpoint is {left[0]}" if left else "there is no earlier checkpoint"
        return (
            f"the checkpoint of step {step} could not be written below {self._run.checkpoints}: {why}\n"
            f"{resume}. Free space, lower max_ckpt_to_keep or change output_dir, then continue with"
            " resume_from_checkpoint=true"
        )


def instead_of(checkpoint: Path) -> str:
    """Return advice for the error about a damaged checkpoint: the checkpoint from which to resume instead."""
    path = checkpoint.resolve()
    steps = {each: step for step, each in checkpoints_of(path.parent.parent).items()}
    earlier = [each for each in complete_checkpoints(path.parent.parent) if steps[each] < steps.get(path, 0)]
    if earlier:
        return f"resume from the checkpoint before it with resume_from_checkpoint={earlier[0]}"
    return "start a new run with resume_from_checkpoint=false: there is no earlier checkpoint"


def find(plan: CheckpointPlan, output_dir: str, exp_name: str) -> Checkpoint | None:
    """Return the checkpoint to resume from, or None for a new run.

    If `plan.resume` is True, the newest checkpoint of the newest run that has a checkpoint is returned. If
    `plan.resume` is a path, it names the directory of an experiment, of a run or of a checkpoint.

    Raises CheckpointError if the named checkpoint does not exist or was superseded.
    """
    if plan.resume is False:
        return None
    path = Path(output_dir, exp_name) if plan.resume is True else Path(plan.resume)
    runs = [path, *RunDirectory.runs(path.parent, path.name)]
    if path.name.startswith(SUPERSEDED):
        raise CheckpointError(
            f"{path} was superseded when its run resumed from an earlier step, and its steps are not in the logs; to"
            f" resume from it, move it to checkpoints/{path.name.removeprefix(SUPERSEDED).split('.')[0]} of a new"
            " directory and name that directory"
        )
    newest = next((checkpoint for run in runs for checkpoint in complete_checkpoints(run)[:1]), None)
    if newest is None and plan.resume is True:
        return None
    return Checkpoint.read(newest or path)


def _check_all_there(files: Sequence[Path]) -> None:
    """Raise OSError if this process does not see a file that a rank has written."""
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise OSError(
            f"{missing[0]} and {len(missing) - 1} more files were written on another node and are not visible on this"
            " node; put output_dir on a file system that all nodes share"
        )


def _first_line(error: BaseException) -> str:
    """Return the root cause of an exception as one line of text."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    system = [line for line in lines if "Errno" in line or "No space" in line]
    return (system or lines or [type(error).__name__])[-1]


def _flush(directory: Path) -> None:
    """Flush all files below `directory` to the disk.

    Without the flush, a rename of the directory could reach the disk before the contents of its files.
    """
    for root, _, files in os.walk(directory):
        for name in files:
            with open(Path(root) / name, "rb") as file:
                os.fsync(file.fileno())
        _flush_directory(Path(root))


def _flush_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def damage(checkpoint: Path) -> str | None:
    """Return the first defect of a checkpoint as text, or None if all parts of the checkpoint can be loaded.

    Raises OSError if the file system fails. Such a failure may be temporary.
    """
    return next(chain(_of_groups(checkpoint), _of_states(checkpoint), _of_models(checkpoint)), None)


def _of_groups(checkpoint: Path) -> Iterator[str]:
    try:
        Checkpoint.read(checkpoint).finished_groups()
    except CheckpointError as error:
        if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError):
            raise error.__cause__ from error
        yield str(error.__cause__ or error)


def _of_states(checkpoint: Path) -> Iterator[str]:
    import torch  # takes seconds
    from torch.distributed.checkpoint import FileSystemReader

    for state in sorted(checkpoint.glob("**/state")):
        try:
            stored = FileSystemReader(state).read_metadata().storage_data.values()
            torch.load(state / "common.pt", map_location="cpu", weights_only=False)
        except Exception as error:
            if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
                raise
            yield f"{state} cannot be read ({': '.join((type(error).__name__, *str(error).splitlines()[:1]))})"
            return
        ends: dict[str, int] = {}
        for piece in stored:
            ends[piece.relative_path] = max(ends.get(piece.relative_path, 0), piece.offset + piece.length)
        for name, end in ends.items():
            file = state / name
            if not file.is_file():
                yield f"{file} is missing"
            elif (size := file.stat().st_size) < end:
                yield f"{file} is cut off: {size} of {end} bytes"


def _of_models(checkpoint: Path) -> Iterator[str]:
    for config in sorted(checkpoint.glob("**/config.json")):
        try:
            read_model(config.parent)
        except ModelFilesError as error:
            yield str(error)
