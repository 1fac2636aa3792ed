"""Check that every prompt of a run has teachers for its tag, a reward, and what that reward needs."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from roll_opd.config.plan import RewardPlan, TeacherPlan
from roll_opd.data.rows import DataError


@dataclass(frozen=True)
class TagRows:
    """What the prompts of one tag lack, and what they name."""

    unanswered: int  # prompts without a ground_truth
    examples: tuple[str, ...]  # the first few of those, `file:line`
    domains: Mapping[str, str] = field(default_factory=dict)  # in a column `domain`: name -> its first row, `file:line`


def check_coverage(
    mode: str,
    teachers: Sequence[TeacherPlan],
    rewards: Sequence[RewardPlan],
    training: Mapping[str, TagRows],
    validation: Mapping[str, TagRows],
    needing_truth: Collection[str],
    *,
    scored_by_workflow: bool = False,
) -> None:
    """Raise `DataError` that names every tag without a teacher or reward, and rows without a ground truth they need.

    `training` and `validation` hold the tags of those prompts; `needing_truth` names the reward workers that need a
    row's ground truth. Domains follow from tags: a row whose column `domain` names the domain of another reward is
    refused as well, since ROLL would give it to that one. In pure distillation rewards are only logged, so a training
    prompt may go without; so may all prompts of a workflow that brings its rewards itself, where none are configured.
    """
    wrong = []
    if teachers:
        wrong += [
            f"no teacher has tag {tag!r} of the training data in its tag_included; add it there, or remove its rows"
            for tag in training
            if not any(teacher.accepts(tag) for teacher in teachers)
        ]
    free = scored_by_workflow and not rewards
    if mode != "pure" and not free:
        wrong += _unrewarded("training", training, rewards, needing_truth)
    if not free:
        wrong += _unrewarded("validation", validation, rewards, needing_truth)
    wrong += _misrouted("training", training, rewards) + _misrouted("validation", validation, rewards)
    if wrong:
        raise DataError("\n".join(wrong))


def unmet(named: Mapping[str, Collection[str] | None], tags: Collection[str]) -> list[str]:
    """Say what no row comes to: each of what is `named`, with its tags (None: all), that has none of the data's `tags`.

    That is no reason to refuse a run: data of all tags may be of one today.
    """
    there = ", ".join(map(repr, tags))
    return [
        f"{name} is never used: no row of the data has {'the tag' if len(own) == 1 else 'one of the tags'}"
        f" {', '.join(map(repr, own))} (tags of the data: {there})"
        for name, own in named.items()
        if own is not None and not set(own) & set(tags)
    ]


def _unrewarded(
    name: str, tags: Mapping[str, TagRows], rewards: Sequence[RewardPlan], needing_truth: Collection[str]
) -> list[str]:
    wrong = []
    for tag, rows in tags.items():
        workers = [term.worker for reward in rewards if reward.accepts(tag) for term in reward.terms]
        needy = next((worker for worker in workers if worker in needing_truth), None)
        if not workers:
            wrong.append(
                f"no reward has tag {tag!r} of the {name} data in its tag_included; add it there, or remove its rows"
            )
        elif needy and rows.unanswered:
            more = ", ..." if rows.unanswered > len(rows.examples) else ""
            wrong.append(
                f"{rows.unanswered} rows of the {name} data with tag {tag!r} have no ground_truth, which {needy} "
                f"needs: {', '.join(rows.examples)}{more}; write it there, remove the rows, or name in response_key the"
                " column that a workflow's rows have it in"
            )
    return wrong


def _misrouted(name: str, tags: Mapping[str, TagRows], rewards: Sequence[RewardPlan]) -> list[str]:
    known = {reward.domain for reward in rewards}
    return [
        f"rows of the {name} data with tag {tag!r} name the domain {domain!r} themselves ({example}), but "
        f"rewards.{reward.domain} has the tag: move it to rewards.{domain}.tag_included, give these rows another tag, "
        "or remove the column"
        for tag, rows in tags.items()
        for reward in rewards
        if reward.accepts(tag)
        for domain, example in rows.domains.items()
        if domain in known and domain != reward.domain
    ]
