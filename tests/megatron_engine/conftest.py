"""The Megatron workers, which do the jobs that tests ask for."""

from collections.abc import Iterator

import pytest
from megatron_answers import Answers, Workers
from megatron_models import save_models


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answers]:
    """Where a job fails, the tests that read its files do."""
    root = tmp_path_factory.mktemp("megatron")
    save_models(root / "models")
    workers = Workers(root)
    yield Answers(root, workers)
    workers.end()
