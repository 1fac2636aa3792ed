"""Every example and every fragment in `configs/` plans as it did when `example_plans.json` was written."""

from pathlib import Path

import pytest
from example_plans import committed, planned
from plan_records import paths_of_difference
from plan_sources import Source, our_sources

WANTED = committed()
RENEW = "where that was meant: python tests/net/example_plans.py"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


@pytest.fixture(scope="module")
def sources(root: Path) -> dict[str, Source]:
    return {source.name: source for source in our_sources(root)}


def test_every_example_has_a_plan(sources: dict[str, Source]) -> None:
    assert sources.keys() == WANTED.keys(), RENEW


@pytest.mark.parametrize("name", WANTED)
def test_an_example_plans_as_before(name: str, sources: dict[str, Source], root: Path) -> None:
    differences = list(paths_of_difference(WANTED[name], planned(sources[name], root)))
    assert not differences, RENEW
