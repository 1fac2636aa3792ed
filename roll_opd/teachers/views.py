"""A teacher's view selects the tokens that the teacher scores, and maps the scores to the student's tokens.

Legend for array axes: T is the number of tokens of the student's sequence, and P the number of prompt tokens.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from roll_opd.base.failures import RunError
from roll_opd.samples.sample import Sample
from roll_opd.teachers.scorer import TeacherAnswer, TokenSequence, Wanted


class TeacherView(Protocol):
    """Maps a sample to the sequence that a teacher scores, and the teacher's answer back to the sample."""

    def reads(self, sample: Sample) -> TokenSequence:
        """Return the tokens that the teacher scores for a sample."""

    def wants(self, wanted: Wanted) -> Wanted:
        """Return the targets that must be requested from the scorer if `back` is to return the targets `wanted`."""

    def back(self, sample: Sample, answer: TeacherAnswer) -> TeacherAnswer:
        """Return the scorer's answer to `reads(sample)`, mapped to the student's response tokens, [T-P]."""


@dataclass(frozen=True)
class SameTokens:
    """The view of a teacher that has the same token ids as the student.

    The teacher scores the student's response after the teacher's prompt, or after the student's prompt if the sample
    has no prompt for the teacher.
    """

    teacher: str

    def reads(self, sample: Sample) -> TokenSequence:
        """Return the tokens of prompt and response, and the length of the prompt."""
        prompt = sample.teacher_prompts.get(self.teacher)
        if prompt is None:
            return sample.tokens, sample.prompt_length
        return np.concatenate([prompt, sample.response_tokens]), len(prompt)

    def wants(self, wanted: Wanted) -> Wanted:
        """Return `wanted`."""
        return wanted

    def back(self, sample: Sample, answer: TeacherAnswer) -> TeacherAnswer:
        """Return `answer` unchanged.

        Raises RunError if it does not have exactly one log-prob for each response token.
        """
        if answer.logprobs.shape != (sample.response_length,):
            raise RunError(
                f"teacher {self.teacher} returned log-probs of shape {answer.logprobs.shape} for sample {sample.id},"
                f" which has {sample.response_length} response tokens; correct the teacher's scorer"
            )
        return answer
