"""Start teachers that have no Megatron processes: create their scorers and answer caches, and check their servers."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from roll_opd.cluster.startup_progress import StartupProgress
from roll_opd.config.plan import ExternalPlan, HttpPlan, RunPlan, TeacherPlan
from roll_opd.models.model_info import read_model
from roll_opd.teachers.answer_cache import AnswerCache
from roll_opd.teachers.http_checks import check_server
from roll_opd.teachers.http_teacher import HttpScorer
from roll_opd.teachers.scorer import Target, TeacherScorer
from roll_opd.teachers.scoring import Teacher


def http_scorer(plan: RunPlan, teacher: TeacherPlan, source: HttpPlan, answers: Path | None) -> HttpScorer:
    """Return the scorer of a teacher that is reached over HTTP. Raises RunError if the API key is missing."""
    vocabulary = source.vocab_size or read_model(Path(plan.student.model.path)).vocab
    cache = AnswerCache(answers / f"{teacher.name}.sqlite") if answers else None
    return HttpScorer(teacher.name, source, vocabulary, cache)


# source of a teacher's log-probs -> function from plan, teacher, source and directory of stored answers to the scorer
SCORERS: dict[type[ExternalPlan], Callable[[RunPlan, TeacherPlan, Any, Path | None], TeacherScorer]] = {
    HttpPlan: http_scorer,
}


def external_scorer(plan: RunPlan, teacher: TeacherPlan, answers: Path | None) -> TeacherScorer:
    """Return the scorer of a teacher for which the run starts no Megatron processes.

    Args:
        answers: directory in which a run stores the answers of servers, for its resumes.
    """
    assert isinstance(teacher.source, ExternalPlan)
    return SCORERS[type(teacher.source)](plan, teacher, teacher.source, answers)


async def check_servers(plan: RunPlan, teachers: Sequence[Teacher], starting: StartupProgress) -> None:
    """Check the servers of the teachers concurrently. Raises RunError for the first problem."""
    await asyncio.gather(*[_check(plan, one, one.scorer, starting) for one in teachers if is_http(one)])


def is_http(teacher: Teacher) -> bool:
    """Return whether the teacher is reached over HTTP."""
    return isinstance(teacher.scorer, HttpScorer)


async def _check(plan: RunPlan, teacher: Teacher, scorer: object, starting: StartupProgress) -> None:
    assert isinstance(scorer, HttpScorer) and plan.rollout is not None
    objective, context = plan.objective, teacher.plan.context
    target: Target | None = None
    if objective.opd_objective == "topk":
        target = "ids" if objective.opd_topk_source == "student" else "topk"
    topk = objective.opd_topk
    if teacher.plan.prefix_topk:
        target, topk = "topk", teacher.plan.prefix_topk
    new = plan.rollout.sampling.max_new_tokens
    longest = max(plan.rollout.max_model_len, context.prompt_length + new if context else 0)
    tokenizer = Path(scorer.plan.tokenizer or plan.student.model.path)
    check = check_server(scorer, tokenizer, target, topk, longest)
    await starting.of(f"{teacher.plan.name} ({scorer.plan.location})", check)
