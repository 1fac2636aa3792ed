"""Select the samples and groups that a step trains on: filters by reward, rejection sampling, masks, weights.

Legend: B samples. Samples of one prompt share a group.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from roll_opd.config.plan import FilterPlan, ObjectivePlan, RewardPlan, SamplingPlan
from roll_opd.samples.sample import Sample, changed


def mean_filter(rewards: Sequence[float], *, threshold_down: float, threshold_up: float) -> bool:
    """Return whether the mean of the rewards is strictly between the thresholds.

    Such a prompt is neither too hard nor too easy.
    """
    return bool(threshold_down < np.mean(rewards) < threshold_up)


def std_filter(rewards: Sequence[float], *, std_threshold: float) -> bool:
    """Return whether the population standard deviation of the rewards is above the threshold."""
    return bool(np.std(rewards) > std_threshold)


FILTERS: dict[str, Callable[..., bool]] = {"mean_filter": mean_filter, "std_filter": std_filter}


def below_longest(lengths: Sequence[int], longest: int) -> list[bool]:
    """Return a mask [B] of responses that are shorter than the maximum length (`max_len_mask`).

    Responses of the maximum length are probably truncated.
    """
    return [length < longest for length in lengths]


def between_difficulties(
    rewards: Sequence[float | None], groups: Sequence[str], *, low: float, high: float
) -> list[bool]:
    """Return a mask [B] of samples in groups of medium difficulty (`difficulty_mask`).

    The mean reward of such a group is strictly between `low` and `high`. Samples without a reward are not counted in
    the mean. A group without any reward is kept.
    """
    by_group: dict[str, list[float]] = defaultdict(list)
    for reward, group in zip(rewards, groups, strict=True):
        if reward is not None:
            by_group[group].append(reward)
    outside = {group for group, found in by_group.items() if not low < sum(found) / len(found) < high}
    return [group not in outside for group in groups]


def right_or_short(rewards: Sequence[float | None], lengths: Sequence[int], *, threshold: int) -> list[bool]:
    """Return a mask [B] of samples that are right or short.

    A sample is kept if its reward is 1 or if it has no reward. A sample with reward 0 is kept if it has fewer than
    `threshold` tokens.
    """
    return [
        reward in (None, 1) or (reward == 0 and length < threshold)
        for reward, length in zip(rewards, lengths, strict=True)
    ]


def sample_weights(
    lengths: Sequence[int], difficulties: Sequence[float | None] | None, *, by_length: bool
) -> list[float]:
    """Return the weights [B] of the samples of an update, with mean 1.

    The weight of a sample is the product of two factors, divided by the mean of these products.

    The first factor is used with `difficulty_loss_weight`. It is 0.5 + 1.5 · difficulty, with the difficulty clipped to
    [0, 1]. For a sample without a difficulty, it is 1.

    The second factor is used with `length_loss_weight`. It falls linearly with the length of the response, from 1.5 for
    the shortest response to 0.5 for the longest response.

    Args:
        lengths: number of response tokens of each sample.
        difficulties: difficulty of each sample, from the rows of the data; None: the first factor is not used.
        by_length: whether the second factor is used.
    """
    weights = [1.0] * len(lengths)
    if difficulties is not None:
        weights = [1.0 if known is None else 0.5 + 1.5 * min(max(known, 0.0), 1.0) for known in difficulties]
    if by_length and lengths:
        shortest, span = min(lengths), max(lengths) - min(lengths)
        factors = [1.5 - ((length - shortest) / span if span else 0.0) for length in lengths]
        weights = [weight * factor for weight, factor in zip(weights, factors, strict=True)]
    mean = sum(weights) / len(weights) if weights else 1.0
    return [weight / mean for weight in weights]


GroupFilter = Callable[[Sequence[Sample]], bool]  # returns whether a group of samples with rewards passes
MASKED = "masked_by"  # prefix of keys in a sample's `metrics`: one key per mask


def group_filter(rewards: Sequence[RewardPlan], *, compared: bool = True, runs: int = 0) -> GroupFilter | None:
    """Return the filter of groups, or None if all groups pass.

    - The `query_filter` of a domain tests the rewards of a group together.
    - The `response_filter` of a domain tests each reward. If the advantages compare the samples of a group
      (`compared`), every sample must pass. Otherwise one sample that passes is enough, and `without_rejected` masks the
      samples that do not pass.
    - A group without rewards passes.
    - A group fails if the reward of one of its samples failed and the domain of this sample has `on_error: replace`.
    - A group fails if its samples come from fewer than `runs` runs.

    A workflow may make several kinds of samples for a prompt, each kind with its own `group_id`. The rewards of each
    kind are then tested separately, and one kind that passes is enough.
    """
    replaced = {reward.domain for reward in rewards if reward.on_error == "replace"}
    filters = {reward.domain: (reward.query_filter, reward.response_filter) for reward in rewards}
    if not (replaced or runs or any(one for both in filters.values() for one in both)):
        return None
    enough = all if compared else any

    def passes(samples: Sequence[Sample]) -> bool:
        has_failed = any(sample.excluded and sample.domain in replaced for sample in samples)
        if has_failed or len({sample.run for sample in samples}) < runs:
            return False
        kinds: dict[str, list[Sample]] = {}
        for sample in samples:
            if sample.reward is not None:
                kinds.setdefault(sample.group_id, []).append(sample)
        return not kinds or any(kind_passes(kind) for kind in kinds.values())

    def kind_passes(group: Sequence[Sample]) -> bool:
        scores = [sample.reward for sample in group if sample.reward is not None]
        query, response = filters.get(group[0].domain, (None, None))
        return _passes(query, scores) and enough(_passes(response, [score]) for score in scores)

    return passes


def without_rejected(samples: Sequence[Sample], rewards: Sequence[RewardPlan]) -> list[Sample]:
    """Return the samples after rejection sampling.

    A sample that the `response_filter` of its domain rejects gets an empty `loss_mask`.
    """
    filters = {reward.domain: reward.response_filter for reward in rewards}
    return [
        sample
        if sample.reward is None or _passes(filters.get(sample.domain), [sample.reward])
        else sample.with_columns(loss_mask=np.zeros(sample.response_length, dtype=bool))
        for sample in samples
    ]


def _passes(filter_: FilterPlan | None, rewards: Sequence[float]) -> bool:
    return filter_ is None or FILTERS[filter_.type](rewards, **filter_.args)


def masked(samples: Sequence[Sample], objective: ObjectivePlan, sampling: SamplingPlan) -> list[Sample]:
    """Return the samples after the sample masks.

    A sample that a mask rejects gets an empty `loss_mask`, but its reward still counts in the mean of its group. If the
    reward of a sample failed, the masks treat the sample as a sample without a reward. The mask by difficulty has no
    effect with one response per prompt.
    """
    lengths = [sample.action_tokens for sample in samples]
    rewards = [None if sample.excluded else sample.reward for sample in samples]
    kept: dict[str, list[bool]] = {}
    if objective.max_len_mask:
        kept["max_len"] = below_longest(lengths, sampling.max_new_tokens)
    if objective.difficulty_mask and sampling.n > 1:
        low, high = objective.difficulty_low_threshold, objective.difficulty_high_threshold
        kept["difficulty"] = between_difficulties(rewards, [sample.group_id for sample in samples], low=low, high=high)
    if objective.error_max_len_clip:
        kept["error_max_len"] = right_or_short(rewards, lengths, threshold=objective.error_max_len_threshold)
    if not kept:
        return list(samples)
    return [
        masked_by(sample, {name: not found[number] for name, found in kept.items()})
        for number, sample in enumerate(samples)
    ]


def masked_by(sample: Sample, masks: Mapping[str, bool]) -> Sample:
    """Return the sample with a record of the masks that reject it.

    `masks` maps the name of each mask to whether the mask rejects the sample. If any mask does, the `loss_mask` of the
    sample becomes empty. `mask_metrics` reads the record.
    """
    metrics = {**sample.metrics, **{f"{MASKED}_{name}": float(value) for name, value in masks.items()}}
    noted = changed(sample, metrics=metrics)
    return noted.with_columns(loss_mask=np.zeros(sample.response_length, dtype=bool)) if any(masks.values()) else noted


def mask_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return `rollout/masked/*`: the fraction of samples that each mask rejects.

    `rollout/masked/any` is the fraction of samples that at least one mask rejects.
    """
    found: dict[str, list[float]] = {}
    for sample in samples:
        of_sample = {name: value for name, value in sample.metrics.items() if name.startswith(MASKED)}
        for name, value in (of_sample | ({"any": max(of_sample.values())} if of_sample else {})).items():
            found.setdefault(name.removeprefix(f"{MASKED}_"), []).append(value)
    return {f"rollout/masked/{name}": float(np.mean(values)) for name, values in found.items()}
