"""Checks of data sets before a run, and the report of a pass over prompt files.

Every tag needs a teacher and a reward. Every row needs a ground truth if its reward reads it. Training and validation
rows should not overlap. The report has the number of usable rows, and of bad rows by kind and file, with examples.

Legend: V validation rows, L training rows.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from roll_opd.base.frozen import FrozenDict
from roll_opd.config.plan import RewardPlan, TeacherPlan
from roll_opd.data.row_formats import DataError

if TYPE_CHECKING:
    from roll_opd.data.dataset import PromptSet

EXAMPLES_PER_KIND = 3  # number of bad rows that are named per kind and file; further rows are only counted
FILES_NAMED = 10  # number of files whose bad rows are listed; further files are only counted

# kinds of rows that can be parsed but not used
TOO_LONG = "longer than prompt_length"
WHOLE_TOO_LONG = "longer than sequence_length"  # rows with answers
TEACHER_TOO_LONG = "longer than a teacher's prompt_length, with the context of that teacher"
NOT_ENCODABLE = "refused by the template"
NO_TOKEN = "without a token"
NOT_LEARNED = "excluded from the loss"  # not an error


@dataclass
class FileReport:
    """The counts of one file: rows, prompts, and bad rows by kind. They are updated during the pass."""

    path: str
    rows: int = 0
    prompts: int = 0
    bad_counts: Counter = field(default_factory=Counter)  # kind -> rows
    # kind -> "file:line (detail)" of the first few rows
    bad_examples: dict[str, list[str]] = field(default_factory=dict)
    # ignored column -> number of rows with a value in it, see `Row.unread`
    unread: Counter = field(default_factory=Counter)

    def add_bad(self, kind: str, line: int, detail: str = "") -> None:
        """Count a bad row. If it is one of the first of its kind, also store its position."""
        self.bad_counts[kind] += 1
        if self.bad_counts[kind] <= EXAMPLES_PER_KIND:
            named = f"{self.path}:{line}" + (f" ({detail})" if detail else "")
            self.bad_examples.setdefault(kind, []).append(named)

    @property
    def bad(self) -> int:
        """Number of bad rows of all kinds."""
        return self.bad_counts.total()

    def describe_bad(self) -> str:
        """Return a text about the bad rows, with one line per kind."""
        lines = [f"  {self.path}: {self.bad} of {self.rows} rows"]
        for kind, count in self.bad_counts.items():
            more = ", ..." if count > EXAMPLES_PER_KIND else ""
            lines.append(f"    {count} x {kind}: {', '.join(self.bad_examples[kind])}{more}")
        return "\n".join(lines)


@dataclass(frozen=True)
class DataReport:
    """The report on all files of a data set."""

    files: tuple[FileReport, ...]
    length_key: str  # key that sets `most_tokens`
    most_tokens: int  # limit on the tokens of a row
    longest: int  # tokens of the longest row, including dropped rows
    renamed: int = 0  # number of prompts with a duplicate id, which became `id@file:line`
    streams: FrozenDict = field(default_factory=FrozenDict)  # domain, tag or file -> number of prompts
    undrawn: FrozenDict = field(default_factory=FrozenDict)  # tag -> number of prompts that no stream draws
    warnings: tuple[str, ...] = ()  # warnings about ignored parts of usable rows

    @property
    def rows(self) -> int:
        """Number of rows, without blank lines."""
        return sum(file.rows for file in self.files)

    @property
    def prompts(self) -> int:
        """Number of usable rows."""
        return sum(file.prompts for file in self.files)

    @property
    def bad_counts(self) -> Counter:
        """Number of bad rows of each kind, over all files."""
        return sum((file.bad_counts for file in self.files), Counter())

    @property
    def bad(self) -> int:
        """Number of bad rows, over all kinds and files."""
        return sum(file.bad for file in self.files)

    def describe_bad(self) -> str:
        """Return a text about the bad rows of each file; "" if there are none."""
        wrong = [file for file in self.files if file.bad]
        lines = [file.describe_bad() for file in wrong[:FILES_NAMED]]
        if len(wrong) > FILES_NAMED:
            left = sum(file.bad for file in wrong[FILES_NAMED:])
            lines.append(f"  {len(wrong) - FILES_NAMED} more files: {left} rows")
        return "\n".join(lines)

    def summary(self) -> str:
        """Return the report as text: first a summary line, then a line for each kind of problem."""
        files = "1 file" if len(self.files) == 1 else f"{len(self.files)} files"
        lines = [f"{self.prompts} prompts from {self.rows} rows of {files}; the longest row has {self.longest} tokens"]
        if self.streams:
            lines.append("drawn from " + ", ".join(f"{name} ({count})" for name, count in self.streams.items()))
        if self.undrawn:
            tags = ", ".join(f"{tag!r} ({count})" for tag, count in self.undrawn.items())
            lines.append(f"never drawn, because domain_interleave_probs names no domain with their tag: {tags}")
        if self.renamed:
            lines.append(f"{self.renamed} prompts with a duplicate id got a new id")
        if self.bad:
            lines.append(
                f"{self.bad} rows dropped ({self.length_key}={self.most_tokens} tokens):\n{self.describe_bad()}"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class TagRows:
    """Facts about the prompts with one tag: prompts without a ground truth, and names in their column `domain`."""

    unanswered: int  # prompts without a ground_truth
    examples: tuple[str, ...]  # `file:line` of the first few of these prompts
    # name in column `domain` -> `file:line` of the first row with it
    domains: Mapping[str, str] = field(default_factory=dict)


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
    """Check that every tag has a teacher and a reward, and that every row has the ground truth for its reward.

    Raises a `DataError` that lists all faults.

    In pure distillation, training prompts need no reward, because rewards are only logged. No prompt needs a reward if
    the workflow scores its samples and no reward is configured.

    The tag of a row selects the reward. If the row's column `domain` names another reward, the row is refused, because
    ROLL would use that reward.

    Args:
        mode: mode of the run, for example pure.
        training, validation: tag -> `TagRows` of the data set.
        needing_truth: the reward workers that need a ground truth.
        scored_by_workflow: whether the workflow scores its samples.
    """
    wrong = []
    if teachers:
        wrong += [
            f"no teacher accepts tag {tag!r} of the training data; add the tag to a"
            " tag_included, or remove the rows with this tag"
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


def unused_warnings(named: Mapping[str, Collection[str] | None], tags: Collection[str]) -> list[str]:
    """Return a warning for each template, teacher or reward whose tags are not in the data set.

    This is not an error, because a data set may have only some of the configured tags.

    Args:
        named: name of the template, teacher or reward -> its tags. None: all tags.
        tags: the tags of the data set.
    """
    known = ", ".join(map(repr, tags))
    return [
        f"{name} is never used: no row of the data has {'the tag' if len(own) == 1 else 'one of the tags'}"
        f" {', '.join(map(repr, own))} (tags of the data: {known})"
        for name, own in named.items()
        if own is not None and not set(own) & set(tags)
    ]


def _unrewarded(
    name: str, tags: Mapping[str, TagRows], rewards: Sequence[RewardPlan], needing_truth: Collection[str]
) -> list[str]:
    wrong = []
    for tag, rows in tags.items():
        workers = [term.worker for reward in rewards if reward.accepts(tag) for term in reward.terms]
        worker = next((worker for worker in workers if worker in needing_truth), None)
        if not workers:
            wrong.append(
                f"no reward accepts tag {tag!r} of the {name} data; add the tag to a"
                " tag_included, or remove the rows with this tag"
            )
        elif worker and rows.unanswered:
            more = ", ..." if rows.unanswered > len(rows.examples) else ""
            wrong.append(
                f"{rows.unanswered} rows of the {name} data with tag {tag!r} have no ground_truth, which {worker}"
                f" needs: {', '.join(rows.examples)}{more}; add ground truths or remove the rows; for rows of a"
                " workflow, name the column in response_key"
            )
    return wrong


def _misrouted(name: str, tags: Mapping[str, TagRows], rewards: Sequence[RewardPlan]) -> list[str]:
    known = {reward.domain for reward in rewards}
    return [
        f"rows of the {name} data with tag {tag!r} name the domain {domain!r} ({example}), but "
        f"rewards.{reward.domain} has the tag: move it to rewards.{domain}.tag_included, give these rows another tag, "
        "or remove the column"
        for tag, rows in tags.items()
        for reward in rewards
        if reward.accepts(tag)
        for domain, example in rows.domains.items()
        if domain in known and domain != reward.domain
    ]


def overlap_warning(validation: "PromptSet", learned: "Sequence[PromptSet]") -> str | None:
    """Return a warning with the number of validation prompts that are also training prompts; None if there are none."""
    held_out = validation.prompt_hashes(np.arange(len(validation)))  # [V]
    numbers = [prompts.drawn() for prompts in learned]
    trained = [prompts.prompt_hashes(drawn) for prompts, drawn in zip(learned, numbers, strict=True)]  # [L] each
    shared = np.isin(held_out, np.concatenate(trained))
    if not shared.any():
        return None
    first = int(shared.argmax())
    same = next(
        prompts.where(int(drawn[place[0]]))
        for prompts, drawn, hashes in zip(learned, numbers, trained, strict=True)
        if len(place := np.flatnonzero(hashes == held_out[first]))
    )
    count, total = int(shared.sum()), len(validation)
    return (
        f"validation: {count} of {total} validation rows ({_share(count, total)}) are also training rows:"
        f" {validation.where(first)} has the same prompt as {same}. Results on these rows do not measure new prompts;"
        " remove the rows from the training files, or name other files in validation.data_args.file_name"
    )


def _share(count: int, total: int) -> str:
    share = 100 * count / total
    return f"{share:.0f} %" if share >= 1 else f"{share:.1g} %"
