"""Teachers and students with known distributions over strings, and with different tokens."""

import math
from itertools import product

import numpy as np
import pytest

from roll_opd.models.token_bytes import ByteEncoder, TokenBytes
from roll_opd.samples.sample import Sample
from roll_opd.teachers.other_tokenizer import OtherTokenizer
from roll_opd.teachers.teacher_interface import TeacherAnswer

LETTERS = "abc"
END = 0.2  # probability that a text ends after a pair of letters
NEXT = {"": (0.5, 0.3, 0.2), "a": (0.1, 0.6, 0.3), "b": (0.7, 0.1, 0.2), "c": (0.3, 0.3, 0.4)}  # after a letter


def letters_tokenizer() -> dict:
    vocabulary = {letter: number for number, letter in enumerate((*LETTERS, *"0123456789"))}
    added = {"id": len(vocabulary), "content": "<end>", "special": True, "single_word": False, "lstrip": False}
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    return {"version": "1.0", "model": model, "added_tokens": [{**added, "rstrip": False, "normalized": False}]}


def table_of(tokens: list[str]) -> TokenBytes:
    """Return the student's table: these tokens, and one that ends."""
    by_id = tuple(token.encode() for token in [*tokens, "<end>"])
    return TokenBytes(by_id, {"<end>": len(tokens)}, frozenset({len(tokens)}))


def of_letters(text: str, place: int) -> float:
    """Return the teacher's log-prob of a letter of `text`; it may end only after a pair."""
    stays = 1 - END if place and place % 2 == 0 else 1.0
    return math.log(stays * NEXT[text[place - 1] if place else ""][LETTERS.index(text[place])])


def test_equal_distributions_over_strings_have_a_reverse_kl_of_zero() -> None:
    """The student writes pairs of letters, the teacher letters; both have the same probability of every text."""
    pairs = ["".join(pair) for pair in product(LETTERS, repeat=2)]
    encoder = ByteEncoder(letters_tokenizer())
    table = table_of(pairs)
    view = OtherTokenizer("t", table, encoder, {len(pairs): encoder.table.added["<end>"]})
    rng = np.random.default_rng(0)
    for _ in range(50):
        chosen = rng.integers(0, len(pairs), rng.integers(1, 12)).tolist()
        text = "".join(pairs[one] for one in chosen)
        by_letter = [of_letters(text, place) for place in range(len(text))]
        own = np.array([sum(by_letter[2 * k : 2 * k + 2]) for k in range(len(chosen))] + [math.log(END)], np.float32)
        sample = Sample(
            np.array([0, *chosen, len(pairs)]),
            1,
            {"action_mask": np.ones(len(own), bool)},
            teacher_prompts={"t": np.array([0])},
        )
        tokens, length = view.reads(sample)
        assert len(tokens) - length == len(text) + 1
        answer = view.back(sample, TeacherAnswer(np.array([*by_letter, math.log(END)], np.float32)))
        assert answer.alignment is not None and answer.alignment.chunks.tolist() == list(range(len(own)))
        assert np.abs(own - answer.logprobs).max() < 1e-5


@pytest.mark.parametrize("number", ["201", "7", "1900"])
def test_a_teacher_that_splits_digits_raises_a_number_that_it_likes(number: str) -> None:
    """A whole-number token that the teacher's digits make likely gets a positive advantage: nothing is unmatched."""
    encoder = ByteEncoder(letters_tokenizer())
    table = table_of([number, "a"])
    view = OtherTokenizer("t", table, encoder, {2: encoder.table.added["<end>"]})
    prompts = {"t": np.array([0])}
    sample = Sample(np.array([0, 0, 1, 2]), 1, {"action_mask": np.ones(3, bool)}, teacher_prompts=prompts)
    tokens, length = view.reads(sample)
    liked = np.full(len(tokens) - length, math.log(0.9), np.float32)
    answer = view.back(sample, TeacherAnswer(liked))
    own = np.log(np.array([0.1, 0.5, 0.5], np.float32))
    assert answer.logprobs[0] == pytest.approx(len(number) * math.log(0.9))
    assert (answer.logprobs - own)[0] > 0
