"""Let roles that share devices take turns.

A role is loaded for a call after the other roles have released the devices. `roll_opd.models.device_phases` has the
rules, and this module applies them to the processes of the roles. The members of a scheduler are the roles that share
devices. Without members, every call goes directly to the processes of the called role.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

from roll_opd.base.failures import RunError
from roll_opd.models.device_phases import Move, Phase, PhaseError, PhaseMachine, PhaseMember, State, needs_of
from roll_opd.workers.actor_group import ActorGroup

G = TypeVar("G", bound=ActorGroup)


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

    def forget(self) -> None:
        """Record that no member has started, because all of them start again."""
        self._state, self._at_work = State(), Counter()  # calls that have not failed yet count in the former counter

    def takes_turns(self, name: str) -> bool:
        """Return whether a role takes turns with other roles on its devices."""
        return name in self._machine.members

    def share(self, name: str, other: str) -> bool:
        """Return whether two roles take turns on at least one device."""
        members = self._machine.members
        return name in members and other in members and members[name].meets(members[other])

    def join(self, name: str, group: G) -> G:
        """Return the group through which a role is called.

        If the role takes turns, each call to the returned group waits for the turn of the role.
        """
        if name not in self._machine.members:
            return group
        self._groups[name] = group
        return group.in_turn(partial(self.turn, name))

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
        kind = self._machine.members[name].kind
        async with self._working(name, lambda: self._machine.act(self._state, name, method, needs_of(kind, method))):
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
            at_work = self._at_work
            at_work[name] += 1
        try:
            yield
        finally:
            async with self._changed:
                at_work[name] -= 1
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
        moving.add_done_callback(
            lambda ended: ended.cancelled() or ended.exception()
        )  # raised below, unless the caller was cancelled
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
