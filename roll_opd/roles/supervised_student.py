"""The student of supervised training (SFT, DPO), whose rows bring their answers, as the driver sees it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from roll_opd.algorithms.aggregation import loss_scales
from roll_opd.config.plan import ObjectivePlan
from roll_opd.roles.colocation import Turns
from roll_opd.roles.learner_role import Learner, optimizer_metrics, total
from roll_opd.roles.policy_roles import gathered
from roll_opd.samples.dp_shards import Cut, cut, without_tokens
from roll_opd.samples.training import TrainSample


@dataclass
class SupervisedStudent(Learner):
    """A student that learns from given answers."""

    turns: Turns = field(default_factory=Turns)  # with a reference policy that shares its devices

    async def compute_logprobs(self, samples: Sequence[TrainSample]) -> list[np.ndarray]:
        """Return the log-probs of every answer, f32 [T-P] each, under the weights as they are now."""
        return await gathered(self.group, "compute_logprobs", samples, 1.0)

    async def learn(
        self, samples: Sequence[TrainSample], objective: ObjectivePlan
    ) -> tuple[list[np.ndarray], float, dict[str, float]]:
        """Run all updates of one step.

        Returns the log-probs of every answer before the update that learned from it, the loss (mean over updates), and
        `actor/*` metrics.
        """
        size = self.plan.mini_batch_sequences
        self.updates.begin(-(-len(samples) // size))
        logprobs: dict[int, np.ndarray] = {}
        updates = []
        for start in range(0, len(samples), size):
            batch = self._cut(samples[start : start + size], objective)
            update, computed = await self._update("update_supervised", batch, objective)
            updates.append(update)
            logprobs |= {start + number: values for number, values in computed.items()}
            numbers = range(start, min(start + size, len(samples)))
            self._check_applied(update, [replace(samples[n], old_logprobs=logprobs[n]) for n in numbers])
        loss = total(updates, "weighted_loss") / len(updates)
        return [logprobs[n] for n in range(len(samples))], loss, optimizer_metrics(updates)

    def _cut(self, samples: Sequence[TrainSample], objective: ObjectivePlan) -> Cut[TrainSample]:
        """Cut a mini-batch into what each data-parallel rank learns from."""
        counts = [int(np.count_nonzero(sample.action_mask)) for sample in samples]
        scales = loss_scales(counts, [sample.demonstration for sample in samples], objective)
        assignment = self._assigned(samples, group_size=2 if objective.paired else 1)
        return cut(samples, assignment, lambda sample: sample.ref_logprobs is None, without_tokens, scales=scales)
