"""Filters by reward: which groups of samples a step learns from, and which samples of them."""

from collections.abc import Callable, Sequence

import numpy as np

from roll_opd.algorithms.filters import FILTERS
from roll_opd.config.plan import FilterPlan, RewardPlan
from roll_opd.samples.experience import Experience, changed

GroupFilter = Callable[[Sequence[Experience]], bool]  # whether a group, whose samples have their rewards, passes


def group_filter(rewards: Sequence[RewardPlan], *, compared: bool = True) -> GroupFilter | None:
    """Return the test that a group must pass, or None where no reward domain has a filter.

    A domain's `query_filter` sees the rewards of the whole group, its `response_filter` each one alone. Where the
    samples of a group are `compared`, one that fails takes its group along; else the group passes with one that passes,
    and the others are left to `without_rejected`. A group that no reward worker scored passes. Where a workflow makes
    samples of several kinds, which have a `group_id` each, one kind that passes is enough.
    """
    filters = {reward.domain: (reward.query_filter, reward.response_filter) for reward in rewards}
    if not any(one for both in filters.values() for one in both):
        return None
    enough = all if compared else any

    def passes(samples: Sequence[Experience]) -> bool:
        kinds: dict[str, list[Experience]] = {}
        for sample in samples:
            if sample.reward is not None:
                kinds.setdefault(sample.group_id, []).append(sample)
        return not kinds or any(kind_passes(kind) for kind in kinds.values())

    def kind_passes(group: Sequence[Experience]) -> bool:
        scores = [experience.reward for experience in group if experience.reward is not None]
        query, response = filters.get(group[0].domain, (None, None))
        return _passes(query, scores) and enough(_passes(response, [score]) for score in scores)

    return passes


def without_rejected(experiences: Sequence[Experience], rewards: Sequence[RewardPlan]) -> list[Experience]:
    """Empty the `loss_mask` of samples that their domain's `response_filter` rejects: rejection sampling."""
    filters = {reward.domain: reward.response_filter for reward in rewards}
    return [
        e
        if e.reward is None or _passes(filters.get(e.domain), [e.reward])
        else changed(e, loss_mask=np.zeros(e.response_length, dtype=bool))
        for e in experiences
    ]


def _passes(filter_: FilterPlan | None, rewards: Sequence[float]) -> bool:
    return filter_ is None or FILTERS[filter_.type](rewards, **filter_.args)
