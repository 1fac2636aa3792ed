"""The golden runs: two deterministic steps of every objective, as command lines.

`{inputs}` is the directory that `inputs.py` fills.
"""

from dataclasses import dataclass

PURE = "start_onpolicy_distill_pipeline.py"
RLVR = "start_rlvr_pipeline.py"
SFT = "start_sft_pipeline.py"
DPO = "start_dpo_pipeline.py"
AGENTIC = "start_agentic_pipeline.py"

COMMON = (
    "exp_name=golden",
    "deterministic=true",
    "max_steps=2",
    "save_steps=0",
    "eval_steps=0",
    "track_with=stdout",
)
# 8 prompts x 4 samples a step, all of them recorded
ROLLOUT = (
    "validation=null",
    "rollout_batch_size=8",
    "num_return_sequences_in_group=4",
    "logged_samples_per_step=32",
)


@dataclass(frozen=True)
class GoldenRun:
    """One run: a launcher of `examples/`, --config_path and --config_name, and its overrides."""

    launcher: str
    config: tuple[str, str]
    overrides: tuple[str, ...]


def training(role: str, sequences: int) -> tuple[str, ...]:
    """Return the overrides for updates of `sequences` on each data-parallel rank at a constant learning rate."""
    settings = {
        "per_device_train_batch_size": sequences,
        "gradient_accumulation_steps": 1,
        "learning_rate": "3e-4",
        "warmup_steps": 0,
        "lr_scheduler_type": "constant",
    }
    return tuple(f"++{role}.training_args.{name}={value}" for name, value in settings.items())


def frozen(model: str, *more: str) -> str:
    """Return the section of a frozen model of the demo on the second slot, as one value."""
    settings = (
        f"model_args: {{model_name_or_path: examples/demo/models/{model}, dtype: fp32}}",
        'device_mapping: "[1]"',
        "strategy_args: {strategy_name: megatron_infer}",
        *more,
    )
    return f"{{{', '.join(settings)}}}"


def follower(*more: str) -> str:
    """Return the section of a teacher that follows the student's weights and reads the answer as a hint."""
    return frozen("hinted", "hint: '{ground_truth}'", *more)


def pure(*overrides: str, config: str = "onpolicy_distill", sequences: int = 16) -> GoldenRun:
    return GoldenRun(PURE, ("demo", config), (*ROLLOUT, *training("student_train", sequences), *overrides))


def rlvr(config: str, *overrides: str, sequences: int = 16) -> GoldenRun:
    return GoldenRun(RLVR, ("demo", config), (*ROLLOUT, *training("actor_train", sequences), *overrides))


REFERENCE = f"++reference={frozen('student')}"
ONE_SLOT = ("student_train.device_mapping=[0]", "student_infer.device_mapping=[1]")
LORA = ("++actor_train.model_args.lora_target=all-linear", "++actor_train.model_args.lora_rank=4")
MIXTURE = (
    "student_train.model_args.model_name_or_path={inputs}/mixture",
    "student_infer.model_args.model_name_or_path={inputs}/mixture",
    "++student_train.strategy_args.strategy_config.expert_model_parallel_size=2",
    "++student_train.router_replay.mode=R3",
    "++student_infer.router_replay.mode=R3",
)
TAGS = (
    "actor_train.data_args.file_name=[{inputs}/odd.jsonl,{inputs}/even.jsonl]",
    "++actor_train.data_args.interleave_probs=[0.6,0.4]",
    "rewards.math_rule.tag_included=[odd,even]",
)
FILTER = (
    "++rewards.math_rule.query_filter_config={type: std_filter, filter_args: {std_threshold: 0.0}}",
    "++is_use_additional_prompts=true",
    "++max_additional_running_prompts=8",
)

RUNS = {
    # student and teacher on both slots, one update a step
    "pure": pure(),
    # two updates a step, importance weights and a mask for samples of another engine
    "mixed": rlvr(
        "rlvr_opd",
        "++train_infer_correction={is_weight: {enabled: true}, filters: [{enabled: true, ratio_low: 0.9999999}]}",
        "++whiten_advantages=true",
    ),
    # two updates a step, KL to a reference policy as loss and as penalty, groups that are filtered
    "rl": rlvr(
        "rlvr",
        REFERENCE,
        "++use_kl_loss=true",
        "++kl_loss_coef=0.1",
        "++add_token_level_kl=true",
        "++init_kl_coef=0.05",
        *FILTER,
    ),
    "ppo": rlvr(
        "ppo",
        "critic_warmup=0",
        "rollout_batch_size=32",
        "num_return_sequences_in_group=1",
        "critic.training_args.per_device_train_batch_size=16",
    ),
    "topk": pure(
        *ONE_SLOT,
        "++opd_objective=topk",
        "++opd_topk=8",
        "++opd_topk_source=student",
        "++opd_divergence=jsd",
        "++opd_jsd_beta=0.9",
    ),
    "full": pure("++opd_objective=full", "++opd_divergence=reverse_kl"),
    "mix": rlvr("mix", "rollout_batch_size=4"),
    "sft": GoldenRun(SFT, ("demo", "sft"), training("sft_train", 16)),
    "dpo": GoldenRun(DPO, ("demo", "dpo"), training("actor_train", 16)),
    "lora": rlvr(
        "rlvr",
        *LORA,
        "++reference={model_args: {dtype: fp32}, strategy_args: {strategy_name: megatron_infer}}",
        "++use_kl_loss=true",
        "++kl_loss_coef=0.1",
    ),
    "moe": pure(*MIXTURE),
    "hints": pure(config="hints", sequences=32),
    # followers of two kinds: an average of the student's weights, and the student itself
    "self": pure(
        "~teacher",
        f"+teacher={{slow: {follower('follows_student: {ema_decay: 0.75}')}, live: {follower('follows_student: {}')}}}",
        config="hints",
        sequences=32,
    ),
    "frozen_lake": GoldenRun(
        AGENTIC,
        ("games", "frozen_lake"),
        (
            "val_batch_size=8",
            "val_env_manager.num_env_groups=8",
            "validation.evaluate_teacher=false",
            "rollout_batch_size=16",
            "logged_samples_per_step=16",
            "train_env_manager.num_env_groups=8",
            *training("student_train", 8),
        ),
    ),
    # the rollout as a workflow
    "workflow": rlvr("rlvr", "++workflow=simple_workflow"),
    # two teachers, each for the rows of one tag
    "teachers": rlvr(
        "rlvr_opd",
        *TAGS,
        "~teacher",
        f"+teacher={{good: {frozen('teacher', 'tag_included: [odd]', 'opd_kl_coef: 0.5')},"
        f" same: {frozen('student', 'tag_included: [even]')}}}",
        "opd_kl_coef=0.7",
        "++allow_self_teacher=true",
        "++opd_kl_discount=0.9",
    ),
}
