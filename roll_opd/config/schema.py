"""What a user may write: ROLL's keys and ours, with types, ranges and ROLL's defaults.

Strict pydantic models. `ignored` names ROLL's keys that are accepted without a meaning. Nothing here looks at
the disk or at other sections; that is the business of the checks.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from roll_opd.config import known_names as names
from roll_opd.config.plan import Level


def _number(value: Any) -> Any:
    """Read a number that YAML took for a text, such as "1e-6"; leave anything else to the type check."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _texts(value: Any) -> Any:
    """Take one text for a list of one."""
    if isinstance(value, str):
        return (value,)
    # strict mode asks Python values for a tuple, and this is one by the time a validator has touched it
    return tuple(value) if isinstance(value, list) else value


def _numbers(value: Any) -> Any:
    """Take one number, or a text of numbers with commas, for a list."""
    if isinstance(value, str):
        value = value.split(",")
    return tuple(value) if isinstance(value, list) else (value,)


Number = Annotated[float, BeforeValidator(_number)]
Fraction = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1)]
NotNegative = Annotated[float, BeforeValidator(_number), Field(ge=0)]
AboveZero = Annotated[float, BeforeValidator(_number), Field(gt=0)]
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Name = Annotated[str, Field(min_length=1)]
Probabilities = Annotated[tuple[NotNegative, ...], BeforeValidator(_numbers)]
Texts = Annotated[tuple[str, ...], BeforeValidator(_texts)]
Environment = dict[str, str | int | float]


class Section(BaseModel):
    """A part of the configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    ignored: ClassVar[frozenset[str]] = frozenset()


class ModelArgs(Section):
    """`model_args`. `dtype` defaults to ROLL's bf16."""

    ignored = names.IGNORED_MODEL_ARGS
    model_name_or_path: str | None = None
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    lora_target: Any = None
    adapter_name_or_path: str | None = None
    freeze_module_prefix: Any = None


class SchedulerArgs(Section):
    """`lr_scheduler_kwargs`."""

    min_lr: NotNegative = 0.0


class TrainingArgs(Section):
    """`training_args`: AdamW and its schedule. Batch sizes are per data-parallel rank, steps are updates."""

    ignored = names.IGNORED_TRAINING_ARGS
    learning_rate: NotNegative = 5e-5
    weight_decay: NotNegative = 0.0
    per_device_train_batch_size: Positive = 8
    gradient_accumulation_steps: Positive = 1
    warmup_steps: Count = 0
    warmup_ratio: Fraction = 0.0
    lr_scheduler_type: Literal["constant", "linear", "cosine", "constant_with_warmup", "cosine_with_min_lr"] = (
        "constant"
    )
    lr_scheduler_kwargs: SchedulerArgs | None = None
    adam_beta1: Fraction = 0.9
    adam_beta2: Fraction = 0.999
    adam_epsilon: NotNegative = 1e-8
    max_grad_norm: NotNegative | None = None


class DataArgs(Section):
    """`data_args`. `messages`, `prompt`, `tag` and `id` name columns; `limit` (ours) uses only the first rows.

    `file_name` entries are files, directories or patterns, also below `dataset_dir`. `domain_interleave_probs` maps
    reward domains or tags to shares of the draws, `interleave_probs` gives a share to each entry of `file_name`.
    """

    ignored = names.IGNORED_DATA_ARGS
    file_name: Texts = ()
    dataset_dir: str | None = None
    domain_interleave_probs: dict[str, NotNegative] = {}
    interleave_probs: Probabilities = ()
    template: str | None = None
    messages: Name | None = None
    prompt: Name | None = None
    tag: Name | None = None
    id: Name | None = None
    limit: Positive | None = None


