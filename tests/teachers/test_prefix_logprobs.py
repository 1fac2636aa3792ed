"""Log-probs of student tokens under teachers with other tokenizers, against enumerations of texts and of tokens."""

import math
import time
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from tokenizer_kinds import EVERY_BYTE, TEXT, content

from roll_opd.base.failures import RunError
from roll_opd.models.token_bytes import ByteEncoder
from roll_opd.samples.sample import Sample
from roll_opd.teachers.other_tokenizer import OtherTokenizer
from roll_opd.teachers.prefix_logprobs import PrefixLogprobs
from roll_opd.teachers.teacher_interface import LOGPROBS, TeacherAnswer, Wanted
from tests.each import each

LENGTH = 5  # letters of every text
TEXTS = ["".join(letters) for letters in product("abc", repeat=LENGTH)]


def merged(*pairs: str) -> ByteEncoder:
    """Return a tokenizer of letters and of merged pairs, such as `ab`."""
    tokens = [*"abc", *pairs]
    model = {"type": "BPE", "vocab": {token: n for n, token in enumerate(tokens)}, "merges": [list(p) for p in pairs]}
    end = {"id": len(tokens), "content": "<end>", "special": True}
    added = [end | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)]
    return ByteEncoder({"model": model, "version": "1.0", "added_tokens": added})


def tokens_of(encoder: ByteEncoder, text: str) -> tuple[int, ...]:
    return *encoder.encode(text.encode())[0], encoder.table.added["<end>"]


class Beliefs:
    """Next-token log-probs of a model that has given probabilities of texts, by enumeration of all texts."""

    def __init__(self, encoder: ByteEncoder, probabilities: Sequence[float]) -> None:
        self.masses: dict[tuple[int, ...], float] = {}
        self.size = len(encoder.table.by_id)
        for text, probability in zip(TEXTS, probabilities, strict=True):
            tokens = tokens_of(encoder, text)
            for count in range(len(tokens) + 1):
                self.masses[tokens[:count]] = self.masses.get(tokens[:count], 0.0) + probability

    def next(self, before: tuple[int, ...]) -> np.ndarray:
        """Return the log-probs of all tokens, f32 [V]."""
        masses = [self.masses.get((*before, token), 0.0) / self.masses[before] for token in range(self.size)]
        return np.log(np.maximum(masses, 1e-30)).astype(np.float32)

    def answer(self, tokens: Sequence[int]) -> TeacherAnswer:
        """Return log-probs of tokens, with all tokens as the top-k, most likely ones first."""
        rows = np.stack([self.next(tuple(tokens[:place])) for place in range(len(tokens))])
        ids = np.argsort(-rows, axis=1)
        top = {"topk_ids": ids, "topk_logprobs": np.take_along_axis(rows, ids, 1)}
        return TeacherAnswer(rows[np.arange(len(tokens)), list(tokens)], arrays=top)


def view(student: ByteEncoder, teacher: ByteEncoder, end: str = "<end>", topk: int = 20) -> OtherTokenizer:
    prefixes = PrefixLogprobs(student, teacher.table, topk)
    ends = {student.table.added[end]: teacher.table.added[end]}
    return OtherTokenizer("t", student.table, teacher, ends, prefixes=prefixes)


def sample_of(tokens: Sequence[int], mask: Sequence[bool] | None = None) -> Sample:
    acts = np.ones(len(tokens), bool) if mask is None else np.array(mask)
    return Sample(np.array([0, *tokens]), 1, {"action_mask": acts}, teacher_prompts={"t": np.array([0])})


