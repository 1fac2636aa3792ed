"""Turns on shared devices: the rules against a loop over devices, and concurrent calls of several roles."""

import asyncio
import random
from collections.abc import Iterator
from typing import Any, cast

import pytest
from ray.actor import ActorClass

from roll_opd.base.failures import RunError
from roll_opd.models.device_phases import (
    ALL,
    HOLDS,
    LEARNING,
    STATE,
    TOGETHER,
    WEIGHTS,
    Kind,
    Part,
    Phase,
    PhaseError,
    PhaseMachine,
    PhaseMember,
    State,
    held_together,
    needs_of,
)
from roll_opd.workers.colocation import PROCESSES, DeviceScheduler
from roll_opd.workers.group import WorkerGroup
from roll_opd.workers.student import TrainWorker

EVERYONE = (
    PhaseMember("student", Kind.STUDENT, frozenset({0, 1})),
    PhaseMember("critic", Kind.CRITIC, frozenset({1})),
    PhaseMember("reference", Kind.FROZEN, frozenset({0, 1})),
    PhaseMember("teacher", Kind.FROZEN, frozenset({2, 3})),
    PhaseMember("average", Kind.FOLLOWER, frozenset({2})),
    PhaseMember("engines", Kind.ENGINES, frozenset({0, 1}), keeps_weights=False),
)
CALLS = {
    Kind.STUDENT: (
        *("compute_logprobs", "compute_targets", "update", "forward_backward", "optim_step"),
        *("save", "load", "export_weights", "output_head"),
    ),
    Kind.CRITIC: ("values", "update", "save", "load"),
    Kind.FROZEN: ("compute_logprobs", "output_head"),
    Kind.FOLLOWER: ("compute_logprobs", "load_weights", "save", "load"),
    Kind.ENGINES: ("generate", "load_weights"),
}


def needed(name: str, call: str) -> frozenset[Part]:
    return needs_of(PROCESSES[next(member.kind for member in EVERYONE if member.name == name)], call)


def allowed(machine: PhaseMachine, state: State, name: str, call: str) -> bool:
    """By the tables, one by one."""
    member = machine.members[name]
    if member.kind not in HOLDS[state.phase]:
        return False
    if any(part not in HOLDS[state.phase][member.kind] for part in needed(name, call)):
        return False
    beside_engines = name != "engines" and member.devices & {0, 1}
    return not (state.phase is Phase.GENERATE and beside_engines)


def assert_devices_are_alone(machine: PhaseMachine, state: State, acting: str) -> None:
    for device in range(4):
        there = {m.name: state.of(m.name) for m in EVERYONE if device in m.devices and state.of(m.name)}
        if device not in machine.members[acting].devices:
            continue
        if state.phase in TOGETHER:
            left = {name: HOLDS[state.phase].get(machine.members[name].kind, frozenset()) for name in there}
            assert all(parts <= left[name] for name, parts in there.items() if name != acting), (state, acting)
        else:
            assert set(there) <= {acting}, (state, acting)


@pytest.mark.parametrize("seed", range(100))
def test_a_role_that_acts_has_what_it_needs_and_its_devices(seed: int) -> None:
    machine, state, drawn = PhaseMachine(EVERYONE), State(), random.Random(seed)
    for member in drawn.sample(EVERYONE, len(EVERYONE)):
        moves, state = machine.start(state, member.name)
        assert state.of(member.name) == ALL[member.kind]
        assert_devices_are_alone(machine, state, member.name)
    holds = dict(state.held)  # what the moves, made one after another, leave
    for _ in range(60):
        phase = drawn.choice(list(Phase))
        if phase is Phase.GENERATE and state.blank:
            with pytest.raises(PhaseError, match=r"engines cannot generate.*weight_sync before generate"):
                machine.enter(state, phase)
            continue
        steps = [machine.enter(state, phase)]
        state = steps[0][1]
        for _ in range(3):
            name = drawn.choice(EVERYONE).name
            call = drawn.choice(CALLS[machine.members[name].kind])
            if not allowed(machine, state, name, call):
                with pytest.raises(PhaseError, match=rf"{name}: {call} was called in the phase {phase}"):
                    machine.act(state, name, call, needed(name, call))
                continue
            steps.append(machine.act(state, name, call, needed(name, call)))
            state = steps[-1][1]
            if call == "load_weights" and name == "engines":
                state = machine.sent(state)
            assert needed(name, call) <= state.of(name)
            assert_devices_are_alone(machine, state, name)
        for moves, _ in steps:
            for move in moves:
                before = holds.get(move.member, frozenset())
                assert move.parts and (move.parts <= before if move.away else not move.parts & before)
                holds[move.member] = before - move.parts if move.away else before | move.parts
        assert holds == dict(state.held)


@pytest.mark.parametrize(
    ("phase", "name", "call"),
    [
        (Phase.OLD_LOGPROBS, "student", "update"),  # TRAIN was forgotten
        (Phase.READ, "student", "forward_backward"),
        (Phase.GENERATE, "student", "optim_step"),
        (Phase.READ, "critic", "values"),
        (Phase.WEIGHT_SYNC, "student", "save"),
        (Phase.TRAIN, "engines", "load_weights"),
        (Phase.GENERATE, "reference", "compute_logprobs"),
        (Phase.VALUES, "reference", "compute_logprobs"),
    ],
)
def test_a_forgotten_phase_is_a_sentence(phase: Phase, name: str, call: str) -> None:
    machine = PhaseMachine(EVERYONE)
    _, state = machine.enter(machine.everywhere(), phase)
    with pytest.raises(PhaseError, match=f"{name}: {call} was called in the phase {phase}"):
        machine.act(state, name, call, needed(name, call))


