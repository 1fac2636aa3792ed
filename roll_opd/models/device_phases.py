"""Who holds what in each phase of a step, where roles share devices: a state machine of values, without processes.

A role that acts in a phase has there what `HOLDS` says. Whoever shares a device with it has given everything back by
then; in a phase of `TOGETHER`, all but what `HOLDS` leaves it. Phases may follow one another in any order. One thing
can get lost: engines that give their weights up have to be sent them before they generate again. What does not fit is a
`PhaseError` that names role and phase, and never a move.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from roll_opd.base.frozen import FrozenDict
from roll_opd.config.plan import CriticPlan, FollowingPlan, MegatronPlan, RunPlan, TrainPlan


class Phase(StrEnum):
    """What a pipeline is at, under the names of its times (`time/step_*`) where these have one."""

    START = "start"
    RESTORE = "restore"
    WEIGHT_SYNC = "weight_sync"
    GENERATE = "generate"  # in validation, too
    READ = "teacher"  # log-probs of teachers and reference policy
    OLD_LOGPROBS = "old_logprobs"
    VALUES = "values"
    TRAIN = "train"
    CHECKPOINT = "checkpoint"


class Part(StrEnum):
    """What takes memory on a device between two calls. Of engines, vLLM's own tags."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"  # moments, and f32 weights where the model's are not
    CACHE = "kv_cache"


class Kind(StrEnum):
    """What a role's processes can do."""

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
# phase -> who may be asked for something, and what it holds then
HOLDS: Mapping[Phase, Mapping[Kind, Parts]] = {
    Phase.START: _READERS,  # output heads of teachers
    Phase.RESTORE: {**_READERS, Kind.STUDENT: STATE, Kind.CRITIC: STATE},
    Phase.WEIGHT_SYNC: {Kind.STUDENT: WEIGHTS, Kind.FOLLOWER: WEIGHTS, Kind.ENGINES: WEIGHTS},
    Phase.GENERATE: {**_READERS, Kind.ENGINES: SERVING},  # readers on other devices need not wait
    Phase.READ: _READERS,  # the student's most likely tokens, and the base of its adapters, are read as well
    Phase.OLD_LOGPROBS: {Kind.STUDENT: WEIGHTS},
    Phase.VALUES: {Kind.CRITIC: WEIGHTS},
    Phase.TRAIN: {Kind.STUDENT: LEARNING, Kind.CRITIC: LEARNING},
    Phase.CHECKPOINT: {Kind.STUDENT: STATE, Kind.CRITIC: STATE, Kind.FOLLOWER: WEIGHTS},
}
TOGETHER = frozenset({Phase.WEIGHT_SYNC})  # phases whose roles are side by side; in the others they take turns
# who is there from a phase's beginning on; the others of it are as they are asked
AT_ONCE: Mapping[Phase, tuple[Kind, ...]] = {
    Phase.WEIGHT_SYNC: (Kind.STUDENT, Kind.ENGINES),
    Phase.GENERATE: (Kind.ENGINES,),
}
# what a call needs besides weights; what is not named needs these alone
NEEDS: Mapping[str, Parts] = {
    "update": LEARNING,
    "save": STATE,
    "load": STATE,
    "generate": SERVING,
    "prompt_logprobs": SERVING,
}
NEEDS_NOTHING = frozenset({"written", "weights_version", "close"})


class PhaseError(RuntimeError):
    """A role was asked for something while its memory was another's."""


@dataclass(frozen=True)
class Member:
    """A role whose processes share devices with another's."""

    name: str
    kind: Kind
    devices: frozenset[int]
    keeps_weights: bool = True  # False: engines that give them up, rather than to bring them to the host

    def meets(self, other: "Member") -> bool:
        """Whether both have a part on some device."""
        return self is not other and bool(self.devices & other.devices)


@dataclass(frozen=True)
class Move:
    """What a role gives back of its memory, or gets back."""

    member: str
    parts: Parts
    away: bool


@dataclass(frozen=True)
class State:
    """What the members hold at a moment."""

    phase: Phase = Phase.START
    held: Mapping[str, Parts] = field(default_factory=FrozenDict)  # of members that have started
    blank: frozenset[str] = frozenset()  # engines without weights

    def of(self, member: str) -> Parts:
        return self.held.get(member, NOTHING)


