"""Send the student's weights to the inference engines and to followers (teachers that are updated from the student).

`choose_backend` chooses one of three transports from the devices of the student and the engines. The driver only
coordinates the transfer. The weights never pass through the driver.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from roll_opd.cluster.group import ActorGroup
from roll_opd.inference.plugin import CUDA_IPC, NCCL, SHARED_MEMORY


class WeightSync(Protocol):
    """Transport of the student's weights."""

    async def push(self, version: int, followers: Sequence[ActorGroup] = ()) -> None:
        """Load the student's weights as `version` into all engines and `followers`.

        The receivers verify the weights.
        """
        ...


def choose_backend(student: Sequence[int], engines: Sequence[int], *, on_gpu: bool) -> str:
    """Return the weight-transfer backend for a student and engines on these devices.

    CUDA IPC handles are chosen if every engine's device has a student rank. Otherwise, an NCCL broadcast from student
    rank 0 is chosen if no engine uses the device of this rank, because NCCL does not support two processes of a group
    on one device. In all other cases, and without GPUs, the backend is shared memory.
    """
    if not on_gpu:
        return SHARED_MEMORY
    if set(engines) <= set(student):
        return CUDA_IPC
    return SHARED_MEMORY if student[0] in engines else NCCL


def make_weight_sync(backend: str, student: ActorGroup, engines: ActorGroup, dtype: str, tp: int) -> WeightSync:
    """Return the transport of `backend` (see `choose_backend`) for engines with `tp` ranks and weights in `dtype`."""
    if backend == SHARED_MEMORY:
        return SharedMemorySync(student, engines, dtype)
    return CudaSync(student, engines, dtype, backend, tp)


@dataclass(frozen=True)
class SharedMemorySync:
    """Transport in buckets through shared memory.

    While the receivers load a bucket, the sender writes the next bucket.
    """

    student: ActorGroup
    engines: ActorGroup
    dtype: str

    async def push(self, version: int, followers: Sequence[ActorGroup] = ()) -> None:
        """See `WeightSync.push`."""
        begin = self.engines.call("begin_update", version)
        await stream(self.student, [self.engines, *followers], self.dtype, version, begin)


@dataclass(frozen=True)
class CudaSync:
    """Transport between GPUs with vLLM's senders: IPC handles or an NCCL broadcast."""

    student: ActorGroup
    engines: ActorGroup
    dtype: str
    backend: str
    tp: int

    async def push(self, version: int, followers: Sequence[ActorGroup] = ()) -> None:
        """See `WeightSync.push`. Followers receive the weights through shared memory."""
        await self.student.call("send_weights", self.backend, self.engines.actors, self.tp, self.dtype, version)
        if followers:
            await stream(self.student, followers, self.dtype, version)


@dataclass(frozen=True)
class ReceivingHost:
    """Actors on one Ray node that receive weights."""

    receivers: tuple[tuple[ActorGroup, int], ...]  # (group, index of an actor in the group)
    is_senders: bool  # the sending rank runs on this host

    async def load(self, bucket: dict[str, Any], content: list[Any], *, last: bool) -> None:
        """Load a bucket in all receivers on this host.

        If the sender runs on another host, one receiver first copies `content` into the memory of this host.
        """
        if not self.is_senders:
            bucket = await self.call_first("hold_bucket", content, bucket)
        await asyncio.gather(
            *[group.ask(number, "load_weights", bucket, last=last) for group, number in self.receivers]
        )

    async def call_first(self, method: str, *args: Any) -> Any:
        """Call a method of the first receiver, which copies the buckets to its host."""
        group, number = self.receivers[0]
        return await group.ask(number, method, *args)


async def stream(
    student: ActorGroup, receivers: Sequence[ActorGroup], dtype: str, version: int, begin: Any = None
) -> None:
    """Send all weights to `receivers` in buckets through shared memory.

    The awaitable `begin` runs while the first bucket is written.

    Rank 0 of the student alternates between two memories. It uses one memory if no receiver is on its host. Other hosts
    receive the buckets through Ray's object store.
    """
    hosts = await hosts_of(student, receivers)
    sends = not all(host.is_senders for host in hosts)
    memories = 2 if any(host.is_senders for host in hosts) else 1

    async def send_from_rank_0() -> None:
        (bucket, last), _ = await asyncio.gather(
            student.ask(0, "export_weights", dtype, memories), begin or asyncio.sleep(0)
        )
        while True:
            content = await student.ask(0, "share_bucket") if sends else []
            following = None if last else asyncio.ensure_future(student.ask(0, "next_bucket"))
            bucket["version"] = version
            try:
                await asyncio.gather(*[host.load(bucket, content, last=last) for host in hosts])
            except BaseException:
                if following:
                    following.cancel()
                raise
            del content  # frees the object store for the next bucket
            if following is None:
                break
            bucket, last = await following
        elsewhere = [host.call_first("release_bucket") for host in hosts if not host.is_senders]
        await asyncio.gather(student.ask(0, "end_export"), *elsewhere)

    others = range(1, len(student.actors))
    await asyncio.gather(send_from_rank_0(), *[student.ask(rank, "export_weights", dtype, 0) for rank in others])


async def hosts_of(student: ActorGroup, receivers: Sequence[ActorGroup]) -> list[ReceivingHost]:
    """Return the hosts of all receivers, each with the receivers that run on it."""
    home = (await student.hosts())[0]
    found: dict[str, list[tuple[ActorGroup, int]]] = {}
    for group in receivers:
        for number, host in enumerate(await group.hosts()):
            found.setdefault(host, []).append((group, number))
    return [ReceivingHost(tuple(members), host == home) for host, members in found.items()]
