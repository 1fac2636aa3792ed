"""Other names of keys: accepted like the key, never together with the key."""

import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from configuration_page import sections

from roll_opd.config.plan import RunPlan
from roll_opd.config.schema import other_names

Plan = Callable[..., RunPlan]
NAMES = {  # other name -> its section, a value, and what else the configuration needs
    "num_workers": ("rewards.math_rule", 2, {}),
}
CURRENT = {name: key for section in sections() for name, key in other_names(section).items()}


def path(section: str, key: str) -> str:
    return f"{section}.{key}" if section else key


def compared(run: RunPlan) -> RunPlan:
    """Return a plan without the texts that repeat the configuration's own words."""
    return replace(run, warnings=(), config_yaml="")


@pytest.fixture
def changes(request: pytest.FixtureRequest, root: Path) -> dict[str, Any]:
    """Return the overrides that the configuration needs in addition to the key."""
    _, _, needs = NAMES[request.param]
    rows = {"validation": {"data_args": {"file_name": [str(root / "train.jsonl")]}}, "rewards": {"math_rule": {}}}
    return deepcopy({**rows, **needs})


each = pytest.mark.parametrize(("name", "changes"), [(name, name) for name in NAMES], indirect=["changes"])


def test_every_other_name_of_a_key_has_a_case_here() -> None:
    assert NAMES.keys() == CURRENT.keys()


@each
def test_a_key_under_its_other_name_makes_the_same_plan(plan: Plan, name: str, changes: dict[str, Any]) -> None:
    section, value, _ = NAMES[name]
    key = CURRENT[name]
    plain = plan(changes)
    other = plan({path(section, name): value})
    override = plan({path(section, name): ...}, (f"{path(section, name)}={value}",))
    current = plan({path(section, key): value})
    assert compared(other) == compared(override) == compared(current) != compared(plain)
    assert set(other.warnings) == set(override.warnings) == set(current.warnings)


@each
def test_a_key_under_two_names_is_refused_with_both_places(
    problems: Callable[..., list[str]], name: str, changes: dict[str, Any]
) -> None:
    section, value, _ = NAMES[name]
    key = CURRENT[name]
    (problem,) = problems(changes | {path(section, key): value, path(section, name): value}, ())
    assert problem.startswith(f"{path(section, name)}: is another name of {key}, and {key} is set as well (run.yaml:")
    assert re.search(r"; remove one of the two keys \(run.yaml:\d+\)$", problem)


@each
def test_an_override_replaces_the_value_of_the_file_under_either_name(
    plan: Plan, name: str, changes: dict[str, Any]
) -> None:
    section, value, _ = NAMES[name]
    key = CURRENT[name]
    other = not value if isinstance(value, bool) else value / 2 if isinstance(value, float) else value + 1
    expected = plan(changes | {path(section, key): value})
    former = plan({path(section, key): other}, (f"{path(section, name)}={value}",))
    current = plan({path(section, key): ..., path(section, name): other}, (f"{path(section, key)}={value}",))
    assert compared(former) == compared(current) == compared(expected)
    for written, run in ((name, former), (key, current)):  # the run's config.yaml has one name, and so can run again
        keys = yaml.safe_load(run.config_yaml)
        for part in filter(None, section.split(".")):
            keys = keys[part]
        assert {name, key} & keys.keys() == {written}


@each
def test_a_wrong_value_under_another_name_is_reported_at_its_line(
    root: Path, problems: Callable[..., list[str]], name: str, changes: dict[str, Any]
) -> None:
    section, _, _ = NAMES[name]
    (problem,) = problems(changes | {path(section, name): "many"})
    lines = (root / "config" / "run.yaml").read_text(encoding="utf-8").splitlines()
    line = next(number for number, text in enumerate(lines, 1) if text.strip() == f"{name}: many")
    assert problem.startswith(f"{path(section, CURRENT[name])}: should be a valid ")
    assert problem.endswith(f"(run.yaml:{line})")