class Machine:
    """The rules for some members."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = {member.name: member for member in members}

    def everywhere(self) -> State:
        """Return the state in which everyone holds everything, as without taking turns."""
        return State(held=FrozenDict({member.name: ALL[member.kind] for member in self.members.values()}))

    def enter(self, state: State, phase: Phase) -> tuple[list[Move], State]:
        """Return the moves as a phase begins, and what is held after them.

        PhaseError where engines are to generate without weights.
        """
        if phase is Phase.GENERATE and state.blank:
            raise PhaseError(
                f"{_listed(state.blank)} cannot generate: the weights there were given up in an earlier phase, and no"
                f" new ones were sent; go through the phase {Phase.WEIGHT_SYNC} before {phase}"
            )
        state, moves = replace(state, phase=phase), []
        if phase in TOGETHER:  # or what has to leave would have to do so beside others' calls
            for member in self.members.values():
                state, leaving = self._leave(state, member)
                moves += leaving
        for kind in AT_ONCE.get(phase, ()):
            for member in self.members.values():
                if member.kind is kind:
                    state, coming = self._come(state, member)
                    moves += coming
        return moves, state

    def act(self, state: State, name: str, call: str) -> tuple[list[Move], State]:
        """Return the moves before a member is asked for `call`, in order, and what is held after them.

        PhaseError where the phase has no such calls of it.
        """
        member = self.members[name]
        if call in NEEDS_NOTHING:
            return [], state
        holds = HOLDS[state.phase].get(member.kind, NOTHING)
        needs = self._needs(member, call)
        if not needs <= holds:
            inside = f"in which its {_listed(needs - holds)} are away" if holds else "in which its memory is another's"
            raise PhaseError(
                f"{name} was asked for {call} in the phase {state.phase}, {inside}; enter a phase that has them there"
                f" ({_listed(phase for phase in Phase if needs <= HOLDS[phase].get(member.kind, NOTHING))})"
            )
        if state.phase is Phase.GENERATE and any(other.kind is Kind.ENGINES for other in self.meeting(member)):
            raise PhaseError(
                f"{name} was asked for {call} in the phase {state.phase}, in which its devices belong to inference"
                f" engines; ask in the phase {Phase.READ}"
            )
        state, moves = self._come(state, member)
        return moves, state

    def start(self, state: State, name: str) -> tuple[list[Move], State]:
        """Return the moves before a member's processes load their model, and what is held when they have."""
        state, moves = self._alone(state, self.members[name])
        return moves, _with(state, name, ALL[self.members[name].kind])

    def sent(self, state: State) -> State:
        """Return the state after engines have been sent weights."""
        return replace(state, blank=frozenset())

    def meeting(self, member: Member) -> list[Member]:
        """Return those who share a device with a member."""
        return [other for other in self.members.values() if member.meets(other)]

    def take_turns(self, name: str, other: str, phase: Phase) -> bool:
        """Whether two members cannot be at work at the same time in a phase."""
        return phase not in TOGETHER and self.members[name].meets(self.members[other])

    def _come(self, state: State, member: Member) -> tuple[State, list[Move]]:
        """Have a member hold what the phase says."""
        state, moves = self._alone(state, member)
        if missing := HOLDS[state.phase][member.kind] - state.of(member.name):
            moves.append(Move(member.name, missing, away=False))
            state = _with(state, member.name, state.of(member.name) | missing)
        return state, moves

    def _alone(self, state: State, member: Member) -> tuple[State, list[Move]]:
        """Have those who share devices with a member leave."""
        moves: list[Move] = []
        for other in self.meeting(member):
            state, leaving = self._leave(state, other)
            moves += leaving
        return state, moves

    def _leave(self, state: State, member: Member) -> tuple[State, list[Move]]:
        """Have a member give back what the phase does not leave it beside others."""
        left = HOLDS[state.phase].get(member.kind, NOTHING) if state.phase in TOGETHER else NOTHING
        held = state.of(member.name)
        parts = held - left
        if parts and member.kind is Kind.ENGINES:  # an engine gives back all or nothing
            parts = held
        if not parts:
            return state, []
        state = _with(state, member.name, held - parts)
        if not member.keeps_weights:
            state = replace(state, blank=state.blank | {member.name})
        return state, [Move(member.name, parts, away=True)]

    def _needs(self, member: Member, call: str) -> Parts:
        if member.kind is Kind.FOLLOWER:
            return WEIGHTS  # it has no more
        return NEEDS.get(call, WEIGHTS)


def members_of(plan: RunPlan) -> list[Member]:
    """Return the roles that share a device with another one; those that serve beside the student's engines stay.

    What another role's processes compute for is that role. Judges and auxiliary models answer at any moment, so they
    are not among them.
    """
    members = [_member(role) for role in plan.megatron_roles().values() if plan.serving(role) is role]
    if plan.rollout:
        rollout = plan.rollout
        given_up = rollout.sleep_level > 1
        members.append(Member(rollout.name, Kind.ENGINES, frozenset(rollout.devices), keeps_weights=not given_up))
    return [member for member in members if any(member.meets(other) for other in members)]


def members_on_gpus(plan: RunPlan) -> list[Member]:
    """Return those that take turns where devices are GPUs: there they do unless it is written otherwise."""
    return [] if plan.is_offload_states is False else members_of(plan)


def at_once(members: Sequence[Member]) -> Iterator[tuple[Phase, dict[str, Parts]]]:
    """Yield what is held at once on a device that `members` share, in each phase, by each of them in its turn."""
    for phase, holds in HOLDS.items():
        there = {member.name: holds[member.kind] for member in members if member.kind in holds}
        if phase is Phase.GENERATE and any(member.kind is Kind.ENGINES for member in members):
            there = {member.name: SERVING for member in members if member.kind is Kind.ENGINES}
        if phase in TOGETHER:
            yield phase, there
        else:
            yield from ((phase, {name: parts}) for name, parts in there.items())


def _member(role: MegatronPlan) -> Member:
    kinds = {CriticPlan: Kind.CRITIC, TrainPlan: Kind.STUDENT, FollowingPlan: Kind.FOLLOWER, MegatronPlan: Kind.FROZEN}
    kind = next(kind for plan, kind in kinds.items() if isinstance(role, plan))
    return Member(role.name, kind, frozenset(role.devices))


def _with(state: State, name: str, parts: Parts) -> State:
    return replace(state, held=FrozenDict({**state.held, name: parts}))


def _listed(names: Iterator[str] | frozenset[str] | frozenset[Part]) -> str:
    return ", ".join(sorted(str(name) for name in names))
