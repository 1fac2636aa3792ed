"""Alarms of a distillation that collapses: one warning each, with the numbers and what to do.

A student that becomes sure of itself, writes shorter or agrees with its teacher may simply have learned. What gives a
collapse away is that it gains nothing by it. Self-distillation is known for it, after 100 to 200 steps
(siyan-zhao/OPSD, issue 20).
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

WINDOW = 5  # steps: the first so many are compared with the last so many
ENTROPY_LEFT = 0.2  # share of the first entropy, below which a student hardly has a choice left
SHORTER, LONGER = 0.5, 2.0  # times the first length
DISAGREEMENT_LEFT = 0.2  # share of the first disagreement, below which a teacher has nothing left to say
GAIN = 0.05  # of rewards from 0 to 1: less is no gain
LOST = 0.5  # share of a gain

ENTROPY, AGREEMENT = "opd/student_entropy", "opd/agreement"
LENGTH, REWARD = "tokens/response_length/mean", "critic/score/mean"
READ = (ENTROPY, AGREEMENT, LENGTH, REWARD)

_SLOWER = (
    "go on from a checkpoint before it with a lower learning_rate, a teacher that changes less (follows_student.decay"
    " nearer to 1, a larger every, or neither) or a hint that says more"
)


class CollapseAlarm:
    """Compares the last steps of a run with its first ones. Each alarm sounds once."""

    def __init__(self, *, is_itself: bool) -> None:
        """`is_itself`: a teacher has the student's own weights, so that agreement with it is no end in itself."""
        self._is_itself = is_itself
        self._first: list[Mapping[str, float]] = []
        self._last: deque[Mapping[str, float]] = deque(maxlen=WINDOW)
        self._steps = 0
        self._best = -np.inf  # of the reward's means over so many steps
        self._sounded: set[str] = set()

    def after(self, metrics: Mapping[str, float | None]) -> list[str]:
        """Return the warnings that the metrics of one more step give rise to. What is not finite is None on record."""
        measured = {name: metrics.get(name) for name in READ}
        read = {name: value for name, value in measured.items() if value is not None and np.isfinite(value)}
        self._steps += 1
        self._last.append(read)
        if len(self._first) < WINDOW:
            self._first.append(read)
        if self._steps < 2 * WINDOW:
            return []
        first, last = _means(self._first), _means(self._last)
        self._best = max(self._best, last.get(REWARD, -np.inf))
        found = dict(alarms(first, last, is_itself=self._is_itself, best=self._best))
        new = [text for name, text in found.items() if name not in self._sounded]
        self._sounded |= found.keys()
        return new


def alarms(
    first: Mapping[str, float], last: Mapping[str, float], *, is_itself: bool, best: float = -np.inf
) -> Iterator[tuple[str, str]]:
    """Yield (name, sentence) for what has collapsed from the `first` values of the metrics `READ` to the `last` ones.

    The reward itself has where it has lost half of what it had gained when it was at its `best`. Else nothing has where
    the reward has risen. Without a reward, only a teacher that `is_itself` the student is suspected:
    to become as sure, as brief and as the teacher is what one learns from another.
    """
    has_reward = REWARD in first and REWARD in last
    if has_reward and best - first[REWARD] > GAIN and best - last[REWARD] > LOST * (best - first[REWARD]):
        yield (
            "reward",
            f"{REWARD}: the reward has risen from {first[REWARD]:.3g} to {best:.3g} and fallen to {last[REWARD]:.3g}:"
            f" what was learned is being lost; {_SLOWER}",
        )
    if last.get(REWARD, 0.0) - first.get(REWARD, 0.0) > GAIN if has_reward else not is_itself:
        return
    of_reward = f"the reward has not risen ({first[REWARD]:.3g}, now {last[REWARD]:.3g})" if has_reward else ""
    beside = f", and {of_reward}" if of_reward else ""
    if ENTROPY in first and last.get(ENTROPY, np.inf) < ENTROPY_LEFT * first[ENTROPY]:
        yield (
            "entropy",
            f"{ENTROPY}: the student's entropy has fallen from {first[ENTROPY]:.3g} to {last[ENTROPY]:.3g} nats a"
            f" token{beside}: it has collapsed onto a few answers; {_SLOWER}",
        )
    if LENGTH in first and LENGTH in last:
        ratio = last[LENGTH] / first[LENGTH] if first[LENGTH] else 1.0
        if not SHORTER <= ratio <= LONGER:
            yield (
                "length",
                f"{LENGTH}: responses had {first[LENGTH]:.3g} tokens and have {last[LENGTH]:.3g}{beside}: the style"
                f" that a hint brings along is learned in place of the task; {_SLOWER}, and look at samples.jsonl",
            )
    if is_itself and AGREEMENT in first and AGREEMENT in last:
        apart = [1 - first[AGREEMENT], 1 - last[AGREEMENT]]
        if apart[1] < DISAGREEMENT_LEFT * apart[0]:
            yield (
                "agreement",
                f"{AGREEMENT}: student and teacher had {first[AGREEMENT]:.3g} of their probability in common and have"
                f" {last[AGREEMENT]:.3g}{beside}: the teacher has become what the student is and teaches nothing more;"
                f" {_SLOWER}",
            )


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric that all rows have."""
    names = [name for name in READ if all(name in row for row in rows)]
    return {name: float(np.mean([row[name] for row in rows])) for name in names}
