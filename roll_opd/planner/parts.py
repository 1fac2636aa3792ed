"""Builds the parts of a plan from roles that have been read and found right. Every rule is in the checks."""

from dataclasses import replace

from roll_opd.algorithms.registry import POLICY_LOSSES
from roll_opd.algorithms.table import KL_PENALTIES, ROLL_LOSS_AGG_MODE, loss_facts
from roll_opd.base.frozen import FrozenDict
from roll_opd.config.plan import (
    FollowingPlan,
    MegatronPlan,
    ModelPlan,
    ObjectivePlan,
    OptimizerPlan,
    RolloutPlan,
    SamplingPlan,
    TeacherPlan,
    TrainPlan,
)
from roll_opd.config.schema import (
    DistillationKeys,
    FollowKeys,
    GeneratingArgs,
    ObjectiveKeys,
    OptimizerKeys,
    ReinforcementKeys,
    Run,
    SamplingKeys,
    TeacherWorker,
    Top,
    Worker,
    keys_of,
    shared,
)
from roll_opd.planner import correction
from roll_opd.planner.check_objective import clip_range, has_norm_levels, keys_of_steps
from roll_opd.planner.check_values import micro_batch
from roll_opd.planner.roles import Role
from roll_opd.planner.schedule import read_schedule
from roll_opd.planner.teacher_context import context_of

JUDGE_TOKENS = 1024  # of a judge's instructions, and of its answer where no max_new_tokens is written


def environment(*sections: Run | Worker) -> FrozenDict:
    """Return the environment variables that sections say, those of a later one over those before it."""
    return FrozenDict({name: str(value) for section in sections for name, value in section.system_envs.items()})


def megatron_plan(role: Role, top: Run, student: Role | None = None) -> MegatronPlan:
    """Return what every Megatron role has; a wider frozen model gives the log-probs of the tokens of `student`."""
    assert role.info and role.strategy.devices and role.strategy.layout
    vocabulary = student.info.vocab if student and student.info else role.info.vocab
    return MegatronPlan(
        name=role.path,
        model=ModelPlan(str(role.info.path), role.dtype),
        devices=role.strategy.devices,
        layout=role.strategy.layout,
        forward_limits=micro_batch(role.worker, False),
        megatron_args=FrozenDict(role.strategy.args),
        env=environment(top, role.worker),
        vocab_size=vocabulary if vocabulary < role.info.vocab else None,
    )


def train_plan(role: Role, top: Run, mini_batch: int, total: int, answers: int = 1) -> TrainPlan:
    """Return a role that learns.

    Args:
        mini_batch: sequences behind an update.
        total: updates of the run.
        answers: sequences that stay together in a micro-batch, whose limit counts them as one.
    """
    args, limits = role.worker.training_args, micro_batch(role.worker, True)
    if limits.sequences:
        limits = replace(limits, sequences=limits.sequences * answers)
    optimizer = OptimizerPlan(
        **{**shared(OptimizerKeys, args), **read_schedule(args, total)},
        max_grad_norm=top.max_grad_norm if args.max_grad_norm is None else args.max_grad_norm,
        use_distributed_optimizer=role.strategy.use_distributed_optimizer,
        overlap_grad_reduce="overlap_grad_reduce" in role.strategy.overlaps,
        overlap_param_gather="overlap_param_gather" in role.strategy.overlaps,
    )
    plan = megatron_plan(role, top)
    return TrainPlan(
        **vars(plan),
        train_limits=limits,
        mini_batch_sequences=mini_batch,
        optimizer=optimizer,
        lora=role.lora,
        router_replay=role.worker.router_replay.mode,
    )


def teacher_plan(name: str, role: Role, top: Top, student: Role, response: int) -> TeacherPlan:
    """Return a teacher of `student` with its own coefficient, else the top-level one."""
    own, source = role.worker.opd_kl_coef, megatron_plan(role, top, student)
    if isinstance(role.worker, TeacherWorker) and (follow := role.worker.follows_student):
        source = FollowingPlan(**vars(source), **shared(FollowKeys, follow))
    return TeacherPlan(
        name=name,
        source=source,
        context=context_of(name, role, top, response),
        opd_kl_coef=top.opd_kl_coef if own is None else own,
        tags=role.worker.tag_included or None,
    )


