"""What every role that learns has, as the driver sees it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from roll_opd.cluster.group import WorkerGroup
from roll_opd.config.plan import TrainPlan
from roll_opd.data.compact import Compact
from roll_opd.data.training import TrainResult
from roll_opd.workers.errors import SkippedUpdates

SKIPS_ALLOWED = 3  # updates in a row without a finite loss and gradient


@dataclass
class Learner:
    """A model that learns. What it learns from is its subclass's."""

    plan: TrainPlan
    group: WorkerGroup
    _skipped: int = field(default=0, init=False)

    async def save(self, directory: Path) -> None:
        """Write training state and a Hugging Face model into `directory`."""
        (directory / "state").mkdir(parents=True, exist_ok=True)
        await self.group.call("save", directory)

    async def load(self, directory: Path) -> None:
        """Put back what `save` wrote."""
        await self.group.call("load", directory)

    async def _update(self, method: str, samples: Sequence[Any], *args: Any) -> list[TrainResult]:
        """Run one optimizer update from one mini-batch; returns what each rank says of it."""
        return await self.group.call(method, ray.put(Compact(samples)), *args)

    def _check_applied(self, ranks: Sequence[TrainResult], samples: Sequence[Any]) -> None:
        """Count an update that was skipped. SkippedUpdates, with its `samples`, after `SKIPS_ALLOWED` in a row."""
        self._skipped = 0 if ranks[0].applied else self._skipped + 1
        if self._skipped >= SKIPS_ALLOWED:
            raise SkippedUpdates(
                f"{self._skipped} updates in a row of {self.plan.name} had log-probs, a loss or a gradient that were"
                " not finite, and were skipped; its weights are those before them. Lower its learning_rate, or look"
                " for what is not finite in the samples of the last one",
                samples,
            )