@pytest.mark.parametrize("pairs", [(), ("ab",), ("ab", "cc"), ("ab", "bc")])
def test_a_student_of_letters_with_the_teachers_distribution_over_texts_has_equal_log_probs(
    pairs: Sequence[str],
) -> None:
    """Every text of five letters; some are a thousand times as likely as others, so the teacher looks ahead."""
    rng = np.random.default_rng(len(pairs))
    weights = np.exp(rng.normal(0, 3, len(TEXTS)))
    student, teacher = merged(), merged(*pairs)
    own, beliefs = Beliefs(student, weights / weights.sum()), Beliefs(teacher, weights / weights.sum())
    found = view(student, teacher)
    for text in TEXTS:
        tokens = tokens_of(student, text)
        answer = found.back(sample_of(tokens), beliefs.answer(tokens_of(teacher, text)))
        assert answer.alignment is not None
        assert answer.alignment.credits.tolist() == list(range(len(tokens)))
        expected = own.answer(tokens).logprobs
        if pairs != ("ab", "bc"):
            np.testing.assert_allclose(answer.logprobs, expected, atol=2e-5)
        # with ab and bc, a sequence may leave the tokens of the response early
        assert answer.logprobs.sum() == pytest.approx(expected.sum(), abs=2e-5)
        assert answer.logprobs.max() <= 0


def test_a_wrong_token_has_the_penalty_and_the_right_one_before_it_has_none() -> None:
    """The teacher is certain of `ab`: its log-prob of a lone `a` is low, but the wrong token of `ac` is `c`."""
    student, teacher = merged(), merged("ab")
    probabilities = np.array([0.999 if text == "cabcc" else 0.001 / (len(TEXTS) - 1) for text in TEXTS])
    beliefs = Beliefs(teacher, probabilities)
    tokens = tokens_of(teacher, "caccc")
    of_teacher = beliefs.answer(tokens)
    assert of_teacher.logprobs[1] < -5 and of_teacher.logprobs[2] > -2  # of a, then of c
    answer = view(student, teacher).back(sample_of(tokens_of(student, "caccc")), of_teacher)
    assert answer.logprobs[1] > -0.01 and answer.logprobs[2] < -5


@pytest.mark.parametrize("pairs", [(), ("ab",), ("ab", "bc"), ("ca", "ab")])
def test_the_same_tokenizer_returns_the_same_bits(pairs: Sequence[str]) -> None:
    rng = np.random.default_rng(0)
    weights = rng.random(len(TEXTS))
    encoder = merged(*pairs)
    beliefs, found = Beliefs(encoder, weights / weights.sum()), view(encoder, encoder)
    for text in TEXTS[::3]:
        answer = beliefs.answer(tokens_of(encoder, text))
        assert found.back(sample_of(tokens_of(encoder, text)), answer).logprobs.tobytes() == answer.logprobs.tobytes()


@each("student", EVERY_BYTE)
@each("teacher", EVERY_BYTE)
def test_log_probs_are_those_of_loops_over_all_covers(student: str, teacher: str) -> None:
    """Random top-k entries, mostly continuations of the text; ends of turns, observed text and partial characters."""
    one, other = ByteEncoder(content(student)), ByteEncoder(content(teacher))
    rng = np.random.default_rng(0)
    found = view(one, other, "<|end|>")
    line = TEXT[rng.integers(len(TEXT))].encode()[:60]
    first, rest = one.encode(line[:41])[0], one.encode(line[41:])[0]
    end = one.table.added["<|end|>"]
    ids = [*first, end, *rest, *rest, end]
    mask = [True] * (len(first) + 1) + [False] * len(rest) + [True] * (len(rest) + 1)
    sample = sample_of(ids, mask)
    tokens = found.reads(sample)[0][1:]
    assert found.aligned(sample)[1].uncovered == 0
    top = rng.integers(0, len(other.table.by_id), (len(tokens), 200))
    top[:, 0] = tokens
    top_logprobs = -8 * rng.random(top.shape)
    # probabilities: with a sum above 1, a longer text could be more likely than its beginning
    top_logprobs -= np.logaddexp.reduce(top_logprobs, axis=1, keepdims=True)
    top_logprobs = top_logprobs.astype(np.float32)
    logprobs = top_logprobs[:, 0]
    answer = found.back(sample, TeacherAnswer(logprobs, arrays={"topk_ids": top, "topk_logprobs": top_logprobs}))
    stretches = [(0, len(first)), (len(first) + 1 + len(rest), len(ids) - 1)]
    for start, stop in stretches:
        cut = other.encode(one.table.bytes_of(ids[start:stop]))[0]
        at = len(tokens) - 1 - len(cut) if start else 0  # the teacher's tokens end with those of the last stretch
        assert tokens[at : at + len(cut)].tolist() == cut
        expected = _by_loops(one, other, ids[start:stop], cut, logprobs[at:], top[at:], top_logprobs[at:])
        np.testing.assert_allclose(answer.logprobs[start:stop], np.diff(expected, prepend=0.0), atol=1e-4)
        ended = float(logprobs[at : at + len(cut) + 1].sum()) - expected[-1]
        assert answer.logprobs[stop] == pytest.approx(ended, abs=1e-4)
    assert np.isnan(answer.logprobs[~sample.action_mask]).all()


