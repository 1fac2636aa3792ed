"""Metrics of a step's optimizer updates, from the sums that each rank reports."""

from collections.abc import Sequence

import numpy as np

from roll_opd.objective.engine_evidence import engine_metrics
from roll_opd.samples.micro_batches import ROUTER_LOSSES, TrainResult

ACTOR_METRICS = ("actor/grad_norm", "actor/lr", "actor/skipped_updates")
CRITIC_METRICS = ("critic/grad_norm", "critic/lr", "critic/skipped_updates")

Update = Sequence[TrainResult]  # results of one optimizer update, one per rank


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


def evidence_metrics(update: Update) -> dict[str, float]:
    """Return the engine check's metrics of one update, summed over its ranks."""
    return engine_metrics({name: total([update], name) for rank in update for name in rank.sums})


def loss_metrics(updates: Sequence[Update]) -> dict[str, float]:
    """Return the loss metrics of a step's updates.

    The losses and the entropy are means over the updates. The ratio, the clip fraction and the approximate KL are means
    over the tokens.
    """
    tokens = total(updates, "tokens") or 1.0
    reported = {name for update in updates for rank in update for name in rank.sums}
    optional = {
        "actor/opd_loss": "opd_loss",
        "actor/entropy": "entropy",
        "actor/demonstration_loss": "demonstration_loss",
        "actor/demonstration_tokens": "demonstration_tokens",
    }
    return {
        **{metric: total(updates, name) / len(updates) for metric, name in optional.items() if name in reported},
        **_router_metrics(updates, reported),
        "actor/pg_loss": total(updates, "policy_loss") / len(updates),
        "actor/total_loss": total(updates, "weighted_loss") / len(updates),
        "actor/ratio_mean": total(updates, "ratio") / tokens,
        "actor/clipfrac": total(updates, "clipped") / tokens,
        "actor/approx_kl": total(updates, "approx_kl") / tokens,
        "actor/kl_loss": total(updates, "kl_loss") / len(updates),
    }


def _router_metrics(updates: Sequence[Update], reported: set[str]) -> dict[str, float]:
    """Return the router metrics of a step's updates.

    `router/rerouted_tokens` is the fraction of tokens for which the student and the inference engine choose different
    experts. `router/rerouted_choices` is the corresponding fraction of single choices. All other metrics are router
    losses.
    """
    parts = {"router/rerouted_tokens": "routed_tokens", "router/rerouted_choices": "routed_choices"}
    shards = {
        name: total(updates, name.removeprefix("router/")) / (total(updates, of) or 1.0)
        for name, of in parts.items()
        if of in reported
    }
    losses = [name for name in ROUTER_LOSSES if name in reported]
    return shards | {f"router/{name}": total(updates, name) / len(updates) for name in losses}


def critic_metrics(updates: Sequence[Update]) -> dict[str, float]:
    """Return the metrics of the updates of a step.

    Each metric is a mean over tokens or over updates, except the learning rate and the number of skipped updates.
    """
    tokens = total(updates, "tokens") or 1.0
    return {
        "critic/loss": total(updates, "weighted_loss") / len(updates),
        "critic/vpred": total(updates, "values") / tokens,
        "critic/error": total(updates, "squared_error") / tokens,
        "critic/clipfrac": total(updates, "clipped") / tokens,
        **optimizer_metrics(updates, CRITIC_METRICS),
    }
