"""Shows a `RunPlan`: a text for people and a dict for programs. Used by `roll-opd plan`."""

from typing import Any

from roll_opd.config.plan import MegatronPlan, RunPlan
from roll_opd.config.ranges import short_devices

MODES = {
    "pure": "pure on-policy distillation",
    "mixed": "on-policy distillation with a reward",
    "rl": "reinforcement learning",
}


def to_json(plan: RunPlan) -> dict[str, Any]:
    """Return the plan as plain data: `mode`, `pipeline`, `roles`, `batch`, `objective`, `warnings`.

    A role has `strategy, model, devices, tp, pp, cp, ep, dp, tags, opd_kl_coef, memory_bytes_per_rank`;
    what does not apply to it is null. For the rollout, `dp` is the number of engines.
    """
    student, rollout = plan.student, plan.rollout
    roles = {student.name: _megatron(plan, student, "megatron_train")}
    roles[rollout.name] = {
        "strategy": "vllm",
        "model": rollout.model.path,
        "dtype": rollout.model.dtype,
        "devices": list(rollout.devices),
        "tp": rollout.tp,
        "pp": 1,
        "cp": 1,
        "ep": 1,
        "dp": rollout.engines,
        "tags": None,
        "opd_kl_coef": None,
        "memory_bytes_per_rank": _memory(plan, rollout.name),
    }
    for teacher in plan.teachers:
        roles[teacher.worker.name] = {
            **_megatron(plan, teacher.worker, "megatron_infer"),
            "tags": None if teacher.tags is None else list(teacher.tags),
            "opd_kl_coef": teacher.opd_kl_coef,
        }
    return {
        "mode": plan.mode,
        "pipeline": plan.pipeline,
        "exp_name": plan.exp_name,
        "roles": roles,
        "batch": _batch(plan),
        "objective": {
            "adv_estimator": plan.objective.adv_estimator,
            "policy_loss": plan.objective.policy_loss,
            "loss_agg_mode": plan.objective.loss_agg_mode,
            "opd_kl_discount": plan.objective.opd_kl_discount,
            "recompute_old_logprobs": plan.objective.recompute_old_logprobs,
        },
        "warnings": list(plan.warnings),
    }


def _megatron(plan: RunPlan, role: MegatronPlan, strategy: str) -> dict[str, Any]:
    layout = role.layout
    return {
        "strategy": strategy,
        "model": role.model.path,
        "dtype": role.model.dtype,
        "devices": list(role.devices),
        "tp": layout.tp,
        "pp": layout.pp,
        "cp": layout.cp,
        "ep": layout.ep,
        "dp": layout.dp,
        "tags": None,
        "opd_kl_coef": None,
        "memory_bytes_per_rank": _memory(plan, role.name),
    }


def _memory(plan: RunPlan, name: str) -> int:
    return sum(plan.memory.get(name, {}).values())


