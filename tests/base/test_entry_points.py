"""Entry points of an installed package and of a room: found without an import, loaded on use, refused if ambiguous."""

import subprocess
import sys
from pathlib import Path

import pytest

METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: 1\n"
LOSSES = """
import torch
from roll_opd.objective.registry import register_policy_loss

@register_policy_loss("{name}", {fact})
def loss(batch, *, power: int = 3):
    return batch.ratio_M
"""


def install(place: Path, package: str, losses: dict[str, str], fact: str = "reads_advantages=False") -> None:
    """Write what pip writes for a package with one module per loss."""
    info = place / f"{package}-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(METADATA.format(name=package))
    entries = "".join(f"{name} = {value}\n" for name, value in losses.items())
    (info / "entry_points.txt").write_text(f"[roll_opd.losses]\n{entries}")
    (place / package).mkdir()
    (place / package / "__init__.py").write_text("")
    for name in losses:
        (place / package / f"{name}.py").write_text(LOSSES.format(name=name, fact=fact))


def answer(place: Path, program: str) -> str:
    """Run a program with the packages of `place`; return what it prints."""
    code = f"import sys; sys.path.append({str(place)!r})\n{program}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return done.stdout + done.stderr


def test_an_installed_package_is_read_without_an_import(tmp_path: Path) -> None:
    install(
        tmp_path, "mine", {"cubic": "mine.cubic:loss", "absent": "mine.nowhere:loss", "wrong": "mine.cubic:nothing"}
    )
    program = """
from roll_opd.objective.registry import POLICY_LOSSES as registry, AlgorithmError
print("cubic" in registry.builtin, registry.facts("cubic").reads_advantages, registry.defaults("cubic"))
print(registry.located("cubic"), "torch" in sys.modules, registry.find("cubic").__module__)
for name in ("absent", "wrong"):
    try:
        registry.find(name)
    except AlgorithmError as error:
        print(name in str(error), "mine." in str(error))
"""
    assert answer(tmp_path, program).splitlines() == [
        *("True False {'power': 3}", "cubic False mine.cubic", "True True", "True True"),
    ]


def test_facts_that_are_no_literals_are_read_by_an_import(tmp_path: Path) -> None:
    install(tmp_path, "mine", {"cubic": "mine.cubic:loss"}, fact="reads_advantages=bool(0)")
    program = """
from roll_opd.objective.registry import POLICY_LOSSES as registry
print(registry.facts("cubic").reads_advantages, registry.defaults("cubic"))
"""
    assert answer(tmp_path, program) == "False {'power': 3}\n"


@pytest.mark.parametrize("name", ["ppo", "cubic"])
def test_a_name_for_two_parts_is_refused(tmp_path: Path, name: str) -> None:
    install(tmp_path, "mine", {name: f"mine.{name}:loss"})
    install(tmp_path, "theirs", {name: f"theirs.{name}:loss"})
    said = answer(tmp_path, "from roll_opd.objective.registry import POLICY_LOSSES as registry; registry.builtin")
    assert f"mine.{name}:loss" in said and name in said.splitlines()[-1] and "Error" in said
