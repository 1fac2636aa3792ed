"""Interface of rewards.

A reward is a sync or async function. It maps each `RewardSample` of a batch to a `Score` or a `Failure`. Rewards get
the text of a sample and the other keys of its row. The field `tokenized` has tokens and log-probs. `flag`, `choice`
and `number` validate the configured arguments of a reward.
"""

import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from roll_opd.base.frozen import FrozenDict
from roll_opd.samples.sample import Sample

TIMEOUT = "timeout"  # kind of a Failure


class RewardError(ValueError):
    """A reward is missing or misconfigured, or it violates the interface.

    The message states the problem and a remedy.
    """


@dataclass(frozen=True)
class RewardSample:
    """One response to score."""

    id: str
    response: str  # the student's text after the prompt
    ground_truth: str | None
    tag: str
    extra: FrozenDict = field(default_factory=FrozenDict)  # the row's other keys, such as test_cases
    tokenized: Sample | None = None  # with tokens, log-probs and mask
    read_prompt: Callable[[], str] = str  # returns the text of `prompt`, lazily because few rewards read it

    @property
    def prompt(self) -> str:
        """Text of the rendered prompt.

        Neither this text nor `response` contains special tokens.
        """
        return self.read_prompt()


@dataclass(frozen=True)
class Score:
    """The score of one sample.

    A reward may return a plain number instead of `Score(number)`, and None instead of `Score(None)`.
    """

    value: float | None  # finite value; None: the reward does not apply to this sample
    # values that are logged by name and not added to the value
    parts: Mapping[str, float] = field(default_factory=FrozenDict)
    reason: str = ""  # short outcome such as "wrong answer"; outcomes are counted by name
    errors: Mapping[str, int] = field(default_factory=FrozenDict)  # kind -> number of failed attempts before this score


@dataclass(frozen=True)
class Failure:
    """Result for a sample that could not be scored.

    Key `on_error` of the reward decides what happens to the sample.
    """

    kind: str  # kind such as "timeout" or "http_500"; kinds are counted by name
    message: str  # what failed, where, and what to do
    # kind -> number of failed attempts before the last attempt
    errors: Mapping[str, int] = field(default_factory=FrozenDict)
    # whether a service failed that the reward asks, so that the reward is repeated for a while; see `base.failures`
    of_a_service: bool = False


Scored = Score | Failure
Scores = Sequence[Score | Failure | float | None]


class RewardFunction(Protocol):
    """Function that returns the scores of a batch, in the order of its samples.

    It is called concurrently and from any thread. Coroutine functions are awaited.
    """

    def __call__(self, samples: Sequence[RewardSample]) -> Scores | Awaitable[Scores]: ...


def read_scores(scores: Scores, samples: Sequence[RewardSample], name: str) -> list[Scored]:
    """Validate the result of a reward, and return one `Scored` per sample.

    Raises `RewardError` if the result violates the interface.
    """
    if isinstance(scores, str) or not hasattr(scores, "__len__"):
        raise RewardError(f"reward {name} returned {type(scores).__name__}; return a list with one score per sample")
    if len(scores) != len(samples):
        raise RewardError(
            f"reward {name} returned {len(scores)} scores for {len(samples)} samples; return one score per sample"
        )
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
            f" parts as a mapping of names to numbers (got {score.parts!r})"
        ) from None
    if not all(map(math.isfinite, (value or 0.0, *parts.values()))):
        return Failure("not_finite", f"reward {name} returned {value} with parts {dict(parts)}; scores must be finite")
    return Score(value, parts, "" if score.reason is None else str(score.reason), score.errors)


Name = TypeVar("Name", bound=str)


def flag(reward: str, key: str, value: object) -> bool:
    """Return `value` if it is a bool; raise `RewardError` otherwise."""
    if not isinstance(value, bool):
        raise RewardError(f"reward {reward}: {key} is {value!r}; write true or false")
    return value


def choice(reward: str, key: str, value: Name, known: Collection[Name]) -> Name:
    """Return `value` if it is one of the known names; raise `RewardError` otherwise."""
    if not isinstance(value, str) or value not in known:
        raise RewardError(f"reward {reward}: {key} is {value!r}; write one of {', '.join(known)}")
    return value


def number(reward: str, key: str, value: object, least: float = -math.inf) -> float:
    """Return `value` as a float if it is a finite number of at least `least`; raise `RewardError` otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < least:
        bound = "" if least == -math.inf else f" of at least {least:g}"
        raise RewardError(f"reward {reward}: {key} is {value!r}; write a number{bound}")
    return float(value)
