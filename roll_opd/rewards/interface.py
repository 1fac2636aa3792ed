"""What a reward is: a function from a batch of answers to as many numbers.

Rewards see text, because that is what rules, sandboxes and judges read, and the row's other keys; `experience` is
there for those that need tokens or log-probs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from roll_opd.config.frozen import FrozenDict
from roll_opd.data.experience import Experience


class RewardError(ValueError):
    """A reward cannot be found, or did not keep to the interface; the message says which and what to do."""


@dataclass(frozen=True)
class RewardSample:
    """One answer to score."""

    id: str
    response: str  # the student's text after the prompt
    ground_truth: str | None
    tag: str
    extra: FrozenDict = field(default_factory=FrozenDict)  # the row's other keys, such as test_cases
    experience: Experience | None = None
    read_prompt: Callable[[], str] = str  # makes the text of `prompt`; most rewards never ask for it

    @property
    def prompt(self) -> str:
        """The text that the student was given, through the template, without special tokens (as `response` is)."""
        return self.read_prompt()


class Reward(Protocol):
    """Scores a batch: one finite number a sample, in order; None for one it cannot judge. Called from any thread."""

    def __call__(self, samples: Sequence[RewardSample]) -> Sequence[float | None]: ...


def score_samples(reward: Reward, samples: Sequence[RewardSample]) -> list[float | None]:
    """The scores of `samples`; `RewardError` where the reward returns another count, or a number that is not
    finite.
    """
    if not samples:
        return []
    scores = [None if score is None else float(score) for score in reward(samples)]
    if len(scores) != len(samples):
        raise RewardError(f"reward {reward!r} returned {len(scores)} scores for {len(samples)} samples")
    for sample, score in zip(samples, scores, strict=True):
        if score is not None and not math.isfinite(score):
            raise RewardError(f"reward {reward!r} returned {score} for sample {sample.id}; scores must be finite")
    return scores
