"""One Ray cluster for this directory; its processes are forks of a preloaded server and can import a user's modules."""

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from roll_opd.cluster.forkserver import forkserver_start
from roll_opd.cluster.forkserver.forkserver_main import ENGINES, MEGATRON
from roll_opd.cluster.ray_runtime import ray_cluster
from roll_opd.config.plan import RewardPlan, RewardTerm
from roll_opd.workers.reward_pool import RewardPool, RewardWorker

MODEL = Path(__file__).parents[2] / "examples" / "demo" / "models" / "student"


@pytest.fixture(scope="session")
def my_rewards() -> Path:
    return Path(__file__).with_name("users")


@pytest.fixture(scope="session")
def cluster(my_rewards: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(my_rewards), os.environ.get("PYTHONPATH", "")]))
        patch.syspath_prepend(my_rewards)
        with forkserver_start.fork_server() as server, ray_cluster(1):
            server.import_for({"engines": "", "variables": {MEGATRON: {}, ENGINES: {}}})
            yield


@pytest.fixture(scope="session")
def warm_options(cluster: None) -> dict[str, Any]:
    """Ray's options of a worker that is a fork of the preloaded server, as in a run without GPUs."""
    return {"num_cpus": 0, "runtime_env": {"env_vars": forkserver_start.variables(MEGATRON, {})}}


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    with asyncio.Runner() as runner:  # cancels at its end what is still running
        yield runner.get_loop()


@pytest.fixture
def start(warm_options: dict[str, Any], loop: asyncio.AbstractEventLoop) -> Iterator[Callable[..., RewardPool]]:
    """Starts reward workers for a function or class of `my_rewards`; they end with the test."""
    reward_pools = []

    def begin(
        worker: str, timeout: float | None = 30.0, args: dict | None = None, is_learned: bool = True, **settings
    ) -> RewardPool:
        terms = (RewardTerm(worker, f"my_rewards.{worker}", args or {}, timeout=timeout),)
        plan = RewardPlan("code", **{"terms": terms, **settings})
        spawn = RewardWorker.options(**warm_options).remote
        reward_pools.append(RewardPool(plan, spawn, str(MODEL), is_learned=is_learned))
        loop.run_until_complete(reward_pools[-1].start())
        return reward_pools[-1]

    yield begin
    for pool in reward_pools:
        loop.run_until_complete(pool.end())
