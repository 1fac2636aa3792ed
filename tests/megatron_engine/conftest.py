"""The Megatron workers, which execute the jobs that tests request."""

from collections.abc import Iterator

import pytest
from megatron_answers import Answers, Workers
from megatron_models import save_models


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answers]:
    """The answers of the jobs; if a job fails, the tests that read its files fail."""
    root = tmp_path_factory.mktemp("megatron")
    save_models(root / "models")
    workers = Workers(root)
    yield Answers(root, workers)
    workers.end()
