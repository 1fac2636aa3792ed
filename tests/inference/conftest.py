"""One engine for most tests: starting vLLM takes longer than any of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from inference_models import Running, make_model, running, save_model


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(make_model(seed=0), Path(tmp_path_factory.mktemp("tiny-qwen3")))


@pytest.fixture(scope="session")
def shared_engine(tiny_model_path: str) -> Iterator[Running]:
    """Its weights change under way: a test that compares with a model sends that model first."""
    yield from running(tiny_model_path)
