"""The ledger of prompts: an audit finds every lost, repeated or changed draw."""

import json
from pathlib import Path
from typing import Any

import pytest

from roll_opd.commands.main import main
from roll_opd.tracking.audit import audit
from roll_opd.tracking.ledger import Ledger
from roll_opd.tracking.run_directory import LEDGER, RunDirectory, truncate_jsonl

STEPS = [([0, 2], [1]), ([3, 4], []), ([6, 7], [5])]


def written(place: Path, steps: list[tuple[list[int], list[int]]] = STEPS) -> RunDirectory:
    run = RunDirectory.create(place, "demo")
    ledger = Ledger(run)
    for step, (trained, filtered) in enumerate(steps, 1):
        ledger.append(step, trained, filtered)
    return run


def checkpoint(run: RunDirectory, step: int, taken: int, **more: Any) -> None:
    path = run.path / f"checkpoints/step_{step}"
    path.mkdir(parents=True)
    (path / "run_state.json").write_text(json.dumps({"step": step, "source": {"taken": taken, **more}}))


def test_a_whole_ledger_has_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = written(tmp_path)
    checkpoint(run, 2, 5)
    assert audit(run.path) == (
        {"steps": 3, "trained": 6, "filtered": 2, "failed": 0, "in flight before the last draw": 0},
        [],
    )
    assert main(["audit", str(run.path)]) == 0
    assert "each prompt is trained once, or filtered once" in capsys.readouterr().out


def test_a_resume_continues_the_chain(tmp_path: Path) -> None:
    run = written(tmp_path)
    truncate_jsonl(run.path / LEDGER, 2)
    Ledger(run).append(3, [5, 6], [])
    assert audit(run.path)[1] == []


def test_draws_in_a_window_are_those_that_have_passed(tmp_path: Path) -> None:
    run = written(tmp_path, [([0, 3], []), ([1, 4], [])])
    checkpoint(run, 1, 1, passed=[3])
    counts, errors = audit(run.path)
    assert counts["in flight before the last draw"] == 1 and errors == []


def test_a_run_from_another_runs_checkpoint_has_a_ledger_from_there_on(tmp_path: Path) -> None:
    """Draws 0 to 4 are in the ledger of the other run; later checkpoints must have all draws of this one."""
    run = RunDirectory.create(tmp_path, "demo")
    Ledger(run).append(3, [5, 7], [])
    checkpoint(run, 3, 6, passed=[7])
    counts, errors = audit(run.path)
    assert counts["in flight before the last draw"] == 1 and errors == []
    Ledger(run).append(4, [6, 9], [])
    checkpoint(run, 4, 10)
    (error,) = audit(run.path)[1]
    assert "the checkpoint of step 4 disagrees with the ledger: draws [8] are done only in the checkpoint" in error


def changed_row(run: RunDirectory, row: int, old: str, new: str) -> None:
    lines = (run.path / LEDGER).read_text().splitlines()
    lines[row] = lines[row].replace(old, new)
    (run.path / LEDGER).write_text("\n".join(filter(None, lines)) + "\n")


def test_every_damage_is_found(tmp_path: Path) -> None:
    run = written(tmp_path / "changed")
    changed_row(run, 1, "[3, 4]" if "[3, 4]" in (run.path / LEDGER).read_text() else "[3,4]", "[3,9]")
    assert any("row 2 (step 2) has a wrong checksum" in error for error in audit(run.path)[1])
    run = written(tmp_path / "removed")
    lines = (run.path / LEDGER).read_text().splitlines()
    (run.path / LEDGER).write_text("\n".join([lines[0], lines[2]]) + "\n")
    assert any("wrong checksum" in error for error in audit(run.path)[1])
    run = written(tmp_path / "twice", [([0, 1], []), ([1, 2], [])])
    assert audit(run.path)[1] == ["draw 1 occurs 2 times"]
    run = written(tmp_path / "lost", [([0, 1], []), ([3], [])])
    checkpoint(run, 2, 4)
    (error,) = audit(run.path)[1]
    assert "the checkpoint of step 2 disagrees with the ledger: draws [2] are done only in the checkpoint" in error
    assert main(["audit", str(run.path)]) == 1


def test_a_run_without_a_ledger_is_an_error_of_the_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(tmp_path)]) == 2
    assert "only runs with a rollout have a ledger" in capsys.readouterr().err
