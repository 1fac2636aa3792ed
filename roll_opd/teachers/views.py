"""The view of a teacher chooses the tokens that the teacher scores, and maps its scores to the student's tokens.

Legend for array axes: T tokens of the student's sequence, P prompt tokens.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from roll_opd.base.failures import RunError
from roll_opd.samples.sample import Sample
from roll_opd.teachers.scorer import TeacherAnswer, TokenSequence, Wanted


class TeacherView(Protocol):
    """Maps a sample to the sequence that a teacher scores, and maps the teacher's answer back to the sample."""

    def reads(self, sample: Sample) -> TokenSequence:
        """Return (tokens, prompt length) of the sequence that the teacher scores for a sample."""

    def wants(self, wanted: Wanted) -> Wanted:
        """Return the targets to request from the scorer, so that `back` can return the targets `wanted`."""

    def back(self, sample: Sample, answer: TeacherAnswer) -> TeacherAnswer:
        """Return the scorer's answer for a sample, mapped to the student's response tokens, [T-P].

        Args:
            answer: the scorer's answer to the sequence `reads(sample)`.
        """


@dataclass(frozen=True)
class SameTokens:
    """The view of a teacher that has the same token ids as the student.

    The teacher scores the student's response after its own prompt. If the sample has no prompt for this teacher, the
    student's prompt is used.
    """

    teacher: str

    def reads(self, sample: Sample) -> TokenSequence:
        """Return (tokens, prompt length) of the sequence that the teacher scores."""
        prompt = sample.teacher_prompts.get(self.teacher)
        if prompt is None:
            return sample.tokens, sample.prompt_length
        return np.concatenate([prompt, sample.response_tokens]), len(prompt)

    def wants(self, wanted: Wanted) -> Wanted:
        """Return `wanted` unchanged."""
        return wanted

    def back(self, sample: Sample, answer: TeacherAnswer) -> TeacherAnswer:
        """Return `answer` unchanged.

        Raises RunError if the number of log-probs is not the number of response tokens.
        """
        if answer.logprobs.shape != (sample.response_length,):
            raise RunError(
                f"teacher {self.teacher} returned log-probs of shape {answer.logprobs.shape} for sample {sample.id},"
                f" which has {sample.response_length} response tokens; correct the teacher's scorer"
            )
        return answer
