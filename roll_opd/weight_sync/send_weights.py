"""Send the student's weights to the inference engines, and to followers (teachers that are updated from the student).

`choose_transport` chooses one of four transports. The choice depends on the devices of the student and the engines. The
driver only coordinates the transfer, so the weights never pass through the driver.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray

from roll_opd.cluster.lost_processes import ProcessDied
from roll_opd.cluster.startup_progress import process_died
from roll_opd.inference.plugin import SHARED_MEMORY
from roll_opd.workers.actor_group import ActorGroup


class WeightSync(Protocol):
    """Interface of a transport of the student's weights."""

    async def push(self, version: int, followers: Sequence[ActorGroup] = (), *, only_lacking: bool = False) -> int:
        """Load the student's weights into all engines and into all `followers`. The receivers verify the weights.

        An engine that is lost meanwhile is left out.

        Returns how many bytes the student sent; what goes to several receivers counts once.

        Args:
            version: version number of the weights.
            followers: teachers that are updated from the student.
            only_lacking: only into the engines that lack weights.
        """
        ...

    def lacking(self) -> list[int]:
        """Return the engines that run, but were replaced since they received weights."""
        ...

    @property
    def has_failed(self) -> bool:
        """Whether the last transfer began in engines and failed. They answer no request before the next transfer."""
        ...


def make_weight_sync(
    backend: str, student: ActorGroup, engines: ActorGroup, dtype: str, tp: int, *, adapter: bool = False
) -> WeightSync:
    """Return the transport for a backend.

    Args:
        backend: result of `choose_transport.choose_backend`; shared memory for an adapter.
        student: actors of the student.
        engines: actors of the inference engines.
        dtype: dtype of the weights in the engines.
        tp: number of tensor-parallel ranks per engine.
        adapter: the engines hold the base model, and get only the student's adapter.
    """
    if backend == SHARED_MEMORY:
        return SharedMemorySync(student, engines, dtype, adapter)
    return CudaSync(student, engines, dtype, backend, tp)


@dataclass
class EngineSync:
    """Base class of transports: the engines, and which of them have received weights in their present life.

    A transfer that fails remains open in its engines. They are replaced before the next transfer.
    """

    student: ActorGroup
    engines: ActorGroup
    dtype: str
    _received: dict[int, int] = field(default_factory=dict, init=False)  # engine -> its life
    _open: list["Receiver"] = field(default_factory=list, init=False)  # engines in a transfer that has not ended

    def lacking(self) -> list[int]:
        """See `WeightSync.lacking`."""
        up = [number for number in range(len(self.engines.actors)) if self.engines.is_up(number)]
        return [number for number in up if self._received.get(number) != self.engines.life(number)]

    @property
    def has_failed(self) -> bool:
        """See `WeightSync.has_failed`."""
        return bool(self._open)

    async def _receivers(self, *, only_lacking: bool) -> list["Receiver"]:
        """Return the engines to which a transfer goes."""
        await asyncio.gather(*[one.start_again("the last transfer of weights failed") for one in self._open])
        self._open = []
        numbers = self.lacking() if only_lacking else range(len(self.engines.actors))
        every = [Receiver(self.engines, number, self.engines.life(number)) for number in numbers]
        return [one for one in every if one.is_there]

    def _end(self, receivers: Sequence["Receiver"]) -> None:
        self._received |= {one.number: one.life for one in receivers if one.is_there}
        self._open = []


@dataclass
class SharedMemorySync(EngineSync):
    """Transport that sends the weights in buckets through shared memory.

    The sender writes the next bucket while the receivers load the previous one.
    """

    adapter: bool = False

    async def push(self, version: int, followers: Sequence[ActorGroup] = (), *, only_lacking: bool = False) -> int:
        """See `WeightSync.push`. Followers always get whole weights."""
        engines = await self._receivers(only_lacking=only_lacking)
        together = [] if self.adapter else followers
        to = [*engines, *receivers_of(together)]
        sent = await stream(self.student, to, self.dtype, version, engines, adapter=self.adapter, begun=self._open)
        self._end(engines)
        if followers and self.adapter:
            sent += await stream(self.student, receivers_of(followers), self.dtype, version)
        return sent


