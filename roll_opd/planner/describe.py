"""Shows a `RunPlan`: a text for people and a dict for programs. Used by `roll-opd plan`."""

import sys
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar

from roll_opd.base.frozen import thaw
from roll_opd.base.terminal import table, wrapped
from roll_opd.config.plan import (
    CorrectionPlan,
    FollowingPlan,
    LoraPlan,
    RewardPlan,
    RolloutPlan,
    RunPlan,
    TeacherPlan,
    TrainPlan,
)
from roll_opd.config.schema import (
    ContextKeys,
    CriticKeys,
    DistillationKeys,
    FollowKeys,
    ObjectiveKeys,
    Section,
    keys_of,
    shared,
)
from roll_opd.models.device_phases import members_on_gpus
from roll_opd.models.memory import device_memory, fullest, readable_bytes
from roll_opd.planner.device_mapping import short_devices
from roll_opd.tracking.secrets import without_secrets

T = TypeVar("T")
SHOWN = {  # keys of the objective that its formulas show
    *keys_of(DistillationKeys),
    *("gamma", "lambd", "whiten_rewards", "whiten_advantages", "norm_mean_type", "norm_std_type", "reward_clip"),
    *("advantage_clip", "pg_clip", "pg_clip_low", "pg_clip_high", "opd_kl_discount"),
}
SIZES = ("tp", "pp", "cp", "ep", "dp")
OTHER_TAGS = "*"  # in `routing`: every tag that no teacher and no reward names


