"""Forged ledgers whose checksums are right, and damage of any file of a run."""

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from forger import KINDS, KINDS_OF_VERSIONS, rows_of, write
from legal_runs import Settings, Source, start

from roll_opd.commands.main import main
from roll_opd.tracking.audit import examine
from roll_opd.tracking.run_directory import RunDirectory, checkpoints_of
from tests.cover import tiered

# a run of the demo with filtered groups: four steps with the bound 2, then resumed with the bound 1
RECORDED = Path(__file__).parent / "recorded_run"
PLAIN = Settings(groups=3, steps=6, rejected=0.3)


def whole(place: Path, settings: Settings, seed: int) -> Path:
    """Write a run that has reached its end."""
    run = RunDirectory.create(place, "demo")
    parts = [{"first": 1, "last": None, "changed": {}}]
    assert start(random.Random(seed), run, settings, parts, 0, Source(), is_killed=False)
    assert any(row["filtered"] for row in rows_of(run.path))
    return run.path


def without_end(run: Path) -> Path:
    """Take the summary and the checkpoints from a run, as if it had been killed."""
    (run / "summary.json").unlink()
    for checkpoint in checkpoints_of(run).values():
        shutil.rmtree(checkpoint)
    return run


@pytest.mark.parametrize("bound", tiered([0, 1, 2, 4], [0, 4]))
def test_every_forgery_is_found_in_the_contents(tmp_path: Path, bound: float) -> None:
    settings, kinds = replace(PLAIN, bound=bound), KINDS | (KINDS_OF_VERSIONS if bound else {})
    for seed in range(3):
        runs = [whole(tmp_path / f"{seed}/whole", settings, seed)]
        runs.append(without_end(whole(tmp_path / f"{seed}/killed", settings, seed)))
        for run in runs:
            rows = rows_of(run)
            write(run, rows)
            assert examine(run).errors == []  # the forger computes the checksums of the package
            for name, forge in kinds.items():
                write(run, forge(rows))
                found = [error for error in examine(run).errors if "checksum" not in error]
                assert found or forge(rows) == rows, (name, seed, run.parent.name)
                if forge(rows) != rows:
                    assert main(["audit", str(run)]) == 1, name


def test_forgeries_of_a_recorded_run_are_found(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(RECORDED, run)
    rows, original = rows_of(run), (run / "ledger.jsonl").read_bytes()
    write(run, rows)
    assert (run / "ledger.jsonl").read_bytes() == original and main(["audit", str(run)]) == 0
    for name, forge in (KINDS | KINDS_OF_VERSIONS).items():
        if forge(rows) != rows:
            write(run, forge(rows))
            assert [error for error in examine(run).errors if "checksum" not in error], name
    write(run, rows)
    for file, old, new in (
        ("config.yaml", "async_generation_ratio: 1", "async_generation_ratio: 3"),  # the checkpoints know better
        ("config.yaml", "seed: 42", "seed: 43"),
        ("checkpoints/step_4/run_state.json", '"step": 4', '"step": 3'),
        ("summary.json", '"steps": 7', '"steps": 8'),
        ("run.json", "00906a", "00906b"),
    ):
        text = (run / file).read_text()
        assert old in text
        (run / file).write_text(text.replace(old, new, 1))
        assert main(["audit", str(run)]) in (1, 2), file
        (run / file).write_text(text)
    assert main(["audit", str(run)]) == 0
    (run / "ledger.jsonl").unlink()
    assert main(["audit", str(run)]) == 2


def files_of(run: Path) -> list[Path]:
    return sorted(path for path in run.rglob("*") if path.is_file())


@pytest.mark.parametrize("flips", tiered([12, 60], [12]))
def test_damage_of_any_file_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str], flips: int) -> None:
    """Flip bits, cut and remove files: no damage of the ledger passes, and no damage is an unexpected error."""
    run, rng = tmp_path / "run", random.Random(flips)
    shutil.copytree(RECORDED, run)
    assert main(["audit", str(run)]) == 0
    for file in files_of(run):
        data = file.read_bytes()
        places = [rng.randrange(len(data)) for _ in range(flips)]
        flipped = [data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :] for place in places]
        cuts = [data[: rng.randrange(len(data))] for _ in range(flips // 4)]
        for damaged in [*flipped, *cuts, b"", b"\x00" * len(data), b"[" * 10**5]:
            file.write_bytes(damaged)
            code = main(["audit", str(run)])
            output = capsys.readouterr()
            assert code in (0, 1, 2) and "Traceback" not in output.err + output.out, (file, damaged[:80])
            if file.name == "ledger.jsonl":
                assert code == 1, damaged
        file.unlink()
        assert main(["audit", str(run)]) in (0, 1, 2)
        file.mkdir()
        assert main(["audit", str(run)]) in (0, 1, 2)
        file.rmdir()
        file.write_bytes(data)
    assert main(["audit", str(run)]) == 0
