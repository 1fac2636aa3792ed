"""Teachers that answer at different times: what they say is summed in one order, or a run is not played again."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from roll_opd.config.plan import ContextPlan, Layout, MegatronPlan, MicroBatchLimits, ModelPlan, TeacherPlan
from roll_opd.roles.policy_roles import FrozenModels, Teacher
from roll_opd.samples.experience import Experience


@dataclass
class Slow:
    """A teacher that takes its time, and says how many tokens it has read."""

    plan: TeacherPlan
    seconds: float

    async def compute_logprobs(self, samples: Sequence[Experience], temperature: float) -> list[np.ndarray]:
        await asyncio.sleep(self.seconds)
        return [np.full(sample.response_length, -len(sample.tokens), np.float32) for sample in samples]


def slow(name: str, seconds: float, context: ContextPlan | None = None) -> Slow:
    worker = MegatronPlan(name, ModelPlan(""), (0,), Layout(), MicroBatchLimits())
    return Slow(TeacherPlan(name, worker, 1.0, context=context), seconds)


def test_the_order_of_teachers_is_not_that_of_their_answers() -> None:
    tokens, logprobs = np.arange(5), np.zeros(3, np.float32)
    sample = Experience(
        "0", "0", "", "", tokens, 2, np.ones(3, bool), logprobs, "stop", 0,
        teacher_prompts={"b": np.arange(9)}, teacher_logprobs={"d": logprobs},
    )  # fmt: skip
    teachers = [slow("a", 0.03), slow("b", 0.0, ContextPlan(name="b", key="", prompt_length=9)), slow("c", 0.01)]
    models = FrozenModels(cast(Sequence[Teacher], (*teachers, slow("d", 0.0))))
    (read,) = asyncio.run(models.compute_logprobs([sample], 1.0))
    assert list(read.teacher_logprobs) == ["a", "b", "c", "d"]
    assert [values.tolist() for values in read.teacher_logprobs.values()] == [[-5] * 3, [-12] * 3, [-5] * 3, [0] * 3]
    assert np.array_equal(read.tokens, tokens) and read.prompt_length == 2  # the student's own are what they were