def to_json(plan: RunPlan) -> dict[str, Any]:
    """Return the plan as plain data: `mode`, `pipeline`, `roles`, `routing`, `batch`, `objective`, `warnings`, ….

    A role has `strategy, model, devices, tp, pp, cp, ep, dp, tags, opd_kl_coef, optimizer, lora`, of teachers `context`
    and `follows_student`, and memory in bytes, `memory_bytes_per_rank` (of the stage that needs most) and
    `memory_bytes_of_stages` (the parts of each); what does not apply to it is null. For the rollout, `dp` is the number
    of engines. `routing` maps each tag that a teacher or a reward names, and "*" for all others, to its `teachers` and
    `rewards`.
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
    return roles


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
    """Return tag -> {teachers, rewards} for every tag that is named or played, and OTHER_TAGS for the rest."""
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


def to_text(plan: RunPlan, width: int | None = None) -> str:
    """Return the plan as text: roles, devices, batch arithmetic, memory, objective, warnings.

    Lines are broken where they are longer than `width`; None: nowhere.
    """
    content = to_json(plan)
    nodes = f"{plan.num_nodes} node(s) x {plan.devices_per_node} devices"
    sections = {
        f"{plan.exp_name}: {plan.title}, {plan.kind} pipeline, {nodes}\n": _role_lines(
            content["roles"], width or sys.maxsize
        ),
        "Devices": _sharing(content["roles"]),
        "Routing": _routing_lines(plan, content),
        "Frozen models": _frozen_lines(plan),
        "Batch": _batch_lines(plan, content["batch"]),
        "Memory a rank (estimate)": [*_memory_lines(plan), *_device_lines(plan)],
        "Objective": _objective_lines(plan),
        "Warnings": [f"  - {text}" for text in plan.warnings],
    }
    text = "\n\n".join("\n".join([title, *lines]) for title, lines in sections.items() if lines)
    return wrapped(text, width) if width else text


def _role_lines(roles: dict[str, dict[str, Any]], width: int) -> list[str]:
    head = ["role", "strategy", "model", "dtype", "devices", *SIZES, "coef", "tags"]
    rows = []
    for name, role in roles.items():
        sizes = [str(role[key]) for key in SIZES]
        coefficient = "" if role["opd_kl_coef"] is None else f"{role['opd_kl_coef']:g}"
        tags = ", ".join(role["tags"] or []) or ("all" if role["opd_kl_coef"] is not None else "")
        model = "/".join(role["model"].split("/")[-2:])
        devices = short_devices(role["devices"])
        rows.append([name, role["strategy"], model, role["dtype"], devices, *sizes, coefficient, tags])
    return table([head, *rows], width)


def _sharing(roles: dict[str, dict[str, Any]]) -> list[str]:
    """Say which roles sit on which devices, one line for each set of devices with the same roles."""
    owners: dict[int, list[str]] = {}
    for name, role in roles.items():
        for device in role["devices"]:
            owners.setdefault(device, []).append(name)
    groups = _alike({device: tuple(names) for device, names in sorted(owners.items())})
    turns = {names: " (take turns)" if len(names) > 1 else "" for names in groups}
    return [f"  {devices}: {', '.join(names)}{turns[names]}" for names, devices in groups.items()]


def _alike(of_devices: Mapping[int, T]) -> dict[T, str]:
    """Return each value with the devices that have it, written in short."""
    groups: dict[T, list[int]] = {}
    for device, value in of_devices.items():
        groups.setdefault(value, []).append(device)
    return {value: short_devices(devices) for value, devices in groups.items()}


def _batch_lines(plan: RunPlan, batch: dict[str, int | None]) -> list[str]:
    limits = plan.student.train_limits
    micro = f"{limits.tokens} tokens" if limits.tokens else f"{limits.sequences} sequences"
    what = "rows" if plan.rollout is None else "groups" if plan.is_agentic else "prompts"
    samples = "trajectories" if plan.is_agentic else "responses"
    longest = f"prompt <= {batch['prompt_length']}, response <= {batch['max_new_tokens']} tokens"
    if plan.rollout is None:
        longest = f"prompt and answer <= {batch['prompt_length']} tokens"
    if plan.rollout and plan.workflow:
        longest = f"prompt and response <= {plan.rollout.max_model_len} tokens together"
    lines = [
        f"  {batch['prompts_per_step']} {what} x {batch['responses_per_prompt']} {samples} ="
        f" {batch['sequences_per_step']} sequences a step, {batch['updates_per_step']} update(s) of"
        f" {batch['sequences_per_update']} a step",
        f"  micro-batches of {micro} on each of {plan.student.layout.dp} data-parallel rank(s)",
        f"  {batch['steps']} steps, {batch['updates']} updates; {longest}",
    ]
    if plan.demonstrations:
        lines.insert(
            1,
            f"  beside them {plan.demonstrations.rows_per_step} demonstrations a step,"
            f" {plan.demonstrations.rows_per_update} in each update",
        )
    if plan.workflow:
        kept = plan.workflow
        lines.append(
            f"  by workflow {kept.workflow}, in {kept.workflow_workers} x {kept.workflow_concurrency} runs at once"
        )
        for model in kept.auxiliary_models:
            place = model.engine.model.path if model.engine else f"{model.model_name} at {model.base_url}"
            lines.append(f"  which may ask {model.name}, {place}")
    if plan.extra_prompts:
        lines.append(f"  up to {plan.extra_prompts} more prompts under way; what is not needed is aborted")
    if plan.rollout and plan.rollout.max_running_requests:
        lines.append(f"  at most {plan.rollout.max_running_requests} requests under way")
    return lines


def _routing_lines(plan: RunPlan, content: dict[str, Any]) -> list[str]:
    lines = []
    for tag, route in content["routing"].items():
        shown = "every other tag" if tag == OTHER_TAGS and len(content["routing"]) > 1 else tag
        shown = "every tag" if shown == OTHER_TAGS else shown
        teachers = ", ".join(route["teachers"]) or ("none" if plan.teachers else "")
        rewards = ", ".join(route["rewards"]) or "none"
        lines.append(f"  {shown}: " + (f"teachers {teachers}; " if plan.teachers else "") + f"rewards {rewards}")
    for domain, reward in content["rewards"].items():
        filters = [
            f"{key} " + " ".join(str(part) for pair in reward[key].items() for part in pair if part != "type")
            for key in ("query_filter", "response_filter")
            if reward[key]
        ]
        terms = " + ".join(
            ("" if term["weight"] == 1 else f"{term['weight']:g} * ") + term["worker"]
            for term in reward["terms"].values()
        )
        lines.append(f"  rewards.{domain}: {terms} x {reward['world_size']}" + "".join(f", {f}" for f in filters))
    return lines


def _frozen_lines(plan: RunPlan) -> list[str]:
    """Say what teachers read beside the student's prompt, and which frozen models are the student itself."""
    lines = []
    for teacher in plan.teachers:
        if context := teacher.context:
            texts = {name: getattr(context, name) for name in keys_of(ContextKeys)}
            read = ", ".join(f"{name} {text!r}" for name, text in texts.items() if text is not None)
            lines.append(f"  {teacher.name} reads {read}; at most {context.prompt_length} tokens before a response")
        if teacher.following:
            lines.append(f"  {teacher.name} is the student, {_age(teacher.following)}")
    bases = [role for role in plan.frozen_roles() if plan.is_base(role)]
    return lines + [f"  {role.name} is the student without its adapter" for role in bases]


