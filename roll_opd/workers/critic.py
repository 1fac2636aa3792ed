"""The driver's part of the critic.

It computes the values of a step's samples, and updates the critic.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from roll_opd.base.failures import RunError
from roll_opd.config.plan import CriticPlan, MegatronPlan
from roll_opd.models.device_phases import LEARNING, WEIGHTS, Kind, needs
from roll_opd.objective.columns import value_columns
from roll_opd.samples.micro_batches import DPShard, ShardedBatch, shard_batch
from roll_opd.samples.sample import Sample, present, shard_sample, with_columns
from roll_opd.samples.transport import Compact
from roll_opd.tracking.reward_metrics import statistics
from roll_opd.tracking.update_metrics import critic_metrics
from roll_opd.workers.actor_group import actor, gathered
from roll_opd.workers.model_worker import Learner, TrainableRank, sequences_of


@dataclass
class Critic(Learner):
    """Model that estimates the value of each state."""

    plan: CriticPlan

    async def compute_values(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples with the column `values`; raise RunError if a value is not finite."""
        values = await gathered(self.group, "values", [shard_sample(sample) for sample in samples])
        wrong = sum(int((~np.isfinite(array)).sum()) for array in values)
        if wrong:
            raise RunError(
                f"{self.plan.name}: {wrong} values are not finite; check its model, or lower its learning_rate"
            )
        return with_columns(samples, values=values)

    async def learn(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Make all updates of one step; return the metrics `critic/*`.

        The samples must have the columns `values` and `returns`.
        """
        updates = []
        size = self.plan.mini_batch_sequences
        self.updates.begin(self.plan.critic_epochs * -(-len(samples) // size))
        for _ in range(self.plan.critic_epochs):
            for start in range(0, len(samples), size):
                batch = samples[start : start + size]
                shards = self._shards(batch)
                update, _ = self._counted(shards, await self.group.scatter("update", shards))
                updates.append(update)
                self._check_applied(updates[-1], batch)
        return critic_metrics(updates) | value_metrics(samples)

    def _shards(self, samples: Sequence[Sample]) -> ShardedBatch:
        """Split a mini-batch into shards for the data-parallel ranks.

        A shard has the columns that the loss reads.
        """
        read = value_columns(samples)
        return shard_batch(read, self._assigned(read))


def value_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the metrics of values and returns.

    `critic/values` and `critic/returns` are statistics over action tokens. `critic/explained_variance` is 1 - Var(R -
    V) / Var(R). It is 1 for a perfect critic, 0 for a critic that predicts a constant, and negative for a worse critic.
    It is missing if all returns are equal.
    """
    counted = [sample for sample in samples if sample.is_learned_from]
    values = _of_actions(counted, [present(e.values) for e in counted])
    returns = _of_actions(counted, [present(e.returns) for e in counted])
    kinds = ("mean", "max", "min")
    metrics = {**statistics("critic/values", values, kinds), **statistics("critic/returns", returns, kinds)}
    if len(returns) and (variance := float(returns.var())) > 0:
        metrics["critic/explained_variance"] = 1.0 - float((returns - values).var()) / variance
    return metrics


def _of_actions(samples: Sequence[Sample], arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return the elements of the arrays at action tokens, concatenated to f64 [K].

    Args:
        arrays: one array [T-P] for each sample.
    """
    kept = [array[sample.action_mask] for sample, array in zip(samples, arrays, strict=True)]
    return np.concatenate(kept).astype(np.float64) if kept else np.zeros(0)


@actor(Kind.CRITIC)
class CriticWorker(TrainableRank):
    """Rank of the critic."""

    def _build(self, plan: MegatronPlan, seed: int, deterministic: bool) -> Any:
        from roll_opd.megatron.critic_engine import MegatronCritic

        assert isinstance(plan, CriticPlan)
        return MegatronCritic(plan, seed=seed, deterministic=deterministic)

    @needs(WEIGHTS)
    def values(self, shard: DPShard) -> Compact:
        """Return the value of the state before each response token; see `MegatronCritic.values`."""
        return Compact(self._engine.values(sequences_of(shard), shard.micro_batches))

    @needs(LEARNING)
    def update(self, shard: DPShard) -> Compact:
        """Make one optimizer update from a mini-batch; see `MegatronCritic.update`."""
        return Compact(self._engine.update(shard.samples, assigned=shard.micro_batches))

    def _save_hf(self, directory: Path, later: bool) -> Callable[[], list[Path]]:
        from roll_opd.megatron.critic_engine import save_critic_hf

        return save_critic_hf(self._engine, directory, later=later)
