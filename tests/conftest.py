"""What several rooms need, and which rooms are slow as a whole."""

import os
import shutil
from pathlib import Path

import pytest

WIDTH = shutil.get_terminal_size().columns  # of pytest's own report
os.environ["COLUMNS"] = "1000"  # messages in one line, whose words tests look for; tests of the width set their own

TESTS = Path(__file__).parent
SLOW_ROOMS = {"inference", "megatron_engine", "pipelines", "workers"}  # start engines, process groups or Ray
GSM8K = Path(__file__).resolve().parents[2] / "shared" / "data" / "gsm8k"  # beside the repository
GSM8K_FILES = ("train.jsonl", "test.jsonl")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Report as wide as the terminal is, whatever tests are told."""
    session.config.get_terminal_writer().fullwidth = WIDTH


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the slow rooms alone where none of their tests would be run: to import them takes long, too."""
    return True if config.option.markexpr == "not slow" and collection_path.name in SLOW_ROOMS else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of a slow room as slow; the others carry `@pytest.mark.slow` themselves."""
    for item in items:
        if item.path.relative_to(TESTS).parts[0] in SLOW_ROOMS:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def gsm8k_dir() -> Path:
    """The directory with GSM8K's own files; without them a test is skipped."""
    missing = [name for name in GSM8K_FILES if not (GSM8K / name).is_file()]
    if missing:
        pytest.skip(f"needs real data: put GSM8K's {' and '.join(missing)} (rows of question and answer) into {GSM8K}")
    return GSM8K
