"""One stage for all tests that play on it, one warm server for all launchers that may be forks."""

from collections.abc import Iterator

import pytest
import runs
from stage import Stage, open_stage


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Up from the first test that asks for it to the end of the session."""
    with open_stage(tmp_path_factory.mktemp("stage")) as opened:
        yield opened


@pytest.fixture(scope="session")
def forks() -> Iterator[None]:
    """Launchers that a test starts are forks of one warm server."""
    with runs.forks():
        yield
