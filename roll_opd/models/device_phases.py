"""State machine for the memory that each role holds on shared devices in each phase. Starts no processes.

`HOLDS` lists, for each phase, the parts of the device memory that an active role keeps. In most phases, the other roles
on the same device hold no memory. In the phases in `TOGETHER`, they also hold their parts in `HOLDS`. Each method that
a role's processes offer declares the parts that it uses (`needs`); `declare` checks this for a class of processes.

Phases may follow each other in any order. Engines that discarded their weights need a weight sync before they generate
again. Invalid calls raise `PhaseError` and do not change the state.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeVar

from roll_opd.base.frozen import FrozenDict
from roll_opd.config.plan import CriticPlan, FollowingPlan, MegatronPlan, RunPlan, TrainPlan


class Phase(StrEnum):
    """Phase of a step. The timing metrics (`time/step_*`) have the same names."""

    START = "start"
    RESTORE = "restore"
    WEIGHT_SYNC = "weight_sync"
    GENERATE = "generate"  # includes validation
    READ = "teacher"  # log-probs of teachers and reference policy
    OLD_LOGPROBS = "old_logprobs"
    VALUES = "values"
    TRAIN = "train"
    CHECKPOINT = "checkpoint"


class Part(StrEnum):
    """Kind of memory that a role holds between calls.

    The values for engines are vLLM's tags.
    """

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"  # moments, and for models that are not f32 also f32 master weights
    CACHE = "kv_cache"


class Kind(StrEnum):
    """Kind of role."""

    STUDENT = "student"
    CRITIC = "critic"
    FROZEN = "frozen"
    FOLLOWER = "follower"
    ENGINES = "engines"


Parts = frozenset[Part]
NOTHING: Parts = frozenset()
WEIGHTS: Parts = frozenset({Part.WEIGHTS})
STATE: Parts = WEIGHTS | {Part.OPTIMIZER}
LEARNING: Parts = STATE | {Part.GRADIENTS}
SERVING: Parts = WEIGHTS | {Part.CACHE}

ALL: Mapping[Kind, Parts] = {
    Kind.STUDENT: LEARNING,
    Kind.CRITIC: LEARNING,
    Kind.FROZEN: WEIGHTS,
    Kind.FOLLOWER: WEIGHTS,
    Kind.ENGINES: SERVING,
}
_READERS: Mapping[Kind, Parts] = {Kind.STUDENT: WEIGHTS, Kind.FROZEN: WEIGHTS, Kind.FOLLOWER: WEIGHTS}
# phase -> kinds of roles that may be called, and the memory that they hold
HOLDS: Mapping[Phase, Mapping[Kind, Parts]] = {
    Phase.START: _READERS,  # output heads of teachers
    Phase.RESTORE: {**_READERS, Kind.STUDENT: STATE, Kind.CRITIC: STATE},
    Phase.WEIGHT_SYNC: {Kind.STUDENT: WEIGHTS, Kind.FOLLOWER: WEIGHTS, Kind.ENGINES: WEIGHTS},
    Phase.GENERATE: {**_READERS, Kind.ENGINES: SERVING},  # readers on other devices may run concurrently
    Phase.READ: _READERS,  # the student is read for its top-k tokens, or without its adapters
    Phase.OLD_LOGPROBS: {Kind.STUDENT: WEIGHTS},
    Phase.VALUES: {Kind.CRITIC: WEIGHTS},
    Phase.TRAIN: {Kind.STUDENT: LEARNING, Kind.CRITIC: LEARNING},
    Phase.CHECKPOINT: {Kind.STUDENT: STATE, Kind.CRITIC: STATE, Kind.FOLLOWER: WEIGHTS},
}
TOGETHER = frozenset({Phase.WEIGHT_SYNC})  # phases in which roles that share a device run concurrently
# kinds that acquire memory when the phase starts; other kinds acquire it on their first call
ACQUIRED_ON_ENTRY: Mapping[Phase, tuple[Kind, ...]] = {
    Phase.WEIGHT_SYNC: (Kind.STUDENT, Kind.ENGINES),
    Phase.GENERATE: (Kind.ENGINES,),
}
_DECLARED = "_device_memory"  # attribute of a method
_NEEDS: dict[Kind, Mapping[str, Parts]] = {}  # method -> memory that it uses, for the processes of each kind
Method = TypeVar("Method", bound=Callable[..., Any])


class PhaseError(RuntimeError):
    """A call or a change of phase that the current state does not allow."""


def needs(parts: Parts) -> Callable[[Method], Method]:
    """Declare the device memory that a method uses. A method that uses `NOTHING` may be called in every phase."""

    def declare(method: Method) -> Method:
        setattr(method, _DECLARED, parts)
        return method

    return declare


def declare(kind: Kind, processes: type) -> None:
    """Record the class of the processes of a kind of role.

    Raises TypeError if a public method declares no memory, because it could then read offloaded memory, or if it
    declares memory that the kind does not have.
    """
    methods = {name: getattr(processes, name) for name in dir(processes) if not name.startswith("_")}
    found: dict[str, Parts] = {}
    for name, method in methods.items():
        parts: Parts | None = getattr(method, _DECLARED, None)
        if parts is None or not parts <= ALL[kind]:
            raise TypeError(
                f"{processes.__name__}.{name} does not declare which device memory of a {kind} it uses; decorate it"
                " with @needs(...)"
            )
        found[name] = parts
    _NEEDS[kind] = found


def needs_of(kind: Kind, method: str) -> Parts:
    """Return the device memory that a method of a kind of role uses. Raises PhaseError if no method declares it."""
    if method not in _NEEDS.get(kind, ()):
        raise PhaseError(f"{method} is no method of a {kind}; decorate the method with @needs(...)")
    return _NEEDS[kind][method]


@dataclass(frozen=True)
class PhaseMember:
    """A role that shares devices with another role."""

    name: str
    kind: Kind
    devices: frozenset[int]
    keeps_weights: bool = True  # False: engines that discard their weights instead of offloading them

    def meets(self, other: "PhaseMember") -> bool:
        """Return whether both roles share a device."""
        return self is not other and bool(self.devices & other.devices)


@dataclass(frozen=True)
class Move:
    """Memory that a role must release or acquire. `away`: True to release it."""

    member: str
    parts: Parts
    away: bool


@dataclass(frozen=True)
class State:
    """Current phase, and the memory that each member holds in it."""

    phase: Phase = Phase.START
    held: Mapping[str, Parts] = field(default_factory=FrozenDict)  # memory of the members that have started
    blank: frozenset[str] = frozenset()  # engines with discarded weights

    def of(self, member: str) -> Parts:
        return self.held.get(member, NOTHING)


class PhaseMachine:
    """Rules for the state of the given members: which calls are allowed, and which memory is moved."""

    def __init__(self, members: Sequence[PhaseMember]) -> None:
        self.members = {member.name: member for member in members}

    def everywhere(self) -> State:
        """Return a state in which all members hold all their memory, as if no devices were shared."""
        return State(held=FrozenDict({member.name: ALL[member.kind] for member in self.members.values()}))

    def enter(self, state: State, phase: Phase) -> tuple[list[Move], State]:
        """Return (moves, state) for entering a phase.

        Raises PhaseError if the phase is `GENERATE`, but the weights of engines are discarded.
        """
        if phase is Phase.GENERATE and state.blank:
            raise PhaseError(
                f"{_listed(state.blank)} cannot generate: their weights were discarded in an earlier phase and not"
                f" sent again; enter the phase {Phase.WEIGHT_SYNC} before {phase}"
            )
        state, moves = replace(state, phase=phase), []
        if phase in TOGETHER:  # all members release memory now; a later release would happen while other members run
            for member in self.members.values():
                state, released = self._release(state, member)
                moves += released
        for kind in ACQUIRED_ON_ENTRY.get(phase, ()):
            for member in self.members.values():
                if member.kind is kind:
                    state, acquired = self._acquire(state, member)
                    moves += acquired
        return moves, state

    def act(self, state: State, name: str, call: str, needs: Parts) -> tuple[list[Move], State]:
        """Return (moves, state) for a call of a member's method.

        The moves must be made before the call, in this order. The state is the state after the moves. Raises PhaseError
        if the phase does not allow the call.

        Args:
            name: name of the member.
            call: name of the method.
            needs: memory that the method uses, see `needs_of`.
        """
        member = self.members[name]
        if not needs:
            return [], state
        holds = HOLDS[state.phase].get(member.kind, NOTHING)
        if not needs <= holds:
            inside = f"without its {_listed(needs - holds)}" if holds else "in which its memory is released"
            raise PhaseError(
                f"{name}: {call} was called in the phase {state.phase}, {inside}; enter a phase that allows it"
                f" ({_listed(phase for phase in Phase if needs <= HOLDS[phase].get(member.kind, NOTHING))})"
            )
        if state.phase is Phase.GENERATE and any(other.kind is Kind.ENGINES for other in self.meeting(member)):
            raise PhaseError(
                f"{name}: {call} was called in the phase {state.phase}, in which its devices belong to inference"
                f" engines; call it in the phase {Phase.READ}"
            )
        state, moves = self._acquire(state, member)
        return moves, state

    def start(self, state: State, name: str) -> tuple[list[Move], State]:
        """Return (moves, state) for loading the model of a member."""
        state, moves = self._release_others(state, self.members[name])
        return moves, _with(state, name, ALL[self.members[name].kind])

    def sent(self, state: State) -> State:
        """Return the state after a weight sync to the engines."""
        return replace(state, blank=frozenset())

    def meeting(self, member: PhaseMember) -> list[PhaseMember]:
        """Return the other members that share a device with `member`."""
        return [other for other in self.members.values() if member.meets(other)]

    def take_turns(self, name: str, other: str, phase: Phase) -> bool:
        """Return whether two members must not run at the same time in a phase."""
        return phase not in TOGETHER and self.members[name].meets(self.members[other])

    def _acquire(self, state: State, member: PhaseMember) -> tuple[State, list[Move]]:
        """Acquire the memory that a member needs in the current phase."""
        state, moves = self._release_others(state, member)
        if missing := HOLDS[state.phase][member.kind] - state.of(member.name):
            moves.append(Move(member.name, missing, away=False))
            state = _with(state, member.name, state.of(member.name) | missing)
        return state, moves

    def _release_others(self, state: State, member: PhaseMember) -> tuple[State, list[Move]]:
        """Release the memory of all members that share a device with `member`."""
        moves: list[Move] = []
        for other in self.meeting(member):
            state, released = self._release(state, other)
            moves += released
        return state, moves

    def _release(self, state: State, member: PhaseMember) -> tuple[State, list[Move]]:
        """Release the memory that a member must not hold in the current phase while other members run."""
        left = HOLDS[state.phase].get(member.kind, NOTHING) if state.phase in TOGETHER else NOTHING
        held = state.of(member.name)
        parts = held - left
        if parts and member.kind is Kind.ENGINES:  # engines release everything or nothing
            parts = held
        if not parts:
            return state, []
        state = _with(state, member.name, held - parts)
        if not member.keeps_weights:
            state = replace(state, blank=state.blank | {member.name})
        return state, [Move(member.name, parts, away=True)]


def members_of(plan: RunPlan) -> list[PhaseMember]:
    """Return the roles that share a device with another role.

    Some roles are omitted:

    - a role whose requests are answered by the processes of another role
    - judges and auxiliary models, because they must always be able to respond
    """
    members = [_member(role) for role in plan.megatron_roles().values() if plan.serving(role) is role]
    if plan.rollout:
        rollout = plan.rollout
        given_up = rollout.sleep_level > 1
        members.append(PhaseMember(rollout.name, Kind.ENGINES, frozenset(rollout.devices), keeps_weights=not given_up))
    return [member for member in members if any(member.meets(other) for other in members)]


def members_on_gpus(plan: RunPlan) -> list[PhaseMember]:
    """Return the roles that take turns on shared GPUs, which is the default.

    The result is [] if `is_offload_states` is false.
    """
    return [] if plan.is_offload_states is False else members_of(plan)


def held_together(members: Sequence[PhaseMember]) -> Iterator[tuple[Phase, dict[str, Parts]]]:
    """Yield (phase, {member: parts}) for each combination of parts that a device may hold at the same time.

    All `members` are on this device.
    """
    for phase, holds in HOLDS.items():
        there = {member.name: holds[member.kind] for member in members if member.kind in holds}
        if phase is Phase.GENERATE and any(member.kind is Kind.ENGINES for member in members):
            there = {member.name: SERVING for member in members if member.kind is Kind.ENGINES}
        if phase in TOGETHER:
            yield phase, there
        else:
            yield from ((phase, {name: parts}) for name, parts in there.items())


def _member(role: MegatronPlan) -> PhaseMember:
    kinds = {CriticPlan: Kind.CRITIC, TrainPlan: Kind.STUDENT, FollowingPlan: Kind.FOLLOWER, MegatronPlan: Kind.FROZEN}
    kind = next(kind for plan, kind in kinds.items() if isinstance(role, plan))
    return PhaseMember(role.name, kind, frozenset(role.devices))


def _with(state: State, name: str, parts: Parts) -> State:
    return replace(state, held=FrozenDict({**state.held, name: parts}))


def _listed(names: Iterator[str] | frozenset[str] | frozenset[Part]) -> str:
    return ", ".join(sorted(str(name) for name in names))
