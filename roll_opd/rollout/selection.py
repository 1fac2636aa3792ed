"""Which groups of samples a step learns from: filters by reward, and the order in which groups count.

Groups count in the order in which their prompts were drawn, not in the order in which they are finished: a step's
batch is the first so many that pass, whatever the timing, and short answers are not preferred.
"""

from collections.abc import Callable, Sequence

import numpy as np

from roll_opd.algorithms.filters import FILTERS
from roll_opd.data.experience import Experience, changed
from roll_opd.plan import FilterPlan, RewardPlan

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


class Selection:
    """Takes runs as they end; knows when the first `wanted` groups that pass are certain."""

    def __init__(self, groups: int, n: int, wanted: int, group_filter: GroupFilter | None) -> None:
        self._runs: list[dict[int, Sequence[Experience]]] = [{} for _ in range(groups)]  # by number in the group
        self._passed: list[bool | None] = [None] * groups  # None: not all of its runs have ended
        self._n, self._wanted, self._filter = n, wanted, group_filter
        self._used = 0
        self._chosen: list[int] = []

    def add(self, number: int, made: Sequence[Experience]) -> None:
        """Take what run `number % n` of group `number // n` made. A group that made nothing at all does not pass."""
        group, run = divmod(number, self._n)
        self._runs[group][run] = made
        if len(self._runs[group]) == self._n:
            samples = self._in_order(group)
            self._passed[group] = bool(samples) and (self._filter is None or self._filter(samples))
            self._advance()

    def _advance(self) -> None:
        """Count the groups behind the last one of `used` that are decided, as far as they are needed."""
        while self._used < len(self._passed) and not self.enough and self._passed[self._used] is not None:
            if self._passed[self._used]:
                self._chosen.append(self._used)
            self._used += 1

    @property
    def used(self) -> int:
        """Groups, from the first on, that are decided and needed; those behind them are as if never drawn."""
        return self._used

    @property
    def chosen(self) -> list[int]:
        """Numbers of the groups to learn from, at most `wanted`, ascending."""
        return self._chosen

    @property
    def enough(self) -> bool:
        """Whether nothing that is still being written can matter."""
        return len(self._chosen) == self._wanted

    @property
    def generated_tokens(self) -> int:
        """Action tokens of the `used` groups."""
        return sum(int(e.action_mask.sum()) for group in range(self.used) for e in self._in_order(group))

    def experiences(self) -> list[Experience]:
        """Return what the runs of the chosen groups made, in order."""
        return [experience for group in self.chosen for experience in self._in_order(group)]

    def _in_order(self, group: int) -> list[Experience]:
        return [experience for run in range(self._n) for experience in self._runs[group][run]]