class GeneratingArgs(Section):
    """`generating_args`. `top_k` 0 or -1 is off."""

    ignored = names.IGNORED_GENERATING_ARGS
    max_new_tokens: Positive | None = None
    top_p: Annotated[float, BeforeValidator(_number), Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    temperature: NotNegative = 1.0
    num_return_sequences: Positive | None = None
    repetition_penalty: Annotated[float, BeforeValidator(_number), Field(gt=0)] = 1.0
    stop_strings: Texts | None = None


class StrategyArgs(Section):
    """`strategy_args`. What a strategy_config may hold depends on the strategy, see `strategies.py`."""

    strategy_name: str
    strategy_config: dict[str, Any] | None = None


class SequencePackingArgs(Section):
    """`sequence_packing_args`: tokens a packed micro-batch may hold."""

    ignored = names.IGNORED_SEQUENCE_PACKING
    max_packed_sequence_length_forward: Positive | None = None
    max_packed_sequence_length_train: Positive | None = None


class Worker(Section):
    """A role: student, rollout, teacher, reference policy or critic."""

    ignored = names.IGNORED_WORKER
    model_args: ModelArgs = ModelArgs()
    training_args: TrainingArgs = TrainingArgs()
    data_args: DataArgs = DataArgs()
    generating_args: GeneratingArgs = GeneratingArgs()
    strategy_args: StrategyArgs | None = None
    device_mapping: str | int | tuple[int, ...] | None = None
    infer_batch_size: Positive = 16
    use_sequence_packing: bool = False
    sequence_packing_args: SequencePackingArgs = SequencePackingArgs()
    use_dynamic_batching_in_train: bool = False
    use_dynamic_batching_in_infer: bool = False
    max_tokens_per_microbatch_in_train: Count | None = None
    max_tokens_per_microbatch_in_infer: Count | None = None
    opd_kl_coef: NotNegative | None = None
    tag_included: Texts | None = None
    system_envs: Environment = {}


class FilterArgs(Section):
    """`filter_args`: thresholds on the mean or the standard deviation of rewards."""

    threshold_up: Number | None = None
    threshold_down: Number | None = None
    std_threshold: Number | None = None


class Filter(Section):
    """`query_filter_config` and `response_filter_config`."""

    type: Literal["no_filter", "mean_filter", "std_filter"] = "no_filter"
    filter_args: FilterArgs = FilterArgs()


class Term(Section):
    """`rewards.<domain>.terms.<name>`: what is added to a reward. Keys that are not listed go to it as arguments."""

    worker_cls: str | None = None
    weight: Number = 1.0
    timeout: AboveZero | None = None
    args: dict[str, Any] = {}


class Reward(Term):
    """`rewards.<domain>`. `infer_batch_size` are samples in a call of the reward, `max_concurrency` its calls under
    way in a worker, `timeout` seconds a sample.
    """

    ignored = names.IGNORED_REWARD
    tag_included: Texts | None = None
    world_size: Positive = 1
    infer_batch_size: Positive = 16
    max_concurrency: Positive | None = None
    on_error: Literal["zero", "drop", "stop"] = "stop"
    terms: dict[Name, Term] = {}
    query_filter_config: Filter = Filter()
    response_filter_config: Filter = Filter()


class EnvManager(Section):
    """`train_env_manager` and `val_env_manager`: how many environments of which tags."""

    ignored = names.IGNORED_ENV_MANAGER
    num_env_groups: Positive = 128
    group_size: Positive = 1
    tags: Texts = ("SimpleSokoban",)
    num_groups_partition: tuple[Positive, ...] | None = None
    max_env_num_per_worker: Count = 0
    max_traj_per_env: Annotated[int, Field(ge=-1)] = -1


class RewardNormalization(Section):
    """`reward_normalization` of agentic runs."""

    grouping: str = "state"
    method: str = "identity"


class Validation(Section):
    """`validation`. `measure_teacher` (ours): score the teacher's own answers once, for comparison."""

    ignored = names.IGNORED_VALIDATION
    data_args: DataArgs = DataArgs()
    generating_args: GeneratingArgs = GeneratingArgs()
    measure_teacher: bool = False


class ImportanceWeight(Section):
    """`is_weight`. `method` and `lower_bound` are ours; a bound of null is none. See `correction.py` for defaults."""

    enabled: bool = False
    method: Literal["tis", "icepop"] = "tis"
    weight_type: Level = "token"
    lower_bound: NotNegative | None = None
    upper_bound: AboveZero | None = None
    detach: bool = True


class TokenFilter(Section):
    """An entry of `filters`: tokens outside its bounds are left out. A bound of null is none."""

    enabled: bool = False
    agg_type: Level = "token"
    ratio_enabled: bool = True
    ratio_low: NotNegative | None = None
    ratio_high: NotNegative | None = None
    diff_enabled: bool = False
    diff_low: Number | None = None
    diff_high: Number | None = None


class TrainInferCorrection(Section):
    """`train_infer_correction`. `negatives_delta` is ours."""

    is_weight: ImportanceWeight = ImportanceWeight()
    filters: tuple[TokenFilter, ...] = ()
    negatives_delta: AboveZero | None = None


class Demonstrations(Section):
    """`demonstrations` (ours): rows with answers, for losses mix and mix_chord; `*_key` name columns."""

    data_args: DataArgs = DataArgs()
    prompt_key: Name | None = None
    query_key: Name | None = None
    system_key: Name | None = None
    response_key: Name | None = None


class Run(Section):
    """What every run has, whatever it learns from."""

    ignored = names.IGNORED_TOP
    exp_name: str | None = None
    output_dir: str = "./output"
    seed: Count = 42
    deterministic: bool = False
    system_envs: Environment = {}
    track_with: Texts = ("tensorboard",)
    tracker_kwargs: dict[str, Any] = {}  # see `trackers.py`
    num_nodes: Positive | None = None  # None: as many as the device mappings reach over
    num_gpus_per_node: Positive = 8
    max_steps: Positive = 500
    save_steps: Count = 50
    logging_steps: Positive = 1
    eval_steps: Count = 10
    resume_from_checkpoint: bool | str = False
    max_ckpt_to_keep: Count = 0
    max_grad_norm: NotNegative = 1.0
    pretrain: str | None = None
    global_template: str | None = None
    tag_to_template: dict[str, str] = {}
    algorithm_type: str | None = None  # a row of `algorithms.ALGORITHMS`, or the dotted path of a user's own
    loss_agg_mode: (
        Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] | None
    ) = None  # the loss's own, else ROLL's seq-mean-token-mean
    on_bad_row: Literal["drop", "refuse"] = "refuse"
    on_long_prompt: Literal["drop", "refuse"] = "drop"
    strict_strategies: bool = False


