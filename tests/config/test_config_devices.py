"""Default devices of roles: the student gets all devices, and other roles get the student's devices."""

import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roll_opd.base import hardware
from roll_opd.config.plan import RunPlan
from roll_opd.models.memory import device_memory

Plan = Callable[..., RunPlan]
ROLES = ("student_train", "student_infer", "teacher")
UNWRITTEN: dict[str, Any] = {f"{role}.device_mapping": ... for role in ROLES}
UNWRITTEN["student_train.training_args.gradient_accumulation_steps"] = 1  # one update a step on up to four devices


def devices(run: RunPlan) -> list[tuple[int, ...]]:
    assert run.rollout is not None
    return [run.student.devices, run.rollout.devices, run.teachers[0].source.devices]


@pytest.mark.parametrize("nodes, per_node", [(1, 2), (1, 4), (2, 2)])
def test_all_roles_have_all_devices(plan: Plan, nodes: int, per_node: int) -> None:
    run = plan({**UNWRITTEN, "num_nodes": nodes, "num_gpus_per_node": per_node})
    every = tuple(range(nodes * per_node))
    assert devices(run) == [every] * 3
    assert not any("device_mapping" in warning for warning in run.warnings)


def test_others_take_turns_with_the_student(plan: Plan) -> None:
    run = plan({**UNWRITTEN, "student_train.device_mapping": "[2,3]"})
    assert devices(run) == [(2, 3)] * 3
    said = [
        f"{role}.device_mapping: is not written, so this role shares the student's devices 2-3" for role in ROLES[1:]
    ]
    assert all(any(warning.startswith(text) for warning in run.warnings) for text in said)


@pytest.mark.parametrize("gpus", [0, 1, 4])
def test_a_node_has_what_the_machine_has(
    plan: Plan, gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho asked >> {tool}.log\nfor gpu in $(seq {gpus}); do echo 81920; done\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    # a teacher of one device a copy fits any number
    unwritten = {**UNWRITTEN, "num_gpus_per_node": ..., "teacher.strategy_args.strategy_config": {}}
    assert plan(unwritten).devices_per_node == (gpus or hardware.SLOTS)
    written = {"student_train.device_mapping": "[0,1]"}  # then a node is as large as ROLL's
    assert plan({**unwritten, **written}).devices_per_node == 8
    assert Path(f"{tool}.log").read_text() == "asked\n"  # once, whatever asks


def test_one_core_is_one_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3})
    assert hardware.devices() == 1
    assert hardware.gpu_memory_gb() is None


def test_teachers_with_the_same_weights_are_loaded_once(plan: Plan, values: dict[str, Any]) -> None:
    """Also devices, layout and limits must be the same; tags and coefficients may differ."""
    values["is_offload_states"] = False  # or those that share devices would be there one after another
    once, single = device_memory(plan()), values["teacher"]
    special = {**single, "tag_included": ["math"], "opd_kl_coef": 0.25}
    values["teacher"] = {"general": single, "special": special}
    assert device_memory(plan()) == once
    values["teacher"]["coarse"] = {**single, "model_args": {**single["model_args"], "dtype": "bf16"}}
    run = plan()
    serving = {teacher.name: run.serving(teacher.source).name.removeprefix("teacher.") for teacher in run.teachers}
    assert serving == {"general": "general", "special": "general", "coarse": "coarse"}
    assert run.serving(run.student) is run.student
    assert sum(device_memory(run).values()) > sum(once.values())


def test_an_engine_is_inside_a_node(plan: Plan, problems: Callable[..., list[str]]) -> None:
    tp2 = {"student_infer.strategy_args.strategy_config.tensor_parallel_size": 2, "num_nodes": 2}
    inside = plan({**tp2, "student_infer.device_mapping": "[2,3,4,5]"})
    assert inside.rollout and inside.rollout.engines == 2
    apart = {**tp2, "student_train.device_mapping": "[3,4]", "student_infer.device_mapping": "[3,4]"}
    apart["teacher.device_mapping"] = "[0,1]"
    (problem,) = problems(apart)
    assert "student_infer.device_mapping" in problem
    assert (
        "devices 3-4 are on several nodes of 4 devices each, which is not available yet; choose devices of a single"
        in problem
    )


def test_a_tensor_parallel_group_over_nodes_is_warned_of(plan: Plan) -> None:
    run = plan({"num_nodes": 2, "teacher.device_mapping": "[3,4]"})
    assert any("teacher.device_mapping" in said and "devices 3-4 are on several nodes" in said for said in run.warnings)
    assert not any("several nodes" in said for said in plan({"teacher.device_mapping": "[4,5]"}).warnings)
