"""Recorded answers to held-out prompts: always to the same prompts."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import pytest

from roll_opd.config.plan import SamplingPlan
from roll_opd.pipelines.validation_runs import first_answers, read_answers
from roll_opd.samples.sample import Sample, as_columns
from roll_opd.teachers.scoring import Scorers, Teacher
from roll_opd.teachers.teacher_interface import TeacherAnswer, Wanted


def answer(number: int, tag: str = "a", length: int = 3) -> Sample:
    tokens = np.arange(2 + length)
    logprobs = np.zeros(length, dtype=np.float32)
    return Sample(
        id=f"{number}",
        group_id=f"{number}",
        tag=tag,
        tokens=tokens,
        prompt_length=2,
        finish_reason="stop",
        columns=as_columns(action_mask=np.ones(length, dtype=bool), rollout_logprobs=logprobs),
    )


@dataclass
class Reader:
    """A teacher that returns the temperature of the call; it refuses tags that it does not accept."""

    tag: str
    context: str | None = None

    @property
    def plan(self) -> "Reader":
        return self

    @property
    def name(self) -> str:
        return f"of {self.tag}"

    def accepts(self, tag: str) -> bool:
        return tag == self.tag

    def scores(self, sample: Sample) -> bool:
        return self.accepts(sample.tag)

    async def score(self, samples: Sequence[Sample], temperature: float, wanted: Wanted) -> list[TeacherAnswer]:
        return [TeacherAnswer(np.full(sample.response_length, temperature, dtype=np.float32)) for sample in samples]


@pytest.mark.parametrize(
    ("prompts", "samples", "most"), [(1, 1, 4), (5, 3, 4), (200, 1, 4), (200, 2, 0), (0, 1, 4), (4, 1, 4)]
)
def test_the_first_answers_of_evenly_spread_prompts(prompts: int, samples: int, most: int) -> None:
    answers = [answer(number) for number in range(prompts * samples)]
    numbers = [int(one.id) for one in first_answers(answers, samples, most)]
    assert len(numbers) == min(prompts, most) and all(number % samples == 0 for number in numbers)
    gaps = np.diff(numbers) // samples
    assert not len(gaps) or (gaps.min() >= 1 and gaps.max() - gaps.min() <= 1)


def test_who_reads_which_answer() -> None:
    """Each teacher reads the answers of its tags; no teacher reads answers longer than in training."""
    models = Scorers(cast(Sequence[Teacher], (Reader("a"), Reader("b"))))
    answers = [answer(0, "a"), answer(1, "b"), answer(2, "c"), answer(3, "a", length=9)]
    for temperature, expected in ((0.0, 1.0), (0.7, np.float32(0.7))):
        read = asyncio.run(read_answers(models, answers, SamplingPlan(temperature=temperature), 8))
        assert [one.id for one in read] == ["0", "1", "2", "3"]
        found = [{name: set(values.tolist()) for name, values in one.teacher_logprobs.items()} for one in read]
        assert found == [{"of a": {expected}}, {"of b": {expected}}, {}, {}]
    assert asyncio.run(read_answers(Scorers(), answers, SamplingPlan(), 8)) == answers
    assert (
        asyncio.run(read_answers(replace(models, teachers=models.teachers[1:]), answers[:1], SamplingPlan(), 8))
        == answers[:1]
    )


def test_a_teacher_with_a_hint_reads_no_held_out_answer() -> None:
    """Held-out rows need not have the columns of the hint, and an answer that no teacher reads is no error."""
    hinted = Reader("a", context="a hint")
    for teachers in ((hinted,), (hinted, Reader("b"))):
        models = Scorers(cast(Sequence[Teacher], teachers))
        (read,) = asyncio.run(read_answers(models, [answer(0, "a")], SamplingPlan(), 8))
        assert not read.teacher_logprobs
