"""The tables of names on the pages for users of ROLL and Trinity-RFT: each name does what its row states."""

import importlib
import re

import pytest

from roll_opd.config.diagnostics import Diagnostics
from roll_opd.extras.games.factory import EnvironmentFailure, name_of_roll
from roll_opd.extras.games.prompt_templates import makes_steps, manager_problem
from roll_opd.extras.trinity.translation.objective import objective
from roll_opd.extras.trinity.translation.reading import Machine, Translation
from roll_opd.objective.algorithms import algorithm, algorithm_names
from roll_opd.rewards.reward_registry import REWARDS, RewardError, _find, reward_arguments
from tests.pages import DOCS

CODE = re.compile(r"`([^`]+)`")


def rows(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the tables below a heading of a page."""
    section = (DOCS / page).read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    assert section, heading
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def found(name: str) -> object:
    """Return the object with this dotted name."""
    module, _, attribute = name.rpartition(".")
    if not module:
        return importlib.import_module(name)
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError:
        return getattr(found(module), attribute)


def test_paths_of_roll_are_what_the_table_states() -> None:
    kinds = set()
    for cells in rows("coming-from-roll.md", "Names in ROLL's code"):
        here = cells[-1]
        for path in CODE.findall(cells[0]):
            if ".rewards." in path:
                if here.startswith("not available"):
                    with pytest.raises(RewardError):
                        reward_arguments(path)
                else:
                    assert _find(path) is REWARDS.find(here.strip("`")), path
                kinds.add("reward")
            elif ".env_manager." in path:
                assert (manager_problem(path) is None) == (here != "not available"), path
                if here != "not available":
                    assert makes_steps(path) == (here == "a sample per action"), path
                kinds.add("manager")
            elif ".env." in path:
                assert name_of_roll(path) == here.strip("`")
                kinds.add("environment")
    assert kinds == {"reward", "manager", "environment"}
    with pytest.raises(EnvironmentFailure):
        name_of_roll("roll.pipeline.agentic.env.webshop.env.WebShopEnv")


def test_names_of_this_package_in_the_tables_exist() -> None:
    for page, heading in (
        ("coming-from-roll.md", "Names in ROLL's code"),
        ("coming-from-trinity.md", "Algorithm classes"),
    ):
        names = {name for cells in rows(page, heading) for name in CODE.findall(cells[-1]) if "roll_opd." in name}
        assert names
        for name in names:
            assert found(name) is not None, name


def test_each_algorithm_class_of_trinity_is_a_row_that_the_translation_accepts() -> None:
    page = (DOCS / "coming-from-trinity.md").read_text(encoding="utf-8")
    section = page.partition("\n## Algorithm classes\n")[2].partition("\n## ")[0]
    named = dict(re.findall(r"`(\w+Algorithm)`:\s`(\w+)`", section))
    assert len(named) == 19 and sorted(named.values()) == sorted(algorithm_names())
    for class_name, name in named.items():
        assert class_name.removesuffix("Algorithm").lower() == name.replace("_", "")
        diag = Diagnostics()
        read = Translation(diag, Machine(1, False), found={"algorithm.algorithm_type": name})
        objective(read)
        if algorithm(name).schema == "experience":
            assert read.values["algorithm_type"] == name and not diag.problems
        else:
            assert f"start_{name}_pipeline.py" in diag.problems[0]
