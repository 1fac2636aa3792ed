"""The Megatron workers, which execute the jobs that tests request."""

import re
from collections.abc import Iterator
from math import prod
from pathlib import Path

import pytest
from megatron_answers import Answers, Workers
from megatron_models import save_models

FOUR_ON_EVERY_PUSH = ("test_megatron_families.py", "test_megatron_distillation.py")
LAYOUT = re.compile(r"(?:(?:tp|pp|cp|dp|ep|etp|vpp)\d|sp)+")


def ranks_of(name: str) -> int:
    """Return the number of ranks of the largest layout in a test's id."""
    layouts = [part for part in re.split(r"[\[\]-]", name) if LAYOUT.fullmatch(part)]
    return max([1, *(prod(int(size) for size in re.findall(r"(?<!v)(?:tp|pp|cp|dp)(\d)", one)) for one in layouts)])


@pytest.hookimpl(tryfirst=True)  # before `-m` deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave layouts of four ranks, which take a quarter of this room's time, to the nightly tier, except in two files.

    On every push, the others run on one and two ranks.
    """
    for item in items:
        here = item.path.parent == Path(__file__).parent and item.path.name not in FOUR_ON_EVERY_PUSH
        if here and ranks_of(item.name) > 2:
            item.add_marker(pytest.mark.nightly)


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answers]:
    """The answers of the jobs; if a job fails, the tests that read its files fail."""
    root = tmp_path_factory.mktemp("megatron")
    save_models(root / "models")
    workers = Workers(root)
    yield Answers(root, workers)
    workers.end()
