"""Makes `runs` and `stage` importable whatever the import mode; one stage for all tests that play on it."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from stage import Stage, open_stage


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Up from the first test that asks for it to the end of the session."""
    with open_stage(tmp_path_factory.mktemp("stage")) as opened:
        yield opened
