"""A teacher's log-probs of the student's tokens, from one pass over the teacher's tokens of the same text.

How a tokenizer splits text depends on the bytes that follow. If a teacher expects the token `\\n1`, its log-prob of the
token `\\n` is low, although the byte `\\n` has a probability near 1. The exact quantity is a probability of text. Let
P(n) be the probability that the teacher's text begins with the first n bytes of the response. A student token of the
bytes m to n then has the log-prob

    q = log P(n) - log P(m)

P(n) is a sum over the shortest token sequences that cover the n bytes. Each sequence has the teacher's tokens of the
response up to the start b of some token, and then one token t, which covers the bytes b to n and may be longer:

    P(n) = Σ_b Σ_t exp(A_b) · p(t | b),    A_b: log-prob of the teacher's tokens before byte b

The tokens t at b are the teacher's token of the response and the tokens of the teacher's top-k. A token t that is
longer counts if the student's tokenizer would also split its bytes at n. With the same tokenizer, tokens t that are
longer do not count, and q is the teacher's log-prob of the token. Sequences that differ from the response's tokens
before b would need a further pass each and are left out. Tokens beyond the top-k are left out too. This lowers P at
some n, and moves part of a penalty from a token to its neighbour. Over a whole text, Σ q is always the log-prob of the
teacher's tokens.

Legend: T-P student tokens of a response, U teacher tokens of it, K tokens of a top-k, V token ids.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from roll_opd.models.token_bytes import ByteEncoder, TokenBytes
from roll_opd.samples.alignment import NO_CHUNK, Alignment

KEPT_CUTS = 65536  # maximum number of texts whose student tokens are cached


@dataclass(frozen=True)
class PrefixLogprobs:
    """Computes log-probs of student tokens from both tokenizers and the teacher's top-k (`topk` entries)."""

    student: ByteEncoder
    teacher: TokenBytes
    topk: int
    _cuts: dict[bytes, list[int]] = field(default_factory=dict, repr=False, compare=False)

    def on_student_tokens(
        self,
        alignment: Alignment,
        is_text: np.ndarray,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        top: tuple[np.ndarray, np.ndarray],
    ) -> np.ndarray:
        """Return the teacher's log-probs q on the student's tokens, f32 [T-P]; NaN without a credit.

        If a student token is also a teacher token, and longer tokens do not count, q is the teacher's log-prob, bit for
        bit.

        Args:
            alignment: alignment of the response.
            is_text: bool [T-P], true for ordinary text; no teacher token spans such a token and another kind of token.
            tokens: int64 [U - missing], the teacher's tokens.
            logprobs: f32 [U - missing], finite.
            top: ids and log-probs [U - missing, K] of the most likely tokens at the position of each token in `tokens`.
        """
        if not (len(alignment.student_ends) and len(logprobs)):
            return alignment.on_student_tokens(logprobs)
        credited = alignment.chunks != NO_CHUNK
        text = _Text.of(alignment, is_text & credited, logprobs)
        further: dict[int, list[float]] = {}
        for row, entry in self._candidates(text, tokens, top[0]):
            piece = self.teacher.by_id[int(top[0][row, entry])]
            for student in self._covered(text, row, piece):
                term = text.before[row] + float(top[1][row, entry]) - text.reached[student]
                further.setdefault(student, []).append(term)
        shifts = text.own.copy()
        for student, terms in further.items():
            shifts[student] = np.logaddexp.reduce([shifts[student], *terms])
        follows = text.is_text[:-1] & credited[1:]
        moved = shifts - np.append(0.0, np.where(follows, shifts[:-1], 0.0))
        found = np.where(moved == 0, text.sums, np.minimum(text.sums + moved, 0))
        return np.where(credited, found, np.nan).astype(np.float32)

    def _candidates(self, text: "_Text", tokens: np.ndarray, ids: np.ndarray) -> list[tuple[int, int]]:
        """Return (teacher token, entry of its top-k) for entries that may cover the end of a student token."""
        ids = np.minimum(ids, len(self._firsts) - 1)
        firsts = np.frombuffer(text.data, np.uint8)[np.minimum(text.starts, len(text.data) - 1)]
        fits = (self._firsts[ids] == firsts[:, None]) & (ids != tokens[:, None])
        fits &= (self._lengths[ids] >= text.needed[:, None]) & text.in_text[:, None]
        return [(int(row), int(entry)) for row, entry in np.argwhere(fits)]

    def _covered(self, text: "_Text", row: int, piece: bytes) -> Iterator[int]:
        """Yield the student tokens at whose ends a token with bytes `piece` counts if it replaces teacher token `row`.

        Up to such an end, `piece` has the bytes of the response, and the student's tokenizer splits it in the same way.
        """
        start, first = int(text.starts[row]), int(text.nexts[row])
        begin = int(text.ends[first - 1]) if first else 0
        cut: list[int] | None = None
        for student in range(first, len(text.ends)):
            end = int(text.ends[student])
            if not text.is_text[student] or end - start > len(piece):
                return
            if piece[: end - start] != text.data[start:end]:
                return
            if cut is None and end - start < len(piece):
                cut = self._student_cut(text.data[begin:start] + piece)
            if cut is not None and cut[student - first : student - first + 1] != [end - begin]:
                return
            yield student

    def _student_cut(self, data: bytes) -> list[int]:
        """Return the ends of the tokens into which the student's tokenizer splits a text."""
        if data not in self._cuts:
            if len(self._cuts) >= KEPT_CUTS:
                self._cuts.clear()
            self._cuts[data] = self.student.encode(data)[1].tolist()
        return self._cuts[data]

    @cached_property
    def _firsts(self) -> np.ndarray:
        """int16 [V + 1], first byte of each token; -1 for special tokens, ids without bytes, and larger ids."""
        firsts = [token[0] if token else -1 for token in self.teacher.by_id]
        for token in self.teacher.special:
            firsts[token] = -1
        return np.array([*firsts, -1], np.int16)

    @cached_property
    def _lengths(self) -> np.ndarray:
        """int64 [V + 1], bytes of each token."""
        return np.append(self.teacher.lengths, 0)


