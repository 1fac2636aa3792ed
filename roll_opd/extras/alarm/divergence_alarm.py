"""Alarms for a run that degrades. Each alarm warns once, with numbers and a remedy.

Lower entropy, shorter answers and more agreement with the teacher are normal in training if the reward also rises. In a
collapse, the reward does not rise. Self-distillation often collapses after 100 to 200 steps (siyan-zhao/OPSD, issue
20). In another known failure of on-policy distillation, answers grow to the length limit (arXiv 2604.08527).

An alarm is given if a change meets three conditions. It is large, it is significant compared with the noise between
steps (`significance`), and it is present in both halves of the last window.

The alarm for samples of other weights has fixed limits and does not depend on the reward. The reason is that the
importance weights of a few sequences dominate an update before the reward falls (arXiv 2602.17616). If the samples are
older than the weights, a single step is enough. Otherwise sampler and learner only compute differently, and the alarm
needs several steps.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from roll_opd.extras.alarm.significance import Shift, is_due, least_evidence, lost_gain, shift, threshold

WINDOW = 5  # number of steps in the first and in the last window
LONG_WINDOW = 10  # the same for the fraction of truncated answers, because it is noisy
WINDOW_SHARE = 10  # a window has 1 / WINDOW_SHARE of the steps so far, at most `MAX_WINDOW`
MAX_WINDOW = 40
MAX_TESTS = 200  # longer runs are tested only at every (steps / MAX_TESTS)-th step, since each test reads all steps
MIN_ENTROPY = 0.2  # alarm below this fraction of the first entropy
SHORTER, LONGER = 0.5, 2.0  # alarm below or above these multiples of the first length
MIN_DISAGREEMENT = 0.2  # alarm below this fraction of the first disagreement
RISEN = 1.0  # standard errors: a larger rise of the reward counts as learning
TRUNCATED_MORE = 0.1  # increase of the fraction of truncated answers that gives an alarm
TRUNCATED_TIMES = 1.5  # factor by which the fraction of truncated answers must increase
GROWN = 1.1  # factor by which the mean length must increase
ESS_WINDOW = 3  # number of steps that the alarm for samples of other weights needs if the samples are not older
MIN_ESS = 0.2  # alarm below this effective fraction of the sequences (geometric mean over the steps)
# nats per token: the KL from sampler to learner must also be above this, as long answers lower the fraction too
MIN_KL = 0.01

TINY = 1e-9

ENTROPY, AGREEMENT = "opd/student_entropy", "opd/agreement"
LENGTH, REWARD = "tokens/response_length/mean", "critic/score/mean"
TRUNCATED = "rollout/finish_length_rate"
ESS, KL, AGE = "rollout/mismatch/ess_sequence", "rollout/mismatch/k1", "rollout/async/age_mean"
READ = (ENTROPY, AGREEMENT, LENGTH, REWARD, TRUNCATED, ESS)
STDERR = "critic/score/stderr"


@dataclass(frozen=True)
class Remedies:
    """Advice for alarms. Each piece of advice is a clause that names configuration keys."""

    slower: Sequence[str] = ()  # advice in addition to a lower learning rate
    shorter: Sequence[str] = ()  # advice against truncated answers
    fresher: Sequence[str] = ()  # advice against samples of other weights

    def against_collapse(self) -> str:
        """Return the advice against a loss of earlier gains."""
        return f"resume from an earlier checkpoint with {_listed(['a lower learning_rate', *self.slower])}"

    def against_length(self) -> str:
        """Return the advice against truncated answers."""
        return _listed(["raise response_length", *self.shorter, "lower learning_rate"])

    def against_staleness(self) -> str:
        """Return the advice against samples from weights that differ much from the student's."""
        return _listed([*self.fresher, "lower learning_rate"])


@dataclass
class _Series:
    """The values of several metrics over the steps. Steps that lack one of these metrics are left out."""

    names: tuple[str, ...]
    rows: list[list[float]] = field(default_factory=list)

    def add(self, metrics: Mapping[str, float | None]) -> bool:
        """Add the values of a step if it has all of the metrics. Return whether they were added."""
        values = [_finite(metrics.get(name)) for name in self.names]
        given = [value for value in values if value is not None]
        if len(given) < len(self.names):
            return False
        self.rows.append(given)
        return True

    def values(self) -> np.ndarray:
        """Return the values, f64 [metrics, steps]."""
        return np.array(self.rows).T


