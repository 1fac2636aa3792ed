"""The student of a run over rows that bring their answers, as the driver sees it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import ray

from roll_opd.config.plan import ObjectivePlan
from roll_opd.data.compact import Compact
from roll_opd.data.training import TrainSample
from roll_opd.workers.roles import Student, gathered_logprobs


@dataclass
class Learner(Student):
    """A student that nobody samples from."""

    async def score(self, samples: Sequence[TrainSample]) -> list[np.ndarray]:
        """Return the log-probs of every answer, f32 [T-P] each, under the weights as they are now."""
        return await gathered_logprobs(self.group, samples, temperature=1.0)

    async def fit(
        self, samples: Sequence[TrainSample], objective: ObjectivePlan
    ) -> tuple[list[np.ndarray], float, dict[str, float]]:
        """Run all updates of one step.

        Returns the log-probs of every answer before the update that learned from it, the loss (mean over updates), and
        `actor/*` metrics.
        """
        size = self.plan.mini_batch_sequences
        logprobs: dict[int, np.ndarray] = {}
        updates = []
        for start in range(0, len(samples), size):
            batch = ray.put(Compact(samples[start : start + size]))
            ranks = await self.group.call("fit", batch, objective)
            updates.append(ranks)
            self.count_skips(applied=ranks[0].applied)
            logprobs |= {start + number: values for rank in ranks for number, values in rank.logprobs.items()}
        loss = sum(rank.sums.get("weighted_loss", 0.0) for ranks in updates for rank in ranks) / len(updates)
        metrics = {
            "actor/grad_norm": float(np.mean([ranks[0].grad_norm for ranks in updates])),
            "actor/lr": updates[-1][0].learning_rate,
            "actor/skipped_updates": float(sum(not ranks[0].applied for ranks in updates)),
        }
        return [logprobs[number] for number in range(len(samples))], loss, metrics
