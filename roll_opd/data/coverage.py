"""Whether every prompt of a run has someone to score it: teachers for its tag, a reward, and what the reward needs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roll_opd.config.plan import Mode, RewardPlan, TeacherPlan
from roll_opd.data.rows import DataError


@dataclass(frozen=True)
class Unanswered:
    """The prompts of one tag that have no ground_truth."""

    count: int
    examples: tuple[str, ...]  # the first few, `file:line`


def check_coverage(
    mode: Mode,
    teachers: Sequence[TeacherPlan],
    rewards: Sequence[RewardPlan],
    training: Mapping[str, Unanswered],
    validation: Mapping[str, Unanswered],
) -> None:
    """Raise `DataError` that names every tag nobody scores and every row that `math_rule` cannot score.

    `training` and `validation` map each tag of those prompts to its rows without an answer. In pure distillation
    rewards only look on, so a training prompt may go without.
    """
    wrong = []
    if teachers:
        wrong += [
            f"no teacher has tag {tag!r} of the training data in its tag_included; add it there, or remove its rows"
            for tag in training
            if not any(teacher.scores(tag) for teacher in teachers)
        ]
    if mode != "pure":
        wrong += _unrewarded("training", training, rewards)
    wrong += _unrewarded("validation", validation, rewards)
    if wrong:
        raise DataError("\n".join(wrong))


def _unrewarded(name: str, tags: Mapping[str, Unanswered], rewards: Sequence[RewardPlan]) -> list[str]:
    wrong = []
    for tag, unanswered in tags.items():
        workers = [reward.worker for reward in rewards if reward.scores(tag)]
        if not workers:
            wrong.append(
                f"no reward has tag {tag!r} of the {name} data in its tag_included; add it there, or remove its rows"
            )
        elif "math_rule" in workers and unanswered.count:
            more = ", ..." if unanswered.count > len(unanswered.examples) else ""
            wrong.append(
                f"{unanswered.count} rows of the {name} data with tag {tag!r} have no ground_truth, which math_rule "
                f"needs: {', '.join(unanswered.examples)}{more}; write it there, or remove the rows"
            )
    return wrong
