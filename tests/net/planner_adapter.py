"""Access to the planner: the only file of the safety net that must change if the planner's functions move or are
renamed."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import roll_opd

REPOSITORY = Path(roll_opd.__file__).resolve().parents[1]
# the first module that exists is taken: the net also runs on earlier revisions
PLANNER = ("roll_opd.planner.load_plan", "roll_opd.config.build")  # has `load_plan`
DESCRIPTION = ("roll_opd.commands.describe", "roll_opd.planner.describe")  # has `to_json`
MACHINE = ("roll_opd.base.hardware", "roll_opd.hardware")  # says what the machine has

Planner = Callable[..., Any]


def _module(names: tuple[str, ...]) -> ModuleType:
    for name in names:
        if find_spec(name.rpartition(".")[0]) and find_spec(name):
            return importlib.import_module(name)
    raise ImportError(f"none of {', '.join(names)} exists; correct {Path(__file__).name}")


def planner() -> Planner:
    """Return `load_plan(config_path, config_name, overrides, **options)`, which returns a plan or raises."""
    return _module(PLANNER).load_plan


def replace_planner(make: Callable[[Planner], Planner]) -> None:
    """Replace the planner by `make(load_plan)` for all later imports."""
    module = _module(PLANNER)
    module.load_plan = make(module.load_plan)


def plan_as_json(plan: Any) -> dict[str, Any]:
    """Return the output of `roll-opd plan --json` for a plan."""
    return _module(DESCRIPTION).to_json(plan)


def problems_of(error: Exception) -> list[str] | None:
    """Return the problems of a refused configuration; None for any other error."""
    return getattr(error, "problems", None)


@contextmanager
def plain_machine() -> Iterator[None]:
    """Plan as on a machine with two slots and no GPU, regardless of this machine."""
    answers = {"gpus": 0, "devices": 2, "gpu_memory_gb": None, "has_gpu_driver": False}
    with mock.patch.multiple(_module(MACHINE), **{name: mock.Mock(return_value=of) for name, of in answers.items()}):
        yield
