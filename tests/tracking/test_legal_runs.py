"""Audits of legal histories: no run is accused, however it was killed, resumed or changed."""

import random
from pathlib import Path

import pytest
from legal_runs import legal_run

from roll_opd.tracking.audit import examine


@pytest.mark.parametrize("first", [0, pytest.param(60, marks=pytest.mark.nightly)])
def test_no_legal_run_is_accused(tmp_path: Path, first: int) -> None:
    audited = steps = 0
    for seed in range(first, 60 if not first else 660):
        for run in legal_run(tmp_path / str(seed), random.Random(seed)):
            found = examine(run)
            assert (found.errors, found.damaged) == ([], []), (seed, run)
            audited, steps = audited + 1, steps + found.counts["steps"]
    assert steps > audited > 40
