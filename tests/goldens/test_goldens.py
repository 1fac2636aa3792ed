"""The golden runs reproduce the recorded bits, if there is a record for this class of machine."""

import json
from dataclasses import fields
from pathlib import Path

import pytest
from compare import Renamed, reports
from record import fixtures, record

from roll_opd.objective.engine_evidence import EngineEvidence

# metrics that are newer than the records
ADDED = frozenset(f"metrics:rollout/engine/{field.name}" for field in fields(EngineEvidence))
# recorded when they were computed in f64 after the update; they are now the f32 values of the update
CHANGED = frozenset(
    f"metrics:critic/{name}/{kind}" for name in ("advantages", "rewards") for kind in ("mean", "max", "min")
)
CHANGED |= {"samples:advantages", "samples:token_level_rewards"}


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_runs_end_with_the_bits_on_record(tmp_path: Path) -> None:
    place = fixtures()
    if not place.is_dir():
        there = ", ".join(sorted(path.name for path in place.parent.glob("*")))
        pytest.skip(f"no record of this class of machine, {place.name}, but of {there} (record.py --fixture makes one)")
    record(tmp_path, [])
    gaps = {
        name: lines[:5]
        for name, lines in reports(place, tmp_path, [], Renamed(added=ADDED | CHANGED, removed=CHANGED))
        if lines
    }
    assert not gaps, json.dumps(gaps, indent=1)
