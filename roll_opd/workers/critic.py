"""The critic as the driver sees it: what it can do for a step's samples."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from roll_opd.config.plan import CriticPlan
from roll_opd.data.experience import Experience
from roll_opd.data.training import TrainResult
from roll_opd.tracking.metrics import statistics
from roll_opd.workers.errors import RunError
from roll_opd.workers.learner import Learner
from roll_opd.workers.roles import gathered
from roll_opd.workers.samples import value_samples


@dataclass
class Critic(Learner):
    """The model that says what a state is worth."""

    plan: CriticPlan

    async def values(self, experiences: Sequence[Experience]) -> list[Experience]:
        """Fill in `values`. RunError when they cannot be a working model's."""
        values = await gathered(self.group, "values", experiences)
        wrong = sum(int((~np.isfinite(piece)).sum()) for piece in values)
        if wrong:
            raise RunError(
                f"{self.plan.name}: {wrong} values are not finite; look at its model, or lower learning_rate"
            )
        return [replace(e, values=v) for e, v in zip(experiences, values, strict=True)]

    async def learn(self, experiences: Sequence[Experience]) -> dict[str, float]:
        """Run all updates of one step on samples with `values` and `returns`; returns `critic/*` metrics."""
        results = []
        size = self.plan.mini_batch_sequences
        for _ in range(self.plan.epochs):
            for start in range(0, len(experiences), size):
                batch = experiences[start : start + size]
                results.append(await self._update("update", value_samples(batch)))
                self._check_applied(results[-1], batch)
        return _update_metrics(results) | value_metrics(experiences)


def value_metrics(experiences: Sequence[Experience]) -> dict[str, float]:
    """`critic/values` and `critic/returns` of action tokens, and `critic/explained_variance`.

    That is 1 - Var(R - V) / Var(R): 1 for a perfect critic, 0 for one that knows the mean alone, less than 0 for a
    worse one. It is left out where all returns are the same.
    """
    experiences = [experience for experience in experiences if not experience.excluded]
    values = _of_actions(experiences, [e.values for e in experiences])
    returns = _of_actions(experiences, [e.returns for e in experiences])
    kinds = ("mean", "max", "min")
    metrics = {**statistics("critic/values", values, kinds), **statistics("critic/returns", returns, kinds)}
    if len(returns) and (spread := float(returns.var())) > 0:
        metrics["critic/explained_variance"] = 1.0 - float((returns - values).var()) / spread
    return metrics


def _of_actions(experiences: Sequence[Experience], arrays: Sequence[np.ndarray]) -> np.ndarray:
    """f64 [K] of [T-P] each."""
    kept = [array[e.action_mask] for e, array in zip(experiences, arrays, strict=True)]
    return np.concatenate(kept).astype(np.float64) if kept else np.zeros(0)


def _update_metrics(results: Sequence[Sequence[TrainResult]]) -> dict[str, float]:
    """Metrics of a step's updates (each the list of its ranks' results): means over tokens or updates."""

    def total(name: str) -> float:
        return sum(rank.sums.get(name, 0.0) for ranks in results for rank in ranks)

    tokens = total("tokens") or 1.0
    return {
        "critic/loss": total("weighted_loss") / len(results),
        "critic/vpred": total("values") / tokens,
        "critic/error": total("squared_error") / tokens,
        "critic/clipfrac": total("clipped") / tokens,
        "critic/grad_norm": float(np.mean([ranks[0].grad_norm for ranks in results])),
        "critic/lr": results[-1][0].learning_rate,
        "critic/skipped_updates": float(sum(not ranks[0].applied for ranks in results)),
    }
