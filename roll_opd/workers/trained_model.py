"""The driver's part of a trained model.

It makes updates, counts skipped updates and writes checkpoints.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from roll_opd.base.failures import SkippedUpdates
from roll_opd.config.plan import TrainPlan
from roll_opd.models.device_phases import STATE, needs
from roll_opd.samples.sharding import Assignment, ShardedBatch, TrainResult
from roll_opd.tracking.console import Count
from roll_opd.workers.frozen_model import Rank
from roll_opd.workers.group import WorkerGroup
from roll_opd.workers.worker_progress import Writing

SKIPS_ALLOWED = 3  # consecutive updates without a finite loss and gradient

ACTOR_METRICS = ("actor/grad_norm", "actor/lr", "actor/skipped_updates")

Update = Sequence[TrainResult]  # results of one optimizer update, one per rank


@dataclass
class Learner:
    """A trained model; subclasses prepare the samples."""

    plan: TrainPlan
    group: WorkerGroup
    updates: Count = field(init=False)  # counter of a step's updates
    _skipped: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.updates = Count(f"updates of {self.plan.name}")

    async def save(self, directory: Path) -> Writing:
        """Write the training state and a Hugging Face model into a directory.

        With `async_save`, they are written in the background.
        """
        (directory / "state").mkdir(parents=True, exist_ok=True)
        await self.group.call("save", directory)
        return Writing([self.group])

    async def load(self, directory: Path) -> None:
        """Restore the state that `save` wrote."""
        await self.group.call("load", directory)

    def end(self) -> None:
        """End the processes."""
        self.group.end()

    def _assigned(self, samples: Sequence[Any], group_size: int = 1) -> Assignment:
        """Return the assignment of samples to micro-batches.

        For each data-parallel rank, the assignment lists the rank's micro-batches. A micro-batch is a list of sample
        numbers.
        """
        sequences = [(sample.tokens, sample.prompt_length) for sample in samples]
        return self.group.packing.assign(sequences, self.plan.train_limits, group_size)

    def _counted(
        self, sharded: ShardedBatch, results: Sequence[tuple[int, TrainResult]]
    ) -> tuple[list[TrainResult], dict[int, dict[str, np.ndarray]]]:
        """Count an update. Return (results, columns): the new columns of each sample by its number.

        Args:
            results: (data-parallel rank, result) of each rank.
        """
        self.updates.one()
        return [result for _, result in results], sharded.merged((rank, result.columns) for rank, result in results)

    def _check_applied(self, update: Update, samples: Sequence[Any]) -> None:
        """Count the consecutive skipped updates; raise SkippedUpdates after `SKIPS_ALLOWED` of them.

        Args:
            samples: samples of the update, which the exception contains.
        """
        self._skipped = 0 if update[0].applied else self._skipped + 1
        if self._skipped >= SKIPS_ALLOWED:
            raise SkippedUpdates(
                f"{self._skipped} consecutive updates of {self.plan.name} were skipped, because their log-probs, loss"
                " or gradient were not finite; they did not change its weights. Lower its learning_rate, or look for"
                " values that are not finite in the samples of the last update",
                samples,
            )


def total(updates: Sequence[Update], name: str) -> float:
    """Return the sum of `name` over all ranks and updates.

    A rank that does not report `name` counts as 0.
    """
    return sum(rank.sums.get(name, 0.0) for update in updates for rank in update)


def optimizer_metrics(updates: Sequence[Update], names: tuple[str, str, str] = ACTOR_METRICS) -> dict[str, float]:
    """Return the mean gradient norm, the last learning rate and the number of skipped updates.

    Args:
        names: keys of these three metrics, in this order.
    """
    grad_norm = float(np.mean([update[0].grad_norm for update in updates]))
    skipped = float(sum(not update[0].applied for update in updates))
    return dict(zip(names, (grad_norm, updates[-1][0].learning_rate, skipped), strict=True))


class TrainableRank(Rank):
    """Base class of the ranks of trainable models. It saves and loads the training state."""

    @needs(STATE)
    def save(self, directory: Path) -> None:
        """Save the training state in state/, the model in hf/, and a LoRA adapter in adapter/.

        Call `written` to get the list of files.
        """
        from roll_opd.megatron.checkpoint import save_state
        from roll_opd.megatron.export import save_adapter

        later = self._async_save
        parts = [save_state(self._engine, directory / "state", later=later), self._save_hf(directory / "hf", later)]
        if self._engine.adapters:
            parts.append(save_adapter(self._engine, directory / "adapter", later=later))
        self._write(*parts)

    @needs(STATE)
    def load(self, directory: Path) -> None:
        """Load a saved state."""
        from roll_opd.megatron.checkpoint import load_state

        load_state(self._engine, directory / "state")

    def _save_hf(self, directory: Path, later: bool) -> Callable[[], list[Path]]:
        from roll_opd.megatron.export import save_hf

        return save_hf(self._engine, directory, later=later)
