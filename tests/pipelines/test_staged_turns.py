"""Runs whose roles offload their memory between phases learn the same bits as other runs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from runs import Run
from stage import CRITIC_SCHEDULE, REFERENCE, TEACHER, WITH_CRITIC, Stage, optimizer_of

from roll_opd.cluster.placement import Placement
from roll_opd.config.plan import RunPlan
from roll_opd.inference.plugin import SHARED_MEMORY
from roll_opd.models.device_phases import ALL, members_of
from roll_opd.pipelines.run_workers import RunWorkers
from roll_opd.samples.sample import Sample
from roll_opd.weight_sync.send_weights import make_weight_sync
from roll_opd.workers.actor_group import gathered
from roll_opd.workers.colocation import DeviceScheduler
from roll_opd.workers.sampler import Sampler

SHORT = (
    "deterministic=true",
    "max_steps=2",
    "rollout_batch_size=16",
    "num_return_sequences_in_group=4",
    "eval_steps=1",
    "save_steps=1",
    "max_ckpt_to_keep=null",
    "logged_samples_per_step=64",
    "validation.data_args.file_name=examples/demo/data/val.jsonl",
    "validation.evaluate_teacher=false",
)
ALL_ROLES = (
    TEACHER,
    REFERENCE,
    CRITIC_SCHEDULE,
    "critic_warmup=1",
    "use_opd=true",
    "opd_kl_coef=1",
    "use_kl_loss=true",
    "kl_loss_coef=0.1",
    "actor_infer.device_mapping=[0,1]",
    "actor_train.training_args.gradient_accumulation_steps=1",
)


class Taking:
    """A stage's roles, as a run with `is_offload_states: true` has them."""

    def __init__(self, stage: Stage) -> None:
        self._workers = stage.workers
        self.groups: dict[str, Any] = {}  # the members' own processes

    async def workers(self, plan: RunPlan, placement: Placement, answers: Path) -> RunWorkers:
        there, members = await self._workers(plan, placement, answers), members_of(plan)
        turns = DeviceScheduler(members).everywhere()
        assert plan.rollout is not None
        models = there.scorers
        found = {there.student.plan.name: there.student.group, plan.rollout.name: there.sampler.engines}
        found |= {plan.serving(teacher.plan.source).name: teacher.scorer.group for teacher in models.teachers}
        if there.critic:
            found[there.critic.plan.name] = there.critic.group
        if models.reference:
            found[models.reference.name] = models.reference.group
        joined = {name: turns.join(name, group) for name, group in found.items()}
        self.groups = {member.name: found[member.name] for member in members}
        self.parts = {member.name: ALL[member.kind] for member in members}
        engines = joined[plan.rollout.name]
        student = replace(there.student, group=joined[there.student.plan.name])
        teachers = [
            replace(t, scorer=replace(t.scorer, group=joined[plan.serving(t.plan.source).name]))
            for t in models.teachers
        ]
        reference = models.reference and replace(models.reference, group=joined[models.reference.name])
        return replace(
            there,
            student=student,
            sampler=Sampler(
                engines, make_weight_sync(SHARED_MEMORY, student.group, engines, plan.rollout.model.dtype, 1)
            ),
            critic=there.critic and replace(there.critic, group=joined[there.critic.plan.name]),
            scorers=replace(
                models, teachers=teachers, reference=reference, student=student if models.student else None
            ),
            turns=turns,
        )

    async def asked(self, name: str) -> None:
        await gathered(self.groups[name], "compute_logprobs", [Sample(np.arange(8), 2)], 1.0)

    async def back(self) -> None:
        """Load all memory back, as other runs of the stage expect it."""
        for name, group in self.groups.items():
            await group.call("onload", self.parts[name])


def both(stage: Stage, patch: pytest.MonkeyPatch, name: str, *overrides: str, config: tuple[str, str]) -> list[Run]:
    off = stage.run(*SHORT, *overrides, "is_offload_states=false", config=config, name=f"{name}_off")
    taking = Taking(stage)
    with patch.context() as on:
        on.setattr(stage, "workers", taking.workers)
        run = stage.run(*SHORT, *overrides, "is_offload_states=true", config=config, name=f"{name}_on")
    assert off.code == run.code == 0
    frozen = "reference" if "reference" in taking.groups else "teacher"
    with pytest.raises(ray.exceptions.RayTaskError, match=rf"{frozen} cannot .* are offloaded since the phase"):
        stage.complete(taking.asked(frozen))
    stage.complete(taking.back())
    return [off, run]


def assert_same(off: Run, on: Run) -> None:
    for name in ("metrics.jsonl", "samples.jsonl", "validation_samples.jsonl"):
        assert _timeless(off.rows(name)) == _timeless(on.rows(name)), name
    files = sorted(file.relative_to(off.path) for file in (off.path / "checkpoints").rglob("*.safetensors"))
    assert len(files) >= 2
    for file in files:
        assert (off.path / file).read_bytes() == (on.path / file).read_bytes(), file


def _timeless(rows: list[dict]) -> list[str]:
    kept = [{key: value for key, value in row.items() if not key.startswith(("time/", "system/"))} for row in rows]
    return [json.dumps(row, sort_keys=True) for row in kept]


@pytest.mark.nightly
def test_all_roles_on_the_same_devices(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Student, critic, teacher, reference policy and engines; validation and a checkpoint in each step."""
    overrides = (*optimizer_of("actor_train"), *ALL_ROLES)
    assert_same(*both(stage, monkeypatch, "turns", *overrides, config=WITH_CRITIC))
