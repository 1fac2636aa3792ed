"""What several rooms need."""

from pathlib import Path

import pytest

GSM8K = Path(__file__).resolve().parents[2] / "shared" / "data" / "gsm8k"  # beside the repository
GSM8K_FILES = ("train.jsonl", "test.jsonl")


@pytest.fixture(scope="session")
def gsm8k_dir() -> Path:
    """The directory with GSM8K's own files; without them a test is skipped."""
    missing = [name for name in GSM8K_FILES if not (GSM8K / name).is_file()]
    if missing:
        pytest.skip(f"needs real data: put GSM8K's {' and '.join(missing)} (rows of question and answer) into {GSM8K}")
    return GSM8K
