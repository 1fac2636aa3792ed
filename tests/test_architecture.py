"""The layers of `roll_opd`: a module imports only from its own package or from lower layers.

Imports inside functions count; imports under `if TYPE_CHECKING` do not count, because they are never executed.
"""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib.util import resolve_name
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "roll_opd"

# prefix of a module -> (floor, room); the longest prefix that fits counts. Rooms on one floor do not know each other.
FLOORS = {
    "roll_opd.extras": (14, "extras"),  # parts that registries find by name; no other room imports them
    "roll_opd": (13, "front"),  # imports on first use; any floor may read the version
    "roll_opd.api": (12, "api"),
    "roll_opd.__main__": (11, "commands"),
    "roll_opd.commands": (11, "commands"),
    "roll_opd.pipelines": (10, "pipelines"),
    "roll_opd.rollout": (9, "rollout"),
    "roll_opd.planner": (9, "planner"),  # reads facts from the rooms below
    "roll_opd.teachers": (8, "teachers"),  # scorers, views, and checks of them
    "roll_opd.workers": (7, "workers"),  # models and pools of a run: the driver's clients and Ray's actors
    "roll_opd.weight_sync": (6, "weight_sync"),
    "roll_opd.workers.actor_group": (5, "workers"),  # calls of actors, without their classes
    "roll_opd.workflows": (5, "workflows"),
    "roll_opd.megatron": (5, "megatron"),
    "roll_opd.cluster": (4, "cluster"),
    "roll_opd.tracking": (4, "tracking"),
    "roll_opd.inference": (3, "inference"),
    "roll_opd.objective": (3, "objective"),
    "roll_opd.rewards": (3, "rewards"),
    "roll_opd.data": (2, "data"),
    "roll_opd.models": (2, "models"),
    "roll_opd.samples": (2, "samples"),
    "roll_opd.config": (1, "config"),
    "roll_opd.rollout.staleness": (1, "rollout"),  # order and ages of groups, without a run
    "roll_opd.base": (0, "base"),
}
ENGINES_AND_RAY = {"ray", "vllm", "megatron"}
# room -> distributions' modules that none of its files imports
STRANGERS = {
    "base": ENGINES_AND_RAY | {"torch", "transformers"},
    "config": ENGINES_AND_RAY | {"torch", "transformers"},
    "models": ENGINES_AND_RAY | {"torch"},
    "samples": ENGINES_AND_RAY,
    "data": ENGINES_AND_RAY,
    "tracking": ENGINES_AND_RAY,
    "planner": {"ray", "megatron"},
    "objective": ENGINES_AND_RAY,
    "megatron": {"ray", "vllm"},
    "inference": {"ray", "megatron"},
    "rewards": ENGINES_AND_RAY,
    "workflows": ENGINES_AND_RAY,
    "extras": ENGINES_AND_RAY,
}
# names of files and classes that stand for two things, each with its reason
SHARED_NAMES = {
    "Experience",  # Trinity-RFT's class, which user workflows construct
    "Task",  # Trinity-RFT's class, which user workflows receive
    "Workflow",  # Trinity-RFT's class, which user workflows derive from
    *("Batch", "Sampler", "Student", "Teacher"),  # roll_opd.api's own, by the names that Tinker's and TRL's users know
    # left until their rooms are merged
    *("batch.py", "demonstrations.py", "registry.py"),
    *("Run", "Worker"),
}
TORCH_FREE = (
    "roll_opd.config.compose",
    "roll_opd.config.plan",
    "roll_opd.config.schema",
    "roll_opd.rewards.interface",
    "roll_opd.extras.games",
    "roll_opd.commands.main",
    "roll_opd.pipelines.check_machine",
)


def modules() -> dict[str, Path]:
    """Name -> file of every module of the package."""
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


MODULES = modules()


def place(module: str) -> tuple[int, str]:
    """Floor and room of a module."""
    while module not in FLOORS:
        module = module.rpartition(".")[0]
    return FLOORS[module]


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


@functools.cache
def imported(module: str, path: Path) -> list[tuple[int, str]]:
    """(line, module) of every import that can be run; `from package import module` gives the module."""
    return list(runnable_imports(module, path))


