"""A teacher's log-probs of the student's tokens, from one pass over the teacher's tokens of the same text.

How a tokenizer splits some bytes depends on the bytes that follow. For example, if a teacher expects the token `\\n1`,
its log-prob of the token `\\n` is low, although the probability of the byte `\\n` is near 1. For this reason, log-probs
of tokens are computed here from probabilities of text. Let P(n) be the probability that the teacher's text begins with
the first n bytes of the response. A student token that covers the bytes from m to n then has the log-prob

    q = log P(n) - log P(m)

P(n) is a sum over the shortest token sequences that cover the first n bytes. Let b be a byte at which one of the
teacher's tokens of the response starts. A sequence then consists of the teacher's tokens before b and of one further
token t at b. The token t covers the bytes from b to n, and can extend beyond n:

    P(n) = Σ_b Σ_t exp(A_b) · p(t | b),    A_b: log-prob of the teacher's tokens before byte b

The candidates for t at b are the teacher's own token of the response at b, and the tokens of the teacher's top-k at b.
A candidate of the top-k may extend beyond n. The student's tokenizer then encodes the text with this candidate, and the
candidate counts only if one of the student's tokens ends at n. If student and teacher have the same tokenizer, no
candidate that extends beyond n counts, and q is the teacher's log-prob of the token.

Two kinds of sequences are left out:

- Sequences that differ from the teacher's tokens before b, because each of them would need a further pass.
- Sequences with a token t that is not in the top-k, because its log-prob is unknown.

As a result, P(n) is too low at some n, and part of a penalty moves from one token to a neighbouring token. Over a whole
text, the sum of q is always the log-prob of the teacher's tokens.

Legend: T-P student tokens and U teacher tokens of a response, S scored teacher tokens (see `samples.byte_alignment`), K
tokens of a top-k, V token ids of the teacher.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from roll_opd.models.token_bytes import ByteEncoder, TokenBytes
from roll_opd.samples.byte_alignment import NO_CHUNK, Alignment

KEPT_CUTS = 65536  # maximum number of texts whose student tokens are cached


@dataclass(frozen=True)
class PrefixLogprobs:
    """Computes a teacher's log-probs of student tokens, from the teacher's top-k and both tokenizers."""

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
        """Return the teacher's log-probs q of the student's tokens, f32 [T-P].

        Tokens without credit have the value NaN. If a student token is also a teacher token, and longer tokens do not
        count, q is the teacher's log-prob, bit for bit.

        Args:
            alignment: alignment of the response.
            is_text: bool [T-P], true for tokens of ordinary text. A teacher token does not span ordinary text and other
                tokens.
            tokens: int64 [S], the scored teacher tokens.
            logprobs: f32 [S], their log-probs, all finite.
            top: (ids, log-probs) [S, K], the teacher's top-k at the position of each token in `tokens`.
        """
        if not (len(alignment.student_ends) and len(logprobs)):
            return alignment.on_student_tokens(logprobs)
        credited = alignment.chunks != NO_CHUNK
        text = _Text.of(alignment, is_text & credited, logprobs)
        further: dict[int, list[float]] = {}
        opening = (text.starts == 0) & (self._lengths[tokens] == text.widths + 1)
        for row, entry in self._candidates(text, tokens, top[0], opening):
            piece = self.teacher.by_id[int(top[0][row, entry])][int(opening[row]) :]
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

    def _candidates(
        self, text: "_Text", tokens: np.ndarray, ids: np.ndarray, opening: np.ndarray
    ) -> list[tuple[int, int]]:
        """Return the candidates of the top-k that may count, as pairs (index of a teacher token, index in the top-k).

        A candidate may count if its first byte is correct and it is long enough to reach the end of a student token.

        Args:
            opening: bool [S], true for a token that begins with a space which the teacher's tokenizer added.
        """
        ids = np.minimum(ids, len(self._firsts) - 1)
        first_bytes = np.where(opening[:, None], self._seconds[ids], self._firsts[ids])
        firsts = np.frombuffer(text.data, np.uint8)[np.minimum(text.starts, len(text.data) - 1)]
        fits = (first_bytes == firsts[:, None]) & (ids != tokens[:, None])
        fits &= self._lengths[ids] - opening[:, None] >= text.needed[:, None]
        # all tokens of an observed turn end at its last byte
        fits &= (text.in_text & ((text.widths > 0) | opening))[:, None]
        return [(int(row), int(entry)) for row, entry in np.argwhere(fits)]

    def _covered(self, text: "_Text", row: int, piece: bytes) -> Iterator[int]:
        """Yield the index of each student token at whose end a candidate counts.

        A candidate counts at the end of a student token under two conditions:

        - Up to this end, the candidate has the same bytes as the response.
        - The student's tokenizer splits these bytes in the same way as in the response.

        Args:
            row: index of the teacher token that the candidate replaces.
            piece: bytes of the candidate.
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
        """Return the byte offsets at which tokens end when the student's tokenizer splits a text."""
        if data not in self._cuts:
            if len(self._cuts) >= KEPT_CUTS:
                self._cuts.clear()
            self._cuts[data] = self.student.encode(data)[1].tolist()
        return self._cuts[data]

    @cached_property
    def _firsts(self) -> np.ndarray:
        """int16 [V + 1], the first byte of each teacher token.

        The value is -1 for special tokens and for ids without bytes. The last entry is for all larger ids and is -1
        too.
        """
        firsts = [token[0] if token else -1 for token in self.teacher.by_id]
        for token in self.teacher.special:
            firsts[token] = -1
        return np.array([*firsts, -1], np.int16)

    @cached_property
    def _seconds(self) -> np.ndarray:
        """int16 [V + 1], the second byte of each teacher token that begins with a space; otherwise -1."""
        return np.array(
            [
                token[1] if first == ord(" ") and len(token) > 1 else -1
                for token, first in zip((*self.teacher.by_id, b""), self._firsts.tolist(), strict=True)
            ],
            np.int16,
        )

    @cached_property
    def _lengths(self) -> np.ndarray:
        """int64 [V + 1], the number of bytes of each teacher token. The last entry is for all larger ids and is 0."""
        return np.append(self.teacher.lengths, 0)


@dataclass(frozen=True)
class _Text:
    """A response split by both tokenizers, with the log-probs of the teacher's tokens in f64."""

    data: bytes
    ends: np.ndarray  # [T-P], ends of the student's tokens, in bytes
    is_text: np.ndarray  # bool [T-P], true for ordinary text with a credit
    sums: np.ndarray  # [T-P], sum of the log-probs of teacher tokens that end inside the student token or at its end
    reached: np.ndarray  # [T-P], A at the last teacher-token end that is not after the student token's end
    # [T-P], log-prob of the teacher token that spans the student token's end; 0 if a teacher token ends there
    own: np.ndarray
    before: np.ndarray  # [S], A at the teacher token's start
    starts: np.ndarray  # [S]
    widths: np.ndarray  # [S], bytes of the response in the teacher token
    nexts: np.ndarray  # [S], first student token that ends after the teacher token's start
    needed: np.ndarray  # [S], bytes from the teacher token's start to the end of that student token
    in_text: np.ndarray  # bool [S]

    @classmethod
    def of(cls, alignment: Alignment, is_text: np.ndarray, logprobs: np.ndarray) -> "_Text":
        """Return the arrays of an alignment that has at least one student token and at least one teacher token."""
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
            widths=teacher_ends[covered] - starts,
            nexts=nexts,
            needed=ends[inside] - starts,
            in_text=is_text[inside] & (nexts < len(ends)),
        )
