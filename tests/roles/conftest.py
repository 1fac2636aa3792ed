"""One Ray for the room, in whose processes a user's module `my_rewards` is found."""

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from roll_opd.actors.reward_actor import RewardWorker
from roll_opd.cluster.runtime import ray_cluster
from roll_opd.config.plan import RewardPlan, RewardTerm
from roll_opd.roles.reward_pool import RewardPool

MODEL = Path(__file__).parents[2] / "examples" / "demo" / "models" / "student"


@pytest.fixture(scope="session")
def my_rewards() -> Path:
    return Path(__file__).with_name("users")


@pytest.fixture(scope="session")
def cluster(my_rewards: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(my_rewards), os.environ.get("PYTHONPATH", "")]))
        with ray_cluster(1):
            yield


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture
def start(cluster: None, loop: asyncio.AbstractEventLoop) -> Iterator[Callable[..., RewardPool]]:
    """Starts reward workers for a function or class of `my_rewards`; they end with the test."""
    reward_pools = []

    def begin(
        worker: str, timeout: float | None = 30.0, args: dict | None = None, is_learned: bool = True, **settings
    ) -> RewardPool:
        terms = (RewardTerm(worker, f"my_rewards.{worker}", args or {}, timeout=timeout),)
        plan = RewardPlan("code", **{"terms": terms, **settings})
        spawn = RewardWorker.options(num_cpus=0).remote
        reward_pools.append(RewardPool(plan, spawn, str(MODEL), is_learned=is_learned))
        loop.run_until_complete(reward_pools[-1].start())
        return reward_pools[-1]

    yield begin
    for pool in reward_pools:
        loop.run_until_complete(pool.end())
