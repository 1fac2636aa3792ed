"""`format`: reward term that is 1.0 if the whole response matches a pattern, else 0.0."""

from collections.abc import Sequence

from roll_opd.rewards.interface import TIMEOUT, Failure, RewardSample, Score
from roll_opd.rewards.patterns import PatternTimeout, compiled, matches
from roll_opd.rewards.reward_registry import register

# one thought followed by an answer
THINK_THEN_ANSWER = r"\s*+<think>(?:(?!</?think>).)*+</think>\s*+(?!</?think>)\S(?:(?!</?think>).)*+"


@register("format")
class Format:
    """The score is 1.0 if the whole response matches a pattern, else 0.0.

    `pattern` has the syntax of the package `regex`. Its `.` also matches newlines.
    """

    def __init__(self, pattern: str = THINK_THEN_ANSWER) -> None:
        self.pattern = compiled("format", "pattern", pattern)

    def score(self, samples: Sequence[RewardSample]) -> list[Score | Failure]:
        return [self._score(sample.response) for sample in samples]

    def _score(self, response: str) -> Score | Failure:
        try:
            well_formed = matches(self.pattern, response, whole=True)
        except PatternTimeout as timeout:
            return Failure(TIMEOUT, f"reward format: the pattern {timeout}")
        return Score(float(well_formed), reason="well formed" if well_formed else "other form")
