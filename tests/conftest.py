"""Rooms run side by side (`make test` starts two workers), each room in one worker: it shares engines and processes."""

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
LONGEST_FIRST = ("pipelines", "megatron_engine", "inference")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Name the room of each test, and put the rooms first that take longest."""

    def room(item: pytest.Item) -> str:
        place = item.path.relative_to(TESTS)
        return place.parts[0] if len(place.parts) > 1 else "tests"

    ranks = {name: rank for rank, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: ranks.get(room(item), len(ranks)))
    for item in items:
        item.add_marker(pytest.mark.xdist_group(room(item)))
