"""The student of a run over rows that bring their answers, as the driver sees it."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from roll_opd.config.plan import ObjectivePlan
from roll_opd.data.training import TrainSample
from roll_opd.workers.learner import Learner
from roll_opd.workers.roles import gathered, optimizer_metrics


class SupervisedStudent(Learner):
    """A student that nobody samples from."""

    async def score(self, samples: Sequence[TrainSample]) -> list[np.ndarray]:
        """Return the log-probs of every answer, f32 [T-P] each, under the weights as they are now."""
        return await gathered(self.group, "logprobs", samples, 1.0)

    async def learn(
        self, samples: Sequence[TrainSample], objective: ObjectivePlan
    ) -> tuple[list[np.ndarray], float, dict[str, float]]:
        """Run all updates of one step.

        Returns the log-probs of every answer before the update that learned from it, the loss (mean over updates), and
        `actor/*` metrics.
        """
        size = self.plan.mini_batch_sequences
        logprobs: dict[int, np.ndarray] = {}
        results = []
        for start in range(0, len(samples), size):
            ranks = await self._update("fit", samples[start : start + size], objective)
            results.append(ranks)
            logprobs |= {start + number: values for rank in ranks for number, values in rank.logprobs.items()}
            numbers = range(start, min(start + size, len(samples)))
            self._check_applied(ranks, [replace(samples[n], old_logprobs=logprobs[n]) for n in numbers])
        loss = sum(rank.sums.get("weighted_loss", 0.0) for ranks in results for rank in ranks) / len(results)
        return [logprobs[number] for number in range(len(samples))], loss, optimizer_metrics(results)
