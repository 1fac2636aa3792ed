"""Whole samples that a step's update leaves out, as the objective says: see `algorithms.sample_masks`."""

from collections.abc import Sequence

import numpy as np

from roll_opd.algorithms.sample_masks import below_longest, between_difficulties, right_or_short
from roll_opd.config.plan import ObjectivePlan, SamplingPlan
from roll_opd.samples.experience import Experience, changed

MASKED = "masked_by"  # begins the names under which a sample's `metrics` tell which rules left it out


def masked(experiences: Sequence[Experience], objective: ObjectivePlan, sampling: SamplingPlan) -> list[Experience]:
    """Empty the `loss_mask` of samples that a mask leaves out; their rewards stay in the means of their group.

    A sample whose reward failed has none here. A mask by difficulty needs more than one response a prompt.
    """
    lengths = [e.action_tokens for e in experiences]
    rewards = [None if e.excluded else e.reward for e in experiences]
    kept: dict[str, list[bool]] = {}
    if objective.max_len_mask:
        kept["max_len"] = below_longest(lengths, sampling.max_new_tokens)
    if objective.difficulty_mask and sampling.n > 1:
        low, high = objective.difficulty_low_threshold, objective.difficulty_high_threshold
        kept["difficulty"] = between_difficulties(rewards, [e.group_id for e in experiences], low=low, high=high)
    if objective.error_max_len_clip:
        kept["error_max_len"] = right_or_short(rewards, lengths, threshold=objective.error_max_len_threshold)
    if not kept:
        return list(experiences)
    return [
        _with_mask(e, {name: not found[number] for name, found in kept.items()}) for number, e in enumerate(experiences)
    ]


def mask_metrics(experiences: Sequence[Experience]) -> dict[str, float]:
    """Return `rollout/masked/*`: the share of the samples that each mask leaves out, and `any` of them."""
    found: dict[str, list[float]] = {}
    for experience in experiences:
        of_sample = {name: value for name, value in experience.metrics.items() if name.startswith(MASKED)}
        for name, value in (of_sample | ({"any": max(of_sample.values())} if of_sample else {})).items():
            found.setdefault(name.removeprefix(f"{MASKED}_"), []).append(value)
    return {f"rollout/masked/{name}": float(np.mean(values)) for name, values in found.items()}


def _with_mask(experience: Experience, out: dict[str, bool]) -> Experience:
    metrics = {**experience.metrics, **{f"{MASKED}_{name}": float(value) for name, value in out.items()}}
    if not any(out.values()):
        return changed(experience, metrics=metrics)
    return changed(experience, metrics=metrics, loss_mask=np.zeros(experience.response_length, dtype=bool))
