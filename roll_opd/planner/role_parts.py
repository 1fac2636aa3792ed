"""Build the parts of a plan from checked roles: Megatron and inference roles, optimizer, schedule and sampling."""

import math
from dataclasses import replace
from typing import Any

from roll_opd.base import hardware
from roll_opd.base.frozen import FrozenDict
from roll_opd.config.plan import (
    FollowingPlan,
    LoraPlan,
    MegatronPlan,
    ModelPlan,
    OptimizerPlan,
    RolloutPlan,
    SamplingPlan,
    TeacherPlan,
    TeacherSource,
    TrainPlan,
)
from roll_opd.config.roll_keys import SCHEDULES
from roll_opd.config.schema import (
    FollowKeys,
    GeneratingArgs,
    OptimizerKeys,
    Run,
    SamplingKeys,
    TeacherWorker,
    Top,
    TrainingArgs,
    Worker,
    shared,
)
from roll_opd.models.adapter_files import ENGINE_RANKS
from roll_opd.planner.lengths_and_batches import micro_batch
from roll_opd.planner.teacher_sections import context_of, prefix_topk

JUDGE_TOKENS = 1024  # assumed tokens of a judge's instructions, and of a judge's answer without max_new_tokens


def environment(*sections: Run | Worker) -> FrozenDict:
    """Return the environment variables that sections set. Later sections override earlier sections."""
    return FrozenDict({name: str(value) for section in sections for name, value in section.system_envs.items()})


def megatron_plan(role: Worker, top: Run, student: Worker | None = None) -> MegatronPlan:
    """Return the plan of a Megatron role.

    The log-probs of a frozen model are normalised over the token ids that it shares with `student`. If the model has
    another tokenizer, its ids do not stand for the student's tokens, so the log-probs are normalised over all of its
    ids.
    """
    assert role.info and role.devices and role.layout
    scored = student.info if student and student.info and not role.is_aligned else role.info
    return MegatronPlan(
        name=role.path,
        model=ModelPlan(str(role.info.path), role.dtype),
        devices=role.devices,
        layout=role.layout,
        forward_limits=micro_batch(role, False),
        megatron_args=FrozenDict(role.engine_args),
        env=environment(top, role),
        vocab_size=scored.vocab if scored.vocab < role.info.vocab else None,
    )


def train_plan(role: Worker, top: Run, total: int, answers: int = 1) -> TrainPlan:
    """Return the plan of a trained role.

    Args:
        total: number of updates in the run.
        answers: number of sequences that stay together in a micro-batch. If a micro-batch is limited by a number of
            sequences, these sequences count as one.
    """
    args, limits = role.training_args, micro_batch(role, True)
    if limits.sequences:
        limits = replace(limits, sequences=limits.sequences * answers)
    optimizer = OptimizerPlan(
        **{**shared(OptimizerKeys, args), **_schedule(args, total)},
        max_grad_norm=top.max_grad_norm if args.max_grad_norm is None else args.max_grad_norm,
        use_distributed_optimizer=role.use_distributed_optimizer,
        overlap_grad_reduce="overlap_grad_reduce" in role.overlaps,
        overlap_param_gather="overlap_param_gather" in role.overlaps,
    )
    plan = megatron_plan(role, top)
    assert role.mini_batch
    return TrainPlan(
        **vars(plan),
        train_limits=limits,
        mini_batch_sequences=role.mini_batch,
        optimizer=optimizer,
        lora=role.lora,
        router_replay=role.router_replay.mode,
    )


def _schedule(args: TrainingArgs, total: int) -> dict[str, Any]:
    """Return the fields of `OptimizerPlan` that describe the learning-rate schedule.

    `total` is the number of updates in the run.
    """
    style, kwargs = SCHEDULES[args.lr_scheduler_type], args.lr_scheduler_kwargs
    warmup = args.warmup_steps or math.ceil(args.warmup_ratio * total)
    if args.warmup_steps and args.warmup_ratio:
        args.diag.error(
            "warmup_ratio",
            f"{args.warmup_ratio:g} and warmup_steps {args.warmup_steps} both set the warm-up's length; remove one",
        )
    peak = args.learning_rate if kwargs.max_lr is None else kwargs.max_lr
    if not peak:
        args.diag.warn("learning_rate", "0 changes no weights, so the run only measures")
    if warmup > total:
        args.diag.note("", f"{warmup} warm-up updates are more than the run's {total}")
    for name, rate in (("min_lr", kwargs.min_lr), ("init_lr", kwargs.init_lr)):
        if rate > peak:
            kwargs.diag.error(name, f"{rate:g} is above {peak:g}, the rate after the warm-up; lower it")
    if kwargs.lr_decay_steps is not None and kwargs.lr_decay_steps <= warmup:
        kwargs.diag.error("lr_decay_steps", f"{kwargs.lr_decay_steps} does not exceed the warm-up, {warmup}; raise it")
    if style == "WSD" and kwargs.wsd_decay_steps is None:
        kwargs.diag.error(
            "wsd_decay_steps", f"is missing; {args.lr_scheduler_type} needs the number of updates in its decay"
        )
    return {
        "learning_rate": peak,
        "lr_scheduler_type": style,
        "warmup_steps": warmup,
        "total_steps": total,
        "decay_steps": kwargs.lr_decay_steps,
        "initial_learning_rate": kwargs.init_lr,
        "min_learning_rate": kwargs.min_lr,
        "wsd_decay_steps": kwargs.wsd_decay_steps if style == "WSD" else None,
        "wsd_decay_style": (kwargs.lr_wsd_decay_style or "exponential") if style == "WSD" else None,
    }


