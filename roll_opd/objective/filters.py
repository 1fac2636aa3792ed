"""Select the samples and groups that a step trains on: filters by reward, rejection sampling, and masks of samples."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from roll_opd.config.plan import FilterPlan, ObjectivePlan, RewardPlan, SamplingPlan
from roll_opd.objective.sample_masks import FILTERS, below_longest, between_difficulties, right_or_short
from roll_opd.samples.sample import Sample, changed

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