def rollout_plan(role: Role, top: Top, n: int, response: int, held_out: int) -> RolloutPlan:
    """Return the student's engines: `n` responses a prompt of at most `response` tokens, `held_out` in validation."""
    sampling = sampling_plan(role.worker.generating_args, n, response)
    plan = _engines(role, top, sampling, top.prompt_length + max(response, held_out))
    if top.max_running_requests:  # what an engine does not run yet, it keeps waiting
        each = {"max_num_seqs": -(-top.max_running_requests // plan.engines)}
        plan = replace(plan, engine_args=FrozenDict({**each, **plan.engine_args}))
    routes = role.worker.router_replay.mode != "disable"
    return replace(plan, max_running_requests=top.max_running_requests, returns_routes=routes)


def judge_plan(role: Role, top: Top, response: int) -> RolloutPlan:
    """Return a judge's engines. It reads prompt and response inside its own question, and its own last answer."""
    assert role.info is not None
    args = role.worker.generating_args
    new = args.max_new_tokens or JUDGE_TOKENS
    question = top.prompt_length + 2 * response + 2 * new + JUDGE_TOKENS
    sampling = sampling_plan(args, 1, new)
    if "temperature" not in args.written:
        sampling = replace(sampling, temperature=0.0)
    return _engines(role, top, sampling, min(question, role.info.max_positions))


def _engines(role: Role, top: Top, sampling: SamplingPlan, max_model_len: int) -> RolloutPlan:
    assert role.info and role.strategy.devices and role.strategy.layout
    return RolloutPlan(
        name=role.path,
        model=ModelPlan(str(role.info.path), role.dtype),
        devices=role.strategy.devices,
        tp=role.strategy.layout.tp,
        engines=role.strategy.layout.dp,
        sampling=sampling,
        max_model_len=role.strategy.max_model_len or max_model_len,
        engine_args=FrozenDict(role.strategy.args),
        sleep_level=role.strategy.sleep_level,
        env=environment(top, role.worker),
    )


def sampling_plan(args: GeneratingArgs, n: int, max_new_tokens: int) -> SamplingPlan:
    """Return the sampling plan of `generating_args`."""
    plan = SamplingPlan(**shared(SamplingKeys, args), n=n, max_new_tokens=max_new_tokens, stop=args.stop_strings or ())
    return replace(plan, top_k=plan.top_k if plan.top_k > 0 else -1)


def objective_plan(top: Top, mode: str, updates: int, response: int, vocab_size: int) -> ObjectivePlan:
    """Return the objective of a run with `updates` optimizer updates a step.

    `vocab_size` is how many token ids student and teachers all have.
    """
    assert top.policy_loss
    pure = mode == "pure"
    low, high = clip_range(top)
    clips = {
        "clip_low": low,
        "clip_high": high,
        "dual_clip": 1 + 2 * top.pg_clip if top.dual_clip_loss is True else top.dual_clip_loss or None,  # as in ROLL
    }
    reads_clips = top.policy_loss in POLICY_LOSSES.builtin and loss_facts(top.policy_loss).reads_pg_clip
    read = correction.read(top)
    has_divergence = mode != "rl" and top.opd_objective != "sampled"
    own_clips = {
        "pg_clip_low": None if low == top.pg_clip else low,
        "pg_clip_high": None if high == top.pg_clip else high,
    }
    keys = shared(ObjectiveKeys, top) | own_clips
    off = {*(keys_of(ReinforcementKeys) if pure else ()), *(() if has_divergence else keys_of(DistillationKeys))}
    plan = ObjectivePlan(
        **{key: value for key, value in keys.items() if key not in off},
        policy_loss=top.policy_loss,
        policy_loss_args=FrozenDict({**(clips if reads_clips else {}), **top.policy_loss_fn_args}),
        dual_clip=clips["dual_clip"],
        loss_agg_mode=top.loss_agg_mode or ROLL_LOSS_AGG_MODE,
        loss_normaliser=float(response),
        opd_vocab_size=vocab_size if has_divergence else None,
        correction=read,
        # a correction is of the weights that sampled, before the update
        recompute_old_logprobs=updates > 1 or top.enable_old_logprobs_recompute or read is not None,
    )
    return replace(plan, gamma=0.0) if pure else _with_reward(plan, top)


def _with_reward(plan: ObjectivePlan, top: Top) -> ObjectivePlan:
    """Return the objective with the reward's part: advantages, and KLs to the reference policy."""
    assert top.adv_estimator
    name, mean, std = top.adv_estimator, top.norm_mean_type, top.norm_std_type
    if name == "grpo":  # what the estimator is; writing null takes it away
        mean = mean if "norm_mean_type" in top.written else "group"
        std = std if "norm_std_type" in top.written else "group"
    levels = {"mean_cal_level": mean, "std_cal_level": std} if has_norm_levels(name) else {}
    arguments = {**levels, **{key: getattr(top, key) for key in sorted(keys_of_steps(name))}, **top.advantage_fn_args}
    token_kl = top.init_kl_coef if top.add_token_level_kl else 0.0
    return replace(
        plan,
        adv_estimator=name,
        advantage_args=FrozenDict(arguments),
        norm_mean_type=mean,
        norm_std_type=std,
        kl_loss=plan.kl_loss if top.kl_loss_fn in (None, "none") else top.kl_loss_fn,
        kl_loss_coef=plan.kl_loss_coef if top.use_kl_loss else 0.0,
        kl_penalty=KL_PENALTIES.get(plan.kl_penalty, plan.kl_penalty),
        init_kl_coef=token_kl,
        target_kl=plan.target_kl if token_kl else None,
        # the token rewards need log-probs before the update
        recompute_old_logprobs=plan.recompute_old_logprobs or bool(token_kl),
    )
