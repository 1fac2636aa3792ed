"""How the student's weights get to the inference engines, and to teachers that follow it.

One of three ways, chosen by where the roles are (`way_of`). The arithmetic of a transfer is here, as the driver sees
it; the driver itself never holds a weight.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from roll_opd.cluster.group import ActorGroup
from roll_opd.inference.plugin import CUDA_IPC, NCCL, SHARED_MEMORY


class WeightSync(Protocol):
    """One of the ways."""

    async def push(self, version: int, followers: Sequence[ActorGroup] = ()) -> None:
        """Give the student's weights to all engines, as `version`, and to `followers`; all check that they arrived."""
        ...


def way_of(student: Sequence[int], engines: Sequence[int], *, on_gpu: bool) -> str:
    """Return the weight-transfer backend for a student and engines on these devices.

    Handles of CUDA memory where a rank of the student is on every engine's device. A broadcast where its first rank,
    which sends, has a device of its own: NCCL takes no two processes of a group on one. Else, as without GPUs, through
    the memory of the hosts.
    """
    if not on_gpu:
        return SHARED_MEMORY
    if set(engines) <= set(student):
        return CUDA_IPC
    return SHARED_MEMORY if student[0] in engines else NCCL


def sync_of(way: str, student: ActorGroup, engines: ActorGroup, dtype: str, tp: int) -> WeightSync:
    """Return the way that engines of `tp` ranks and `dtype` were started for (see `way_of`)."""
    if way == SHARED_MEMORY:
        return SharedMemorySync(student, engines, dtype)
    return CudaSync(student, engines, dtype, way, tp)


@dataclass(frozen=True)
class SharedMemorySync:
    """Bucket by bucket through shared memory: while one is loaded, the next one is written."""

    student: ActorGroup
    engines: ActorGroup
    dtype: str

    async def push(self, version: int, followers: Sequence[ActorGroup] = ()) -> None:
        """Do what `WeightSync.push` does."""
        begin = self.engines.call("begin_update", version)
        await stream(self.student, [self.engines, *followers], self.dtype, version, begin)


@dataclass(frozen=True)
class CudaSync:
    """From the student's GPUs to the engines', by vLLM's own senders: as handles, or as a broadcast."""

    student: ActorGroup
    engines: ActorGroup
    dtype: str
    way: str
    tp: int

    async def push(self, version: int, followers: Sequence[ActorGroup] = ()) -> None:
        """Do what `WeightSync.push` does; followers get theirs through shared memory."""
        await self.student.call("send_weights", self.way, self.engines.actors, self.tp, self.dtype, version)
        if followers:
            await stream(self.student, followers, self.dtype, version)


@dataclass(frozen=True)
class Host:
    """Actors on one of Ray's nodes that take weights."""

    takers: tuple[tuple[ActorGroup, int], ...]  # a group, and the number of an actor in it
    is_students: bool  # of the rank that sends

    async def give(self, bucket: dict[str, Any], content: list[Any], *, last: bool) -> None:
        """Have all load a bucket. Elsewhere than with the student, the first one brings its `content` here for all."""
        if not self.is_students:
            bucket = await self.carry("hold_bucket", content, bucket)
        await asyncio.gather(*[group.ask(number, "load_weights", bucket, last=last) for group, number in self.takers])

    async def carry(self, method: str, *args: Any) -> Any:
        """Call a method of the actor that brings buckets to this host."""
        group, number = self.takers[0]
        return await group.ask(number, method, *args)


async def stream(
    student: ActorGroup, takers: Sequence[ActorGroup], dtype: str, version: int, begin: Any = None
) -> None:
    """Send all weights to `takers`, in buckets through shared memory; first `begin`, beside the first one.

    The student's first rank writes into two memories in turns, or one where nobody reads them: to other hosts each
    bucket goes through Ray's object store.
    """
    hosts = await hosts_of(student, takers)
    sends = not all(host.is_students for host in hosts)
    memories = 2 if any(host.is_students for host in hosts) else 1

    async def from_first_rank() -> None:
        (bucket, last), _ = await asyncio.gather(
            student.ask(0, "export_weights", dtype, memories), begin or asyncio.sleep(0)
        )
        while True:
            content = await student.ask(0, "share_bucket") if sends else []
            following = None if last else asyncio.ensure_future(student.ask(0, "next_bucket"))
            bucket["version"] = version
            try:
                await asyncio.gather(*[host.give(bucket, content, last=last) for host in hosts])
            except BaseException:
                if following:
                    following.cancel()
                raise
            del content  # of the store, before the next one comes there
            if following is None:
                break
            bucket, last = await following
        elsewhere = [host.carry("release_bucket") for host in hosts if not host.is_students]
        await asyncio.gather(student.ask(0, "end_export"), *elsewhere)

    others = range(1, len(student.actors))
    await asyncio.gather(from_first_rank(), *[student.ask(rank, "export_weights", dtype, 0) for rank in others])


async def hosts_of(student: ActorGroup, takers: Sequence[ActorGroup]) -> list[Host]:
    """Return the hosts of those who take weights."""
    home = (await student.hosts())[0]
    found: dict[str, list[tuple[ActorGroup, int]]] = {}
    for group in takers:
        for number, host in enumerate(await group.hosts()):
            found.setdefault(host, []).append((group, number))
    return [Host(tuple(members), host == home) for host, members in found.items()]