class DivergenceAlarm:
    """Compares the last steps of a run with earlier steps. Each alarm is given only once."""

    def __init__(self, *, is_itself: bool, remedies: Remedies | None = None) -> None:
        """Create the alarms.

        Args:
            is_itself: whether a teacher has the student's weights. Agreement with such a teacher is not progress.
            remedies: the advice that the warnings give.
        """
        self._is_itself, self._remedies = is_itself, remedies or Remedies()
        self._series = {name: _Series((name,)) for name in (ENTROPY, AGREEMENT, LENGTH)}
        self._rewards, self._truncated = _Series((REWARD,)), _Series((TRUNCATED, LENGTH))
        self._effective = _Series((ESS, KL))
        self._stderr2: list[float] = []  # squared standard error of each reward; 0 if not recorded
        self._sounded: set[str] = set()
        self._steps, self._untested = 0, set[str]()

    def after(self, metrics: Mapping[str, float | None]) -> list[str]:
        """Add the metrics of a step, and return new warnings. A metric that is not finite may be given as None."""
        measured = {name for name, series in self._series.items() if series.add(metrics)}
        if self._rewards.add(metrics):
            measured.add(REWARD)
            self._stderr2.append((_finite(metrics.get(STDERR)) or 0.0) ** 2)
        if self._truncated.add(metrics):
            measured.add(TRUNCATED)
        self._steps += 1
        self._untested |= measured
        if self._steps % max(1, self._steps // MAX_TESTS):
            measured &= {REWARD}  # the reward is tested at other steps than the rest
        else:
            measured, self._untested = self._untested, set()
        new = dict(self._found(measured - self._sounded))
        steps = 1 if _finite(metrics.get(AGE)) else ESS_WINDOW
        if self._effective.add(metrics) and ESS not in self._sounded and (text := self._staleness(steps)):
            new[ESS] = text
        self._sounded |= new.keys()
        return list(new.values())

    def _found(self, measured: set[str]) -> Iterator[tuple[str, str]]:
        if REWARD in measured and (text := self._reward()):
            yield REWARD, text
        if TRUNCATED in measured and (text := self._truncation()):
            yield TRUNCATED, text
        if measured.isdisjoint(self._series):
            return
        reward = self._reward_shift()
        if reward.errors[0] > RISEN if reward else not self._is_itself:
            return
        reward_text = (
            ""
            if reward is None
            else f", and the reward has not risen ({reward.first[0]:.3g}, now {reward.last[0]:.3g})"
        )
        for name in (ENTROPY, LENGTH, AGREEMENT):
            if name in measured and (name != AGREEMENT or self._is_itself):
                change = _change(self._series[name].values(), WINDOW)
                limit = threshold(len(self._series[name].rows))
                if change and abs(change.errors[0]) > limit and _is_collapse(name, change):
                    yield name, f"{name}: {_COLLAPSED[name](change, reward_text)}; {self._remedies.against_collapse()}"

    def _reward(self) -> str:
        """Return a warning if the reward has lost part of an earlier gain, otherwise ""."""
        steps = len(self._rewards.rows)
        if not is_due(steps):
            return ""
        values = self._rewards.values()
        lost = lost_gain(values, np.array([self._stderr2]))
        if not lost.evidence[0] > least_evidence(steps):
            return ""
        first, best, last = float(lost.first[0]), float(lost.best[0]), float(lost.last[0])
        return (
            f"{REWARD}: the reward has risen from {first:.3g} to {best:.3g} and fallen to {last:.3g} (by"
            f" {lost.errors[0]:.1f} standard errors): training is losing earlier gains;"
            f" {self._remedies.against_collapse()}"
        )

    def _staleness(self, steps: int) -> str:
        """Return a warning if the last samples are from weights that differ much from the student's, otherwise ""."""
        shares, kl = self._effective.values()[:, -steps:]
        effective = float(np.exp(np.log(np.maximum(shares, TINY)).mean()))
        if len(shares) < steps or effective >= MIN_ESS or kl.mean() <= MIN_KL:
            return ""
        last = "this step" if steps == 1 else f"the last {steps} steps"
        return (
            f"{ESS}: the effective number of sequences in {last} is {effective:.0%} of their actual number, because the"
            f" KL of the student from the weights that sampled the sequences is {kl.mean():.2g} nats per token: updates"
            f" become noisy, and the reward may fall; {self._remedies.against_staleness()}"
        )

    def _truncation(self) -> str:
        """Return a warning if answers have become longer and more of them are truncated, otherwise "".

        This alarm does not consider the reward.
        """
        values = self._truncated.values()
        steps = values.shape[1]
        window = max(LONG_WINDOW, min(MAX_WINDOW, steps // WINDOW_SHARE))
        if steps < 2 * window:
            return ""
        shares, lengths = values[:1], values[1:]
        start = _lowest_window(shares[0, :-window], window)
        truncated, length = (shift(series, window, start=start) for series in (shares, lengths))
        first, last = float(truncated.first[0]), float(truncated.least[0])
        enough = (
            last > max(first + TRUNCATED_MORE, TRUNCATED_TIMES * first) and length.least[0] > GROWN * length.first[0]
        )
        if not (enough and min(truncated.errors[0], length.errors[0]) > threshold(steps)):
            return ""
        return (
            f"{TRUNCATED}: answers become longer, and more answers are truncated: {first:.0%} ended at response_length"
            f" around step {start + window // 2 + 1}, now {truncated.last[0]:.0%}; the mean length of answers rose from"
            f" {length.first[0]:.3g} to {length.last[0]:.3g} tokens. Truncated answers have no end token and often "
            f"repeat themselves (see samples.jsonl); {self._remedies.against_length()}"
        )

    def _reward_shift(self) -> Shift | None:
        """Return the change of the reward from the first to the last steps, or None if there are too few steps.

        Each window has a quarter of the steps, but at least `WINDOW` and at most `MAX_WINDOW` steps.
        """
        values = self._rewards.values() if self._rewards.rows else np.zeros((1, 0))
        steps = values.shape[1]
        return _change(values, max(WINDOW, min(MAX_WINDOW, steps // 4))) if steps >= 2 * WINDOW else None


def _is_collapse(name: str, change: Shift) -> bool:
    """Return whether a change is as large as in a collapse, in both halves of the last window."""
    first, least = float(change.first[0]), float(change.least[0])
    if name == ENTROPY:
        return 0 <= least < MIN_ENTROPY * first
    if name == AGREEMENT:
        return 1 - least < MIN_DISAGREEMENT * (1 - first)
    return first > 0 and not SHORTER <= least / first <= LONGER


_COLLAPSED = {
    ENTROPY: lambda change, reward: (
        f"the student's entropy fell from {change.first[0]:.3g} to {change.last[0]:.3g} nats per token{reward}: it has"
        " collapsed onto a few answers"
    ),
    LENGTH: lambda change, reward: (
        f"responses had {change.first[0]:.3g} tokens and now have {change.last[0]:.3g}{reward}: the student adopts a"
        " style instead of the task (see samples.jsonl)"
    ),
    AGREEMENT: lambda change, reward: (
        f"the agreement of student and teacher rose from {change.first[0]:.3g} to"
        f" {change.last[0]:.3g}{reward}: the teacher has become equal to the student, so distillation has no effect"
    ),
}


def _change(values: np.ndarray, window: int) -> Shift | None:
    """Return the change from the first window to the last window, or None if there are too few steps."""
    return shift(values, window) if values.shape[1] >= 2 * window else None


def _lowest_window(values: np.ndarray, window: int) -> int:
    """Return the index at which the window with the lowest mean starts."""
    return int(np.convolve(values, np.ones(window), "valid").argmin())


def _finite(value: float | None) -> float | None:
    return value if value is not None and np.isfinite(value) else None


def _listed(clauses: Sequence[str]) -> str:
    """Return the clauses as one text, such as `a, b or c`."""
    *others, last = clauses
    return f"{', '.join(others)} or {last}" if others else last
