"""Selection of groups from runs that end in any order."""

from collections.abc import Sequence

from roll_opd.objective.filters import GroupFilter
from roll_opd.samples.sample import Sample


class Selection:
    """Selects the first `wanted` groups that pass, from runs in any order of completion."""

    def __init__(self, groups: int, n: int, wanted: int, group_filter: GroupFilter | None) -> None:
        self._runs: list[dict[int, Sequence[Sample]]] = [{} for _ in range(groups)]  # by number in the group
        self._passed: list[bool | None] = [None] * groups  # None: some runs have not ended
        self._n, self._wanted, self._filter = n, wanted, group_filter
        self._used = 0
        self._chosen: list[int] = []

    def add(self, number: int, samples: Sequence[Sample]) -> None:
        """Add the samples of run `number % n` of group `number // n`. A group without a sample does not pass."""
        group, run = divmod(number, self._n)
        self._runs[group][run] = samples
        if len(self._runs[group]) == self._n:
            of_group = self.samples_of(group)
            self._passed[group] = bool(of_group) and (self._filter is None or self._filter(of_group))
            self._advance()

    def _advance(self) -> None:
        """Use decided groups, in order, while more are wanted."""
        while self._used < len(self._passed) and not self.enough and self._passed[self._used] is not None:
            if self._passed[self._used]:
                self._chosen.append(self._used)
            self._used += 1

    @property
    def decided(self) -> dict[int, bool]:
        """Whether a group has passed, for each group whose runs have all ended."""
        return {group: passed for group, passed in enumerate(self._passed) if passed is not None}

    @property
    def used(self) -> int:
        """Number of groups, from the first on, that are decided and needed; later prompts stay undrawn."""
        return self._used

    @property
    def chosen(self) -> list[int]:
        """Numbers of the selected groups, at most `wanted`, ascending."""
        return self._chosen

    @property
    def enough(self) -> bool:
        """Whether no unfinished run can change the selection."""
        return len(self._chosen) == self._wanted

    def samples_of(self, group: int) -> list[Sample]:
        """Return the samples of a group, by run."""
        return [sample for run in range(self._n) for sample in self._runs[group][run]]
