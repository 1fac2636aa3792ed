"""Convert a `RunPlan` to plain data for `roll-opd plan --json`. `plan_text` writes the plan as text instead."""

from dataclasses import asdict
from typing import Any

from roll_opd.base.frozen import thaw
from roll_opd.config.plan import (
    ExternalPlan,
    FollowingPlan,
    RewardPlan,
    RolloutPlan,
    RunPlan,
    TeacherPlan,
    TrainPlan,
)
from roll_opd.config.schema import FollowKeys, shared
from roll_opd.models.memory import device_memory, fullest
from roll_opd.tracking.secrets import without_secrets

SIZES = ("tp", "pp", "cp", "ep", "dp")
OTHER_TAGS = "*"  # in `routing`: every tag that no teacher and no reward names


def to_json(plan: RunPlan) -> dict[str, Any]:
    """Return the plan as plain data: `mode`, `pipeline`, `roles`, `routing`, `batch`, `objective`, `warnings`, ….

    A role has the keys `strategy, model, devices, tp, pp, cp, ep, dp, tags, opd_kl_coef, optimizer, lora`. A teacher
    also has `context` and `follows_student`. Keys that do not apply are null.

    - `dp`: for the rollout, the number of engines.
    - `memory_bytes_per_rank`: memory of the largest pipeline stage, in bytes.
    - `memory_bytes_of_stages`: parts of the memory of each stage, in bytes.
    - `hub`, `downloads`: only with names on a hub, see `_hub`.
    - `routing`: map from each tag that a teacher or a reward names to its `teachers` and `rewards`. The key "*" stands
      for all other tags.
    """
    return {
        "mode": plan.mode,
        "pipeline": plan.kind,
        "exp_name": plan.exp_name,
        "num_nodes": plan.num_nodes,
        "num_gpus_per_node": plan.devices_per_node,
        "roles": _roles(plan),
        "routing": routing(plan),
        "rewards": {reward.domain: _reward(reward) for reward in plan.rewards},
        "batch": _batch(plan),
        "sampling": {
            "rollout": thaw(asdict(plan.rollout.sampling)) if plan.rollout else None,
            "validation": thaw(asdict(plan.validation.sampling)) if plan.validation and plan.rollout else None,
        },
        "objective": thaw(asdict(plan.objective)),
        "workflow": without_secrets(thaw(asdict(plan.workflow))) if plan.workflow else None,
        "environments": thaw(plan.data.environments) or None,
        "memory_bytes_per_device": {str(device): size for device, size in device_memory(plan).items()},
        "warnings": list(plan.warnings),
        **(_hub(plan) if plan.hub else {}),
    }


def _hub(plan: RunPlan) -> dict[str, Any]:
    """Return the commit of each name on a hub, and the bytes of the weights that a run downloads; null: unknown."""
    return {
        "hub": {name: use.commit for name, use in plan.hub.items()},
        "downloads": {str(one.name): one.bytes or None for one in plan.downloads},
    }


def _roles(plan: RunPlan) -> dict[str, dict[str, Any]]:
    roles: dict[str, dict[str, Any]] = {}
    teachers = {teacher.source.name: teacher for teacher in plan.teachers}
    for name, role in plan.roles().items():
        megatron = "megatron_train" if isinstance(role, TrainPlan) else "megatron_infer"
        teacher = teachers.get(name)
        roles[name] = {
            "strategy": "vllm" if isinstance(role, RolloutPlan) else megatron,
            **{size: getattr(role.layout, size) for size in SIZES},
            "model": role.model.path,
            "dtype": role.model.dtype,
            "devices": list(role.devices),
            "tags": list(teacher.tags) if teacher and teacher.tags is not None else None,
            "opd_kl_coef": teacher.opd_kl_coef if teacher else None,
            "context": asdict(teacher.context) if teacher and teacher.context else None,
            "follows_student": shared(FollowKeys, role) if isinstance(role, FollowingPlan) else None,
            "optimizer": asdict(role.optimizer) if isinstance(role, TrainPlan) else None,
            "lora": asdict(role.lora) if isinstance(role, TrainPlan) and role.lora else None,
            "memory_bytes_per_rank": sum(fullest(plan.memory.get(name, ())).values()),
            "memory_bytes_of_stages": [dict(parts) for parts in plan.memory.get(name, ())],
        }
    for teacher in plan.teachers:
        if isinstance(teacher.source, ExternalPlan):
            roles[teacher.source.name] = _external(teacher, teacher.source)
    return roles


def _external(teacher: TeacherPlan, source: ExternalPlan) -> dict[str, Any]:
    """Return the data of a teacher without devices.

    It has the same keys as other roles, and also the settings of the teacher's source.
    """
    fields = {
        "strategy": "",
        **dict.fromkeys(SIZES, ""),
        "model": "",
        "dtype": "",
        "devices": [],
        "tags": list(teacher.tags) if teacher.tags is not None else None,
        "opd_kl_coef": teacher.opd_kl_coef,
        "context": asdict(teacher.context) if teacher.context else None,
        **dict.fromkeys(("follows_student", "optimizer", "lora")),
        "memory_bytes_per_rank": 0,
        "memory_bytes_of_stages": [],
    }
    return fields | thaw(source.shown)


def _reward(reward: RewardPlan) -> dict[str, Any]:
    filters = {"query_filter": reward.query_filter, "response_filter": reward.response_filter}
    return {
        "worker": reward.terms[0].worker,
        "terms": {term.name: {"worker": term.worker, "weight": term.weight} for term in reward.terms},
        "tags": thaw(reward.tags),
        "world_size": reward.world_size,
        "on_error": reward.on_error,
        **{key: found and {"type": found.type, **found.args} for key, found in filters.items()},
    }


def routing(plan: RunPlan) -> dict[str, dict[str, list[str]]]:
    """Return a map from tags to the names of their teachers and rewards.

    The map has every tag of an environment, and every tag that a teacher or reward names. OTHER_TAGS stands for all
    other tags.
    """
    routed: tuple[TeacherPlan | RewardPlan, ...] = (*plan.teachers, *plan.rewards)
    named = dict.fromkeys([*plan.data.environments, *(tag for one in routed for tag in one.tags or ())])
    routes = {}
    for tag in (*named, OTHER_TAGS):
        routes[tag] = {
            "teachers": [teacher.name for teacher in plan.teachers if teacher.accepts(tag)],
            "rewards": [reward.domain for reward in plan.rewards if reward.accepts(tag)],
        }
    return routes if routed else {}


def _batch(plan: RunPlan) -> dict[str, int | None]:
    warmup = plan.critic.critic_warmup if plan.critic else 0
    updates = plan.student.optimizer.total_steps // (plan.max_steps - warmup)
    return {
        "prompts_per_step": plan.rollout_batch_size,
        "responses_per_prompt": plan.answers_per_prompt,
        "sequences_per_step": plan.sequences_per_step,
        "demonstrations_per_step": plan.demonstrations.rows_per_step if plan.demonstrations else 0,
        "sequences_per_update": plan.student.mini_batch_sequences,
        "updates_per_step": updates,
        "steps": plan.max_steps,
        "updates": plan.student.optimizer.total_steps,
        "prompt_length": plan.data.prompt_length if plan.workflow is None else None,
        "max_new_tokens": plan.rollout.sampling.max_new_tokens if plan.rollout else None,
        "extra_prompts": plan.extra_prompts,
        "max_running_requests": plan.rollout.max_running_requests if plan.rollout else None,
    }
