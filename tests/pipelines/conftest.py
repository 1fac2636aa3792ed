"""One stage for all tests that play on it."""

from collections.abc import Iterator

import pytest
from stage import Stage, open_stage


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Up from the first test that asks for it to the end of the session."""
    with open_stage(tmp_path_factory.mktemp("stage")) as opened:
        yield opened
