"""Alignment of a response's tokens in two tokenizers, by byte offsets.

Student and teacher read the same bytes of the response. A chunk ends at each byte at which both a student token and a
teacher token end. A chunk is therefore the shortest piece of the response that consists of whole tokens in both
tokenizers. The student's log-prob of a chunk is the sum of the log-probs of its student tokens. The teacher's log-prob
of a chunk is the sum of the log-probs of its teacher tokens. The ends of tokens are offsets in bytes, not offsets in
decoded text.

Legend: T-P student tokens and U teacher tokens of a response, C chunks, S scored teacher tokens: the teacher tokens
that are not `missing`.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

NO_CHUNK = -1  # index for student tokens without a teacher log-prob and for observed tokens


@dataclass(frozen=True)
class Alignment:
    """The byte offsets at which the tokens of a response end, in the student's and in the teacher's tokenizer.

    The chunks follow from these offsets. Both arrays of offsets are non-decreasing and have the same last value. A
    teacher token is `missing` if it stands for bytes or for a special token that the teacher's tokenizer cannot encode.
    A chunk with a missing token has no teacher log-prob.
    """

    student_ends: np.ndarray  # int64 [T-P], offset in bytes of each token's end
    teacher_ends: np.ndarray  # int64 [U]
    missing: np.ndarray  # bool [U]
    action_mask: np.ndarray  # bool [T-P]; a chunk has either only action tokens or none
    data: bytes = b""  # bytes of the response
    by_token: bool = False  # whether the teacher's log-probs are of single student tokens instead of chunks

    @cached_property
    def _bounds(self) -> np.ndarray:
        """int64 [C], the byte offset at which each chunk ends."""
        places = np.searchsorted(self.teacher_ends, self.student_ends)
        places = np.minimum(places, max(len(self.teacher_ends) - 1, 0))
        common = self.teacher_ends[places] == self.student_ends if len(self.teacher_ends) else places > 0
        ends = self.student_ends[common]
        return ends[np.append(ends[1:] != ends[:-1], True)] if len(ends) else ends

    @cached_property
    def _student_chunks(self) -> np.ndarray:
        """int64 [T-P], the index of the chunk of each student token."""
        return np.searchsorted(self._bounds, self.student_ends)

    @cached_property
    def _teacher_chunks(self) -> np.ndarray:
        return np.searchsorted(self._bounds, self.teacher_ends)

    @cached_property
    def _covered(self) -> np.ndarray:
        """bool [C], true for a chunk if the teacher scores all of its bytes."""
        return np.bincount(self._teacher_chunks, weights=self.missing, minlength=len(self._bounds)) == 0

    @cached_property
    def chunks(self) -> np.ndarray:
        """int32 [T-P], for each student token the index of the first token of its chunk.

        Tokens without credit have the value `NO_CHUNK`.
        """
        if not len(self.student_ends):
            return np.zeros(0, np.int32)
        firsts = np.searchsorted(self._student_chunks, self._student_chunks)
        credited = self._covered[self._student_chunks] & self.action_mask
        return np.where(credited, firsts, NO_CHUNK).astype(np.int32)

    @property
    def credits(self) -> np.ndarray:
        """int32 [T-P], for each student token the index of the first token that shares its credit.

        If `by_token` is true, each token has its own credit. Otherwise, the tokens of a chunk share one credit. Tokens
        without credit have the value `NO_CHUNK`.
        """
        numbers = np.arange(len(self.student_ends), dtype=np.int32)
        return np.where(self.chunks == NO_CHUNK, self.chunks, numbers) if self.by_token else self.chunks

    @cached_property
    def sizes(self) -> np.ndarray:
        """int64 [N, 3], the size of each of the N chunks with credit.

        The three columns are the number of student tokens, the number of teacher tokens, and the number of bytes.
        """
        count = len(self._bounds)
        students = np.bincount(self._student_chunks[self.chunks != NO_CHUNK], minlength=count)
        teachers = np.bincount(self._teacher_chunks, minlength=count)
        sizes = np.column_stack([students, teachers, np.diff(self._bounds, prepend=0)])
        return sizes[students > 0]

    def cuts(self) -> list[tuple[int, int, list[bytes]]]:
        """Return a list of (first, count, pieces), one for each chunk with credit.

        - `first`: index of the chunk's first student token.
        - `count`: number of student tokens in the chunk.
        - `pieces`: the bytes of each teacher token in the chunk.
        """
        found = []
        starts = np.append(0, self.teacher_ends[:-1])
        bounds = np.searchsorted(self._teacher_chunks, np.arange(len(self._bounds) + 1))
        firsts, counts = np.unique(self.chunks[self.chunks != NO_CHUNK], return_counts=True)
        for first, count in zip(firsts.tolist(), counts.tolist(), strict=True):
            chunk = int(self._student_chunks[first])
            tokens = range(int(bounds[chunk]), int(bounds[chunk + 1]))
            found.append((first, count, [self.data[starts[one] : self.teacher_ends[one]] for one in tokens]))
        return found

    @property
    def uncovered(self) -> int:
        """Number of action tokens without credit."""
        return int(np.count_nonzero(self.action_mask & (self.chunks == NO_CHUNK)))

    def on_student_tokens(self, logprobs: np.ndarray) -> np.ndarray:
        """Return the teacher's log-probs spread over the student's tokens, as f32 [T-P].

        Tokens without credit have the value NaN. The log-prob of a chunk is divided among its student tokens in
        proportion to their numbers of bytes. If a chunk has one student token and one teacher token, the value is the
        teacher's log-prob, bit for bit.

        Args:
            logprobs: f32 [S], log-probs of the scored teacher tokens.
        """
        if not len(self.student_ends):
            return np.zeros(0, np.float32)
        values = np.zeros(len(self.missing))
        values[~self.missing] = logprobs
        totals = np.bincount(self._teacher_chunks, weights=values, minlength=len(self._bounds))
        lengths = np.diff(self.student_ends, prepend=0)
        of_chunks = np.diff(self._bounds, prepend=0)[self._student_chunks]
        shares = np.where(of_chunks == lengths, 1.0, lengths / np.maximum(of_chunks, 1))
        found = totals[self._student_chunks] * shares
        return np.where(self.chunks == NO_CHUNK, np.nan, found).astype(np.float32)
