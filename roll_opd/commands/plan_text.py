"""Write a `RunPlan` as the text that `roll-opd plan` prints."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from roll_opd.base.hub import name_of, readable
from roll_opd.base.terminal import table, wrapped
from roll_opd.commands.describe import OTHER_TAGS, SIZES, to_json
from roll_opd.config.plan import AuxiliaryPlan, CorrectionPlan, RunPlan, TrainPlan
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
from roll_opd.rewards.reward_registry import REWARDS
from roll_opd.rollout.staleness import Pace

T = TypeVar("T")
SHOWN = {  # keys of the objective that appear in its formulas
    *keys_of(DistillationKeys),
    *("gamma", "lambd", "whiten_rewards", "whiten_advantages", "norm_mean_type", "norm_std_type", "reward_clip"),
    *("advantage_clip", "pg_clip", "pg_clip_low", "pg_clip_high", "opd_kl_discount"),
}
MORE_OF_BATCH = ("demonstrations_per_step", "extra_prompts", "max_running_requests")
READ_WITH = {"kl_penalty": "init_kl_coef", "kl_horizon": "target_kl"}  # key -> the key without which it has no effect


def to_text(plan: RunPlan, width: int | None = None) -> str:
    """Return the plan as text.

    The text has sections for the roles, the devices, the batch arithmetic, the memory, the objective and the warnings.

    Args:
        width: lines longer than this are wrapped; None means that no line is wrapped.
    """
    content = to_json(plan)
    nodes = f"{plan.num_nodes} node(s) x {plan.devices_per_node} devices"
    title = f"{plan.heading}, {nodes}\n"
    sections = {
        title: _role_lines(content["roles"], width or sys.maxsize),
        "Devices": _sharing(content["roles"]),
        "Routing": _routing_lines(content),
        "Frozen models": _frozen_lines(plan),
        "Hub": _hub_lines(plan),
        "Batch": _batch_lines(plan, content["batch"]),
        "Memory a rank (estimate)": [*_memory_lines(plan), *_device_lines(plan)],
        "FLOPs per token of the longest sequence in a forward pass (a training pass has three times as many)": [
            f"{name}: {flops / 1e9:.4g} GFLOP" for name, flops in plan.flops.items()
        ],
        "Objective": _objective_lines(plan),
        "Warnings": [f"- {text}" for text in plan.warnings],
    }
    text = "\n\n".join("\n  ".join([head, *lines]) for head, lines in sections.items() if lines)
    return wrapped(text, width) if width else text


def _role_lines(roles: dict[str, dict[str, Any]], width: int) -> list[str]:
    head = ["role", "strategy", "model", "dtype", "devices", *SIZES, "coef", "tags"]
    rows = []
    for name, role in roles.items():
        sizes = [str(role[key]) for key in SIZES]
        coefficient = "" if role["opd_kl_coef"] is None else f"{role['opd_kl_coef']:g}"
        tags = ", ".join(role["tags"] or []) or ("all" if role["opd_kl_coef"] is not None else "")
        path = role["model"]
        model = path if "://" in path else name_of(Path(path)) or "/".join(path.split("/")[-2:])
        devices = short_devices(role["devices"])
        rows.append([name, role["strategy"], model, role["dtype"], devices, *sizes, coefficient, tags])
    return table([head, *rows], width - 2, indent=0)


def _hub_lines(plan: RunPlan) -> list[str]:
    """Return a line for each name on the hub: its commit, and what a run downloads."""
    downloads = {str(one.name): one for one in plan.downloads}
    lines = []
    for name, use in plan.hub.items():
        text = use.reading or "in the cache"
        if one := downloads.get(name):
            text = f"a run downloads its weights{f', {readable(one.bytes)}' if one.sizes else ''}"
        lines.append(f"{name}: commit {use.commit[:8]}, {text}")
    return lines


def _sharing(roles: dict[str, dict[str, Any]]) -> list[str]:
    """Return one line for each set of devices that run the same roles."""
    owners: dict[int, tuple[str, ...]] = {}
    for name, role in roles.items():
        for device in role["devices"]:
            owners[device] = (*owners.get(device, ()), name)
    groups = _alike(dict(sorted(owners.items())))
    return [
        f"{devices}: {', '.join(names)}{' (take turns)' if len(names) > 1 else ''}" for names, devices in groups.items()
    ]


def _alike(of_devices: Mapping[int, T]) -> dict[T, str]:
    """Return a map from each value to the devices that have this value.

    The devices are written in the form of `short_devices`.
    """
    groups: dict[T, list[int]] = {}
    for device, value in of_devices.items():
        groups.setdefault(value, []).append(device)
    return {value: short_devices(devices) for value, devices in groups.items()}


def _settings(values: Mapping[str, Any]) -> str:
    """Return the names and values as text: "name value, name value, ..."."""
    shown = {name: f"{value:g}" if type(value) is float else value for name, value in values.items()}
    return ", ".join(f"{name} {value}" for name, value in shown.items())


def _batch_lines(plan: RunPlan, batch: dict[str, int | None]) -> list[str]:
    limits = plan.student.train_limits
    micro = f"{limits.tokens} tokens" if limits.tokens else f"{limits.sequences} sequences"
    unit = "rows" if plan.rollout is None else "groups" if plan.is_agentic else "prompts"
    samples = "trajectories" if plan.is_agentic else "responses"
    longest = f"prompt <= {batch['prompt_length']}, response <= {batch['max_new_tokens']} tokens"
    if plan.rollout is None:
        longest = f"prompt and answer <= {batch['prompt_length']} tokens"
    elif plan.workflow:
        longest = f"prompt and response <= {plan.rollout.max_model_len} tokens together"
    more: dict[str, Any] = {key: batch[key] for key in MORE_OF_BATCH}
    if plan.demonstrations:
        more["demonstrations_per_update"] = plan.demonstrations.rows_per_update
    if plan.workflow:
        names = ("workflow", "workflow_workers", "workflow_concurrency")
        models = ", ".join(f"{model.name} ({_place(model)})" for model in plan.workflow.auxiliary_models)
        more |= {name: getattr(plan.workflow, name) for name in names} | {"auxiliary_models": models}
    lines = [
        f"{batch['prompts_per_step']} {unit} x {batch['responses_per_prompt']} {samples} ="
        f" {batch['sequences_per_step']} sequences per step, in {batch['updates_per_step']} update(s) of"
        f" {batch['sequences_per_update']}",
        f"micro-batches of {micro} on each of {plan.student.layout.dp} data-parallel rank(s)",
        f"{batch['steps']} steps, {batch['updates']} updates; {longest}",
    ]
    written = {name: value for name, value in more.items() if value}
    return [*lines, _settings(written)] if written else lines


def _place(model: AuxiliaryPlan) -> str:
    return model.engine.model.path if model.engine else f"{model.model_name} at {model.base_url}"


def _routing_lines(content: dict[str, Any]) -> list[str]:
    lines, routes = [], content["routing"]
    has_teachers = any(role["opd_kl_coef"] is not None for role in content["roles"].values())
    for tag, route in routes.items():
        shown = tag if tag != OTHER_TAGS else "every other tag" if len(routes) > 1 else "every tag"
        teachers = f"teachers {', '.join(route['teachers']) or 'none'}; " if has_teachers else ""
        lines.append(f"{shown}: {teachers}rewards {', '.join(route['rewards']) or 'none'}")
    for domain, reward in content["rewards"].items():
        weights = [(term["worker"], term["weight"]) for term in reward["terms"].values()]
        terms = " + ".join(worker if weight == 1 else f"{weight:g} * {worker}" for worker, weight in weights)
        filters = {key: dict(reward[key]) for key in ("query_filter", "response_filter") if reward[key]}
        passed = "".join(f", {key} {found.pop('type')} {_settings(found)}" for key, found in filters.items())
        lines.append(f"rewards.{domain}: {terms} x {reward['world_size']}{passed}")
        replaced = {worker: REWARDS.replacement(worker) for worker, _ in weights}
        lines += [
            f"{worker}: {module}, in place of the core's {REWARDS.fallbacks[worker]}"
            for worker, module in replaced.items()
            if module
        ]
    return lines


def _frozen_lines(plan: RunPlan) -> list[str]:
    """Return lines about the teachers and the frozen models.

    There is a line for each teacher with a separate context, and for each teacher whose weights follow the student's
    weights. There is also a line for each frozen model that has the same weights as the student.
    """
    lines = []
    for teacher in plan.teachers:
        if context := teacher.context:
            texts = {name: repr(text) for name in keys_of(ContextKeys) if (text := getattr(context, name)) is not None}
            lines.append(f"{teacher.name} reads {_settings(texts)}, up to {context.prompt_length} tokens")
        if teacher.following:
            lines.append(f"{teacher.name} follows the student: {_settings(shared(FollowKeys, teacher.following))}")
    bases = [role for role in plan.frozen_roles() if plan.is_base(role)]
    return lines + [f"{role.name} is the student without its adapter" for role in bases]


def _memory_lines(plan: RunPlan) -> list[str]:
    """Return lines with the memory of each role per rank, split into parts.

    If a role has several pipeline stages, its lines show the parts of the largest stage, and the total of every stage.
    """
    lines = []
    for name, stages in plan.memory.items():
        parts = fullest(stages)
        text = _settings({part: readable_bytes(size) for part, size in parts.items()})
        lines.append(f"{name}: {readable_bytes(sum(parts.values()))} ({text})")
        if "kv_cache" in parts:
            lines.append(
                "  kv_cache: size if all sequences ran at the same time; vLLM queues the sequences that"
                " do not fit in gpu_memory_utilization"
            )
        if len(stages) > 1:
            sizes = ", ".join(readable_bytes(sum(stage.values())) for stage in stages)
            lines.append(f"  stages, first to last: {sizes}")
    return lines


def _device_lines(plan: RunPlan) -> list[str]:
    """Return lines with the total memory of the roles on each device.

    Devices with the same total share a line.
    """
    limit = int(plan.device_memory_gb * 2**30) if plan.device_memory_gb else None
    needs = device_memory(plan, limit)
    of = f" of {plan.device_memory_gb:g} GiB" if plan.device_memory_gb else ""
    if members_on_gpus(plan):
        how = "roles that share a GPU take turns: figures are of the largest phase of a step"
    else:
        how = "all weights, states and caches are resident; activations of one role at a time"
    lines = [f"  {devices}: {readable_bytes(size)}{of}" for size, devices in _alike(needs).items()]
    return [f"a device ({how}):", *lines]


def objective_text(plan: RunPlan) -> str:
    """Return the objective of a plan as lines of text."""
    return "\n".join(_objective_lines(plan))


def _objective_lines(plan: RunPlan) -> list[str]:
    objective, arguments = plan.objective, _settings(plan.objective.policy_loss_args)
    loss = f"{objective.policy_loss} loss{f' ({arguments})' if arguments and plan.rollout is None else ''}"
    lines = [f"{loss}, {objective.loss_agg_mode}"]
    if plan.rollout is not None:
        again = "recomputed" if objective.recompute_old_logprobs else "taken during the update (one update per rollout)"
        lines = [
            f"advantage = {_advantage(plan)}",
            f"{objective.adv_estimator}, {lines[0]}, discount {objective.opd_kl_discount:g}; old log-probs {again}",
            *_distillation_lines(plan),
            *(
                [f"init_kl_coef {objective.init_kl_coef:g}: coefficient of the token-level KL"]
                if objective.init_kl_coef
                else []
            ),
            *_other_lines(objective, ObjectiveKeys),
            *_correction_lines(objective.correction),
            *_ahead_lines(plan),
            *(_other_lines(plan.critic, CriticKeys) if plan.critic else []),
        ]
    elif plan.teachers:
        taught = [f"advantage = {_advantage(plan)}", *lines]
        lines = taught if objective.opd_objective == "sampled" else _offline_lines(plan, lines)
    lines.append(_optimizer(plan.student))
    if lora := plan.student.lora:
        engines = "the base and the adapter" if plan.rollout and plan.rollout.adapter else "merged weights"
        settings = _settings({name: value for name, value in asdict(lora).items() if value})
        lines.append(f"LoRA: {settings}" + (f"; engines have {engines}" if plan.rollout else ""))
    if plan.critic:
        lines.append(f"critic: {_optimizer(plan.critic)}, mini-batches of {plan.critic.mini_batch_sequences}")
    return lines


def _ahead_lines(plan: RunPlan) -> list[str]:
    """Return lines that state how far generation runs ahead of training, and which engines are reserved.

    The list is empty if generation does not run ahead.
    """
    if not plan.objective.max_age:
        return []
    pace = Pace.of(plan.rollout_batch_size, plan.async_generation_ratio, plan.async_depth, is_strict=plan.deterministic)
    running = plan.rollout.on_weight_update if plan.rollout else "wait"
    return [
        f"async rollouts: {pace.ahead} prompts, window {pace.window}; tokens at most {pace.max_age}"
        f" versions old; running answers at a weight update: {running}",
        *([f"engines reserved for validation: {plan.validation_engines}"] if plan.validation_engines else []),
    ]


def _offline_lines(plan: RunPlan, lines: Sequence[str]) -> list[str]:
    """Return the loss on given answers as lines.

    The lines are the likelihood, if its weight is not 0, and the teacher's term.
    """
    weight = plan.objective.rl_loss_coef
    return [*(f"{weight:g} * {line}" for line in lines if weight), *_distillation_lines(plan)]


def _optimizer(learner: TrainPlan) -> str:
    args = learner.optimizer
    return (
        f"AdamW lr {args.learning_rate:g} ({args.lr_scheduler_type}, {args.warmup_steps} warm-up), betas"
        f" {args.adam_beta1:g} {args.adam_beta2:g}, weight decay {args.weight_decay:g}, clip {args.max_grad_norm:g}"
    )


def _advantage(plan: RunPlan) -> str:
    """Return the formula of the advantage, with its coefficients."""
    objective = plan.objective
    taught = plan.advantage_teachers
    teachers = " ".join(f"- {teacher.opd_kl_coef:g} * reverse_kl({teacher.name})" for teacher in taught)
    clip = f", clipped to +-{objective.advantage_clip:g}" if objective.advantage_clip else ""
    if plan.mode == "pure" or plan.rollout is None:
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
    return [f"loss + {terms}{parameter}, over {over}"]


def _other_lines(part: Any, keys: type[Section]) -> list[str]:
    """Return a line for each key that differs from its default and is not shown elsewhere.

    Args:
        part: the part of the plan that has the values.
        keys: the section that defines the keys.
    """
    lines = []
    for item in fields(keys):
        value = getattr(part, item.name)
        is_read = getattr(part, READ_WITH.get(item.name, ""), True)
        if value != item.default and item.name not in SHOWN and is_read:
            lines.append(f"{item.name} {value}: {item.metadata['meaning']}")
    return lines


def _correction_lines(correction: CorrectionPlan | None) -> list[str]:
    if correction is None:
        return []
    lines = []
    if correction.weight:
        bounds = _bounds(correction.low, correction.high)
        lines.append(
            f"policy loss * {correction.weight} weight, the ratio train / infer of each {correction.level}{bounds}"
        )
    lines += [
        f"leaves out tokens whose {rule.measure} of train and infer, per {rule.level}, is"
        f" not{_bounds(rule.low, rule.high)}"
        for rule in correction.filters
    ]
    if correction.negatives_delta:
        lines.append(f"leaves out negative advantages where infer - train is above {correction.negatives_delta:g}")
    return lines


def _bounds(low: float | None, high: float | None) -> str:
    return ("" if low is None else f" from {low:g}") + ("" if high is None else f" up to {high:g}")
