"""The scoring stage: order of teachers, separate prompts, targets of an objective, and unusable answers."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from roll_opd.base.failures import RunError
from roll_opd.config.plan import (
    ContextPlan,
    Layout,
    MegatronPlan,
    MicroBatchLimits,
    ModelPlan,
    ObjectivePlan,
    TeacherPlan,
)
from roll_opd.samples.sample import Sample, as_columns, teacher_columns
from roll_opd.teachers.megatron_teacher import MegatronScorer
from roll_opd.teachers.scoring import Scorers, Teacher, check_targets, wanted_for
from roll_opd.teachers.teacher_interface import LOGPROBS, Target, TeacherAnswer, TokenSequence, Wanted
from roll_opd.teachers.views import SameTokens


@dataclass
class Slow:
    """A scorer that answers after some seconds, with minus the number of tokens of the sequence."""

    name: str
    seconds: float
    targets: frozenset[Target] = frozenset()
    is_exact = True

    async def score(
        self, sequences: Sequence[TokenSequence], temperature: float, wanted: Wanted = LOGPROBS
    ) -> list[TeacherAnswer]:
        await asyncio.sleep(self.seconds)
        return [TeacherAnswer(np.full(len(tokens) - prompt, -len(tokens), np.float32)) for tokens, prompt in sequences]

    def drain_metrics(self) -> dict[str, float]:
        return {}

    def end(self) -> None: ...


def slow(name: str, seconds: float, context: ContextPlan | None = None) -> Teacher:
    source = MegatronPlan(name, ModelPlan(""), (0,), Layout(), MicroBatchLimits())
    return Teacher(TeacherPlan(name, source, 1.0, context=context), Slow(name, seconds), SameTokens(name))


def sample_of(tag: str = "", **fields: Any) -> Sample:
    columns = as_columns(action_mask=np.ones(3, bool), rollout_logprobs=np.zeros(3, np.float32))
    return Sample(np.arange(5), 2, columns, id="0", group_id="0", tag=tag, **fields)


def test_the_order_of_teachers_is_not_that_of_their_answers() -> None:
    tokens, logprobs = np.arange(5), np.zeros(3, np.float32)
    sample = sample_of(teacher_prompts={"b": np.arange(9)}).with_columns(**teacher_columns({"d": logprobs}))
    teachers = [slow("a", 0.03), slow("b", 0.0, ContextPlan(name="b", key="", prompt_length=9)), slow("c", 0.01)]
    models = Scorers((*teachers, slow("d", 0.0)))
    (read,) = asyncio.run(models.compute_logprobs([sample], 1.0))
    assert list(read.teacher_logprobs) == ["a", "b", "c", "d"]
    assert [values.tolist() for values in read.teacher_logprobs.values()] == [[-5] * 3, [-12] * 3, [-5] * 3, [0] * 3]
    assert np.array_equal(read.tokens, tokens) and read.prompt_length == 2  # the student's own are what they were


def test_a_view_puts_the_response_after_the_prompt_of_the_teacher() -> None:
    sample = sample_of(teacher_prompts={"b": np.array([7, 8, 9])})
    tokens, prompt_length = SameTokens("b").reads(sample)
    assert tokens.tolist() == [7, 8, 9, 2, 3, 4] and prompt_length == 3
    own, own_length = SameTokens("a").reads(sample)
    assert own is sample.tokens and own_length == sample.prompt_length


def test_an_answer_of_another_length_ends_the_run_with_the_name_of_its_teacher() -> None:
    sample = sample_of()
    assert SameTokens("a").back(sample, TeacherAnswer(np.zeros(3, np.float32))).logprobs.tolist() == [0] * 3
    for wrong in (np.zeros(2, np.float32), np.zeros((3, 1), np.float32)):
        with pytest.raises(RunError, match="teacher a returned log-probs of shape"):
            SameTokens("a").back(sample, TeacherAnswer(wrong))


@pytest.mark.parametrize(
    ("objective", "ids", "kind"),
    [
        (ObjectivePlan(opd_objective="topk", opd_topk=4), (), "topk"),
        (ObjectivePlan(opd_objective="topk", opd_topk=4, opd_topk_source="student"), ("reference",), "ids"),
        (ObjectivePlan(opd_objective="full"), (), "hidden"),
        (ObjectivePlan(), (), None),
    ],
)
def test_an_objective_is_refused_for_a_teacher_that_cannot_compute_its_targets(
    objective: ObjectivePlan, ids: tuple, kind: Target | None
) -> None:
    if kind:
        assert wanted_for(objective, ids).target == kind
    every: set[Target] = {"topk", "ids", "hidden"}
    for targets in (every, every - {kind}, {kind} - {None}, set()):
        scorer = Slow("s", 0.0, frozenset(targets))
        teachers = [Teacher(slow("a", 0.0).plan, scorer, SameTokens("a"))]
        if kind in targets or kind is None:
            check_targets(teachers, objective)
        else:
            with pytest.raises(RunError, match="teacher a cannot compute the targets"):
                check_targets(teachers, objective)


def test_without_an_objective_in_its_targets_the_stage_wants_log_probs_only() -> None:
    assert wanted_for(None, ()) == LOGPROBS and LOGPROBS.target is None


def test_a_scored_token_outside_the_normalised_vocabulary_is_refused() -> None:
    model = ModelPlan("/models/larger")
    group: Any = SimpleNamespace(plan=MegatronPlan("teacher", model, (0,), Layout(), MicroBatchLimits(), vocab_size=8))
    scorer = MegatronScorer("teacher", group, vocab_size=9)
    with pytest.raises(RunError, match="token 8 has no log-prob under teacher"):
        asyncio.run(scorer.score([(np.array([8, 1, 7]), 1), (np.array([1, 8]), 1)], 1.0))
