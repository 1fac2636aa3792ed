"""A teacher whose source is not a Megatron role: all readers of a plan support it, and plan no devices for it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from roll_opd.base.frozen import FrozenDict
from roll_opd.cluster.forkserver.forkserver_start import cold_roles, of_servers
from roll_opd.commands.describe import to_json
from roll_opd.commands.plan_text import objective_text, to_text
from roll_opd.config.plan import RunPlan
from roll_opd.models.device_phases import members_of
from roll_opd.models.memory import estimate_memory
from roll_opd.models.model_info import read_model
from roll_opd.pipelines.check_machine import warnings_here
from roll_opd.pipelines.run_facts import run_facts
from roll_opd.pipelines.settings_history import begun, settings_of
from roll_opd.pipelines.start_roles import chunk_samples, reads_beside_generation
from roll_opd.pipelines.start_run import started
from roll_opd.planner.load_plan import load_plan
from roll_opd.workers.colocation import DeviceScheduler

URL = "http://teacher.example:8000"


@dataclass(frozen=True)
class Elsewhere:
    """A source with the two fields that every source has."""

    name: str
    location: str


def estimated(plan: RunPlan) -> dict[str, Any]:
    return estimate_memory(plan, {name: read_model(Path(role.model.path)) for name, role in plan.roles().items()}, 128)


@pytest.fixture(scope="module")
def plan() -> RunPlan:
    """Return the demo's plan with a teacher of another source."""
    found = load_plan("demo", "onpolicy_distill", [], pure=True)
    source: Any = Elsewhere("teacher", URL)
    found = replace(found, teachers=(replace(found.teachers[0], source=source),))
    return replace(found, memory=FrozenDict(estimated(found)))


READERS: dict[str, Callable[[RunPlan], Any]] = {
    "roles": lambda plan: plan.roles(),
    "frozen roles": lambda plan: plan.frozen_roles(),
    "devices in turns": members_of,
    "memory": estimated,
    "processes": lambda plan: cold_roles(plan, of_servers(plan)),
    "text": to_text,
    "JSON": to_json,
    "objective": objective_text,
    "warnings": warnings_here,
    "settings": settings_of,
    "started models": started,
    "chunks": chunk_samples,
    "scoring during generation": lambda plan: reads_beside_generation(plan, DeviceScheduler(members_of(plan))),
}


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_of_a_plan_accepts_a_source_without_devices(plan: RunPlan, reader: str) -> None:
    READERS[reader](plan)
    whole = replace(plan, objective=replace(plan.objective, opd_objective="full"))
    READERS[reader](whole)


def test_a_source_without_devices_is_no_role(plan: RunPlan) -> None:
    (teacher,) = plan.teachers
    assert teacher.role is teacher.following is teacher.model is None
    assert set(plan.megatron_roles()) == {plan.student.name} and plan.frozen_roles() == []
    assert "teacher" not in to_json(plan)["roles"]
    assert to_json(plan)["routing"]["*"]["teachers"] == ["teacher"]


def test_the_run_record_has_the_location_of_a_source(plan: RunPlan) -> None:
    assert URL in run_facts(plan, begun(plan))["models"].values()