def _age(worker: FollowingPlan) -> str:
    if worker.is_live:
        return "as it is in each step"
    steps = "every step" if worker.update_interval == 1 else f"every {worker.update_interval} steps"
    if not worker.ema_decay:
        return f"as it was at most {worker.update_interval} steps ago"
    return (
        f"as a moving average: {steps}, {worker.ema_decay:g} of the average and {1 - worker.ema_decay:g} of the student"
    )


def _memory_lines(plan: RunPlan) -> list[str]:
    """Write what a rank of each role needs, by part; of several stages, what each needs and the fullest one's parts."""
    lines = []
    for name, stages in plan.memory.items():
        parts = fullest(stages)
        text = ", ".join(f"{part} {readable_bytes(size)}" for part, size in parts.items())
        lines.append(f"  {name}: {readable_bytes(sum(parts.values()))} ({text})")
        if "kv_cache" in parts:
            lines.append("    kv_cache: of all sequences at once; vLLM queues those that gpu_memory_utilization lacks")
        if len(stages) > 1:
            sizes = ", ".join(readable_bytes(sum(stage.values())) for stage in stages)
            lines.append(f"    stages, first to last: {sizes}")
    return lines


def _device_lines(plan: RunPlan) -> list[str]:
    """Write what the roles on a device need together, one line for each amount."""
    limit = int(plan.device_memory_gb * 2**30) if plan.device_memory_gb else None
    needs = device_memory(plan, limit)
    of = f" of {plan.device_memory_gb:g} GiB" if plan.device_memory_gb else ""
    lines = [f"    {devices}: {readable_bytes(size)}{of}" for size, devices in _alike(needs).items()]
    if members_on_gpus(plan):
        how = "on GPUs roles that share one take turns: what the phase that needs most has there at once"
    else:
        how = "all weights, states and caches stay; activations of one role at a time"
    return [f"  a device ({how}):", *lines]


def objective_text(plan: RunPlan) -> str:
    """Return what is optimised, a line each, as `to_text` does."""
    return "\n".join(line.strip() for line in _objective_lines(plan))


def _objective_lines(plan: RunPlan) -> list[str]:
    objective, critics = plan.objective, [plan.critic] if plan.critic else []
    again = "recomputed" if objective.recompute_old_logprobs else "taken during the update (one update a rollout)"
    of_rollouts = [
        f"  advantage = {_advantage(plan)}",
        f"  {objective.adv_estimator}, {objective.policy_loss} loss, {objective.loss_agg_mode}, discount"
        f" {objective.opd_kl_discount:g}; old log-probs {again}",
        *_distillation_lines(plan),
        *([f"  init_kl_coef {objective.init_kl_coef:g}: of the token-level KL"] if objective.init_kl_coef else []),
        *_other_lines(objective, ObjectiveKeys),
        *_correction_lines(objective.correction),
        *[line for critic in critics for line in _other_lines(critic, CriticKeys)],
    ]
    arguments = ", ".join(f"{name} {value}" for name, value in objective.policy_loss_args.items())
    of_rows = [f"  {objective.policy_loss} loss{f' ({arguments})' if arguments else ''}, {objective.loss_agg_mode}"]
    return [
        *(of_rows if plan.rollout is None else of_rollouts),
        f"  {_optimizer(plan.student)}",
        *([f"  {_lora(plan.student.lora)}"] if plan.student.lora else []),
        *[f"  critic: {_optimizer(critic)}, mini-batches of {critic.mini_batch_sequences}" for critic in critics],
    ]


def _lora(lora: LoraPlan) -> str:
    begun = f", beginning as {lora.path}" if lora.path else ""
    return f"LoRA of rank {lora.rank}, alpha {lora.alpha:g}, on {', '.join(lora.targets)}{begun}"


