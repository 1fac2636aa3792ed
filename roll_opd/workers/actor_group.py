"""Groups of Ray actors with collective calls.

`actor` makes a class the Ray actor of a kind of role. `ActorGroup` calls the methods of such actors by their names. Two
views change how the actors are called: `in_turn` waits for the turn of the role, and `without_adapter` disables the
LoRA adapters of a student.

Roles use groups without importing Ray. A call to a process that was lost fails, unless the group has a `Renewal`: the
ranks of a frozen model are then started again, and the call is repeated.
"""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeVar

import numpy as np
import ray

from roll_opd.cluster.forkserver import forkserver_start
from roll_opd.cluster.forkserver.forkserver_main import MEGATRON
from roll_opd.cluster.lost_processes import MAX_DEATHS, ProcessDied, RayLost
from roll_opd.cluster.placement import Placement
from roll_opd.cluster.stall_watchdog import WAITS
from roll_opd.cluster.startup_progress import process_died
from roll_opd.config.plan import MegatronPlan
from roll_opd.models.device_phases import Kind, declare
from roll_opd.samples.micro_batches import Packing, ShardedBatch, shard_batch
from roll_opd.samples.sample import Sample, TargetRef
from roll_opd.samples.transport import Compact
from roll_opd.workers.liveness import LIVES, UNKNOWN, Life, ended_of_ray, is_death, last_words, starts_of
from roll_opd.workers.process_replacement import POLL_S, Renewal
from roll_opd.workers.target_refs import bundles_of, references

T = TypeVar("T")
Reference = ray.ObjectRef  # reference to a value in the object store, fetched on first use

Turn = Callable[[str], AbstractAsyncContextManager[None]]  # from a method's name to the context of its calls

