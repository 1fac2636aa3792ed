"""What a reward is: a function from a batch of answers to as many numbers.

Rewards see text, because that is what rules, sandboxes and judges read; `experience` is there for those that
need tokens or log-probs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

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
    prompt: str = ""
    experience: Experience | None = None


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