class Top(Run):
    """Every key outside the roles, of a run that rolls out."""

    rollout_batch_size: Positive = 128
    prompt_length: Positive = 1024
    response_length: Positive | None = None
    sequence_length: Positive | None = None
    num_return_sequences_in_group: Positive | None = None
    ppo_epochs: Positive = 1
    validation: Validation | None = None
    demonstrations: Demonstrations | None = None
    expert_data_ratio: Fraction | None = None  # Trinity-RFT's; None: the algorithm's
    is_pure_opd: bool = False
    use_opd: bool = False
    pure_opd_pipeline_type: Literal["rlvr", "agentic"] = "rlvr"
    opd_kl_coef: NotNegative | None = None
    opd_kl_discount: Fraction = 0.0
    # how the teachers teach (ours); ranges are those of `algorithms.divergences`
    opd_objective: Literal["sampled", "topk", "full"] = "sampled"
    opd_use_policy_gradient: bool | None = None
    opd_divergence: Literal[names.DIVERGENCES] = "reverse_kl"  # type: ignore[valid-type]
    opd_topk: Positive = 64
    opd_topk_source: Literal["teacher", "student"] = "teacher"
    opd_jsd_beta: Fraction = 0.5
    opd_skew_alpha: Annotated[float, BeforeValidator(_number), Field(ge=0, lt=1)] = 0.1
    allow_self_teacher: bool = False
    advantage_fn: str | None = None  # Trinity-RFT's name of adv_estimator; also a registered name or a dotted path
    advantage_fn_args: dict[str, Any] = {}
    policy_loss_fn: str | None = None  # likewise of policy_loss
    policy_loss_fn_args: dict[str, Any] = {}
    kl_loss_fn: Literal[names.KL_LOSSES] | None = None  # type: ignore[valid-type]
    policy_loss: Literal[names.POLICY_LOSSES] | None = None  # type: ignore[valid-type]
    pg_clip: NotNegative = 0.2
    use_pg_clip_range: bool | None = None
    pg_clip_low: NotNegative | None = None
    pg_clip_high: NotNegative | None = None
    dual_clip_loss: bool | Annotated[float, Field(gt=1)] = False
    enable_old_logprobs_recompute: bool = False
    train_infer_correction: TrainInferCorrection = TrainInferCorrection()
    samples_per_step: Count = 4
    # of the reward's part; fixed or without meaning in pure distillation. None: not written
    adv_estimator: Literal[names.ADV_ESTIMATORS] | None = None  # type: ignore[valid-type]
    gamma: Fraction | None = None
    lambd: Fraction | None = None
    whiten_rewards: bool | None = None
    whiten_advantages: bool | None = None
    norm_mean_type: Literal["batch", "group", "running"] | None = None
    norm_std_type: Literal["batch", "group", "running"] | None = None
    reward_clip: AboveZero | None = None
    advantage_clip: AboveZero | None = None
    use_kl_loss: bool | None = None
    kl_loss_coef: NotNegative | None = None
    kl_penalty: Literal[names.KL_PENALTIES] | None = None  # type: ignore[valid-type]
    entropy_loss_coef: Number | None = None
    add_token_level_kl: bool | None = None
    init_kl_coef: NotNegative | None = None
    target_kl: AboveZero | None = None
    kl_horizon: Positive | None = None
    critic_warmup: Count | None = None
    critic_epochs: Positive | None = None
    value_clip: AboveZero | None = None
    # rollout control
    max_running_requests: Positive | None = None
    is_use_additional_prompts: bool = False
    max_additional_running_prompts: Count = 16
    async_generation_ratio: NotNegative = 0.0
    # agentic
    custom_envs: dict[str, Any] | None = None
    train_env_manager: EnvManager | None = None
    val_env_manager: EnvManager | None = None
    reward_normalization: RewardNormalization = RewardNormalization()
    # change what is learnt, and are not available yet where they are on
    opsd_mode: bool = False
    infer_correction: bool = False  # ROLL's older form of train_infer_correction
    opd_token_kld_clip: Number | None = None
    pg_variant: str | None = None
    importance_sampling: str | None = None
    use_topr_loss: bool = False
    use_topr_neg_loss_coef: Number = 0.0
    postive_loss_coef: Number = 0.0  # ROLL's spelling
    reward_norm: str | None = None  # ROLL's older keys, before norm_mean_type and norm_std_type
    reward_shift: bool = False
    reward_scale: bool = False


