"""Builds the frozen `RunPlan` from a checked configuration. Values only; every rule is in the checks."""

import math
from dataclasses import replace

from roll_opd.config import memory
from roll_opd.config.checks import micro_batch
from roll_opd.config.errors import Findings
from roll_opd.config.examine import Checked
from roll_opd.config.frozen import FrozenDict
from roll_opd.config.inference import environment, judge_memory, judge_plan, rollout_plan, sampling_plan
from roll_opd.config.load import write_yaml
from roll_opd.config.objective import read_objective
from roll_opd.config.plan import (
    CheckpointPlan,
    CriticPlan,
    MegatronPlan,
    ModelPlan,
    OptimizerPlan,
    RolloutPlan,
    RunPlan,
    TeacherPlan,
    TrainPlan,
    ValidationPlan,
)
from roll_opd.config.roles import Role
from roll_opd.config.schema import Run, Top, Worker
from roll_opd.config.trackers import without_secrets

SCHEDULES = {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"}


def assemble(checked: Checked, findings: Findings) -> RunPlan:
    """Return the plan, with the warnings in `findings`."""
    top, roles = checked.top, checked.roles
    longest = top.prompt_length + checked.response
    # agentic runs may leave a remainder, which is one more update
    samples = checked.mini_batch - (checked.expert.rows_per_update if checked.expert else 0)
    updates = top.ppo_epochs * -(-top.rollout_batch_size * checked.n // samples)
    warmup = top.critic_warmup or 0 if roles.critic else 0
    learning_steps = top.max_steps - warmup
    student = TrainPlan(
        **train_fields(roles.train, top, checked.mini_batch, longest, updates * learning_steps, findings)
    )
    critic = None
    if roles.critic is not None:
        epochs, mini = top.critic_epochs or 1, checked.critic_mini_batch
        total = top.max_steps * epochs * -(-top.rollout_batch_size * checked.n // mini)
        critic = CriticPlan(
            **train_fields(roles.critic, top, mini, longest, total, findings),
            value_clip=top.value_clip,
            epochs=epochs,
            warmup_steps=warmup,
        )
    rollout = rollout_plan(checked)
    teachers = tuple(
        TeacherPlan(
            name=name,
            worker=MegatronPlan(**megatron_fields(role, top, longest, findings)),
            opd_kl_coef=_coefficient(role.worker, top),
            tags=role.worker.tag_included or None,
        )
        for name, role in roles.teachers.items()
    )
    engines = {domain: judge_plan(role, checked) for domain, role in roles.judges.items()}
    rewards = tuple(replace(reward, engine=engines.get(reward.domain)) for reward in checked.rewards)
    reference = None
    if roles.reference is not None:
        reference = MegatronPlan(**megatron_fields(roles.reference, top, longest, findings))
    return RunPlan(
        mode=roles.mode,
        pipeline="agentic" if checked.agentic else "rlvr",
        exp_name=checked.exp_name,
        output_dir=top.output_dir,
        seed=top.seed,
        deterministic=top.deterministic,
        max_steps=top.max_steps,
        eval_steps=top.eval_steps if checked.validation_data or checked.agentic else 0,
        logging_steps=top.logging_steps,
        rollout_batch_size=top.rollout_batch_size,
        num_nodes=checked.num_nodes,
        devices_per_node=top.num_gpus_per_node,
        student=student,
        rollout=rollout,
        teachers=teachers,
        rewards=rewards,
        data=checked.data,
        objective=read_objective(top, roles.mode, updates, checked.response, roles.shared_vocabulary),
        checkpoint=CheckpointPlan(top.save_steps, top.max_ckpt_to_keep, checked.resume),
        reference=reference,
        critic=critic,
        demonstrations=checked.expert,
        extra_prompts=top.max_additional_running_prompts if top.is_use_additional_prompts else 0,
        async_generation_ratio=top.async_generation_ratio,
        agentic=checked.agentic,
        validation=_validation(checked),
        trackers=tuple(checked.trackers),
        tracker_args=FrozenDict(checked.trackers),
        samples_per_step=top.samples_per_step,
        env=FrozenDict(environment(top)),
        warnings=tuple(findings.warnings),
        memory=FrozenDict(
            _memory(checked, student, rollout, teachers, reference, critic, longest) | judge_memory(checked, rewards)
        ),
        config_yaml=write_yaml(without_secrets(checked.loaded.values)),
    )


def _coefficient(worker: Worker, top: Top) -> float:
    """A teacher's own coefficient, else the top-level one, else ROLL's 1.0."""
    if worker.opd_kl_coef is not None:
        return worker.opd_kl_coef
    return 1.0 if top.opd_kl_coef is None else top.opd_kl_coef


def megatron_fields(role: Role, top: Run, longest: int, findings: Findings) -> dict[str, object]:
    """Return the fields that every Megatron role has."""
    return {
        "name": role.path,
        "model": ModelPlan(str(role.facts.path), role.dtype),
        "devices": role.megatron.devices,
        "layout": role.megatron.layout,
        "forward_limits": micro_batch(role, False, longest, findings),
        "megatron_args": FrozenDict(role.megatron.args),
        "env": FrozenDict(environment(top, role.worker)),
    }


def train_fields(
    role: Role, top: Run, mini_batch: int, longest: int, total: int, findings: Findings
) -> dict[str, object]:
    """Return the fields that every role that learns has; `total` counts its optimizer updates."""
    args = role.worker.training_args
    warmup = args.warmup_steps or math.ceil(args.warmup_ratio * total)
    if warmup > total:
        findings.warn(f"{role.path}.training_args: {warmup} warm-up updates are more than the run's {total}")
    grad_norm = top.max_grad_norm if args.max_grad_norm is None else args.max_grad_norm
    return {
        **megatron_fields(role, top, longest, findings),
        "train_limits": micro_batch(role, True, longest, findings),
        "mini_batch_sequences": mini_batch,
        "optimizer": OptimizerPlan(
            learning_rate=args.learning_rate,
            weight_decay=args.weight_decay,
            adam_beta1=args.adam_beta1,
            adam_beta2=args.adam_beta2,
            adam_epsilon=args.adam_epsilon,
            max_grad_norm=grad_norm,
            lr_scheduler_type=SCHEDULES.get(args.lr_scheduler_type, args.lr_scheduler_type),
            warmup_steps=warmup,
            total_steps=total,
            min_learning_rate=args.lr_scheduler_kwargs.min_lr if args.lr_scheduler_kwargs else 0.0,
            use_distributed_optimizer=role.megatron.use_distributed_optimizer,
        ),
    }


def _validation(checked: Checked) -> ValidationPlan | None:
    section = checked.top.validation
    if section is None or checked.validation_data is None:
        return None
    args = section.generating_args
    sampling = sampling_plan(args, args.num_return_sequences or 1, args.max_new_tokens or checked.response)
    return ValidationPlan(checked.validation_data, sampling, section.measure_teacher)


def _memory(
    checked: Checked,
    student: TrainPlan,
    rollout: RolloutPlan,
    teachers: tuple[TeacherPlan, ...],
    reference: MegatronPlan | None,
    critic: CriticPlan | None,
    longest: int,
) -> dict[str, dict[str, int]]:
    """Estimated bytes a rank, by role name and part."""
    roles, top = checked.roles, checked.top
    sequences = -(-top.rollout_batch_size * checked.n // rollout.engines)
    found = {
        student.name: memory.train_memory(roles.train.facts, student, longest),
        rollout.name: memory.rollout_memory(
            roles.infer.facts, rollout.tp, rollout.model.dtype, rollout.max_model_len, sequences
        ),
    }
    if critic is not None:
        found[critic.name] = memory.train_memory(roles.critic.facts, critic, longest)
    scorers = [(teacher.worker, roles.teachers[teacher.name].facts) for teacher in teachers]
    if reference is not None:
        scorers.append((reference, roles.reference.facts))
    for worker, facts in scorers:
        found[worker.name] = memory.score_memory(
            facts, worker.layout, worker.model.dtype, worker.forward_limits, longest
        )
    if top.opd_objective == "full":
        shards = student.layout.tp
        found[student.name]["teacher_heads"] = sum(
            facts.hidden * roles.train.facts.vocab // shards * memory.BYTES[worker.model.dtype]
            for worker, facts in scorers[: len(teachers)]
        )
    return found
