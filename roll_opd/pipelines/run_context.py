"""`Run`: the plan, data, records and checkpoints of one run, for its pipeline."""

import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from roll_opd.cluster.placement import Placement
from roll_opd.config.plan import RunPlan
from roll_opd.data.dataset import Prompt
from roll_opd.data.prompt_source import TaskSource
from roll_opd.pipelines.checkpoints import Checkpoint, Checkpoints, Save
from roll_opd.pipelines.run_logger import RunLogger
from roll_opd.pipelines.settings_history import History
from roll_opd.pipelines.shutdown import Ending
from roll_opd.rollout.workflow_runs import FinishedGroup
from roll_opd.tracking.console import Progress
from roll_opd.tracking.phase_clock import PhaseClock

Validate = Callable[[], Awaitable[dict[str, float]]]


@dataclass(frozen=True)
class Run:
    """A run of a pipeline. Its methods resume, validate, save and log the run."""

    plan: RunPlan
    placement: Placement
    source: TaskSource
    held_out: list[Prompt]
    logger: RunLogger
    checkpoints: Checkpoints
    resumed: Checkpoint | None  # None for a new run
    history: History  # settings of the run's steps
    ending: Ending
    first_state: Mapping[str, Any] = field(default_factory=dict)  # of the prompt source at the start of the run

    @property
    def clock(self) -> PhaseClock:
        return self.logger.clock

    @property
    def progress(self) -> Progress:
        return self.logger.progress

    @property
    def steps_done(self) -> int:
        """Number of steps that the resumed checkpoint has completed, or 0 for a new run."""
        return self.resumed.step if self.resumed else 0

    @property
    def steps(self) -> Iterator[int]:
        """Yield the numbers of the remaining steps. The first step of a run has the number 1.

        Garbage is collected only between two steps, after the samples of the finished step have been released.
        """
        for step in range(self.steps_done + 1, self.plan.max_steps + 1):
            yield step
            gc.collect()

    async def restore(self, load: Callable[[Path], Awaitable[None]]) -> None:
        """Restore the state of a resumed run by calling `load`."""
        if self.resumed:
            await self.placement.starting.of(f"the state after step {self.resumed.step}", load(self.resumed.path))

    async def log_start(self, validate: Validate) -> None:
        """Validate and log the student before the first step of a new run."""
        if self.resumed or self.logger.is_begun:
            self.logger.restart()
        else:
            with self.clock.phase("validate"):
                metrics = await validate() if self.held_out else {}
            self.logger.start(metrics)
        self.logger.startup_parts |= self.placement.starting.parts
        self.ending.is_training = True  # from here on, a checkpoint is worth writing

    def rewound(self) -> "Run":
        """Return this run at its newest checkpoint, or at its start if it has none.

        The records of later steps are removed, and the prompts are drawn again.
        """
        newest = self.checkpoints.newest()
        resumed = Checkpoint.read(newest[1]) if newest else self.resumed
        self.checkpoints.forget()
        self.source.load_state_dict(dict(resumed.source_state if resumed else self.first_state))
        self.logger.rewind(resumed.step if resumed else 0)
        return replace(self, resumed=resumed)

    async def validation(self, step: int, validate: Validate) -> dict[str, float]:
        """Return validation metrics every `eval_steps` steps and after the last step.

        For all other steps the map is empty.
        """
        if not self.validates(step):
            return {}
        with self.clock.phase("validate"):
            return await validate()

    def validates(self, step: int) -> bool:
        """Return whether the weights after `step` are validated."""
        every, is_last = self.plan.eval_steps, step == self.plan.max_steps
        return bool(self.held_out and every and (step % every == 0 or is_last))

    def saves(self, step: int) -> bool:
        """Return whether a checkpoint after `step` is due now."""
        return self.checkpoints.due(step) or self.ending.is_asked_for

    @asynccontextmanager
    async def checkpoint(
        self,
        step: int,
        save: Save,
        kl_coef: float | None = None,
        source_state: dict[str, Any] | None = None,
        groups: Sequence[FinishedGroup] = (),
    ) -> AsyncIterator[None]:
        """Write a checkpoint after `step` if one is due.

        The checkpoint is written before the block and marked as logged after the block. The block logs the step, so the
        logs are complete up to every valid checkpoint. With `async_save`, a checkpoint may become valid only after a
        later step, but the checkpoint of the last step becomes valid after its own block.

        If SIGTERM has arrived, a checkpoint is always written. Terminated is then raised, except after the last step.

        Args:
            kl_coef: KL coefficient of the next step.
            source_state: state of the prompt source after the step's batch (default: its current state).
            groups: finished groups that no batch has used yet.
        """
        source_state = self.source.state_dict() if source_state is None else source_state

        async def write() -> None:
            with self.clock.phase("checkpoint"):
                await self.checkpoints.write(step, save, source_state, kl_coef, groups)

        is_written = self.saves(step)
        if is_written:
            await write()
        yield
        if self.ending.is_asked_for and not is_written:  # SIGTERM arrived while the step was logged
            await write()
            is_written = True
        if is_written:
            self.checkpoints.mark_logged(self.logger.model_files(step))
        ends = self.ending.is_asked_for or step == self.plan.max_steps
        await self.checkpoints.commit(wait=ends or not self.plan.checkpoint.async_save)
        if self.ending.is_asked_for and step < self.plan.max_steps:
            raise self.ending.saved(step)