class EpochArgs(TrainingArgs):
    """`training_args` of a run over rows that bring their answers. Batch sizes count rows."""

    ignored = names.IGNORED_TRAINING_ARGS - {"num_train_epochs"}
    num_train_epochs: AboveZero | None = None


class SupervisedWorker(Worker):
    """The role that learns from rows. Nothing is sampled and there is no teacher."""

    ignored = names.IGNORED_WORKER | {"generating_args", "opd_kl_coef", "tag_included"}
    training_args: EpochArgs = EpochArgs()


class HeldOut(Section):
    """`validation` without generating: the loss on held-out rows."""

    ignored = names.IGNORED_VALIDATION | {"generating_args"}
    data_args: DataArgs = DataArgs()


class Supervised(Run):
    """Keys of both pipelines that learn from rows."""

    max_steps: Annotated[int, Field(ge=-1)] | None = None  # -1: from num_train_epochs, as in ROLL
    sequence_length: Positive = 1024
    train_batch_size: Positive | None = None  # rows a step; None: those of one update
    validation: HeldOut | None = None


class Sft(Supervised):
    """Keys of the SFT pipeline outside its role `sft_train`; `*_key` name columns."""

    prompt_key: Name | None = None
    query_key: Name | None = None
    system_key: Name | None = None
    response_key: Name | None = None


class Dpo(Supervised):
    """Keys of the DPO pipeline outside its roles `actor_train` and `reference`; `*_key` name columns."""

    chosen_key: Name | None = None
    rejected_key: Name | None = None
    beta: AboveZero | None = None
    label_smoothing: Annotated[float, BeforeValidator(_number), Field(ge=0, lt=0.5)] | None = None
    ipo: bool = False
    use_reference_model: bool = True
