"""Bound the age of trained samples: the order of groups from the prompt source to the learner. Starts no processes.

The order is a first-in-first-out queue with a window. A group consists of all samples of one prompt. Groups are
numbered in the order of admission. Training on batch v turns the weights of version v into version v + 1.

Legend: P number of groups in a batch, A number of groups that are admitted ahead of a batch, W size of the window, R
number of groups in reserve.

**Admission.** Until version v + 1 is published, at most (v + 1) · P + A groups have been admitted since the start, not
counting rejected groups. These are the groups of v + 1 batches, and A groups ahead.

**Order.** Let h be the number of the oldest group that is neither in a batch nor rejected. A batch takes only finished
groups with numbers below h + W. So, for every group, at most W - 1 younger groups are trained before it.

**Bound.** A group is admitted as number n < (v + 1) · P + A, and at most n + W - 1 groups are trained before it. The
group is in batch (n + W - 1) // P at the latest. So its age in versions is at most (P + A + W - 2) // P. With A = S · P
this bound is S + ceil((W - 1) / P). No group is discarded because of its age. With A = 0 and W = 1 the bound is 0, and
sampling and learning take turns.

**Reserve.** With A = 0, R further groups may be admitted while a batch lacks groups, because filters may reject some.
When the batch is taken, all groups after its last group are withdrawn: they count as not admitted. So no group of the
reserve is trained at a later version.
"""

from dataclasses import dataclass

DEPTH = 2  # batches; deeper queues give older samples, but hardly faster steps (benchmarks/async_runs.md)


@dataclass(frozen=True)
class Pace:
    """Three numbers of groups that together bound the age of samples."""

    groups: int  # P: groups of a batch
    ahead: int = 0  # A: groups admitted beyond the batch of the published version
    window: int = 1  # W: window; 1 means strict order
    reserve: int = 0  # R: groups admitted in case others are rejected; 0 if groups are ahead

    @classmethod
    def of(
        cls, groups: int, bound: int, depth: int | None = None, *, is_strict: bool = False, reserve: int = 0
    ) -> "Pace":
        """Return the pace whose `max_age` is `bound`, in versions.

        The depth uses a part of the bound, and the window gets the rest. Raises ValueError if the depth is above
        the bound, or 0 with a bound above 0.

        Args:
            depth: number of batches that are sampled ahead; by default, the smaller of the bound and `DEPTH`.
            is_strict: the window is 1, and `max_age` is `depth`.
            reserve: groups in reserve if the bound is 0. With a higher bound, groups ahead replace rejected ones.
        """
        depth = min(bound, DEPTH) if depth is None else depth
        if not min(1, bound) <= depth <= bound:
            raise ValueError(f"a depth of {depth} batches does not fit the bound of {bound} versions")
        return cls(groups, depth * groups, 1 if is_strict else (bound - depth) * groups + 1, 0 if bound else reserve)

    @property
    def max_age(self) -> int:
        """Largest age of a trained group, in versions. See **Bound** in the docstring of the module."""
        return (self.groups + self.ahead + self.window - 2) // self.groups


class GroupWindow:
    """The groups of batches `first` to `last - 1`, and the state of each group.

    The states are: running, passed (finished), rejected, trained.
    """

    def __init__(self, pace: Pace, first: int, last: int, published: int | None = None, start: int = 0) -> None:
        """Create a window without groups.

        Args:
            published: version of the weights that the engines have at the start; by default, `first`.
            start: number of the first group.
        """
        self.pace, self._first, self._last = pace, first, last
        self.version = first if published is None else published
        self.next = start  # number of the next group
        self.admitted = 0  # number of groups that have been admitted
        self._open: dict[int, bool] = {}  # number -> has passed; only groups that are neither rejected nor in a batch
        self._filling: list[int] = []  # numbers of the batch that is being filled
        self.batches = 0  # number of complete batches

    @property
    def room(self) -> int:
        """Number of further groups that may be admitted."""
        last, groups = self._last - self._first, self.pace.groups
        limit = min(min(self.version - self._first + 1, last) * groups + self.pace.ahead, last * groups)
        lacking = limit - self.batches * groups
        return max(0, lacking + self.pace.reserve - len(self._filling) - len(self._open)) if lacking > 0 else 0

    @property
    def running(self) -> int:
        """Number of groups that are being sampled."""
        return sum(not passed for passed in self._open.values())

    @property
    def finished(self) -> int:
        """Number of groups that have passed the filters and are not in a complete batch."""
        return len(self._open) - self.running + len(self._filling)

    @property
    def head(self) -> int:
        """Number of the oldest group that is neither in a batch nor rejected.

        If there is no such group, the number of the next group.
        """
        return min(self._open, default=self.next)

    @property
    def is_complete(self) -> bool:
        """Whether the last batch is complete."""
        return self.batches == self._last - self._first

    def publish(self, version: int) -> None:
        """Set the version of the engines' weights. Raises ValueError if `version` is older than the current version."""
        if version < self.version:
            raise ValueError(f"version {version} was published after version {self.version}")
        self.version = version

    def admit(self, count: int) -> range:
        """Admit `count` new groups, mark them as running, and return their numbers."""
        numbers = range(self.next, self.next + count)
        self.next += count
        self.admitted += count
        self._open |= dict.fromkeys(numbers, False)
        return numbers

    def pass_over(self) -> int:
        """Skip the number of a group that was trained or filtered before the run was resumed, and return this number.

        So all other groups have the same numbers as in a run without interruption.
        """
        self.next += 1
        return self.next - 1

    def runs(self, numbers: range) -> bool:
        """Return whether one of the groups is running."""
        return any(self._open.get(number) is False for number in numbers)

    def decide(self, number: int, *, passed: bool) -> None:
        """End the sampling of a running group.

        `passed`: whether the group passed the filters. If False, the group is rejected, and one more group may be
        admitted.
        """
        if self._open.get(number) is not False:
            raise ValueError(f"group {number} is not running")
        if passed:
            self._open[number] = True
        else:
            del self._open[number]

    def take(self) -> list[int] | None:
        """Return the numbers of the groups in the next batch, in ascending order.

        The batch consists of the oldest groups that have passed. All of them must be inside the window. The result is
        None if there are too few. If there is a reserve, all groups after the batch are withdrawn, and
        later groups get their numbers (from `next` on).
        """
        while len(self._filling) < self.pace.groups:
            limit = self.head + self.pace.window
            chosen = min((n for n, passed in self._open.items() if passed and n < limit), default=None)
            if chosen is None:
                return None
            del self._open[chosen]
            self._filling.append(chosen)
        batch, self._filling = sorted(self._filling), []
        self.batches += 1
        if self.pace.reserve:
            self.next = batch[-1] + 1
            self._open.clear()  # the order is strict: all older groups are in a batch or rejected
        return batch
