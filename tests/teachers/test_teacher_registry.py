"""A kind of teacher from outside: a class that computes log-probs from a table of bigrams."""

import asyncio
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from roll_opd.base.failures import RunError
from roll_opd.base.frozen import FrozenDict
from roll_opd.config.plan import ScorerPlan, TeacherPlan
from roll_opd.samples.sample import Sample, as_columns
from roll_opd.teachers.scoring import Scorers, Teacher
from roll_opd.teachers.teacher_interface import LOGPROBS, Target, TeacherAnswer, TokenSequence, Wanted
from roll_opd.teachers.teacher_registry import TEACHERS, TeacherStart, register_teacher, scorer_of
from roll_opd.teachers.views import SameTokens


@register_teacher("bigrams")
class Bigrams:
    """log p(t | previous) = log((count + 1) / (all + V)), at temperature 1."""

    targets: frozenset[Target] = frozenset()
    is_exact = True

    def __init__(self, start: TeacherStart, *, counts: dict[str, dict[str, int]], vocab_size: int = 4) -> None:
        self.name, self._counts, self._vocab = start.name, counts, vocab_size

    async def score(
        self, sequences: Sequence[TokenSequence], temperature: float, wanted: Wanted = LOGPROBS
    ) -> list[TeacherAnswer]:
        return [TeacherAnswer(self._logprobs(tokens, prompt)) for tokens, prompt in sequences]

    def _logprobs(self, tokens: np.ndarray, prompt: int) -> np.ndarray:
        found = []
        for before, token in zip(tokens[prompt - 1 :].tolist(), tokens[prompt:].tolist(), strict=False):
            row = self._counts.get(str(before), {})
            found.append(math.log((row.get(str(token), 0) + 1) / (sum(row.values()) + self._vocab)))
        return np.array(found, np.float32)

    def drain_metrics(self) -> dict[str, float]:
        return {}

    def end(self) -> None:
        pass


def start_of(kind: str, **arguments: Any) -> TeacherStart:
    teacher = TeacherPlan("t", ScorerPlan("teacher.t", kind, FrozenDict(arguments)), 0.5)
    return TeacherStart(cast(Any, SimpleNamespace()), teacher, cast(Any, None))


def test_a_kind_from_outside_scores_samples() -> None:
    start = start_of("bigrams", counts={"1": {"2": 3}, "2": {"0": 1}})
    scorer = scorer_of(start)
    assert scorer is not None
    sample = Sample(np.array([3, 1, 2, 0]), 2, as_columns(action_mask=np.ones(2, bool)), id="s")
    models = Scorers((Teacher(start.teacher, scorer, SameTokens("t")),))
    (scored,) = asyncio.run(models.compute_logprobs([sample], 1.0))
    np.testing.assert_allclose(scored.teacher_logprobs["t"], np.log([4 / 7, 2 / 5]), rtol=1e-6)


def test_the_built_in_kinds_are_registered_as_a_users_kind_is() -> None:
    assert TEACHERS.builtin == ("files", "http", "megatron")
    with pytest.raises(RunError, match="unknown teacher 'bigram'"):
        scorer_of(start_of("bigram"))