@dataclass
class CudaSync(EngineSync):
    """Transport from GPU to GPU with vLLM's senders, through IPC handles or an NCCL broadcast.

    The sender connects again when engines have been replaced. A loss during a transfer ends it for all engines.
    """

    backend: str
    tp: int
    _connected: list["Receiver"] = field(default_factory=list, init=False)

    async def push(self, version: int, followers: Sequence[ActorGroup] = (), *, only_lacking: bool = False) -> int:
        """See `WeightSync.push`. Followers receive the weights through shared memory."""
        engines, sent = await self._receivers(only_lacking=False), 0
        if engines:
            actors = [self.engines.actors[one.number] for one in engines]
            is_new = engines != self._connected
            self._open = engines
            try:
                given = self.backend, actors, self.tp, self.dtype, version, is_new
                sent = (await self.student.call("send_weights", *given))[0]
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, ray.exceptions.RayActorError):
                    raise process_died("an inference engine", error.cause) from error
                raise
        self._connected = engines
        self._end(engines)
        return sent + (await stream(self.student, receivers_of(followers), self.dtype, version) if followers else 0)


@dataclass(frozen=True)
class Receiver:
    """An actor that receives weights, in one of its lives."""

    group: ActorGroup
    number: int
    life: int

    @property
    def is_there(self) -> bool:
        """Whether the actor still has this life."""
        return self.group.is_up(self.number) and self.group.life(self.number) == self.life

    async def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method. Return None for an engine that is lost, and let it be replaced."""
        if not self.is_there:
            return None
        try:
            return await self.group.ask(self.number, method, *args, **kwargs)
        except ProcessDied as died:
            if not self.group.renewals:
                raise
            self.group.replace_actor(self.number, self.life, str(died))
            return None

    async def start_again(self, why: str) -> None:
        """Replace the actor, if it still has this life and can be replaced. This counts for no limit of losses."""
        if self.group.renewals:
            await self.group.renewals[self.number].since(self.life, why, is_loss=False)


def receivers_of(groups: Sequence[ActorGroup]) -> list[Receiver]:
    """Return all actors of some groups as receivers."""
    return [Receiver(group, number, group.life(number)) for group in groups for number in range(len(group.actors))]


@dataclass(frozen=True)
class ReceivingHost:
    """The weight-receiving actors on one Ray node."""

    receivers: tuple[Receiver, ...]
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
        await asyncio.gather(*[one.ask("load_weights", bucket, last=last) for one in self.receivers])

    async def call_first(self, method: str, *args: Any) -> Any:
        """Call a method of the first receiver on this host. This receiver holds the copies of the buckets."""
        first = self.receivers[0]  # its loss ends the transfer, because the copies are lost too
        return await first.group.ask(first.number, method, *args)


async def stream(
    student: ActorGroup,
    receivers: Sequence[Receiver],
    dtype: str,
    version: int,
    engines: Sequence[Receiver] = (),
    *,
    adapter: bool = False,
    begun: list[Receiver] | None = None,
) -> int:
    """Send all weights, or only the adapter, to `receivers` in buckets through shared memory. Return their bytes.

    Rank 0 of the student writes two memories in turn, or a single memory if no receiver runs on its host. Receivers on
    other hosts get the buckets through Ray's object store. `engines` are those receivers on which `begin_update` is
    called while the first bucket is written; they are then appended to `begun`.
    """
    hosts = await hosts_of(student, receivers)
    if not hosts:
        return 0
    sends = not all(host.is_senders for host in hosts)
    memories = 2 if any(host.is_senders for host in hosts) else 1

    async def send_from_rank_0() -> int:
        sent = 0
        if begun is not None:
            begun.extend(engines)
        (bucket, last), *_ = await asyncio.gather(
            student.ask(0, "export_weights", dtype, memories, adapter=adapter),
            *[engine.ask("begin_update", version) for engine in engines],
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
    exports = [student.ask(rank, "export_weights", dtype, 0, adapter=adapter) for rank in others]
    sending = asyncio.ensure_future(send_from_rank_0())
    try:
        sent, *_ = await student.together([sending, *exports])
    finally:
        sending.cancel()
        await asyncio.wait({sending})
    return sent


async def hosts_of(student: ActorGroup, receivers: Sequence[Receiver]) -> list[ReceivingHost]:
    """Return all hosts with receivers. Each host lists the receivers that run on it."""
    home, *places = await asyncio.gather(student.ask(0, "host"), *[one.ask("host") for one in receivers])
    found: dict[str, list[Receiver]] = {}
    for one, place in zip(receivers, places, strict=True):
        if place is not None:
            found.setdefault(place, []).append(one)
    return [ReceivingHost(tuple(members), place == home) for place, members in found.items()]
