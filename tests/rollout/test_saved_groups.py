"""Finished groups in a file: they are read back without targets, and a changed file is refused."""

from pathlib import Path

import numpy as np
import pytest

from roll_opd.rollout.saved_groups import read_groups, write_groups
from roll_opd.rollout.workflow_runs import FinishedGroup
from roll_opd.samples.sample import Sample, TargetRef, as_columns, logprobs_column, teacher_columns


def sample(name: str, **more: object) -> Sample:
    columns = as_columns(
        action_mask=np.ones(2, bool),
        rollout_logprobs=np.float32([-1, -2]),
        **teacher_columns({"a": np.float32([-3, -4]), "b": np.float32([-5, -6])}),
    )
    return Sample(np.arange(5), 3, columns, id=name, versions=((1, 2),), **more)  # type: ignore[arg-type]


def test_groups_return_by_draw_with_their_samples(tmp_path: Path) -> None:
    groups = [
        FinishedGroup(7, True, [sample("x", reward=0.5), sample("y", excluded=True)]),
        FinishedGroup(4, False, []),
    ]
    found = read_groups(tmp_path / "groups", write_groups(tmp_path / "groups", groups))
    assert [(group.draw, group.passed, len(group.samples)) for group in found] == [(4, False, 0), (7, True, 2)]
    for one, other in zip(groups[0].samples, found[1].samples, strict=True):
        assert (one.id, one.versions, one.reward, one.excluded) == (
            other.id,
            other.versions,
            other.reward,
            other.excluded,
        )
        assert one.columns.keys() == other.columns.keys()
        for name, values in one.columns.items():
            assert values.dtype == other.columns[name].dtype and (values == other.columns[name]).all()


def test_a_teacher_with_targets_scores_a_stored_sample_again(tmp_path: Path) -> None:
    """Its targets are in another process; the log-probs of the other teacher are kept."""
    target = TargetRef(object(), 0, {})
    groups = [FinishedGroup(0, True, [sample("x", teacher_targets={"a": target})])]
    [found] = read_groups(tmp_path / "groups", write_groups(tmp_path / "groups", groups))
    [stored] = found.samples
    assert not stored.teacher_targets
    assert stored.columns.keys() == groups[0].samples[0].columns.keys() - {logprobs_column("a")}


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:40] + b"?" + data[41:]])
def test_a_changed_file_is_refused(tmp_path: Path, damage: object) -> None:
    file = tmp_path / "groups"
    digest = write_groups(file, [FinishedGroup(0, True, [sample("x")])])
    file.write_bytes(damage(file.read_bytes()))  # type: ignore[operator]
    with pytest.raises(ValueError, match="groups has changed since"):
        read_groups(file, digest)
