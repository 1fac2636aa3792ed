"""Views of teachers: which tokens a teacher scores for a sample, and how its answer maps to the student's tokens.

Legend: T tokens of the student's sequence, P prompt tokens.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from roll_opd.base.failures import RunError
from roll_opd.samples.sample import Sample
from roll_opd.teachers.scorer import TeacherAnswer, TokenSequence, Wanted


class TeacherView(Protocol):
    """Mapping from a sample to a teacher's sequence, and from the answer back to the sample."""

    def reads(self, sample: Sample) -> TokenSequence:
        """Return the tokens that the teacher scores for a sample."""

    def wants(self, wanted: Wanted) -> Wanted:
        """Return the targets to request from the scorer, so that `back` can return `wanted`."""

    def back(self, sample: Sample, answer: TeacherAnswer) -> TeacherAnswer:
        """Return the scorer's answer to `reads(sample)`, mapped to the student's response tokens, [T-P]."""


@dataclass(frozen=True)
class SameTokens:
    """The view for a teacher with the student's token ids.

    The teacher scores the student's response after the teacher's prompt, or after the student's prompt if the sample
    has no prompt for the teacher.
    """

    teacher: str

    def reads(self, sample: Sample) -> TokenSequence:
        """Return prompt and response tokens, and the length of the prompt."""
        prompt = sample.teacher_prompts.get(self.teacher)
        if prompt is None:
            return sample.tokens, sample.prompt_length
        return np.concatenate([prompt, sample.response_tokens]), len(prompt)

    def wants(self, wanted: Wanted) -> Wanted:
        """Return `wanted`."""
        return wanted

    def back(self, sample: Sample, answer: TeacherAnswer) -> TeacherAnswer:
        """Return `answer` unchanged. RunError unless it has exactly one log-prob for each response token."""
        if answer.logprobs.shape != (sample.response_length,):
            raise RunError(
                f"teacher {self.teacher} returned log-probs of shape {answer.logprobs.shape} for sample {sample.id},"
                f" which has {sample.response_length} response tokens; correct the teacher's scorer"
            )
        return answer
