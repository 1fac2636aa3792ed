"""Transport of weights from a student to its receivers on two Ray nodes, and the choice of a transport on GPUs."""

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import ray
import torch
from ray._private.node import Node
from ray._private.parameter import RayParams

from roll_opd.cluster.forkserver.lean_ray import lean
from roll_opd.inference.plugin import CUDA_IPC, M2N, NCCL, SHARED_MEMORY
from roll_opd.samples.weight_bucket import BucketMemory, Description, bucketed, map_bucket
from roll_opd.weight_sync.bucket_writer import BucketHost, BucketWriter, Written
from roll_opd.weight_sync.choose_transport import choose_backend
from roll_opd.weight_sync.send_weights import receivers_of, stream
from roll_opd.workers.actor_group import ActorGroup

ELSEWHERE = "elsewhere"  # what the second node offers
LIMIT = 2**20


def tensors(version: int) -> dict[str, torch.Tensor]:
    """Return tensors of 5 buckets, one of which is larger than the limit."""
    generator = torch.Generator().manual_seed(version)
    sizes = [(300, 300), (7,), (700, 700), (300, 400), (400, 400), (300, 500), (5,)]
    return {f"layer.{number}": torch.randn(*size, generator=generator) for number, size in enumerate(sizes)}


class Student(BucketHost, BucketWriter):
    """Has other weights each time."""

    _times = 0

    def begin_writing(self, memories: Sequence[BucketMemory], dtype: str, *, adapter: bool) -> Written:
        self._times += 1
        stacks = [([name], tensor[None]) for name, tensor in tensors(self._times).items()]
        return bucketed(stacks if memories else (), memories, torch.float32, LIMIT)


class Taker(BucketHost):
    """A receiver that copies the values; like an engine, it does not read a bucket later."""

    def __init__(self) -> None:
        self.arrived: dict[str, torch.Tensor] = {}
        self.complete = 0

    def hold_bucket(self, content: Sequence[ray.ObjectRef], bucket: Description) -> Description:
        return self.hold(ray.get(content[0]), bucket)

    def load_weights(self, bucket: Description, *, last: bool) -> None:
        _, mapped = map_bucket(bucket["path"], bucket["size"], bucket["stacks"])
        self.arrived |= {name: tensor.clone() for name, tensor in mapped}
        self.complete = bucket["version"] if last else 0

    def differs(self, version: int) -> list[str]:
        wanted = tensors(version)
        assert self.complete == version and list(self.arrived) == list(wanted) and self._held is None
        return [name for name, tensor in self.arrived.items() if not torch.equal(tensor, wanted[name])]


@pytest.fixture(scope="module")
def second_node(cluster: None) -> Iterator[None]:
    """Another raylet with an object store of its own, on this machine."""
    params = RayParams(
        gcs_address=ray.get_runtime_context().gcs_address,
        node_ip_address=ray.util.get_node_ip_address(),
        num_cpus=1,
        resources={ELSEWHERE: 8},
    )
    with lean(shows_logs=False):
        node = Node(params, head=False, shutdown_at_exit=False, spawn_reaper=True)
    deadline = time.monotonic() + 120
    while ELSEWHERE not in ray.cluster_resources():
        assert time.monotonic() < deadline and not node.dead_processes()
        time.sleep(0.1)
    yield
    node.kill_all_processes(check_alive=False, allow_graceful=True)


def actors(kind: type, options: dict[str, Any], *nodes: bool) -> ActorGroup:
    """Return actors with Ray's `options`; some of them are on the second node."""
    places = [{"resources": {ELSEWHERE: 1}} if second else {"resources": {"roll_opd_slot": 0.01}} for second in nodes]
    return ActorGroup([ray.remote(kind).options(**options, **each).remote() for each in places])


@pytest.mark.parametrize(
    "nodes",
    [
        pytest.param(([False, False], [False]), id="here", marks=pytest.mark.nightly),
        pytest.param(([True, True], []), id="there", marks=pytest.mark.nightly),
        pytest.param(([False, True], [True, False]), id="both"),
    ],
)
def test_all_get_the_same_bits(
    second_node: None, warm_options: dict[str, Any], loop: asyncio.AbstractEventLoop, nodes: tuple
) -> None:
    """Engines and a follower; the student's second rank only takes part."""
    student = actors(Student, warm_options, False, False)
    groups = [actors(Taker, warm_options, *each) for each in nodes]
    for version in (1, 2):
        loop.run_until_complete(stream(student, receivers_of(groups), "fp32", version))
        for group in groups:
            assert loop.run_until_complete(group.call("differs", version)) == [[]] * len(group.actors)
    for group in (student, *groups):
        group.end()


@pytest.mark.parametrize(
    ("student", "engines", "way"),
    [
        ((0, 1), (0, 1), CUDA_IPC),
        ((0, 1, 2, 3), (2, 3), CUDA_IPC),
        ((0, 1), (2, 3), NCCL),
        ((0, 1), tuple(range(8, 16)), NCCL),  # over hosts
        ((0, 1), (1, 2), NCCL),  # its first rank sends, alone on its device
        ((0, 1), (0, 2), SHARED_MEMORY),
        ((0,), (0, 1), SHARED_MEMORY),
    ],
)
def test_the_way_follows_from_where_they_are(student: tuple, engines: tuple, way: str) -> None:
    assert choose_backend(student, engines, "auto", on_gpu=True) == way
    assert choose_backend(student, engines, "auto", on_gpu=False) == SHARED_MEMORY
    assert choose_backend(student, engines, "m2n", on_gpu=True) == M2N


def test_handles_need_the_student_on_every_device_and_a_broadcast_its_first_rank_apart() -> None:
    """For all ways to put students and engines on four devices."""
    groups = [group for size in (1, 2, 3, 4) for group in itertools.combinations(range(4), size)]
    for student, engines in itertools.product(groups, groups):
        way = choose_backend(student, engines, "auto", on_gpu=True)
        assert (way == CUDA_IPC) == all(device in student for device in engines)
        assert way != NCCL or student[0] not in engines