def teacher_plan(name: str, role: Worker, top: Top, student: Worker) -> TeacherPlan:
    """Return the plan of a teacher.

    The coefficient is the `opd_kl_coef` of the teacher's section or, if it is not set, of the top level.
    """
    own = role.opd_kl_coef
    return TeacherPlan(
        name=name,
        source=_teacher_source(role, top, student),
        context=context_of(name, role, top),
        tokenizer=str(role.info.path) if role.is_aligned and role.info else None,
        prefix_topk=prefix_topk(role, top),
        opd_kl_coef=top.opd_kl_coef if own is None else own,
        tags=role.tag_included or None,
    )


def _teacher_source(role: Worker, top: Top, student: Worker) -> TeacherSource:
    if role.external:
        model, vocab_size = (str(role.info.path), role.info.vocab) if role.info else (None, None)
        return role.external.planned(role.path, model, vocab_size)
    plan = megatron_plan(role, top, student)
    if isinstance(role, TeacherWorker) and (follow := role.follows_student):
        return FollowingPlan(**vars(plan), **shared(FollowKeys, follow))
    return plan


def rollout_plan(role: Worker, top: Top, student: Worker) -> RolloutPlan:
    """Return the plan of the engines of `student`, which is the trained role."""
    response = top.response_tokens or 0
    sampling = sampling_plan(role.generating_args, top.responses, response)
    plan = _engines(role, top, sampling, top.prompt_length + max(response, top.held_out_tokens or 0))
    if top.max_running_requests:  # an engine queues requests beyond this number
        each = {"max_num_seqs": -(-top.max_running_requests // plan.engines)}
        plan = replace(plan, engine_args=FrozenDict({**each, **plan.engine_args}))
    routes = role.router_replay.mode != "disable"
    adapter = _engine_adapter(student, top)
    written = (role.strategy_args and role.strategy_args.strategy_config) or {}
    if adapter and written.get("sleep_level", 1) != 1:
        role.diag.note("strategy_args.strategy_config.sleep_level", "is 1, as no update sends the weights of the base")
    return replace(
        plan,
        max_running_requests=top.max_running_requests,
        returns_routes=routes,
        adapter=adapter,
        # a level of 2 discards the weights of the base, which no update sends
        sleep_level=1 if adapter else plan.sleep_level,
        # without async rollouts, no request runs during an update; deterministic engines finish their batch first
        on_weight_update=top.on_weight_update if top.async_generation_ratio and not top.deterministic else "wait",
    )


def _engine_adapter(student: Worker, top: Top) -> LoraPlan | None:
    """Return the adapter that the engines hold separately from the base; None if they hold merged or whole weights."""
    lora, on_cpu = student.lora, hardware.engines_are_on_cpus()
    if lora is None:
        top.diag.unused(*{"lora_sync"} & top.written)
    if lora is None or top.lora_sync == "merged" or (top.lora_sync == "auto" and on_cpu):
        return None
    if lora.rank > ENGINE_RANKS[-1]:
        why = f"vLLM's adapters have a rank of at most {ENGINE_RANKS[-1]}"
    elif on_cpu and student.info and student.info.experts:
        why = "on CPUs, vLLM supports no adapters in models with experts"
    else:
        return lora
    top.diag.note("lora_sync", f"the engines get the weights with the adapter merged into them, because {why}")
    return None


def judge_plan(role: Worker, top: Top) -> RolloutPlan:
    """Return the plan of the engines of a judge.

    A judge reads the question, the prompt, the response and the final answer.
    """
    assert role.info is not None
    args = role.generating_args
    new = args.max_new_tokens or JUDGE_TOKENS
    question = top.prompt_length + 2 * (top.response_tokens or 0) + 2 * new + JUDGE_TOKENS
    sampling = sampling_plan(args, 1, new)
    if "temperature" not in args.written:
        sampling = replace(sampling, temperature=0.0)
    return _engines(role, top, sampling, min(question, role.info.max_positions))


def _engines(role: Worker, top: Top, sampling: SamplingPlan, max_model_len: int) -> RolloutPlan:
    assert role.info and role.devices and role.layout
    return RolloutPlan(
        name=role.path,
        model=ModelPlan(str(role.info.path), role.dtype),
        devices=role.devices,
        tp=role.layout.tp,
        engines=role.layout.dp,
        sampling=sampling,
        max_model_len=role.max_model_len or max_model_len,
        engine_args=FrozenDict(role.engine_args),
        sleep_level=role.sleep_level,
        env=environment(top, role),
    )


def sampling_plan(args: GeneratingArgs, n: int, max_new_tokens: int) -> SamplingPlan:
    """Return the sampling plan that `generating_args` describe."""
    plan = SamplingPlan(**shared(SamplingKeys, args), n=n, max_new_tokens=max_new_tokens, stop=args.stop_strings or ())
    return replace(plan, top_k=plan.top_k if plan.top_k > 0 else -1)