def test_every_method_of_a_role_declares_the_memory_that_it_uses() -> None:
    """A role has no memory that its kind does not have. A frozen model and a follower have only weights."""
    for kind, processes in PROCESSES.items():
        names = [name for name in dir(processes) if not name.startswith("_") and name not in dir(ActorClass)]
        assert {"setup", "offload", *CALLS[kind]} <= set(names)
        for name in names:
            assert needs_of(processes, name) <= ALL[kind], (kind, name)
    learning = {
        name for name in dir(TrainWorker) if getattr(getattr(TrainWorker, name), "_device_memory", 0) == LEARNING
    }
    assert learning == {"update", "forward_backward", "optim_step"}
    assert needs_of(TrainWorker, "save") == needs_of(TrainWorker, "load") == STATE
    with pytest.raises(PhaseError, match="nonsense does not declare"):
        needs_of(TrainWorker, "nonsense")


def test_what_is_there_at_once() -> None:
    """On one device: only training, only the cache, or both sets of weights during a weight sync."""
    student, engines = EVERYONE[0], EVERYONE[5]
    found = list(held_together([student, engines]))
    assert (Phase.WEIGHT_SYNC, {"student": WEIGHTS, "engines": WEIGHTS}) in found
    assert (Phase.TRAIN, {"student": ALL[Kind.STUDENT]}) in found
    assert (Phase.GENERATE, {"engines": ALL[Kind.ENGINES]}) in found
    assert not any(len(held) > 1 for phase, held in found if phase not in TOGETHER)


class Processes:
    """Processes of a role, which report calls that need memory that they do not hold."""

    def __init__(self, member: PhaseMember, everyone: dict[str, "Processes"]) -> None:
        self.member, self.parts, self.at_work, self.everyone = member, set(ALL[member.kind]), 0, everyone
        self.asked: list[str] = []
        everyone[member.name] = self

    async def call(self, method: str, *args: Any, **_: Any) -> list[Any]:
        if method in ("offload", "onload"):
            assert not self.at_work
            parts = set(args[0])
            assert parts <= self.parts if method == "offload" else not parts & self.parts
            self.parts = self.parts - parts if method == "offload" else self.parts | parts
            return []
        for other in self.everyone.values():
            assert not (self.member.meets(other.member) and other.parts), (method, other.member.name, other.parts)
        self.asked.append(method)
        self.at_work += 1
        await asyncio.sleep(0.001)
        self.at_work -= 1
        assert needed(self.member.name, method) <= self.parts
        return [method]


@pytest.fixture
def opened() -> Iterator[tuple[DeviceScheduler, dict[str, Processes], dict[str, Any]]]:
    everyone: dict[str, Processes] = {}
    turns = DeviceScheduler(EVERYONE).everywhere()
    groups = {
        member.name: turns.join(member.name, cast(WorkerGroup, Processes(member, everyone))) for member in EVERYONE
    }
    yield turns, everyone, groups


def test_calls_at_once_wait_for_each_other(
    opened: tuple[DeviceScheduler, dict[str, Processes], dict[str, Any]],
) -> None:
    turns, everyone, groups = opened

    async def go() -> None:
        await turns.enter(Phase.READ)
        readers = ("reference", "student", "teacher", "average") * 5
        await asyncio.gather(*[groups[name].call("compute_logprobs") for name in readers])
        await turns.enter(Phase.TRAIN)
        await asyncio.gather(*[groups[name].call("update") for name in ("student", "critic")])

    asyncio.run(go())
    assert [len(everyone[name].asked) for name in ("reference", "teacher", "average")] == [5, 5, 5]
    assert everyone["student"].asked[-1] == everyone["critic"].asked[-1] == "update"
    assert not everyone["engines"].parts and turns.lack_weights


def test_a_call_in_the_wrong_phase_asks_nobody(
    opened: tuple[DeviceScheduler, dict[str, Processes], dict[str, Any]],
) -> None:
    turns, everyone, groups = opened

    async def go() -> None:
        await turns.enter(Phase.OLD_LOGPROBS)
        with pytest.raises(RunError, match="student: update was called in the phase old_logprobs"):
            await groups["student"].call("update")
        await groups["student"].call("compute_logprobs")
        with pytest.raises(RunError, match="engines cannot generate"):
            await turns.enter(Phase.GENERATE)
        with pytest.raises(RunError, match="student: save was called"):  # through its adapter's base, too
            await groups["student"].call("without_adapter", "save")

    asyncio.run(go())
    assert everyone["student"].asked == ["compute_logprobs"]


def test_who_shares_nothing_is_asked_straight_away() -> None:
    group = Processes(EVERYONE[0], {})
    turns = DeviceScheduler()
    assert turns.join("student", group) is group
    asyncio.run(turns.enter(Phase.GENERATE))
    assert not turns.share("student", "engines")
    assert Part.CACHE == "kv_cache" and Part.WEIGHTS == "weights"  # vLLM's tags