def _optimizer(learner: TrainPlan) -> str:
    args = learner.optimizer
    return (
        f"AdamW lr {args.learning_rate:g} ({args.lr_scheduler_type}, {args.warmup_steps} warm-up), betas"
        f" {args.adam_beta1:g} {args.adam_beta2:g}, weight decay {args.weight_decay:g}, clip {args.max_grad_norm:g}"
    )


def _advantage(plan: RunPlan) -> str:
    """Write the advantage as a formula, with its coefficients."""
    objective = plan.objective
    taught = plan.advantage_teachers
    teachers = " ".join(f"- {teacher.opd_kl_coef:g} * reverse_kl({teacher.name})" for teacher in taught)
    clip = f", clipped to +-{objective.advantage_clip:g}" if objective.advantage_clip else ""
    if plan.mode == "pure":
        return teachers + clip if teachers else "0 (the teacher's part is in the loss)"
    names = {"group": "tag"} if objective.reward_groups == "tag" else {}
    mean, std = (names.get(level or "", level) for level in (objective.norm_mean_type, objective.norm_std_type))
    steps = [
        f"mean by {mean}" if mean else "",
        f"std by {std}" if std else "",
        "held within {:g} and {:g}".format(*objective.reward_bounds) if objective.reward_bounds else "",
        f"clipped to +-{objective.reward_clip:g}" if objective.reward_clip else "",
        "whitened" if objective.whiten_rewards else "",
    ]
    reward = ", ".join(["reward", *filter(None, steps)])
    whitened = ", whitened" if objective.whiten_advantages else ""
    discounts = f"gamma {objective.gamma:g}" + (f", lambda {objective.lambd:g}" if plan.critic else "")
    shaped = f"{objective.adv_estimator}({reward}; {discounts}){whitened}"
    by_domain = " of each reward domain" if len(plan.rewards) > 1 else ""
    return f"{shaped}{by_domain} {teachers}".rstrip() + clip


def _distillation_lines(plan: RunPlan) -> list[str]:
    objective = plan.objective
    if objective.opd_objective == "sampled":
        return []
    parameter = {"jsd": f" (beta {objective.opd_jsd_beta:g})"}.get(objective.opd_divergence, "")
    if objective.opd_divergence.startswith("skewed"):
        parameter = f" (alpha {objective.opd_skew_alpha:g})"
    over = f"the whole vocabulary ({objective.opd_vocab_size} tokens)"
    if objective.opd_objective == "topk":
        over = f"the {objective.opd_topk_source}'s {objective.opd_topk} most likely tokens and the tail"
    terms = " + ".join(
        f"{teacher.opd_kl_coef:g} * {objective.opd_divergence}({teacher.name})" for teacher in plan.teachers
    )
    return [f"  loss + {terms}{parameter}, over {over}"]


def _other_lines(part: Any, keys: type[Section]) -> list[str]:
    """Return a line for each key of `keys` that is not shown elsewhere and differs from its default."""
    lines, switches = [], {"kl_penalty": "init_kl_coef", "kl_horizon": "target_kl"}
    for item in fields(keys):
        value = getattr(part, item.name)
        is_read = switches.get(item.name) is None or getattr(part, switches[item.name])
        if value != item.default and item.name not in SHOWN and is_read:
            lines.append(f"  {item.name} {value}: {item.metadata['meaning']}")
    return lines


def _correction_lines(correction: CorrectionPlan | None) -> list[str]:
    if correction is None:
        return []
    lines = []
    if correction.weight:
        bounds = _bounds(correction.low, correction.high)
        lines.append(f"  policy loss * {correction.weight} weight, train / infer of each {correction.level}{bounds}")
    lines += [
        f"  without tokens whose {rule.measure} of train and infer, by {rule.level}, is not"
        f"{_bounds(rule.low, rule.high)}"
        for rule in correction.filters
    ]
    if correction.negatives_delta:
        lines.append(f"  without negative advantages where infer - train is above {correction.negatives_delta:g}")
    return lines


def _bounds(low: float | None, high: float | None) -> str:
    return ("" if low is None else f" from {low:g}") + ("" if high is None else f" up to {high:g}")
