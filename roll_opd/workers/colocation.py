"""Let roles that share devices take turns.

A role is loaded for a call after the other roles have released the devices. `roll_opd.models.device_phases` has the
rules, and this module applies them to the processes of the roles. The members of a scheduler are the roles that share
devices. Without members, every call goes directly to the processes of the called role.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

from roll_opd.base.failures import RunError
from roll_opd.models.device_phases import Kind, Move, Phase, PhaseError, PhaseMachine, PhaseMember, State, needs_of
from roll_opd.workers.critic import CriticWorker
from roll_opd.workers.frozen_model import FollowingWorker, LogprobWorker
from roll_opd.workers.group import ActorGroup, WorkerGroup
from roll_opd.workers.sampler import RolloutWorker
from roll_opd.workers.student import TrainWorker

PROCESSES = {  # classes of the roles' processes; their methods declare the memory that they use
    Kind.STUDENT: TrainWorker,
    Kind.CRITIC: CriticWorker,
    Kind.FROZEN: LogprobWorker,
    Kind.FOLLOWER: FollowingWorker,
    Kind.ENGINES: RolloutWorker,
}


class DeviceScheduler:
    """Loads and offloads the roles of a run, when the current phase or a call requires it.

    `enter` sets the current phase.
    """

    def __init__(self, members: Sequence[PhaseMember] = ()) -> None:
        """Create a scheduler for members that have not started yet.

        For members that have started, call `everywhere`.
        """
        self._machine, self._state = PhaseMachine(members), State()
        self._groups: dict[str, ActorGroup] = {}
        self._at_work: Counter[str] = Counter()  # calls in progress, by member
        self._changed = asyncio.Condition()

    def everywhere(self) -> "DeviceScheduler":
        """Record that all members have started, with all their memory on the devices; return this scheduler."""
        self._state = self._machine.everywhere()
        return self

    @property
    def lack_weights(self) -> bool:
        """Whether engines need weights before they can generate."""
        return bool(self._state.blank)

    def engines_have_weights(self) -> None:
        """Record that all engines have weights."""
        self._state = self._machine.sent(self._state)

    def takes_turns(self, name: str) -> bool:
        """Return whether a role takes turns with other roles on its devices."""
        return name in self._machine.members

    def share(self, name: str, other: str) -> bool:
        """Return whether two roles take turns on at least one device."""
        members = self._machine.members
        return name in members and other in members and members[name].meets(members[other])

    def join(self, name: str, group: Any) -> Any:
        """Return the group through which a role is called.

        If the role takes turns, each call to the returned group waits for the turn of the role.
        """
        if name not in self._machine.members:
            return group
        self._groups[name] = group
        return ScheduledGroup(name, group, self)

    async def enter(self, phase: Phase) -> None:
        """Start a phase after all calls in progress have ended.

        Raises RunError if the engines would generate in the phase but have no weights.
        """
        if not self._machine.members:
            return
        async with self._changed:
            await self._changed.wait_for(lambda: not self._at_work.total())
            await self._make(lambda: self._machine.enter(self._state, phase))

    @asynccontextmanager
    async def turn(self, name: str, method: str) -> AsyncIterator[None]:
        """Load a member, and keep it on its devices inside the block.

        The caller makes one call to the member in the block. Raises RunError if the phase forbids the call.
        """
        processes = PROCESSES[self._machine.members[name].kind]
        async with self._working(
            name, lambda: self._machine.act(self._state, name, method, needs_of(processes, method))
        ):
            yield

    @asynccontextmanager
    async def starting(self, name: str) -> AsyncIterator[None]:
        """Reserve the devices of a role inside the block.

        The processes of the role load their model in the block.
        """
        if name not in self._machine.members:
            yield
            return
        async with self._working(name, lambda: self._machine.start(self._state, name)):
            yield

    @asynccontextmanager
    async def _working(self, name: str, moves: Callable[[], tuple[list[Move], State]]) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is_in_the_way(name))
            await self._make(moves)
            self._at_work[name] += 1
        try:
            yield
        finally:
            async with self._changed:
                self._at_work[name] -= 1
                self._changed.notify_all()

    def _is_in_the_way(self, name: str) -> bool:
        phase = self._state.phase
        return any(count and self._machine.take_turns(name, other, phase) for other, count in self._at_work.items())

    async def _make(self, moves: Callable[[], tuple[list[Move], State]]) -> None:
        """Release and load memory: make the moves one after another.

        Args:
            moves: returns the moves, and the state after them.
        """
        try:
            wanted, state = moves()
        except PhaseError as error:
            raise RunError(str(error)) from error
        moving = asyncio.ensure_future(self._carry_out(wanted, state))
        try:
            await asyncio.shield(moving)
        except asyncio.CancelledError:
            await asyncio.wait([moving])  # an interrupted series of moves would leave the state unknown
            raise

    async def _carry_out(self, moves: Sequence[Move], state: State) -> None:
        for move in moves:
            if move.away:
                await self._groups[move.member].call("offload", move.parts, state.phase)
            else:
                await self._groups[move.member].call("onload", move.parts)
        self._state = state


class ScheduledGroup:
    """The processes of a role that takes turns on its devices; each call waits for the turn of the role."""

    def __init__(self, name: str, group: WorkerGroup, turns: DeviceScheduler) -> None:
        self.name, self.group, self._turns = name, group, turns

    @property
    def plan(self) -> Any:
        return self.group.plan

    @property
    def packing(self) -> Any:
        return self.group.packing

    @property
    def actors(self) -> Any:
        """The processes of the member.

        A call to them does not wait for a turn, so use them only in phases that load the member at their start.
        """
        return self.group.actors

    async def hosts(self) -> list[str]:
        """See `ActorGroup.hosts`."""
        return await self.group.hosts()

    async def ask(self, actor: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """See `ActorGroup.ask`."""
        async with self._turns.turn(self.name, method):
            return await self.group.ask(actor, method, *args, **kwargs)

    async def setup(self, **arguments: Any) -> None:
        """Call `WorkerGroup.setup` after the other members have released the devices."""
        async with self._turns.starting(self.name):
            await self.group.setup(**arguments)

    async def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """See `ActorGroup.call`."""
        called = args[0] if method == "without_adapter" else method
        async with self._turns.turn(self.name, called):
            return await self.group.call(method, *args, **kwargs)

    async def scatter(self, method: str, cut: Any, *args: Any, **kwargs: Any) -> list[tuple[int, Any]]:
        """See `WorkerGroup.scatter`."""
        called = args[0] if method == "share_without_adapter" else method
        async with self._turns.turn(self.name, called):
            return await self.group.scatter(method, cut, *args, **kwargs)

    async def stream(self, actor: int, method: str, *args: Any) -> AsyncGenerator[Any, None]:
        """See `ActorGroup.stream`."""
        async with self._turns.turn(self.name, method), aclosing(self.group.stream(actor, method, *args)) as values:
            async for value in values:
                yield value

    def end(self) -> None:
        """End every process."""
        self.group.end()
