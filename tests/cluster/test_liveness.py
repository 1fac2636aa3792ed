"""Dead actors and Ray processes are reported: real processes that are killed."""

import asyncio
import os
import queue
from collections.abc import Iterator

import psutil
import pytest
import ray

from roll_opd.cluster import ray_runtime
from roll_opd.cluster.lost_processes import ProcessDied
from roll_opd.workers.actor_group import ActorGroup
from roll_opd.workers.liveness import watched

pytestmark = pytest.mark.slow


@ray.remote(num_cpus=0)
class Actor:
    def pid(self) -> int:
        return os.getpid()

    async def for_ever(self) -> None:
        await asyncio.sleep(3600)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with ray_runtime.ray_cluster(1):
        yield


def group(*names: str) -> tuple[ActorGroup, list[int]]:
    made = [Actor.remote() for _ in names]
    return ActorGroup(made, names), ray.get([actor.pid.remote() for actor in made])


def test_a_dead_idle_actor_is_reported() -> None:
    lost: queue.Queue[str] = queue.Queue()
    ended, _ = group("ended")
    roles, pids = group("teacher, rank 0,", "teacher, rank 1,")
    with watched(lost.put):
        ended.end()
        psutil.Process(pids[1]).kill()
        said = lost.get(timeout=30)
    assert said.startswith("teacher, rank 1, has died: ")
    roles.end()


def test_a_call_to_an_actor_that_dies_names_it() -> None:
    roles, pids = group("teacher, rank 0,", "teacher, rank 1,")

    async def ask() -> None:
        asyncio.get_running_loop().call_later(0.5, psutil.Process(pids[1]).kill)
        await roles.call("for_ever")

    with pytest.raises(ProcessDied, match=r"^teacher, rank 1, has died: "):
        asyncio.run(ask())
    roles.end()


def name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:  # ended since it was listed
        return ""


def test_dead_ray_processes_are_reported() -> None:
    """The last test: Ray does not survive it."""
    lost: queue.Queue[str] = queue.Queue()
    (gcs,) = [each for each in psutil.Process().children(recursive=True) if name(each) == "gcs_server"]
    with watched(lost.put):
        gcs.kill()
        assert lost.get(timeout=30) == "Ray's gcs_server (killed by signal 9) has ended on this host"