@dataclass(frozen=True)
class _Text:
    """A response split by both tokenizers, with the log-probs of the teacher's tokens, f64."""

    data: bytes
    ends: np.ndarray  # [T-P], ends of the student's tokens, in bytes
    is_text: np.ndarray  # bool [T-P], true for ordinary text with a credit
    sums: np.ndarray  # [T-P], sum of the log-probs of teacher tokens that end inside the student token or at its end
    reached: np.ndarray  # [T-P], A at the last teacher-token end that is not after the student token's end
    # [T-P], log-prob of the teacher token that spans the student token's end; 0 if a teacher token ends there
    own: np.ndarray
    before: np.ndarray  # [U - missing], A at the teacher token's start
    starts: np.ndarray  # [U - missing]
    nexts: np.ndarray  # [U - missing], first student token that ends after the teacher token's start
    needed: np.ndarray  # [U - missing], bytes from the teacher token's start to the end of that student token
    in_text: np.ndarray  # bool [U - missing]

    @classmethod
    def of(cls, alignment: Alignment, is_text: np.ndarray, logprobs: np.ndarray) -> "_Text":
        """Return the arrays of an alignment with at least one token in each tokenizer."""
        ends, teacher_ends, covered = alignment.student_ends, alignment.teacher_ends, ~alignment.missing
        values = np.zeros(len(covered))
        values[covered] = logprobs
        before = np.append(0.0, np.cumsum(values))
        # number of teacher tokens that end up to a student token's end
        done = np.searchsorted(teacher_ends, ends, side="right")
        is_cut = np.append(0, teacher_ends)[done] == ends
        across = values[np.minimum(done, len(values) - 1)]
        starts = np.append(0, teacher_ends[:-1])[covered]
        nexts = np.searchsorted(ends, starts, side="right")
        inside = np.minimum(nexts, len(ends) - 1)
        places = np.minimum(np.searchsorted(ends, teacher_ends), len(ends) - 1)
        return cls(
            data=alignment.data,
            ends=ends,
            is_text=is_text,
            sums=np.bincount(places, weights=values, minlength=len(ends)),
            reached=before[done],
            own=np.where(is_cut | ~is_text, 0.0, across),
            before=before[:-1][covered],
            starts=starts,
            nexts=nexts,
            needed=ends[inside] - starts,
            # all tokens of an observed turn end at its last byte
            in_text=is_text[inside] & (nexts < len(ends)) & (teacher_ends[covered] > starts),
        )
