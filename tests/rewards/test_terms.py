"""Terms that are added to other rewards: the form of a response and its length."""

import numpy as np
import pytest

from roll_opd.rewards.builtin.format import Format
from roll_opd.rewards.builtin.length_penalty import LengthPenalty, overlong, shortness
from roll_opd.rewards.interface import Failure, RewardError, RewardSample, Score
from roll_opd.rewards.patterns import SECONDS
from roll_opd.rewards.reward_registry import resolve
from roll_opd.samples.sample import Sample, as_columns


def of_length(tokens: int, response: str = r"\boxed{B}", truth: str | None = "B") -> RewardSample:
    """A sample of `tokens` tokens of the student's and one of a tool's."""
    mask = np.array([True] * tokens + [False])
    ids = np.zeros(tokens + 3, dtype=np.int64)
    experience = Sample(
        id="e",
        group_id="g",
        tag="t",
        domain="d",
        tokens=ids,
        prompt_length=2,
        finish_reason="stop",
        columns=as_columns(action_mask=mask),
    )
    return RewardSample("r", response, truth, "t", tokenized=experience)


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("<think>well</think>\n\n42", 1.0),
        ("\n<think>\nmany\nlines\n</think>It is 42.\nBye", 1.0),
        ("<think></think>42", 1.0),
        ("42", 0.0),
        ("<think>well</think> \n", 0.0),
        ("<think>well 42", 0.0),
        ("well</think>42", 0.0),
        ("Hm. <think>well</think>42", 0.0),
        ("<think>a</think>b<think>c</think>d", 0.0),
        ("<think>a<think>b</think>c", 0.0),
        ("<think>a</think></think>b", 0.0),
        ("", 0.0),
    ],
)
def test_thinking_and_then_an_answer(response: str, value: float) -> None:
    (score,) = Format().score([RewardSample("r", response, None, "t")])
    assert score.value == value


def test_a_pattern_of_ones_own_matches_the_whole_response() -> None:
    reward = Format(r"<answer>.*</answer>")
    samples = [RewardSample("r", text, None, "t") for text in ("<answer>a\nb</answer>", "so <answer>a</answer>")]
    assert reward.score(samples) == [Score(1.0, reason="well formed"), Score(0.0, reason="other form")]
    with pytest.raises(RewardError, match=r"format: pattern is not a regular expression: .*; correct '\(a'"):
        resolve("format", {"pattern": "(a"})
    with pytest.raises(RewardError, match="pattern is 3; write a regular expression"):
        resolve("format", {"pattern": 3})


def test_a_pattern_that_does_not_end_is_a_failure_in_time() -> None:
    (failure,) = Format("(a|aa)+$").score([RewardSample("r", "a" * 99_999 + "c", None, "t")])
    assert isinstance(failure, Failure)
    assert (failure.kind, f"more than {SECONDS} s" in failure.message) == ("timeout", True)


def test_the_soft_overlong_punishment_is_the_papers() -> None:
    """Equation 13 of arXiv 2503.14476, written as in the paper."""

    def paper(length: int, most: int, cache: int) -> float:
        if length <= most - cache:
            return 0.0
        if length <= most:
            return ((most - cache) - length) / cache
        return -1.0

    for most, cache in ((20480, 4096), (100, 100), (10, 1)):
        lengths = np.unique(np.linspace(0, 2 * most, 50).astype(int))
        assert [overlong(n, most, cache) for n in lengths] == pytest.approx([paper(n, most, cache) for n in lengths])
    lengths = [0, 8, 9, 10, 11, 12, 13, 50]
    scores = LengthPenalty(max_tokens=12, cache_tokens=4).score([of_length(n) for n in lengths])
    assert [score.value for score in scores] == [0.0, 0.0, -0.25, -0.5, -0.75, -1.0, -1.0, -1.0]
    assert scores[3].parts == {"tokens": 10.0}


def test_rolls_term_takes_from_short_answers() -> None:
    assert [shortness(n) for n in (0, 100, 250, 400, 10_000)] == [-0.5, -0.5, -0.25, 0.0, 0.0]
    both = LengthPenalty(max_tokens=500, cache_tokens=100, coef=2)
    assert [score.value for score in both.score([of_length(n) for n in (100, 400, 500)])] == [-1.0, 0.0, -1.0]


def test_text_alone_has_no_length_in_tokens() -> None:
    reward = LengthPenalty(coef=1.0)
    assert reward.score([RewardSample("r", "a", None, "t")]) == [Score(None, reason="no tokens to count")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "write max_tokens and cache_tokens, or coef"),
        ({"max_tokens": 10}, "max_tokens is 10, cache_tokens None"),
        ({"max_tokens": 10, "cache_tokens": 20}, "max_tokens is 10; write a number of at least 20"),
        ({"max_tokens": 10, "cache_tokens": 0}, "cache_tokens is 0; write a number of at least 1"),
        ({"coef": True}, "coef is True; write a number"),
    ],
)
def test_lengths_that_make_no_sense_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        resolve("length_penalty", arguments)
