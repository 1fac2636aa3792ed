"""Turns on shared devices: the rules against a loop over devices, and concurrent calls of several roles."""

import asyncio
import inspect
import random
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pkgutil import iter_modules
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.actor import ActorClass

from roll_opd import workers
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
    needs,
    needs_of,
)
from roll_opd.workers.actor_group import ActorGroup, actor
from roll_opd.workers.colocation import DeviceScheduler
from roll_opd.workers.critic import CriticWorker
from roll_opd.workers.model_worker import FollowingWorker, LogprobWorker
from roll_opd.workers.sampler import RolloutWorker
from roll_opd.workers.student import TrainWorker
from tests.each import each

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
    return needs_of(next(member.kind for member in EVERYONE if member.name == name), call)


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


@each("seed", range(100))
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


def test_every_actor_of_a_role_declares_the_memory_of_its_methods() -> None:
    """Each class that Ray can run is declared, and all methods that can be called have a declaration."""
    room = [import_module(f"roll_opd.workers.{each.name}") for each in iter_modules(workers.__path__)]
    classes = {
        value.__ray_metadata__.modified_class
        for module in room
        for value in vars(module).values()
        if isinstance(value, ActorClass)
    }
    kinds = {RolloutWorker: Kind.ENGINES, TrainWorker: Kind.STUDENT, CriticWorker: Kind.CRITIC}
    kinds |= {LogprobWorker: Kind.FROZEN, FollowingWorker: Kind.FOLLOWER}
    on_devices = {actor.__ray_metadata__.modified_class: kind for actor, kind in kinds.items()}
    assert {one.__name__ for one in classes - on_devices.keys()} == {"RewardWorker", "WorkflowWorker"}  # no device
    for processes, kind in on_devices.items():
        names = {name for name, _ in inspect.getmembers(processes, callable) if not name.startswith("_")}
        assert {"setup", "offload", "onload", *CALLS[kind]} <= names
        assert all(needs_of(kind, name) <= ALL[kind] for name in names)
    student = {name for name in dir(TrainWorker.__ray_metadata__.modified_class) if name[0] != "_"}
    learning = {name for name in student if needs_of(Kind.STUDENT, name) == LEARNING}
    assert learning == {"update", "forward_backward", "optim_step"}
    assert needs_of(Kind.STUDENT, "save") == needs_of(Kind.STUDENT, "load") == STATE
    for name in ("nonsense", "_without_adapter", "__init__", "__ray_call__"):  # Ray would call these
        with pytest.raises(PhaseError, match=f"{name} is no method of a student"):
            needs_of(Kind.STUDENT, name)


class Base:
    @needs(WEIGHTS)
    def read(self) -> None: ...


class Overriding(Base):
    def read(self) -> None: ...  # replaces the declared method


class Coroutine(Base):
    async def wait(self) -> None: ...


class Static(Base):
    @staticmethod
    def seed() -> None: ...


class Mixed(Base, SimpleNamespace):
    run = staticmethod(lambda: None)


class Greedy(Base):
    @needs(LEARNING)
    def update(self) -> None: ...


def test_a_class_with_an_undeclared_method_cannot_become_an_actor() -> None:
    for wrong, name in (Overriding, "read"), (Coroutine, "wait"), (Static, "seed"), (Mixed, "run"), (Greedy, "update"):
        with pytest.raises(TypeError, match=f"{wrong.__name__}.{name} does not declare"):
            actor(Kind.FROZEN)(wrong)


def test_what_is_there_at_once() -> None:
    """On one device: only training, only the cache, or both sets of weights during a weight sync."""
    student, engines = EVERYONE[0], EVERYONE[5]
    found = list(held_together([student, engines]))
    assert (Phase.WEIGHT_SYNC, {"student": WEIGHTS, "engines": WEIGHTS}) in found
    assert (Phase.TRAIN, {"student": ALL[Kind.STUDENT]}) in found
    assert (Phase.GENERATE, {"engines": ALL[Kind.ENGINES]}) in found
    assert not any(len(held) > 1 for phase, held in found if phase not in TOGETHER)


class Process:
    """Actor of a role, which reports calls that need memory that it does not hold."""

    def __init__(self, member: PhaseMember, everyone: dict[str, "Process"]) -> None:
        self.member, self.parts, self.at_work, self.everyone = member, set(ALL[member.kind]), 0, everyone
        self.asked: list[str] = []
        everyone[member.name] = self

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=partial(self._run, method))

    async def _run(self, method: str, *args: Any, **_: Any) -> str:
        if method in ("offload", "onload"):
            assert not self.at_work
            parts = set(args[0])
            assert parts <= self.parts if method == "offload" else not parts & self.parts
            self.parts = self.parts - parts if method == "offload" else self.parts | parts
            return method
        for other in self.everyone.values():
            assert not (self.member.meets(other.member) and other.parts), (method, other.member.name, other.parts)
        self.asked.append(method)
        self.at_work += 1
        await asyncio.sleep(0.001)
        self.at_work -= 1
        assert needed(self.member.name, args[0] if method == "_without_adapter" else method) <= self.parts
        return method


@pytest.fixture
def opened() -> Iterator[tuple[DeviceScheduler, dict[str, Process], dict[str, ActorGroup]]]:
    everyone: dict[str, Process] = {}
    turns = DeviceScheduler(EVERYONE).everywhere()
    groups = {one.name: turns.join(one.name, ActorGroup([cast(Any, Process(one, everyone))])) for one in EVERYONE}
    yield turns, everyone, groups


def test_calls_at_once_wait_for_each_other(
    opened: tuple[DeviceScheduler, dict[str, Process], dict[str, ActorGroup]],
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
    opened: tuple[DeviceScheduler, dict[str, Process], dict[str, ActorGroup]],
) -> None:
    turns, everyone, groups = opened

    async def go() -> None:
        await turns.enter(Phase.OLD_LOGPROBS)
        with pytest.raises(RunError, match="student: update was called in the phase old_logprobs"):
            await groups["student"].call("update")
        await groups["student"].call("compute_logprobs")
        with pytest.raises(RunError, match="engines cannot generate"):
            await turns.enter(Phase.GENERATE)
        base = groups["student"].without_adapter()
        with pytest.raises(RunError, match="student: save was called"):
            await base.call("save")
        await base.call("compute_logprobs")
        await base.ask(0, "compute_logprobs")
        base.end()  # does not end the student

    asyncio.run(go())
    assert everyone["student"].asked == ["compute_logprobs", "_without_adapter", "_without_adapter"]


def test_who_shares_nothing_is_asked_straight_away() -> None:
    group = ActorGroup([cast(Any, Process(EVERYONE[0], {}))])
    turns = DeviceScheduler()
    assert turns.join("student", group) is group
    asyncio.run(turns.enter(Phase.GENERATE))
    assert not turns.share("student", "engines")
    assert Part.CACHE == "kv_cache" and Part.WEIGHTS == "weights"  # vLLM's tags


def test_calls_of_lost_processes_do_not_count_after_a_new_start(
    opened: tuple[DeviceScheduler, dict[str, Process], dict[str, ActorGroup]],
) -> None:
    """They fail only when the processes are started again."""
    turns, _, _ = opened

    async def go() -> None:
        late = turns.turn("reference", "compute_logprobs")
        await late.__aenter__()
        turns.forget()
        async with asyncio.timeout(10), turns.starting("student"):
            await late.__aexit__(None, None, None)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await turns.enter(Phase.READ)  # counts the calls of now
        async with asyncio.timeout(10):
            await turns.enter(Phase.READ)

    asyncio.run(go())
