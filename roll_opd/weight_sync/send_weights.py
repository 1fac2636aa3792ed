"""Send the student's weights to the inference engines, and to followers (teachers that are updated from the student).

`plugin.choose_backend` chooses one of three transports. The choice depends on the devices of the student and the
engines. The driver only coordinates the transfer, so the weights never pass through the driver.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from roll_opd.inference.plugin import SHARED_MEMORY
from roll_opd.workers.group import ActorGroup


class WeightSync(Protocol):
    """Interface of a transport of the student's weights."""

    async def push(self, version: int, followers: Sequence[ActorGroup] = ()) -> int:
        """Load the student's weights into all engines and into all `followers`. The receivers verify the weights.

        Returns how many bytes the student sent; what goes to several receivers counts once.

        Args:
            version: version number of the weights.
            followers: teachers that are updated from the student.
        """
        ...


def make_weight_sync(
    backend: str, student: ActorGroup, engines: ActorGroup, dtype: str, tp: int, *, adapter: bool = False
) -> WeightSync:
    """Return the transport for a backend.

    Args:
        backend: result of `plugin.choose_backend`; shared memory for an adapter.
        student: actors of the student.
        engines: actors of the inference engines.
        dtype: dtype of the weights in the engines.
        tp: number of tensor-parallel ranks per engine.
        adapter: the engines hold the base model, and get only the student's adapter.
    """
    if backend == SHARED_MEMORY:
        return SharedMemorySync(student, engines, dtype, adapter)
    return CudaSync(student, engines, dtype, backend, tp)


@dataclass(frozen=True)
class SharedMemorySync:
    """Transport that sends the weights in buckets through shared memory.

    The sender writes the next bucket while the receivers load the previous one.
    """

    student: ActorGroup
    engines: ActorGroup
    dtype: str
    adapter: bool = False

    async def push(self, version: int, followers: Sequence[ActorGroup] = ()) -> int:
        """See `WeightSync.push`. Followers always get whole weights."""
        begin = partial(self.engines.call, "begin_update", version)
        together = [] if self.adapter else followers
        sent = await stream(self.student, [self.engines, *together], self.dtype, version, begin, adapter=self.adapter)
        if followers and self.adapter:
            sent += await stream(self.student, followers, self.dtype, version)
        return sent


@dataclass(frozen=True)
class CudaSync:
    """Transport from GPU to GPU with vLLM's senders, through IPC handles or an NCCL broadcast."""

    student: ActorGroup
    engines: ActorGroup
    dtype: str
    backend: str
    tp: int

    async def push(self, version: int, followers: Sequence[ActorGroup] = ()) -> int:
        """See `WeightSync.push`. Followers receive the weights through shared memory."""
        sent: list[int] = await self.student.call(
            "send_weights", self.backend, self.engines.actors, self.tp, self.dtype, version
        )
        return sent[0] + (await stream(self.student, followers, self.dtype, version) if followers else 0)


@dataclass(frozen=True)
class ReceivingHost:
    """The weight-receiving actors on one Ray node."""

    receivers: tuple[tuple[ActorGroup, int], ...]  # (group, index of an actor in the group)
    is_senders: bool  # the sending rank runs on this host

    async def load(self, bucket: dict[str, Any], content: list[Any], *, last: bool) -> None:
        """Load a bucket into all receivers on this host.

        If the sender runs on another host, one receiver first copies the bucket into the memory of this host.

        Args:
            bucket: description of the bucket.
            content: reference to the bytes of the bucket in Ray's object store, if the sender runs on another host.
            last: whether this is the last bucket of the update.
        """
        if not self.is_senders:
            bucket = await self.call_first("hold_bucket", content, bucket)
        await asyncio.gather(
            *[group.ask(number, "load_weights", bucket, last=last) for group, number in self.receivers]
        )

    async def call_first(self, method: str, *args: Any) -> Any:
        """Call a method of the first receiver on this host. This receiver holds the copies of the buckets."""
        group, number = self.receivers[0]
        return await group.ask(number, method, *args)


async def stream(
    student: ActorGroup,
    receivers: Sequence[ActorGroup],
    dtype: str,
    version: int,
    begin: Callable[[], Awaitable[Any]] | None = None,
    *,
    adapter: bool = False,
) -> int:
    """Send all weights, or only the adapter, to `receivers` in buckets through shared memory. Return their bytes.

    Rank 0 of the student writes two memories in turn, or a single memory if no receiver runs on its host. Receivers on
    other hosts get the buckets through Ray's object store. `begin` is called while the first bucket is written.
    """
    hosts = await hosts_of(student, receivers)
    sends = not all(host.is_senders for host in hosts)
    memories = 2 if any(host.is_senders for host in hosts) else 1

    async def send_from_rank_0() -> int:
        sent = 0
        (bucket, last), _ = await asyncio.gather(
            student.ask(0, "export_weights", dtype, memories, adapter=adapter), begin() if begin else asyncio.sleep(0)
        )
        while True:
            content = await student.ask(0, "share_bucket") if sends else []
            following = None if last else asyncio.ensure_future(student.ask(0, "next_bucket"))
            bucket["version"] = version
            sent += bucket["size"]
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
        return sent

    others = range(1, len(student.actors))
    sent, *_ = await asyncio.gather(
        send_from_rank_0(), *[student.ask(rank, "export_weights", dtype, 0, adapter=adapter) for rank in others]
    )
    return sent


async def hosts_of(student: ActorGroup, receivers: Sequence[ActorGroup]) -> list[ReceivingHost]:
    """Return all hosts with receivers. Each host lists the receivers that run on it."""
    home = (await student.hosts())[0]
    found: dict[str, list[tuple[ActorGroup, int]]] = {}
    for group in receivers:
        for number, host in enumerate(await group.hosts()):
            found.setdefault(host, []).append((group, number))
    return [ReceivingHost(tuple(members), host == home) for host, members in found.items()]
