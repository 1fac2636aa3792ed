"""The order of groups: a bound of ages that holds for every order of events, without deadlock, loss or starvation."""

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from roll_opd.rollout.staleness import GroupWindow, Pace


@dataclass
class Schedule:
    """A scripted scheduler: executes one possible action of producer, engines, filter and learner at a time."""

    pace: Pace
    seed: int
    batches: int = 6
    rejects: float = 0.0
    slow: frozenset[int] = frozenset()  # groups that end only if nothing else can happen
    admitted_at: dict[int, int] = field(default_factory=dict)
    trained: dict[int, int] = field(default_factory=dict)  # group -> version that it was trained at
    dropped: set[int] = field(default_factory=set)
    passed_by: Counter[int] = field(default_factory=Counter)  # younger groups trained before a group
    most_open: int = 0

    def run(self) -> "Schedule":
        rng, window = random.Random(self.seed), GroupWindow(self.pace, 0, self.batches)
        running: list[int] = []
        learning: int | None = None
        while not (window.is_complete and learning is None):
            actions = []
            if window.room:
                actions.append("admit")
            ending = [n for n in running if n not in self.slow]
            actions += ["end"] * bool(ending)
            if learning is None:
                batch = window.take()
                if batch is not None:
                    learning = window.batches - 1
                    self._train(batch, learning)
            if learning is not None:
                actions.append("publish")
            if not actions:
                assert running, "deadlock: nothing can happen, and groups are missing"
                ending, actions = running, ["end"]
            action = rng.choice(actions)
            if action == "admit":
                for number in window.admit(rng.randint(1, window.room)):
                    self.admitted_at[number] = window.version
                    running.append(number)
            elif action == "end":
                number = rng.choice(ending)
                running.remove(number)
                passed = rng.random() >= self.rejects
                window.decide(number, passed=passed)
                if not passed:
                    self.dropped.add(number)
            else:
                window.publish(learning + 1)
                learning = None
            self.most_open = max(self.most_open, window.running + window.finished)
        assert not running and not window.room
        return self

    def _train(self, batch: list[int], version: int) -> None:
        assert batch == sorted(batch) and len(batch) == self.pace.groups
        for number in batch:
            assert number not in self.trained
            self.trained[number] = version
            for older in range(number):
                if older not in self.trained and older not in self.dropped and older not in batch:
                    self.passed_by[older] += 1

    @property
    def ages(self) -> set[int]:
        return {version - self.admitted_at[number] for number, version in self.trained.items()}


PACES = [
    Pace.of(groups, bound, depth)
    for groups in (1, 2, 5)
    for bound in (0, 1, 2, 4, 8)
    for depth in (None, *{1, bound // 2, bound} - ({0} if bound else {1}))
]


def test_ten_thousand_interleavings_never_deadlock_and_keep_the_bound() -> None:
    """Each group is trained once or rejected; the oldest age is the theorem's in some order, and never above it."""
    reached: dict[Pace, int] = {}
    for seed in range(10_000):
        pace = PACES[seed % len(PACES)]
        done = Schedule(pace, seed, batches=4, rejects=(0, 0, 0.4)[seed % 3]).run()
        assert max(done.ages) <= pace.max_age
        assert done.trained.keys() | done.dropped == done.admitted_at.keys()
        assert not done.trained.keys() & done.dropped and len(done.trained) == 4 * pace.groups
        assert max(done.passed_by.values(), default=0) < pace.window
        assert done.most_open <= pace.groups * 2 + pace.ahead  # a batch in training, one to fill, and those ahead
        reached[pace] = max(reached.get(pace, 0), *done.ages)
    strict = {pace: age for pace, age in reached.items() if pace.window == 1}
    assert all(age == min(pace.max_age, 3) for pace, age in strict.items())  # the bound is not a loose one


@pytest.mark.parametrize("bound", [1, 2, 3])
@pytest.mark.parametrize("window", [1, 2, 5, 9])
def test_the_bound_is_that_of_the_theorem(bound: int, window: int) -> None:
    groups = 4
    pace = Pace(groups, bound * groups, window)
    assert pace.max_age == bound + -(-(window - 1) // groups)


@pytest.mark.parametrize(("bound", "depth"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
def test_slow_groups_are_trained_and_not_discarded(bound: int, depth: int) -> None:
    """Two groups that end only when everything else waits for them."""
    pace = Pace.of(4, bound, depth)
    assert pace.max_age == bound
    done = Schedule(pace, 1, batches=20, slow=frozenset({0, 7})).run()
    assert {0, 7} <= done.trained.keys() and max(done.ages) <= pace.max_age


def test_a_bound_of_zero_takes_turns() -> None:
    """Batch v holds groups vP to (v + 1)P - 1, all admitted at version v."""
    done = Schedule(Pace.of(3, 0), 5).run()
    assert done.ages == {0}
    assert done.trained == {number: number // 3 for number in range(18)}


def test_strict_order_gives_the_same_batches_under_any_timing() -> None:
    expected = {number: number // 5 for number in range(30)}
    for seed in range(50):
        assert Schedule(Pace.of(5, 2), seed).run().trained == expected


def test_the_first_that_pass_are_taken_in_any_order_of_finishing_and_the_others_are_withdrawn() -> None:
    """With a reserve; `taken` is a loop over the numbers in order."""
    for seed in range(200):
        rng = random.Random(seed)
        groups, reserve, batches, start = rng.randint(1, 6), rng.randint(0, 6), 3, rng.randint(0, 5)
        passing = [[rng.random() < 0.6 for _ in range(200)] for _ in range(batches)]  # a group may pass or not later
        window = GroupWindow(Pace.of(groups, 0, reserve=reserve), 0, batches, start=start)
        for version in range(batches):
            window.publish(version)
            taken = [number for number in range(start, 200) if passing[version][number]][:groups]
            running: list[int] = []
            while (batch := window.take()) is None:
                assert window.running + window.finished + window.room == groups + reserve
                running += window.admit(rng.randint(bool(not running), window.room))
                number = running.pop(rng.randrange(len(running)))
                window.decide(number, passed=passing[version][number])
            assert batch == taken
            start = taken[-1] + 1
            assert window.next == start or not reserve
            assert not (window.room or window.running or window.finished)
        assert window.is_complete


def test_wrong_calls_are_refused() -> None:
    window = GroupWindow(Pace.of(2, 1), 0, 3)
    assert list(window.admit(window.room)) == [0, 1, 2, 3] and window.room == 0
    window.decide(1, passed=True)
    with pytest.raises(ValueError, match="group 1 is not running"):
        window.decide(1, passed=True)
    window.publish(1)
    with pytest.raises(ValueError, match="version 0 was published after version 1"):
        window.publish(0)
    for depth in (0, 3):
        with pytest.raises(ValueError, match=f"a depth of {depth} batches does not fit the bound of 2 versions"):
            Pace.of(2, 2, depth)
