"""Configurations of other systems are recognised, and our configurations are never translated."""

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from roll_opd.base.failures import ConfigError
from roll_opd.base.paths import REPOSITORY
from roll_opd.config import translators
from roll_opd.extras.trinity.translation.recognition import is_trinity
from roll_opd.planner.load_plan import load_plan

DEMO = REPOSITORY / "examples" / "demo"
PLANNED_APART = """
import sys
from roll_opd.planner.load_plan import load_plan
load_plan({directory!r}, {name!r})
print(sorted(name for name in sys.modules if name.startswith("roll_opd.extras.trinity.translation.")))
"""


@pytest.mark.parametrize("name", ["onpolicy_distill", "rlvr_opd"])
def test_a_configuration_of_our_own_imports_no_translation(name: str) -> None:
    code = PLANNED_APART.format(directory=str(DEMO), name=name)
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("['roll_opd.extras.trinity.translation.recognition']\n", "")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("buffer:\n  batch_size: 2\n", True),
        ('{"explorer": {}, "trainer": {}}\n', True),
        ("seed: 1\n'cluster' : {node_num: 1}\n", True),
        ("student_train:\n  buffer: {}\n", False),  # a key of that name within a section
        ("actor_train: {}\nmodel: x\n", False),  # one of our roles beside it
        ("defaults: []\nmodel: x\n", False),
        ("reward_model: {}\n# buffer: of samples\n", False),
        ("? [buffer, model]\n: 1\nseed: 'model: x'\n", False),
        ("", False),
        ("- model: x\n", False),
        ("model: [\n", False),
    ],
)
def test_a_file_of_trinity_is_known_by_its_sections(tmp_path: Path, text: str, expected: bool) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert is_trinity(file) is expected


def test_every_example_is_our_own() -> None:
    assert [file for file in (REPOSITORY / "examples").rglob("*.yaml") if is_trinity(file)] == []


def test_a_file_that_cannot_be_read_is_no_trinity(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"model: \xff")
    assert not is_trinity(tmp_path / "binary.yaml")
    assert not is_trinity(tmp_path / "missing.yaml")
    assert not is_trinity(tmp_path)


def test_a_file_of_two_systems_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.yaml").write_text("buffer:\n  batch_size: 2\n")
    value = "roll_opd.extras.trinity.translation.recognition:TRINITY"
    found = {name: EntryPoint(name, value, "roll_opd.translators") for name in ("one", "two")}
    monkeypatch.setattr(translators, "entries", lambda group: found)
    with pytest.raises(ConfigError, match="one and two"):
        load_plan(str(tmp_path), "run")
    monkeypatch.setattr(translators, "entries", lambda group: {"one": EntryPoint("one", "no.where:X", group)})
    with pytest.raises(ConfigError, match=r"no\.where:X"):
        load_plan(str(tmp_path), "run")
