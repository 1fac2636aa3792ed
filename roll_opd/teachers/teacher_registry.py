"""`TEACHERS`: the registry of the kinds of teachers.

A kind is a function or class that makes the `TeacherScorer` of a teacher when a run starts: `kind(start, **arguments)`.
Its name is the `kind` of the teacher's source in the plan. A kind from outside is named in the section `scorer`, whose
`args` are its arguments.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from roll_opd.base.failures import RunError
from roll_opd.base.registry import NoFacts, Registry
from roll_opd.config.plan import MegatronPlan, RunPlan, ScorerPlan, TeacherPlan
from roll_opd.teachers.teacher_interface import TeacherScorer


@dataclass(frozen=True)
class TeacherStart:
    """What a kind gets to make the scorer of a teacher."""

    plan: RunPlan
    teacher: TeacherPlan
    megatron: Callable[[MegatronPlan], TeacherScorer]  # makes the scorer of a Megatron role of the run
    answers: Path | None = None  # directory in which a run stores answers for its resumes

    @property
    def name(self) -> str:
        """The teacher's name."""
        return self.teacher.name

    @property
    def model(self) -> Path:
        """The directory of `model_args.model_name_or_path` of a teacher with `scorer`; default: the student's model."""
        source = self.teacher.source
        return Path((isinstance(source, ScorerPlan) and source.model) or self.plan.student.model.path)


TEACHERS: Registry[NoFacts] = Registry(
    kind="teacher",
    made_of="function or class",
    example="mypackage.MyTeacher",
    error=RunError,
    package="roll_opd.teachers",
    facts_type=NoFacts,
    decorator="register_teacher",
)
register_teacher = TEACHERS.register


def scorer_of(start: TeacherStart) -> TeacherScorer | None:
    """Return the scorer of a teacher, or None if nothing computes its log-probs during the run (teacher files).

    Raises RunError if the kind is unknown, or if it cannot make the scorer.
    """
    source = start.teacher.source
    return TEACHERS.find(source.kind)(start, **source.arguments)
