"""Launches the Megatron workers, once however many tests read their answers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from megatron_answers import Answers
from megatron_reference import save_models

TIME_LIMIT = 2400  # seconds; five minutes on two idle cores, twenty on slow ones that three sessions share
WORKER = Path(__file__).with_name("megatron_worker.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the workers their time: whichever test comes first waits for all of them."""
    for item in items:
        if item.path.parent == WORKER.parent:
            item.add_marker(pytest.mark.timeout(TIME_LIMIT + 100))


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Of all jobs; where a worker fails, every test that asks for them does."""
    root = tmp_path_factory.mktemp("megatron")
    save_models(root / "models")
    log = root / "workers.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4", WORKER, root],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            code = process.wait(TIME_LIMIT)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its ranks
            process.wait(60)
            pytest.fail(f"no end after {TIME_LIMIT} s\n{log.read_text()[-6000:]}")
    if code:
        pytest.fail(f"a worker failed:\n{log.read_text()[-6000:]}")
    return Answers(root)