def runnable_imports(module: str, path: Path) -> Iterator[tuple[int, str]]:
    package = module if path.stem == "__init__" else module.rpartition(".")[0]
    open_nodes: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while open_nodes:
        node = open_nodes.pop()
        if is_type_checking(node):
            open_nodes.extend(node.orelse)
            continue
        open_nodes.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield node.lineno, inner if inner in MODULES else base


def test_the_reader_of_imports_finds_them_all(tmp_path: Path) -> None:
    code = """
import os, ray.util as u
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import vllm
else:
    import torch
from roll_opd.config import plan
from roll_opd.config.plan import RunPlan
from . import vllm_engine
from ..data.rows import read
def late():
    from megatron.core import parallel_state
"""
    (tmp_path / "x.py").write_text(code)
    found = {name for _, name in imported("roll_opd.inference.x", tmp_path / "x.py")}
    assert found == {
        *("os", "ray.util", "typing", "torch", "megatron.core"),
        *("roll_opd.config.plan", "roll_opd.inference.vllm_engine", "roll_opd.data.rows"),
    }


def test_every_module_has_a_place() -> None:
    absent = {name for name in FLOORS if name not in MODULES} - {"roll_opd.extras"}  # which may be removed
    assert not absent, "FLOORS names what is not there"
    assert [name for name in MODULES if name != "roll_opd" and place(name) == FLOORS["roll_opd"]] == []


def test_imports_go_down() -> None:
    wrong = set()
    for module, path in MODULES.items():
        floor, room = place(module)
        for line, other in imported(module, path):
            if other.partition(".")[0] != "roll_opd":
                continue
            below, neighbour = place(other)
            if neighbour != room and below >= floor and other != "roll_opd":
                wrong.add(f"{path.relative_to(PACKAGE.parent)}:{line} (floor {floor}) imports {other} ({below})")
    assert sorted(wrong) == []


@pytest.mark.parametrize("room", STRANGERS)
def test_a_room_does_not_know_strangers(room: str) -> None:
    wrong = [
        f"{path.relative_to(PACKAGE.parent)}:{line} imports {other}"
        for module, path in MODULES.items()
        if place(module)[1] == room
        for line, other in imported(module, path)
        if other.partition(".")[0] in STRANGERS[room]
    ]
    assert wrong == []


def is_builtin(module: str) -> bool:
    """Return whether a module is a built-in part that only its registry imports, by name."""
    room, _, rest = module.removeprefix("roll_opd.").partition(".")
    if room == "extras":  # ROOM.KIND.PART
        return rest.partition(".")[2].startswith(("rewards.", "workflows.", "tracking."))
    return room in ("rewards", "tracking", "workflows") and rest.startswith("builtin.")


def test_only_registries_and_builtin_parts_import_builtin_rewards_and_trackers() -> None:
    wrong = {
        f"{path.relative_to(PACKAGE.parent)}:{line} imports {other}"
        for module, path in MODULES.items()
        for line, other in imported(module, path)
        if other in MODULES
        and is_builtin(other)
        and ".workflows." not in other
        and not (is_builtin(module) or module.startswith("roll_opd.extras."))
    }
    assert sorted(wrong) == []


def repeated(places: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return name -> places of the names with several places."""
    found: dict[str, list[str]] = {}
    for name, where in places:
        found.setdefault(name, []).append(where)
    return {name: where for name, where in found.items() if len(where) > 1}


def test_no_file_name_twice() -> None:
    files = [
        (path.name, str(path.relative_to(PACKAGE)))
        for path in MODULES.values()
        if path.stem not in ("__init__", "__main__") and path.parent.name != "builtin" and path.name not in SHARED_NAMES
    ]
    assert repeated(files) == {}


def test_no_class_name_twice() -> None:
    classes = [
        (node.name, f"{path.relative_to(PACKAGE)}:{node.lineno}")
        for path in MODULES.values()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and node.name not in SHARED_NAMES
    ]
    assert repeated(classes) == {}


@pytest.mark.parametrize("module", TORCH_FREE)
def test_torch_stays_out(module: str) -> None:
    """The imports of reward workers and of the command line must be quick."""
    code = f"import sys, {module}; print({{'torch', 'vllm', 'megatron', 'ray'}} & sys.modules.keys() or 'free')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("free\n", "")
