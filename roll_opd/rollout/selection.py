"""Which groups of samples a step learns from: filters by reward, and the order in which groups count.

Groups count in the order in which their prompts were drawn, not in the order in which they are finished: a step's
batch is the first so many that pass, whatever the timing, and short answers are not preferred.
"""

from collections.abc import Callable, Sequence

from roll_opd.algorithms.filters import FILTERS
from roll_opd.config.plan import FilterPlan, RewardPlan
from roll_opd.data.experience import Experience

Keeps = Callable[[Sequence[Experience]], bool]


def by_reward(rewards: Sequence[RewardPlan]) -> Keeps | None:
    """Return the test that a group must pass, or None where no reward domain has a filter.

    A domain's `query_filter` sees the rewards of the whole group, its `response_filter` each one alone; one response
    that fails takes its group along. A group that no reward worker scored passes.
    """
    filters = {reward.domain: (reward.query_filter, reward.response_filter) for reward in rewards}
    if not any(one for both in filters.values() for one in both):
        return None

    def keeps(group: Sequence[Experience]) -> bool:
        scores = [experience.reward for experience in group if experience.reward is not None]
        query, response = filters.get(group[0].domain, (None, None))
        return not scores or (_passes(query, scores) and all(_passes(response, [score]) for score in scores))

    return keeps


def _passes(filter_: FilterPlan | None, rewards: Sequence[float]) -> bool:
    return filter_ is None or FILTERS[filter_.type](rewards, **filter_.args)


class Selection:
    """Takes samples as they are scored; knows when the first `wanted` groups that pass are certain."""

    def __init__(self, groups: int, n: int, wanted: int, keeps: Keeps | None) -> None:
        self._missing = [n] * groups
        self._samples: list[list[Experience | None]] = [[None] * n for _ in range(groups)]
        self._kept: list[bool | None] = [None] * groups  # None: not all of its samples are there
        self._n, self._wanted, self._keeps = n, wanted, keeps

    def add(self, index: int, experience: Experience) -> None:
        """Take sample `index % n` of group `index // n`."""
        group = index // self._n
        self._samples[group][index % self._n] = experience
        self._missing[group] -= 1
        if not self._missing[group]:
            self._kept[group] = self._keeps is None or self._keeps(self._samples[group])

    @property
    def used(self) -> int:
        """Groups, from the first on, that are decided and needed; those behind them are as if never drawn."""
        passed = 0
        for group, kept in enumerate(self._kept):
            if kept is None or passed == self._wanted:
                return group
            passed += kept
        return len(self._kept)

    @property
    def chosen(self) -> list[int]:
        """Numbers of the groups to learn from, at most `wanted`, ascending."""
        return [group for group in range(self.used) if self._kept[group]]

    @property
    def enough(self) -> bool:
        """Whether nothing that is still being written can matter."""
        return len(self.chosen) == self._wanted

    @property
    def generated_tokens(self) -> int:
        """Action tokens of the `used` groups."""
        return sum(int(sample.action_mask.sum()) for group in self._samples[: self.used] for sample in group)

    def experiences(self) -> list[Experience]:
        """All samples of the chosen groups, in order."""
        return [sample for group in self.chosen for sample in self._samples[group]]
