"""Finished groups in a checkpoint: groups that are completely sampled but not trained on yet.

A resumed run trains on these groups without sampling them again. Teacher targets are in an object store, so they are
not saved. If a teacher has targets, its log-probs are not saved either, and the teacher scores the samples again in the
resumed run. Missing rewards are requested again too.
"""

import hashlib
import pickle
from collections.abc import Collection, Sequence
from pathlib import Path

from roll_opd.base.frozen import FrozenDict
from roll_opd.rollout.staleness import Pace
from roll_opd.rollout.workflow_runs import FinishedGroup
from roll_opd.samples.sample import Sample, changed, chunks_column, logprobs_column
from roll_opd.samples.transport import Compact
from roll_opd.samples.versions import sampling_versions

DIGEST_BYTES = 16


def write_groups(file: Path, groups: Sequence[FinishedGroup]) -> str:
    """Write groups to a file and return the digest of its content. Raises OSError if the file cannot be written."""
    facts = [(group.draw, group.passed, len(group.samples), group.failed_runs) for group in groups]
    samples = [_without_targets(sample) for group in groups for sample in group.samples]
    data = pickle.dumps((facts, Compact(samples)), protocol=5)
    file.write_bytes(data)
    return _digest(data)


def read_groups(file: Path, digest: str) -> list[FinishedGroup]:
    """Return the groups of a file, in the order of their draws.

    Raises OSError if the file is missing, and ValueError if the digest of its content is not `digest`.
    """
    data = file.read_bytes()
    if _digest(data) != digest:
        raise ValueError(f"{file} has changed since it was saved: it was edited or truncated")
    facts, samples = pickle.loads(data)
    groups, begin = [], 0
    for draw, passed, count, failed_runs in facts:
        groups.append(FinishedGroup(draw, passed, samples[begin : begin + count], failed_runs))
        begin += count
    return sorted(groups, key=lambda group: group.draw)


def within_bound(
    groups: Sequence[FinishedGroup], position: int, passed: Collection[int], version: int, pace: Pace
) -> list[FinishedGroup]:
    """Return the groups that are recent enough for the resumed run to train on.

    A group is kept if its age cannot exceed `pace.max_age` when the run trains on it. Let i be the number of older
    groups that the run still has to train on, and P the number of groups per batch. The group is then in batch
    `version` + i // P at the latest.

    Args:
        groups: finished groups, in the order of their draws.
        position: position of the source; all earlier draws are done.
        passed: later draws that were trained on or filtered out.
        version: version of the weights at which the run resumes.
        pace: the pace that sets the age bound.
    """
    rejected = {group.draw for group in groups if not group.passed}
    gone = sorted({draw for draw in (*passed, *rejected) if draw >= position})
    kept = []
    for group in groups:
        older = group.draw - position - sum(draw < group.draw for draw in gone)
        ages = [version + older // pace.groups - oldest for oldest in map(_oldest, group.samples)]
        if max(ages, default=0) <= pace.max_age:
            kept.append(group)
    return kept


def _oldest(sample: Sample) -> float:
    return min(sampling_versions(sample.versions), default=float("-inf"))


def _without_targets(sample: Sample) -> Sample:
    """Return the sample without targets, and without the log-probs and chunks of teachers that have targets."""
    names = sample.teacher_targets.keys()
    if not names:
        return sample
    columns = {column for name in names for column in (logprobs_column(name), chunks_column(name))}
    return changed(
        sample,
        columns={name: values for name, values in sample.columns.items() if name not in columns},
        alignments=FrozenDict({name: cut for name, cut in sample.alignments.items() if name not in names}),
        teacher_targets=FrozenDict(),
    )


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()