def _batch(plan: RunPlan) -> dict[str, int]:
    updates = plan.objective.ppo_epochs * (plan.sequences_per_step // plan.student.mini_batch_sequences)
    return {
        "prompts_per_step": plan.rollout_batch_size,
        "responses_per_prompt": plan.rollout.sampling.n,
        "sequences_per_step": plan.sequences_per_step,
        "sequences_per_update": plan.student.mini_batch_sequences,
        "updates_per_step": updates,
        "steps": plan.max_steps,
        "updates": plan.student.optimizer.total_steps,
        "prompt_length": plan.data.prompt_length,
        "max_new_tokens": plan.rollout.sampling.max_new_tokens,
    }


def to_text(plan: RunPlan) -> str:
    """Return the plan as text: roles, devices, batch arithmetic, memory, objective, warnings."""
    content = to_json(plan)
    sections = [
        f"{plan.exp_name}: {MODES[plan.mode]}, {plan.pipeline} pipeline, {plan.num_nodes} node(s) x"
        f" {plan.devices_per_node} devices",
        _role_table(content["roles"]),
        "Devices\n" + "\n".join(_sharing(content["roles"])),
        "Batch\n" + "\n".join(_batch_lines(plan, content["batch"])),
        "Memory a rank (estimate)\n" + "\n".join(_memory_lines(plan)),
        "Objective\n" + "\n".join(_objective_lines(plan)),
    ]
    if plan.warnings:
        sections.append("Warnings\n" + "\n".join(f"  - {text}" for text in plan.warnings))
    return "\n\n".join(sections)


def _role_table(roles: dict[str, dict[str, Any]]) -> str:
    head = ["role", "strategy", "model", "dtype", "devices", "tp", "pp", "cp", "ep", "dp", "coef", "tags"]
    rows = []
    for name, role in roles.items():
        sizes = [str(role[key]) for key in ("tp", "pp", "cp", "ep", "dp")]
        coefficient = "" if role["opd_kl_coef"] is None else f"{role['opd_kl_coef']:g}"
        tags = ", ".join(role["tags"] or []) or ("all" if role["opd_kl_coef"] is not None else "")
        model = "/".join(role["model"].split("/")[-2:])
        devices = short_devices(role["devices"])
        rows.append([name, role["strategy"], model, role["dtype"], devices, *sizes, coefficient, tags])
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]]
    return "\n".join(f"  {line.rstrip()}" for line in lines)


def _sharing(roles: dict[str, dict[str, Any]]) -> list[str]:
    """Say which roles sit on which devices, one line for each set of devices with the same roles."""
    owners: dict[int, list[str]] = {}
    for name, role in roles.items():
        for device in role["devices"]:
            owners.setdefault(device, []).append(name)
    groups: dict[tuple[str, ...], list[int]] = {}
    for device, names in sorted(owners.items()):
        groups.setdefault(tuple(names), []).append(device)
    return [
        f"  {short_devices(devices)}: {', '.join(names)}" + (" (take turns)" if len(names) > 1 else "")
        for names, devices in groups.items()
    ]


def _batch_lines(plan: RunPlan, batch: dict[str, int]) -> list[str]:
    limits = plan.student.train_limits
    micro = f"{limits.tokens} tokens" if limits.tokens else f"{limits.sequences} sequences"
    return [
        f"  {batch['prompts_per_step']} prompts x {batch['responses_per_prompt']} responses ="
        f" {batch['sequences_per_step']} sequences a step, {batch['updates_per_step']} update(s) of"
        f" {batch['sequences_per_update']} a step",
        f"  micro-batches of {micro} on each of {plan.student.layout.dp} data-parallel rank(s)",
        f"  {batch['steps']} steps, {batch['updates']} updates; prompt <= {batch['prompt_length']},"
        f" response <="
        f" {batch['max_new_tokens']} tokens",
    ]


def _memory_lines(plan: RunPlan) -> list[str]:
    lines = []
    for name, parts in plan.memory.items():
        detail = ", ".join(f"{part} {readable_bytes(size)}" for part, size in parts.items())
        lines.append(f"  {name}: {readable_bytes(sum(parts.values()))} ({detail})")
    return lines


def _objective_lines(plan: RunPlan) -> list[str]:
    objective, optimizer = plan.objective, plan.student.optimizer
    again = "recomputed" if objective.recompute_old_logprobs else "taken during the update (one update a rollout)"
    return [
        f"  {objective.adv_estimator}, {objective.policy_loss} loss, {objective.loss_agg_mode}, discount"
        f" {objective.opd_kl_discount:g}; old log-probs {again}",
        f"  AdamW lr {optimizer.learning_rate:g} ({optimizer.lr_scheduler_type},"
        f" {optimizer.warmup_steps} warm-up),"
        f" betas {optimizer.adam_beta1:g} {optimizer.adam_beta2:g}, weight decay"
        f" {optimizer.weight_decay:g}, clip"
        f" {optimizer.max_grad_norm:g}",
    ]


def readable_bytes(size: float) -> str:
    """Write a number of bytes with a unit."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
