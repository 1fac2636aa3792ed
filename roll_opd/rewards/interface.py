"""What a reward is: a function, sync or async, from a batch of responses to as many scores.

Rewards get text, which rules, sandboxes and judges read, and the row's other keys; `experience` is there for those that
need tokens or log-probs.
"""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from roll_opd.base.frozen import FrozenDict
from roll_opd.samples.experience import Experience

TIMEOUT = "timeout"  # the kind of what runs out of time


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


@dataclass(frozen=True)
class Score:
    """The score of one sample. A plain number is short for `Score(number)`, None for `Score(None)`."""

    value: float | None  # finite; None: the reward does not apply to this sample
    parts: Mapping[str, float] = field(default_factory=FrozenDict)  # logged by name, not added to the value
    reason: str = ""  # a word or two for what was found, such as "wrong answer"; counted by name
    errors: Mapping[str, int] = field(default_factory=FrozenDict)  # attempts that failed before this one, by kind


@dataclass(frozen=True)
class Failure:
    """Takes the place of a score where a sample could not be scored; `on_error` says what happens to the sample."""

    kind: str  # such as "timeout" or "http_500"; counted by name
    message: str  # what failed, where, and what to do
    errors: Mapping[str, int] = field(default_factory=FrozenDict)  # attempts that failed before the last, by kind


Scored = Score | Failure
Scores = Sequence[Score | Failure | float | None]


class Reward(Protocol):
    """Scores a batch, in order. Called from any thread, several at a time; a coroutine function is awaited."""

    def __call__(self, samples: Sequence[RewardSample]) -> Scores | Awaitable[Scores]: ...


def read_scores(scores: Scores, samples: Sequence[RewardSample], name: str) -> list[Scored]:
    """Return the scores in what a reward returned for `samples`; `RewardError` where it broke the interface."""
    if isinstance(scores, str) or not hasattr(scores, "__len__"):
        raise RewardError(f"reward {name} returned {type(scores).__name__}; return a list, one score a sample")
    if len(scores) != len(samples):
        raise RewardError(f"reward {name} returned {len(scores)} scores for {len(samples)} samples; return one each")
    return [_read(score, sample.id, name) for score, sample in zip(scores, samples, strict=True)]


def _read(score: Score | Failure | float | None, sample: str, name: str) -> Scored:
    if isinstance(score, Failure):
        return replace(score, kind=str(score.kind), message=str(score.message))
    if not isinstance(score, Score):
        score = Score(score)
    try:
        value = None if score.value is None else float(score.value)
        parts = FrozenDict({str(part): float(number) for part, number in dict(score.parts).items()})
    except (TypeError, ValueError):
        raise RewardError(
            f"reward {name} returned {score.value!r} for sample {sample}; return a number, a Score or None, and"
            f" parts as numbers by name (they are {score.parts!r})"
        ) from None
    if not all(map(math.isfinite, (value or 0.0, *parts.values()))):
        return Failure("not_finite", f"reward {name} returned {value} with parts {dict(parts)}; scores must be finite")
    return Score(value, parts, "" if score.reason is None else str(score.reason), score.errors)