def _by_loops(
    student: ByteEncoder,
    teacher: ByteEncoder,
    ids: Sequence[int],
    cut: Sequence[int],
    logprobs: np.ndarray,
    top: np.ndarray,
    top_logprobs: np.ndarray,
) -> list[float]:
    """Return log P at the end of each student token of a stretch of text."""
    data, found = student.table.bytes_of(ids), []
    ends = np.cumsum([len(student.table.by_id[token]) for token in ids]).tolist()
    for number, end in enumerate(ends):
        total, start, reached = 0.0, 0, 0.0
        for row, token in enumerate(cut):
            if start >= end:
                break
            entries = [(token, float(logprobs[row]))]
            entries += [
                (int(t), float(q))
                for t, q in zip(top[row], top_logprobs[row], strict=True)
                if t != token and t not in teacher.table.special
            ]
            for other, logprob in entries:
                piece = teacher.table.by_id[other]
                length = end - start
                if len(piece) < length or piece[:length] != data[start:end]:
                    continue
                begin = max([0, *(one for one in ends if one <= start)])
                theirs = begin + student.encode(data[begin:start] + piece)[1]
                ours = [one for one in ends[: number + 1] if one > begin]
                if other == token or len(piece) == len(ours) == 1 or list(theirs[: len(ours)]) == ours:
                    total += math.exp(reached + logprob)
            reached += float(logprobs[row])
            start += len(teacher.table.by_id[token])
        found.append(math.log(total))
    return found


def test_a_view_requests_the_top_k_and_refuses_other_targets() -> None:
    found = view(merged(), merged("ab"), topk=3)
    assert found.wants(LOGPROBS) == Wanted(topk=3, fetched=True)
    without = OtherTokenizer("t", found.student, found.encoder, {})
    assert without.wants(LOGPROBS) == LOGPROBS
    tokens = tokens_of(merged(), "abccc")
    answer = TeacherAnswer(np.zeros(5, np.float32), arrays={"topk_ids": np.zeros((5, 3))})
    with pytest.raises(RunError, match="log-probs only"):
        without.back(sample_of(tokens), answer)


def test_an_infinite_log_prob_stays_visible() -> None:
    student, teacher = merged(), merged("ab")
    answer = Beliefs(teacher, np.full(len(TEXTS), 1 / len(TEXTS))).answer(tokens_of(teacher, "abccc"))
    answer.logprobs[2] = -np.inf
    found = view(student, teacher).back(sample_of(tokens_of(student, "abccc")), answer)
    assert np.isneginf(found.logprobs).tolist() == [False, False, False, True, False, False]


def test_a_token_takes_less_than_twenty_microseconds() -> None:
    one, other = ByteEncoder(content("byte_level")), ByteEncoder(content("llama"))
    found = view(one, other, "<|end|>")
    ids = one.encode("".join(TEXT).encode() * 10)[0]
    rng = np.random.default_rng(0)
    taken = []
    for number in range(5):
        sample = sample_of([*ids, *ids[:number]])
        tokens = found.reads(sample)[0][1:]
        top = rng.integers(0, len(other.table.by_id), (len(tokens), 20))
        arrays = {"topk_ids": top, "topk_logprobs": np.full(top.shape, -5, np.float32)}
        start = time.perf_counter()
        found.back(sample, TeacherAnswer(np.full(len(tokens), -0.1, np.float32), arrays=arrays))
        taken.append((time.perf_counter() - start) / len(ids))
    assert min(taken) < 20e-6  # seconds
