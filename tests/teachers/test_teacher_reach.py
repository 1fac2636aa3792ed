"""The context length that a teacher reads, for models with a known context."""

import numpy as np
import pytest

from roll_opd.teachers.teacher_reach import PARTS, Reach, changes, difference, reach, reach_check

VOCAB, LENGTH = 50, 160
RNG = np.random.default_rng(0)
TEXTS = [RNG.integers(0, VOCAB, LENGTH) for _ in range(PARTS)]


def read(tokens: np.ndarray, context: int) -> np.ndarray:
    """Return two functions of the last `context` tokens and their order, as a model with this context could compute."""
    seen = [tokens[max(0, place - context) : place] for place in range(1, len(tokens))]
    return np.array([[-(part.sum() % 97) / 97, -np.cos(part @ np.arange(len(part), 0, -1))] for part in seen])


def reaches(context: int) -> list[Reach]:
    both = zip(TEXTS, changes(TEXTS), strict=True)
    pairs = [(read(tokens, context), read(one.tokens, context), one) for tokens, one in both]
    return [reach(difference(before, after), 1, one.end) for before, after, one in pairs]


def test_one_part_of_each_text_is_reversed() -> None:
    found = changes([*TEXTS, np.zeros(40, np.int64)])
    assert [one.differs for one in found] == [True] * PARTS + [False]  # zeros read the same in reverse
    for one, text in zip(found, TEXTS, strict=False):
        places = np.flatnonzero(one.tokens != text)
        assert one.end - LENGTH // PARTS <= places.min() and places.max() < one.end < LENGTH
        assert sorted(one.tokens) == sorted(text)


@pytest.mark.parametrize("context", [1, 16, 40, 60])
def test_a_truncated_context_is_measured(context: int) -> None:
    found = reaches(context)
    assert max(one.seen for one in found) <= context  # the token after the part is at distance 0
    assert max(one.seen for one in found) >= 0.9 * context - 1
    assert reach_check(found).verdict == "failed"


def test_a_whole_context_passes() -> None:
    row = reach_check(reaches(LENGTH))
    assert row.verdict == "ok"
    assert row.value == f"sees {LENGTH - 1 - LENGTH // PARTS} tokens back, of {LENGTH - 1 - LENGTH // PARTS} tested"


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        ([Reach(10, 10), Reach(0, 9)], "ok"),  # too short to say anything
        ([Reach(100, 100), Reach(10, 60)], "warning"),
        ([Reach(100, 100), Reach(10, 60), Reach(0, 40)], "failed"),
        ([Reach(40, 100), Reach(30, 30)], "failed"),  # the farthest counts alone
    ],
)
def test_verdicts(found: list[Reach], wanted: str) -> None:
    assert reach_check(found).verdict == wanted