DEATH_GRACE_S = 12.0  # seconds from a lost connection to a dead process until Ray reports the death
LOST_PEER = re.compile("connection|peer|gloo|remote|timed out", re.IGNORECASE)  # in errors of collectives


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
    renewals: tuple[Renewal, ...] = ()  # of each actor; empty if lost processes are not replaced
    set_up_again: Callable[[], Awaitable[None]]  # as at the start of the run, after all processes have started again

    def __init__(self, actors: Sequence[ray.actor.ActorHandle], names: Sequence[str] = ()) -> None:
        """Create a group. `names` are the names of the actors in messages.

        If an actor dies, ProcessDied is raised with its name. In a group without names, Ray's exception is raised
        instead.
        """
        self.actors, self.names = tuple(actors), tuple(names)
        LIVES.update({actor: Life(name) for actor, name in zip(self.actors, self.names, strict=False)})

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

    def is_up(self, actor: int) -> bool:
        """Whether an actor is not being replaced, as far as this process knows."""
        return not self.renewals or self.renewals[actor].is_up

    def life(self, actor: int) -> int:
        """Return the number of times that an actor was replaced."""
        return self.renewals[actor].life if self.renewals else 0

    def replace_actor(self, actor: int, life: int, why: str) -> None:
        """Start to replace an actor that was lost in its given life, unless another process does this."""
        if self.renewals and self.renewals[actor].life == life:
            self.renewals[actor].begin(why)

    def stop_renewals(self) -> None:
        """Replace lost processes no longer, because the processes end."""
        for renewal in self.renewals:
            renewal.end()
        self.renewals = ()

    def split(self, place: int) -> tuple[Self, Self]:
        """Return two groups: the actors before index `place`, and the other actors."""
        first, second = copy(self), copy(self)
        for group, part in (first, slice(place)), (second, slice(place, None)):
            group.actors, group.names = self.actors[part], self.names[part]
            group.renewals = self.renewals[part]
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

        async def call() -> list[Any]:
            async with self._turn(method):
                shared = [_shared(value) for value in args]
                named = {name: _shared(value) for name, value in kwargs.items()}
                return await self._answers([self._send(each, method, *shared, **named) for each in self.actors], method)

        return await self._repeated(call)

    async def _repeated(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return the result of a call of all actors."""
        return await call()

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

    def _send(self, actor: Any, method: str, *args: Any, objects: int = 0, **kwargs: Any) -> Any:
        """Call `method` on an actor; return a reference to its result.

        If the method returns `objects` after its first result, return the list of all references.
        """
        called = getattr(actor, method if self._has_adapter else "_without_adapter")
        if objects:
            called = called.options(num_returns=1 + objects)
        return called.remote(*args, **kwargs) if self._has_adapter else called.remote(method, *args, **kwargs)

    def _waiting(self, actor: int, method: str) -> AbstractContextManager[None]:
        """Record that the driver waits for `method` of the actor, while the block runs.

        If the group has no names, nothing is recorded.
        """
        return WAITS.of("the driver", f"{self.names[actor]} {method}") if self.names and method else nullcontext()

    async def _answers(self, called: Sequence[Any], method: str = "") -> list[Any]:
        return await self.together([self._answer(*each, method) for each in enumerate(called)])

    async def together(self, calls: Iterable[Awaitable[T]]) -> list[T]:
        """Return the results of calls that depend on each other. The first error is raised immediately.

        Raises ProcessDied if the error of a call follows from the end of a process of this group.
        """
        answers = [asyncio.ensure_future(call) for call in calls]
        for answer in answers:  # only the first error is raised
            answer.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        try:
            return await asyncio.gather(*answers)
        except ray.exceptions.RayError as error:
            # of a rank whose peer has ended; Ray may report the end later than the connection is lost
            patience = DEATH_GRACE_S if LOST_PEER.search(str(error)) else DEATH_GRACE_S / 4
            if died := await self._death_in(answers, patience):
                raise died from error
            raise

    async def _death_in(self, answers: Sequence["asyncio.Future[Any]"], patience: float) -> ProcessDied | None:
        """Return the error of an actor that has died, if one is known within `patience` seconds."""
        until = time.monotonic() + patience
        while True:
            _, running = await asyncio.wait(answers, timeout=POLL_S)
            ended = (answer.exception() for answer in answers if answer.done() and not answer.cancelled())
            if died := next((error for error in ended if isinstance(error, ProcessDied)), None):
                return died
            for actor, (state, restarts, _) in (await asyncio.to_thread(starts_of, list(self.actors))).items():
                if actor in LIVES and (state == "DEAD" or restarts > LIVES[actor].restarts):
                    return ProcessDied(f"{LIVES[actor].name} has died: {last_words(actor) or UNKNOWN}")
            if not running or time.monotonic() > until:
                return None

    async def _answer(self, actor: int, coming: Any, method: str = "") -> Any:
        try:
            with self._waiting(actor, method):
                return await coming
        except (ray.exceptions.RayActorError, ray.exceptions.RayTaskError) as error:
            if not (self.names and is_death(error)):
                raise
            if of_ray := ended_of_ray():  # it ends the processes of all roles
                raise RayLost(of_ray) from error
            raise process_died(self.names[actor], error, last_words(self.actors[actor])) from error

    def end(self) -> None:
        """Kill all actors. They are killed without a request to exit, because an exit takes seconds."""
        if not self._has_adapter:
            return
        self.stop_renewals()
        for actor in self.actors:
            LIVES.pop(actor, None)
            ray.kill(actor)


class Batches:
    """Lets either batches or an exclusive block run on the ranks of a group."""

    def __init__(self) -> None:
        self._running, self._is_exclusive, self._changed = 0, False, asyncio.Condition()

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Run a batch inside the block, in parallel with others."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is_exclusive)
            self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            await self._notify()

    @asynccontextmanager
    async def none(self) -> AsyncIterator[None]:
        """Run no batch inside the block."""
        async with self._changed:
            await self._changed.wait_for(lambda: not (self._running or self._is_exclusive))
            self._is_exclusive = True
        try:
            yield
        finally:
            self._is_exclusive = False
            await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


class WorkerGroup(ActorGroup):
    """All ranks of one Megatron role, one process per device."""

    def __init__(self, actor: Any, plan: MegatronPlan, placement: Placement, env: dict[str, str]) -> None:
        """Start one actor on each device of `plan`. `setup` then connects the actors as a process group.

        Args:
            actor: Ray actor class of the ranks.
        """
        self.plan = plan
        self._batches = Batches()
        self._setups: list[tuple[int, Packing]] = []  # (data-parallel rank, packing rules) of each actor, after `setup`
        ranks = []
        env = {**env, **plan.env}
        env |= forkserver_start.variables(MEGATRON, env)
        for rank, device in enumerate(plan.devices):
            variables = {"RANK": str(rank), "WORLD_SIZE": str(len(plan.devices)), "LOCAL_RANK": "0"}
            options = placement.options((device,), plan.devices, {**env, **variables})
            ranks.append(actor.options(max_restarts=-1, **options).remote())  # see `workers.process_replacement`
        where = [f"{plan.name}, rank {rank} ({placement.where(device)})," for rank, device in enumerate(plan.devices)]
        super().__init__(ranks, where)

    async def setup(self, **arguments: Any) -> None:
        """Connect the ranks as a process group, and build the engine on every rank.

        Rank 0 provides the address of the rendezvous.
        """
        address, port = await self.actors[0].address.remote()
        self._setups[:] = await self.call("setup", master_addr=address, master_port=port, plan=self.plan, **arguments)

    @property
    def packing(self) -> Packing:
        """Packing rules of the engine. They are known after `setup`."""
        return self._setups[0][1]

    async def scatter(
        self, method: str, sharded: ShardedBatch, *args: Any, objects: Sequence[int] = (), **kwargs: Any
    ) -> list[tuple[int, Any]]:
        """Call `method` on every rank; return (data-parallel rank, result) for each rank.

        A rank gets the shard of its data-parallel rank, followed by `args`. Each shard is put into the object store
        once. Errors are raised as in `call`.

        Args:
            objects: number of objects, for each data-parallel rank, that the method returns after its first result. The
                result of a rank is then the pair of its first result and references to these objects. The driver owns
                the objects, so they outlive the rank.
        """

        async def call() -> list[tuple[int, Any]]:
            async with self._batches.one(), self._turn(method):
                references = [ray.put(shard) for shard in sharded.shards]
                ranks = [rank for rank, _ in self._setups]
                calls = [
                    self._send(each, method, references[rank], *args, objects=objects[rank] if objects else 0, **kwargs)
                    for rank, each in zip(ranks, self.actors, strict=True)
                ]
                del references  # an object is freed after the last call that reads it
                if not objects:
                    return list(zip(ranks, await self._answers(calls, method), strict=True))
                answers = await self._answers([first for first, *_ in calls], method)
                return [
                    (rank, (answer, others)) for rank, answer, (_, *others) in zip(ranks, answers, calls, strict=True)
                ]

        return await self._repeated(call)

    def without_batches(self) -> AbstractAsyncContextManager[None]:
        """Return a context in which no batch is scattered. It begins when the results of earlier batches are there."""
        return self._batches.none()

    def replace_lost(self, placement: Placement, **arguments: Any) -> None:
        """From now on, start all ranks again after the loss of one of them, and repeat the calls that failed.

        Only a frozen model may be started again, because its ranks have no state. `arguments` are those of `setup`.
        """
        bare = copy(self)  # calls of this group are not repeated
        what = f"{self.plan.name} (Megatron)"
        setup = partial(bare.setup, **arguments)
        renewal = Renewal(self.plan.name, what, [*self.actors], setup, placement.losses, placement.starting)
        self.renewals = (renewal,) * len(self.actors)

    async def _repeated(self, call: Callable[[], Awaitable[T]]) -> T:
        if not self.renewals:
            return await call()
        renewal = self.renewals[0]
        for _ in range(MAX_DEATHS - 1):
            if not renewal.is_up:
                await renewal.since(renewal.life, "")
            life = renewal.life
            try:
                return await call()
            except ProcessDied as died:
                await renewal.since(life, str(died))
        return await call()


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

    The log-probs are f32 [T-P]. The targets are not sent to the driver. They stay on the hosts of the ranks.

    Args:
        held: references to stored targets that the ranks read, one dict per sample.
    """
    sharded = _sharded(group, samples, held)
    lengths = [[samples[n].response_length if n >= 0 else 0 for n in numbers] for numbers in sharded.numbers]
    bundles = [bundles_of(each) for each in lengths]
    answers = await group.scatter("hold_targets", sharded, temperature, objects=[*map(len, bundles)], **wanted)
    answers = [(rank, answer) for rank, answer in answers if answer[0]]
    small = sharded.merged((rank, values) for rank, ((values, _), _) in answers)
    kept = sharded.merged(
        (rank, references(bundles[rank], columns, objects)) for rank, ((_, columns), objects) in answers
    )
    return [(small[n][0], replace(kept[n], hits=small[n][1])) for n in range(len(samples))]


def _sharded(
    group: WorkerGroup, samples: Sequence[Sample], held: Sequence[Mapping[str, TargetRef]] = ()
) -> ShardedBatch:
    sequences = [(sample.tokens, sample.prompt_length) for sample in samples]
    sent = [{name: target.for_ranks() for name, target in by_name.items()} for by_name in held]
    return shard_batch(samples, group.packing.assign(sequences, group.plan.forward_limits), sent)


def _shared(value: Any) -> Any:
    return ray.put(value) if isinstance(value, Compact) else value
