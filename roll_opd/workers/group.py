"""Groups of Ray actors with collective calls, and a thread that detects dead actors.

`actor` makes a class the Ray actor of a kind of role. `ActorGroup` calls the methods of such actors by their names. Two
views change how the actors are called: `in_turn` waits for the turn of the role, and `without_adapter` disables the
LoRA adapters of a student.

Roles use groups without importing Ray. A call to a dead process fails. But the next call to a teacher may come minutes
after the teacher has died, and Ray needs a minute to notice a dead GCS. `watched` therefore polls for dead actors and
dead Ray processes.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace
from typing import Any, Self

import numpy as np
import ray

from roll_opd.cluster.forkserver import forkserver_start
from roll_opd.cluster.forkserver.forkserver_main import MEGATRON
from roll_opd.cluster.placement import Placement
from roll_opd.cluster.stall_watchdog import WAITS
from roll_opd.cluster.startup_progress import ProcessDied
from roll_opd.config.plan import MegatronPlan
from roll_opd.models.device_phases import Kind, declare
from roll_opd.samples.micro_batches import Packing, ShardedBatch, shard_batch
from roll_opd.samples.sample import Sample, TargetRef
from roll_opd.samples.transport import Compact
from roll_opd.workers.liveness import NAMES_OF_ACTORS, ended_of_ray, is_death

Reference = ray.ObjectRef  # reference to a value in the object store, fetched on first use

Turn = Callable[[str], AbstractAsyncContextManager[None]]  # from a method's name to the context of its calls

DEATH_GRACE_S = 3.0  # seconds from a lost connection to a dead process until Ray reports the death


def actor(kind: Kind) -> Callable[[type], Any]:
    """Return a decorator that makes a class the Ray actor of a kind of role; see `device_phases.declare`."""

    def declared(processes: type) -> Any:
        declare(kind, processes)
        return ray.remote(processes)

    return declared


def _at_once(method: str) -> AbstractAsyncContextManager[None]:
    return nullcontext()


class ActorGroup:
    """Actors of one role."""

    _turn: Turn = staticmethod(_at_once)
    _has_adapter = True

    def __init__(self, actors: Sequence[ray.actor.ActorHandle], names: Sequence[str] = ()) -> None:
        """Create a group. `names` are the names of the actors in messages.

        If an actor dies, ProcessDied is raised with its name. In a group without names, Ray's exception is raised
        instead.
        """
        self.actors, self.names = tuple(actors), tuple(names)
        self._hosts: list[str] = []
        NAMES_OF_ACTORS.update(zip(self.actors, self.names, strict=False))

    def in_turn(self, turn: Turn) -> Self:
        """Return the same actors. Each call of a method is made in the context `turn(method)`."""
        group = copy(self)
        group._turn = turn
        return group

    def without_adapter(self) -> Self:
        """Return the same actors, the ranks of a LoRA student. They compute with the student's base model.

        `end` of the result does nothing, because the processes belong to the student.
        """
        group = copy(self)
        group._has_adapter = False
        return group

    async def hosts(self) -> list[str]:
        """Return the Ray node id of each actor, as returned by the actor's method `host`."""
        self._hosts = self._hosts or await self.call("host")
        return self._hosts

    def split(self, place: int) -> tuple[Self, Self]:
        """Return two groups: the actors before index `place`, and the other actors."""
        first, second = copy(self), copy(self)
        for group, part in (first, slice(place)), (second, slice(place, None)):
            group.actors, group.names, group._hosts = self.actors[part], self.names[part], []
        return first, second

    async def ask(self, actor: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call `method` on one actor and return its result."""
        async with self._turn(method):
            return await self._answer(actor, self._send(self.actors[actor], method, *args, **kwargs), method)

    async def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call `method` on every actor with the same arguments; return the results in the order of the actors.

        A `Compact` argument is put into the object store once for all actors. The first error is raised immediately,
        because other actors may wait in a collective for the actor that failed.

        Raises:
            ProcessDied: if an actor has died.
        """
        async with self._turn(method):
            shared = [_shared(value) for value in args]
            named = {name: _shared(value) for name, value in kwargs.items()}
            return await self._answers([self._send(each, method, *shared, **named) for each in self.actors], method)

    async def stream(self, actor: int, method: str, *args: Any) -> AsyncGenerator[Any, None]:
        """Call the generator method `method` of one actor; yield its items.

        Use `aclosing`, so that the call is cancelled if the caller leaves the loop early.
        """
        async with self._turn(method):
            remote = getattr(self.actors[actor], method).options(num_returns="streaming").remote(*args)
            ended = False
            try:
                with self._waiting(actor, method):
                    async for reference in remote:
                        WAITS.moved()
                        yield await self._answer(actor, reference)
                ended = True
            finally:
                if not ended:
                    ray.cancel(remote)

    def _send(self, actor: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call `method` on an actor; return a reference to its result."""
        if self._has_adapter:
            return getattr(actor, method).remote(*args, **kwargs)
        return actor._without_adapter.remote(method, *args, **kwargs)

    def _waiting(self, actor: int, method: str) -> AbstractContextManager[None]:
        """Record that the driver waits for `method` of the actor, while the block runs.

        If the group has no names, nothing is recorded.
        """
        return WAITS.of("the driver", f"{self.names[actor]} {method}") if self.names and method else nullcontext()

    async def _answers(self, called: Sequence[Any], method: str = "") -> list[Any]:
        answers = [asyncio.ensure_future(self._answer(*each, method)) for each in enumerate(called)]
        try:
            return await asyncio.gather(*answers)
        except ray.exceptions.RayError:
            await asyncio.wait(answers, timeout=DEATH_GRACE_S)
            ended = (answer.exception() for answer in answers if answer.done() and not answer.cancelled())
            if died := next((error for error in ended if isinstance(error, ProcessDied)), None):
                raise died from died.__cause__
            raise

    async def _answer(self, actor: int, coming: Any, method: str = "") -> Any:
        try:
            with self._waiting(actor, method):
                return await coming
        except (ray.exceptions.RayActorError, ray.exceptions.RayTaskError) as error:
            if not (self.names and is_death(error)):
                raise
            raise ProcessDied(self.names[actor], error, ended_of_ray()) from error

    def end(self) -> None:
        """Kill all actors. They are killed without a request to exit, because an exit takes seconds."""
        if not self._has_adapter:
            return
        for actor in self.actors:
            NAMES_OF_ACTORS.pop(actor, None)
            ray.kill(actor)


class WorkerGroup(ActorGroup):
    """All ranks of one Megatron role, one process per device."""

    def __init__(self, actor: Any, plan: MegatronPlan, placement: Placement, env: dict[str, str]) -> None:
        """Start one actor on each device of `plan`. `setup` then connects the actors as a process group.

        Args:
            actor: Ray actor class of the ranks.
        """
        self.plan = plan
        self._setups: list[tuple[int, Packing]] = []  # (data-parallel rank, packing rules) of each actor, after `setup`
        ranks = []
        env = {**env, **plan.env}
        env |= forkserver_start.variables(MEGATRON, env)
        for rank, device in enumerate(plan.devices):
            variables = {"RANK": str(rank), "WORLD_SIZE": str(len(plan.devices)), "LOCAL_RANK": "0"}
            options = placement.options((device,), plan.devices, {**env, **variables})
            ranks.append(actor.options(**options).remote())
        where = [f"{plan.name}, rank {rank} ({placement.where(device)})," for rank, device in enumerate(plan.devices)]
        super().__init__(ranks, where)

    async def setup(self, **arguments: Any) -> None:
        """Connect the ranks as a process group, and build the engine on every rank.

        Rank 0 provides the address of the rendezvous.
        """
        address, port = await self.actors[0].address.remote()
        self._setups += await self.call("setup", master_addr=address, master_port=port, plan=self.plan, **arguments)

    @property
    def packing(self) -> Packing:
        """Packing rules of the engine. They are known after `setup`."""
        return self._setups[0][1]

    async def scatter(self, method: str, sharded: ShardedBatch, *args: Any, **kwargs: Any) -> list[tuple[int, Any]]:
        """Call `method` on every rank; return (data-parallel rank, result) for each rank.

        A rank gets the shard of its data-parallel rank, followed by `args`. Each shard is put into the object store
        once. Errors are raised as in `call`.
        """
        async with self._turn(method):
            references = [ray.put(shard) for shard in sharded.shards]
            ranks = [rank for rank, _ in self._setups]
            calls = [
                self._send(each, method, references[rank], *args, **kwargs)
                for rank, each in zip(ranks, self.actors, strict=True)
            ]
            del references  # an object is freed after the last call that reads it
            return list(zip(ranks, await self._answers(calls, method), strict=True))


async def gathered(group: WorkerGroup, method: str, samples: Sequence[Sample], *args: Any, **kwargs: Any) -> list[Any]:
    """Call `method` on the ranks; return its result for each sample, in the order of the samples.

    The samples are sent to the ranks unchanged (see `shard_sample`).
    """
    if not samples:
        return []
    sharded = _sharded(group, samples)
    merged = sharded.merged(await group.scatter(method, sharded, *args, **kwargs))
    return [merged[number] for number in range(len(samples))]


async def gathered_and_held(
    group: WorkerGroup,
    samples: Sequence[Sample],
    temperature: float,
    held: Sequence[Mapping[str, TargetRef]] = (),
    **wanted: Any,
) -> list[tuple[np.ndarray, TargetRef]]:
    """Return (log-probs, reference to the targets) for each sample.

    The log-probs are f32 [T-P]. The targets are not sent to the driver. They stay with the ranks.

    Args:
        held: references to stored targets that the ranks read, one dict per sample.
    """
    sharded = _sharded(group, samples, held)
    answers = [
        (rank, answer) for rank, answer in await group.scatter("hold_targets", sharded, temperature, **wanted) if answer
    ]
    small, kept = (sharded.merged((rank, answer[part]) for rank, answer in answers) for part in (0, 1))
    return [(small[n][0], replace(kept[n], hits=small[n][1])) for n in range(len(samples))]


def _sharded(
    group: WorkerGroup, samples: Sequence[Sample], held: Sequence[Mapping[str, TargetRef]] = ()
) -> ShardedBatch:
    sequences = [(sample.tokens, sample.prompt_length) for sample in samples]
    sent = [{name: target.for_ranks() for name, target in by_name.items()} for by_name in held]
    return shard_batch(samples, group.packing.assign(sequences, group.plan.forward_limits), sent)


def _shared(value: Any) -> Any:
    return ray.put(value) if isinstance(value, Compact) else value
