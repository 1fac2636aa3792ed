"""One engine for most tests, because starting vLLM takes longer than any test."""

import os
from collections.abc import Iterator
from multiprocessing.context import SpawnContext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from inference_models import OPEN, Running, make_model, save_model

from roll_opd.cluster.forkserver import forkserver_worker
from roll_opd.cluster.forkserver.forkserver_main import ENGINES
from roll_opd.cluster.forkserver.forkserver_start import ADDRESS, fork_server


@pytest.fixture(autouse=True)
def no_engine_is_left() -> Iterator[None]:
    """End the engines that a failed test leaves. The fork server waits for its processes at the end of the session."""
    before = set(OPEN)
    yield
    for left in OPEN - before:
        left.close()


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(make_model(seed=0), Path(tmp_path_factory.mktemp("tiny-qwen3")))


@pytest.fixture(scope="session")
def shared_engine(tiny_model_path: str) -> Iterator[Running]:
    """The shared engine. Tests change its weights, so a test that compares with a model sends that model first.

    vLLM spawns its engine core, as on a machine with GPUs.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(forkserver_worker._CONTEXTS, "spawn", SpawnContext())
        engine = Running(tiny_model_path)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def warm() -> Iterator[None]:
    """Processes started later are forked, as in a run without GPUs."""
    plan: Any = SimpleNamespace(rollout=True, env={}, megatron_roles=dict, inference_roles=dict)
    with pytest.MonkeyPatch.context() as patch, fork_server() as server:
        server.serve(plan)
        for name in ("_forkserver_address", "_forkserver_alive_fd", "ensure_running"):
            patch.setattr(forkserver_worker._SERVER, name, getattr(forkserver_worker._SERVER, name))
        tracked = forkserver_worker._TRACKER._fd
        forkserver_worker.connect(forkserver_worker.address_of(os.environ[ADDRESS], ENGINES))
        forkserver_worker._TRACKER._fd = tracked
        patch.setitem(forkserver_worker._CONTEXTS, "spawn", forkserver_worker._CONTEXTS["spawn"])
        forkserver_worker.fork_instead_of_spawning()
        yield
