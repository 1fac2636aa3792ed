"""What a user may write: every key once, with its name, type, range, default, meaning and origin.

A section of the configuration is a frozen dataclass of keys. Pydantic checks types and ranges strictly; nothing here
looks at the disk or at other sections, that is the business of the checks. The types of `plan.py` inherit the classes
of keys whose values pass through as they are, so that such a key needs two lines: one here and one where it is used.
`docs/configuration.md` is written from these declarations.

A pipeline that learns from rows with answers declares its keys as a subclass of `Supervised`.
"""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_type_hints

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from roll_opd.config import roll_keys as roll
from roll_opd.config.diagnostics import Diagnostics

T = TypeVar("T")
S = TypeVar("S", bound="Section")
OURS, TRINITY = "ours", "Trinity-RFT"  # origins of a key that is not ROLL's
PURE_ROLES = ("student_train", "student_infer")  # the student: who learns, who samples
MIXED_ROLES = ("actor_train", "actor_infer")  # and its names in mixed mode


def key(default: T, meaning: str, origin: str = "ROLL") -> T:
    """Declare a key: its default, what it means, and where it comes from."""
    metadata = {"meaning": meaning, "origin": origin}
    if isinstance(default, dict | Section):  # each section has its own, as it knows where it stands
        return field(default_factory=lambda: copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


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


def _temperature(value: float) -> float:
    """Refuse what vLLM samples at another temperature than the one that training divides by."""
    if 0 < value < COLDEST:
        raise ValueError(f"0 (greedy) or from {COLDEST}, which vLLM takes for everything between them")
    return value


COLDEST = 0.01  # `_MAX_TEMP` in vLLM's sampling_params.py, which refuses what is above 2
Number = Annotated[float, BeforeValidator(_number)]
Threshold = Annotated[Number | None, BeforeValidator(lambda value: None if value == "None" else value)]
Fraction = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1)]
NotNegative = Annotated[float, BeforeValidator(_number), Field(ge=0)]
AboveZero = Annotated[float, BeforeValidator(_number), Field(gt=0)]
Temperature = Annotated[float, BeforeValidator(_number), Field(ge=0, le=2), AfterValidator(_temperature)]
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]  # what engines keep counts and lengths in
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Many = Annotated[int, Field(ge=1, le=10**6)]  # of what is in memory, or under way, all at once
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]  # numpy's, which vLLM seeds, takes no larger one
Name = Annotated[str, Field(min_length=1)]
Probabilities = Annotated[tuple[NotNegative, ...], BeforeValidator(_numbers)]
Texts = Annotated[tuple[str, ...], BeforeValidator(_texts)]
Names = Annotated[tuple[Name, ...], BeforeValidator(_texts)]
Environment = dict[Annotated[str, Field(pattern="^[^=]+$")], str | int | float]
Dtype = Literal["fp32", "bf16", "fp16"]
RoutingMode = Literal["disable", "measure", "R3"]
Level = Literal["token", "segment", "geometric", "sequence"]


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the configuration. `ignored` names ROLL's keys that are accepted without a meaning."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    ignored: ClassVar[frozenset[str]] = frozenset()
    # of one that was read: where problems of its keys are told, and those that the user wrote, null included
    diag: ClassVar[Diagnostics] = Diagnostics()
    written: ClassVar[frozenset[str]] = frozenset()


def settle(section: Section, diag: Diagnostics, written: frozenset[str]) -> None:
    """Let `section` know where it stands and what of it was written."""
    vars(section).update(diag=diag, written=written)


def changed(section: S, values: Mapping[str, Any]) -> S:
    """Return `section` with other values, in the same place."""
    new = replace(section, **values)
    settle(new, section.diag, section.written)
    return new


def keys_of(section: type[Section]) -> dict[str, Any]:
    """Return the keys of a section that may be written, with their annotations."""
    if section not in _KEYS:
        hints = get_type_hints(section, include_extras=True)
        _KEYS[section] = {item.name: hints[item.name] for item in fields(section) if item.name not in section.ignored}
    return _KEYS[section]


_KEYS: dict[type[Section], dict[str, Any]] = {}


def shared(keys: type[Section], section: Section) -> dict[str, Any]:
    """Return the values of `section` for the keys of the class `keys`, from which a type of the plan inherits."""
    return {name: getattr(section, name) for name in keys_of(keys)}


@dataclass(frozen=True, kw_only=True)
class ModelArgs(Section):
    """`model_args`."""

    ignored = roll.IGNORED_MODEL_ARGS
    model_name_or_path: str | None = key(None, "directory of a Hugging Face model, or the name of a downloaded one")
    dtype: Dtype | None = key(None, "precision; without it bf16, a rollout's as its student's")
    lora_target: tuple[str, ...] | str | None = key(
        None, "LoRA: linear layers with an adapter, as names or separated by commas; all-linear: every one"
    )
    lora_rank: Annotated[int, Field(ge=0)] | None = key(None, "rank of the adapters; without it 8; 0: no LoRA")
    lora_alpha: AboveZero | None = key(None, "adapters count lora_alpha / lora_rank; without it twice the rank")
    lora_dropout: NotNegative = key(0.0, "only 0: log-probs of a model under dropout are not defined")
    additional_target: Any = key(None, "not available yet: modules that are trained whole beside the adapters")
    ulysses_size: Positive | None = key(None, "of fsdp2: devices that share a sequence; here its tensor-parallel size")
    adapter_name_or_path: str | None = key(None, "directory of a LoRA adapter, as peft saves it, to begin with")
    freeze_module_prefix: Any = key(None, "not available yet: modules that are not trained")


@dataclass(frozen=True, kw_only=True)
class SchedulerArgs(Section):
    """`lr_scheduler_kwargs`."""

    min_lr: NotNegative = key(0.0, "learning rate at which a schedule ends")
    max_lr: AboveZero | None = key(None, "learning rate after the warm-up, instead of learning_rate")
    init_lr: NotNegative = key(0.0, "learning rate at which the warm-up begins")
    lr_decay_steps: Positive | None = key(None, "updates until the learning rate is min_lr; without it all")
    wsd_decay_steps: Positive | None = key(None, "of warmup_stable_decay: updates of the decay")
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] | None = key(
        None, "of warmup_stable_decay: the form of the decay; without it exponential"
    )


@dataclass(frozen=True, kw_only=True)
class OptimizerKeys(Section):
    """AdamW."""

    learning_rate: NotNegative = key(5e-5, "after the warm-up")
    weight_decay: NotNegative = key(0.0, "decoupled")
    adam_beta1: Fraction = key(0.9, "decay of the mean of gradients")
    adam_beta2: Fraction = key(0.999, "decay of the mean of squared gradients")
    adam_epsilon: NotNegative = key(1e-8, "added to the root of the latter")


@dataclass(frozen=True, kw_only=True)
class TrainingArgs(OptimizerKeys):
    """`training_args`: the optimizer and its schedule. Batch sizes are per data-parallel rank, steps are updates."""

    ignored = roll.IGNORED_TRAINING_ARGS
    per_device_train_batch_size: Many = key(8, "sequences in a micro-batch, unless it is limited by tokens")
    gradient_accumulation_steps: Many = key(1, "such micro-batches in an update")
    warmup_steps: Count = key(0, "updates in which the learning rate rises from 0")
    warmup_ratio: Fraction = key(0.0, "warm-up as a share of all updates, where warmup_steps is 0")
    lr_scheduler_type: Literal[
        "linear",
        "constant",
        "constant_with_warmup",
        "cosine",
        "cosine_with_min_lr",
        "cosine_warmup_with_min_lr",
        "inverse_sqrt",
        "warmup_stable_decay",
    ] = key("linear", "learning rate after the warm-up; linear: down to min_lr at the last update")
    lr_scheduler_kwargs: SchedulerArgs = key(SchedulerArgs(), "arguments of the schedule")
    max_grad_norm: NotNegative | None = key(None, "norm of clipping, instead of the top-level key; 0: none")


@dataclass(frozen=True, kw_only=True)
class DataArgs(Section):
    """`data_args`."""

    ignored = roll.IGNORED_DATA_ARGS
    file_name: Texts = key((), "files (JSONL, Parquet), directories or patterns")
    dataset_dir: str | None = key(None, "a directory in which they are looked for, too")
    domain_interleave_probs: dict[str, NotNegative] = key({}, "share of the draws by domain or tag; sum 1")
    interleave_probs: Probabilities = key((), "share of the draws of each entry of file_name; the sum is 1")
    template: str | None = key(None, "how a prompt becomes text; without it the tokenizer's own chat template")
    messages: Name | None = key(
        None, "column of the prompt, as a list of messages or a JSON text of one; of a plain text: write prompt"
    )
    prompt: Name | None = key(None, "column of the prompt, whatever else the rows have")
    tag: Name | None = key(None, "column of the tag by which teachers and rewards are chosen")
    id: Name | None = key(None, "column of the row's id")
    limit: Positive | None = key(None, "use only the first so many rows", OURS)


@dataclass(frozen=True, kw_only=True)
class SamplingKeys(Section):
    """What the distribution is that tokens are sampled from."""

    top_p: Annotated[float, BeforeValidator(_number), Field(gt=0, le=1)] = key(1.0, "share of the mass")
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] = key(-1, "sample from so many tokens; 0 or -1: from all")
    temperature: Temperature = key(1.0, "divides the logits; 0: greedy; else from 0.01")
    repetition_penalty: AboveZero = key(1.0, "vLLM's; 1: none")


@dataclass(frozen=True, kw_only=True)
class GeneratingArgs(SamplingKeys):
    """`generating_args`."""

    ignored = roll.IGNORED_GENERATING_ARGS
    max_new_tokens: Positive | None = key(None, "most tokens of a response; without it response_length")
    num_return_sequences: Many | None = key(None, "responses a prompt; without it num_return_sequences_in_group")
    stop_strings: Names | None = key(None, "texts that end a response")


@dataclass(frozen=True, kw_only=True)
class StrategyArgs(Section):
    """`strategy_args`."""

    strategy_name: str = key("", "megatron_train, megatron_infer or vllm; others of ROLL's become the nearest of these")
    strategy_config: dict[str, Any] | None = key(
        None, "the engine's own options: Megatron-core's TransformerConfig and sizes, or vLLM's engine arguments"
    )


@dataclass(frozen=True, kw_only=True)
class SequencePackingArgs(Section):
    """`sequence_packing_args`."""

    ignored = roll.IGNORED_SEQUENCE_PACKING
    max_packed_sequence_length_forward: Positive | None = key(None, "tokens in a micro-batch of log-probs")
    max_packed_sequence_length_train: Positive | None = key(None, "tokens in a micro-batch of training")


@dataclass(frozen=True, kw_only=True)
class RouterReplay(Section):
    """`router_replay`."""

    mode: RoutingMode = key(
        "disable",
        "R3: training sends tokens to the experts that the inference engine sent them to; measure (ours): it only"
        " counts where its own choice is another one",
    )


@dataclass(frozen=True, kw_only=True)
class Worker(Section):
    """A role: student, rollout, teacher, reference policy, critic, or a judge that runs here."""

    ignored = roll.IGNORED_WORKER
    model_args: ModelArgs = key(ModelArgs(), "the model")
    training_args: TrainingArgs = key(TrainingArgs(), "of roles that learn")
    data_args: DataArgs = key(DataArgs(), "rows; of the role that learns")
    generating_args: GeneratingArgs = key(GeneratingArgs(), "of roles that generate")
    strategy_args: StrategyArgs | None = key(None, "the engine, and how the model is spread over devices")
    device_mapping: str | int | tuple[int, ...] | None = key(
        None,
        'devices, such as "list(range(0,8))"; without GPUs devices are slots that share the cores. Without it the'
        " student has all devices, and the other roles the student's",
    )
    num_gpus_per_worker: Count | None = key(None, "of sglang and hf_infer: devices of an engine")
    worker_cls: str | None = key(None, "ROLL's class of the role: an ActorPGWorker of the student reads pg_variant")
    pg_variant: str | None = key(None, "policy loss of the student, with ROLL's ActorPGWorker")
    topr_positive_weight: NotNegative = key(1.0, "of pg_variant topr: weight of rewards above 0")
    topr_negative_weight: NotNegative = key(1.0, "of pg_variant topr: weight of the others")
    infer_batch_size: Many = key(16, "sequences in a micro-batch of log-probs, unless it is limited by tokens")
    use_sequence_packing: bool = key(False, "limit micro-batches by the tokens of sequence_packing_args")
    sequence_packing_args: SequencePackingArgs = key(SequencePackingArgs(), "limits by tokens")
    router_replay: RouterReplay = key(RouterReplay(), "routes of experts, of a student that is a mixture of them")
    use_dynamic_batching_in_train: bool = key(False, "limit micro-batches of training by tokens")
    use_dynamic_batching_in_infer: bool = key(False, "limit micro-batches of log-probs by tokens")
    max_tokens_per_microbatch_in_train: Count | None = key(None, "limit of a training micro-batch")
    max_tokens_per_microbatch_in_infer: Count | None = key(None, "limit of a log-prob micro-batch")
    opd_kl_coef: NotNegative | None = key(None, "of a teacher: its weight, instead of the top-level key")
    tag_included: Texts | None = key(None, "of a teacher: tags of the rows it teaches; without it all")
    system_envs: Environment = key({}, "environment variables of the role's processes")


@dataclass(frozen=True, kw_only=True)
class ContextKeys(Section):
    """What a teacher reads in the place of the student's prompt."""

    system_prompt: str | None = key(None, "a system message that it alone reads, in the place of the row's", OURS)
    hint: str | None = key(
        None,
        "what it alone reads behind the user's last message, or around {prompt}; {ground_truth} and {NAME} are the"
        " row's columns",
        OURS,
    )
    template: str | None = key(None, "a template of its own; native is its own tokenizer's chat template", OURS)


@dataclass(frozen=True, kw_only=True)
class FollowKeys(Section):
    """`follows_student`: a teacher that begins as the student and takes over what that learns."""

    every: Positive = key(1, "steps from one time to the next", OURS)
    decay: Annotated[NotNegative, Field(lt=1)] = key(0.0, "how much of its own weights stays each time", OURS)


@dataclass(frozen=True, kw_only=True)
class TeacherWorker(Worker, ContextKeys):
    """A teacher has all keys of a role, and these."""

    prompt_length: Positive | None = key(
        None, "most tokens of what it reads before a response; without it prompt_length + response_length", OURS
    )
    follows_student: FollowKeys | None = key(
        None, "learn from the student's own weights; without it it is frozen", OURS
    )


@dataclass(frozen=True, kw_only=True)
class Filter(Section):
    """`query_filter_config` and `response_filter_config`."""

    type: str = key("no_filter", "no_filter, mean_filter or std_filter")
    filter_args: dict[str, Threshold] = key({}, "thresholds: threshold_up and threshold_down, or std_threshold")


@dataclass(frozen=True, kw_only=True)
class Term(Section):
    """`rewards.<domain>.terms.<name>`: what is added to a reward. Keys that are not listed go to it as arguments."""

    worker_cls: str | None = key(None, "a built-in reward, ROLL's class path, or a dotted path; else the domain's name")
    weight: Number = key(1.0, "in the sum of the domain's terms", OURS)
    timeout: AboveZero | None = key(None, "seconds a sample may take", OURS)
    args: dict[str, Any] = key({}, "arguments, beside those that are keys", OURS)


@dataclass(frozen=True, kw_only=True)
class RewardKeys(Section):
    """How a domain's rewards are run."""

    world_size: Annotated[int, Field(ge=1, le=4096)] = key(1, "processes")
    on_error: Literal["zero", "drop", "stop"] = key("stop", "what becomes of a sample whose reward fails", OURS)


@dataclass(frozen=True, kw_only=True)
class Reward(Term, RewardKeys):
    """`rewards.<domain>`."""

    ignored = roll.IGNORED_REWARD
    tag_included: Texts | None = key(None, "tags of the rows it scores; without it all")
    infer_batch_size: Many = key(16, "most samples in a call of the reward")
    max_concurrency: Many | None = key(None, "calls under way in a process")
    terms: dict[Name, Term] = key({}, "rewards that are added, by name", OURS)
    query_filter_config: Filter = key(Filter(), "which groups of samples count")
    response_filter_config: Filter = key(
        Filter(), "which single samples count; one that fails takes along what it is compared with"
    )


@dataclass(frozen=True, kw_only=True)
class Validation(Section):
    """`validation`."""

    # in ROLL it is a role
    ignored = (roll.IGNORED_WORKER | keys_of(Worker).keys() | {"eval_steps"}) - {"data_args", "generating_args"}
    data_args: DataArgs = key(DataArgs(), "held-out rows")
    generating_args: GeneratingArgs = key(GeneratingArgs(), "how they are answered")
    measure_teacher: bool = key(False, "score the teacher's own answers once, for comparison", OURS)


@dataclass(frozen=True, kw_only=True)
class ImportanceWeight(Section):
    """`is_weight`. A bound of null is none."""

    enabled: bool = key(False, "weigh the policy loss with train / infer probabilities")
    method: Literal["tis", "icepop"] = key("tis", "truncate weights, or mask tokens outside", OURS)
    weight_type: Level = key("token", "over what a weight is taken")
    lower_bound: NotNegative | None = key(None, "of icepop; not written: 0.5", OURS)
    upper_bound: AboveZero | None = key(None, "not written: 1.2 of tis, 5 of icepop")
    detach: bool = key(True, "accepted: weights never have a gradient")


@dataclass(frozen=True, kw_only=True)
class TokenFilter(Section):
    """An entry of `filters`: tokens outside its bounds are masked. A bound of null is none."""

    enabled: bool = key(False, "whether it counts")
    agg_type: Level = key("token", "over what it measures")
    ratio_enabled: bool = key(True, "bound train / infer")
    ratio_low: NotNegative | None = key(0.8, "lowest train / infer")
    ratio_high: NotNegative | None = key(1.2, "highest")
    diff_enabled: bool = key(False, "bound train - infer")
    diff_low: Number | None = key(-0.2, "lowest train - infer")
    diff_high: Number | None = key(0.2, "highest")


@dataclass(frozen=True, kw_only=True)
class TrainInferCorrection(Section):
    """`train_infer_correction`: what is done about log-probs of training and inference engine being apart."""

    is_weight: ImportanceWeight = key(ImportanceWeight(), "weights of the policy loss")
    filters: tuple[TokenFilter, ...] = key((), "masks of tokens")
    negatives_delta: AboveZero | None = key(None, "mask negative advantages where infer - train is above this", OURS)


@dataclass(frozen=True, kw_only=True)
class PromptColumns(Section):
    """Columns of rows with an answer."""

    prompt_key: Name | None = key(None, "column of the instruction")
    query_key: Name | None = key(None, "column of what is appended to it")
    system_key: Name | None = key(None, "column of the system message")
    response_key: Name | None = key(None, "column of the answer")


@dataclass(frozen=True, kw_only=True)
class Demonstrations(PromptColumns):
    """`demonstrations`: rows with answers, of which policy losses mix and mix_chord learn a share of each update."""

    data_args: DataArgs = key(DataArgs(), "the rows", OURS)


@dataclass(frozen=True, kw_only=True)
class RowKeys(Section):
    """What becomes of rows that cannot be used."""

    on_bad_row: Literal["drop", "refuse"] = key("refuse", "rows that cannot be read", OURS)
    on_long_prompt: Literal["drop", "refuse"] = key("drop", "rows that are too long", OURS)


@dataclass(frozen=True, kw_only=True)
class CheckpointKeys(Section):
    """When checkpoints are written, and how many stay."""

    save_steps: Count = key(50, "steps between checkpoints; 0: only at the end")
    max_ckpt_to_keep: Count = key(0, "newest ones that stay; 0: all")
    async_save: bool = key(False, "write them beside the steps that follow, from copies in the host's memory", OURS)


@dataclass(frozen=True, kw_only=True)
class RunKeys(Section):
    """What a run of any pipeline has."""

    output_dir: str = key("./output", "where the directory <exp_name>/<run> is made")
    seed: Seed = key(42, "of samples, the order of rows and new weights")
    deterministic: bool = key(False, "the same bits in every run, at some cost", OURS)
    logging_steps: Positive = key(1, "steps between lines on the console")
    eval_steps: Count = key(10, "steps between validations; 0: never")
    device_memory_gb: AboveZero | None = key(
        None, "GiB of a device: what cannot fit is refused, what hardly can is warned of; else its own", OURS
    )
    is_offload_states: bool | None = key(
        None,
        "whether roles that share devices give their memory back while it is another's turn; without it: on GPUs",
    )
    startup_seconds: AboveZero = key(
        1800.0, "how long any part of a run may take to start, until the run gives up", OURS
    )
    grace_seconds: NotNegative = key(120.0, "how long a step may go on after SIGTERM, to end with a checkpoint", OURS)
    host_seconds: AboveZero = key(600.0, "how long the hosts of a run wait for one that does not come", OURS)
    max_restarts: Count = key(0, "times that a run which fails goes on by itself from its last checkpoint", OURS)


@dataclass(frozen=True, kw_only=True)
class Run(RunKeys, CheckpointKeys, RowKeys):
    """Keys outside the roles that every pipeline has."""

    ignored = roll.IGNORED_TOP
    exp_name: str | None = key(None, "name of the experiment; without it that of the file")
    system_envs: Environment = key({}, "environment variables of all processes")
    track_with: Texts = key(("tensorboard",), "trackers: built-in names or dotted paths")
    tracker_kwargs: dict[str, Any] = key({}, "arguments of the tracker; of several, by name")
    num_nodes: Many | None = key(None, "without it as many as the device mappings reach over")
    num_gpus_per_node: Annotated[int, Field(ge=1, le=1024)] = key(
        8,
        "devices of a node; without GPUs, slots that share its cores. Where no role says device_mapping either: this"
        " machine's GPUs, or two slots",
    )
    max_steps: Positive | None = key(500, "steps of the run")
    resume_from_checkpoint: bool | str = key(
        False, "true: the experiment's newest; or an experiment, run or checkpoint"
    )
    max_grad_norm: NotNegative = key(1.0, "norm at which gradients are clipped; 0: none")
    pretrain: str | None = key(None, "the model of roles that name none")
    global_template: str | None = key(None, "the template of all rows whose tag has none")
    tag_to_template: dict[str, str] = key({}, "the template of rows by tag", OURS)
    algorithm_type: str | None = key(None, "a row of algorithms: what is not written follows it", TRINITY)
    loss_agg_mode: (
        Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] | None
    ) = key(None, "how tokens become one loss; without it the loss's own, else seq-mean-token-mean")
    strict_strategies: bool = key(False, "refuse a strategy or precision that is not here; else: the nearest", OURS)


@dataclass(frozen=True, kw_only=True)
class ReinforcementKeys(Section):
    """The reward's part of the objective.

    Of each reward domain by itself, rewards are normalised by `norm_mean_type` and `norm_std_type`, then clipped, and
    advantages are whitened; the teachers' term is added after that. In pure distillation all of it is off.
    """

    gamma: Fraction = key(1.0, "discount of later rewards")
    lambd: Fraction = key(0.95, "of gae")
    whiten_rewards: bool = key(False, "give token rewards mean 0 and deviation 1 over a domain's samples")
    whiten_advantages: bool = key(False, "give advantages mean 0 and deviation 1 over a domain's samples")
    norm_mean_type: Literal["batch", "group", "running"] | None = key(None, "whose mean is subtracted from a reward")
    norm_std_type: Literal["batch", "group", "running"] | None = key(None, "whose deviation divides it")
    reward_clip: AboveZero | None = key(None, "bound of rewards after that, and of token rewards")
    kl_loss_coef: NotNegative = key(0.0, "weight of the KL to the reference policy in the loss, with use_kl_loss")
    kl_penalty: str = key("kl", "estimator of the token-level KL: kl (k1), mse (k2), low_var_kl (k3), abs, full")
    target_kl: AboveZero | None = key(None, "KL towards which the coefficient of the token-level KL adapts")
    kl_horizon: Positive = key(10000, "samples in which init_kl_coef adapts by a fifth at most")


@dataclass(frozen=True, kw_only=True)
class DistillationKeys(Section):
    """How the teachers teach."""

    opd_objective: Literal["sampled", "topk", "full"] = key(
        "sampled",
        "from sampled tokens as an advantage; from a top-k or the whole vocabulary as a part of the loss",
        OURS,
    )
    opd_divergence: str = key("reverse_kl", "of topk and full: a name of algorithms.divergences", OURS)
    opd_topk: Positive = key(64, "tokens of topk", OURS)
    opd_topk_source: Literal["teacher", "student"] = key("teacher", "whose most likely tokens these are", OURS)
    opd_jsd_beta: Fraction = key(0.5, "the teacher's weight in the mixture of jsd", OURS)
    opd_skew_alpha: Annotated[NotNegative, Field(lt=1)] = key(
        0.1, "of the skewed divergences: share of the mixture", OURS
    )


@dataclass(frozen=True, kw_only=True)
class SampleKeys(Section):
    """Which samples of a step are learned from, and with what weight; the formulas are in `algorithms.sample_masks`."""

    max_len_mask: bool = key(False, "leave out responses that have all the tokens they may have")
    difficulty_mask: bool = key(False, "leave out prompts whose mean reward is not between the two thresholds")
    difficulty_low_threshold: Number = key(0.0, "of difficulty_mask: the mean reward must be above it")
    difficulty_high_threshold: Number = key(1.0, "of difficulty_mask: the mean reward must be below it")
    error_max_len_clip: bool = key(False, "keep of rewards below 1 only those of 0 with a short enough response")
    error_max_len_threshold: Annotated[int, Field(ge=1)] = key(
        9999999999, "of error_max_len_clip: fewer tokens are short enough"
    )
    difficulty_loss_weight: bool = key(False, "weigh a sample's policy loss with 0.5 + 1.5 times its row's difficulty")
    length_loss_weight: bool = key(False, "weigh a sample's policy loss with 1.5 down to 0.5, the longest least")
    rl_loss_coef: Number = key(1.0, "weight of the policy and KL losses beside entropy and the teachers' divergence")


@dataclass(frozen=True, kw_only=True)
class ObjectiveKeys(ReinforcementKeys, SampleKeys, DistillationKeys):
    """What is optimised; the formulas are in `roll_opd.algorithms`."""

    advantage_clip: AboveZero | None = key(None, "bound of advantages, the teachers' part included")
    entropy_loss_coef: Number = key(0.0, "weight of the entropy in the loss")
    pg_clip: NotNegative = key(0.2, "how far ratios may be from 1")
    pg_clip_low: NotNegative | None = key(None, "clip range of the ratio downwards; without it pg_clip")
    pg_clip_high: NotNegative | None = key(None, "clip range of the ratio upwards; without it pg_clip")
    opd_kl_discount: Fraction = key(0.0, "discount of later tokens' reverse KL; 0: a token's own alone", OURS)
    ppo_epochs: Positive = key(1, "passes over a step's samples")


@dataclass(frozen=True, kw_only=True)
class CriticKeys(Section):
    """The critic's training."""

    critic_warmup: Count = key(0, "first steps, in which the critic alone learns")
    critic_epochs: Positive = key(1, "passes of the critic over a step's samples", OURS)
    value_clip: AboveZero | None = key(None, "how far a value may move from the one before the update")


@dataclass(frozen=True, kw_only=True)
class RolloutKeys(Section):
    """How a step rolls out."""

    rollout_batch_size: Many = key(128, "prompts a step")
    samples_per_step: Annotated[int, Field(ge=0, le=10**6)] = key(4, "samples a step in samples.jsonl", OURS)
    async_generation_ratio: NotNegative = key(
        0.0, "accepted: steps that generation may run ahead of training, which it never does"
    )
    weight_sync: Literal["auto", "shared_memory"] = key(
        "auto", "how new weights reach the engines: as the devices allow, or through the hosts' memory", OURS
    )
    teacher_preflight: bool | Literal["warn"] = key(
        True, "check every teacher on the first samples, before anything is learned; warn: never stop", OURS
    )


@dataclass(frozen=True, kw_only=True)
class WorkflowKeys(Section):
    """What is done with a row, where it is more than to answer it once."""

    workflow: Name | None = key(None, "the workflow: a name or a dotted path; without it one answer", OURS)
    workflow_args: dict[str, Any] = key({}, "its task.workflow_args", OURS)
    workflow_reward: Name | None = key(None, "its task.reward_fn: a registered name or a dotted path", OURS)
    workflow_reward_args: dict[str, Any] = key({}, "arguments of that function", OURS)
    plugin_dir: Name | None = key(None, "a directory whose modules are imported, to register workflows", OURS)
    prompt_key: Name = key("prompt", "column of a row that is task.task_desc", OURS)
    response_key: Name = key("ground_truth", "column of a row that is task.truth, and its ground truth", OURS)
    system_prompt: str | None = key(None, "task.format_args.system_prompt", OURS)
    reply_prefix: str | None = key(None, "task.format_args.reply_prefix: how every answer begins", OURS)
    workflow_workers: Annotated[int, Field(ge=1, le=4096)] = key(2, "processes that run it", OURS)
    workflow_concurrency: Many = key(128, "runs under way at once in each of them", OURS)
    workflow_timeout: AboveZero = key(600.0, "seconds that a call of it may take", OURS)
    workflow_memory_gb: AboveZero = key(16.0, "GiB that each of them may need", OURS)
    endpoint_host: Name = key("127.0.0.1", "where OpenAI clients reach the policy: an address of this machine", OURS)
    endpoint_port: Annotated[int, Field(ge=0, le=65000)] = key(
        0, "its port in the first process, the next in the second, and so on; 0: any, started when a run asks", OURS
    )
    endpoint_api_key: Name | None = key(None, "an API key of all runs, told apart by URL or header", OURS)
    tool_call_parser: Name = key("hermes", "how the model writes tool calls; names of vLLM's --tool-call-parser", OURS)
    on_workflow_error: Literal["drop", "stop"] = key("drop", "a run that fails: leave it out, or end", OURS)


@dataclass(frozen=True, kw_only=True)
class RemoteModelKeys(Section):
    """An auxiliary model that runs elsewhere, behind an OpenAI-compatible address."""

    base_url: Name = key("", "its address, with the /v1", OURS)
    api_key: Name = key("EMPTY", "its key", OURS)
    model_name: Name = key("", "what it is called there", OURS)


@dataclass(frozen=True, kw_only=True)
class EnvironmentKeys(Section):
    """`custom_envs.TAG`: a game, and how the model is told of it."""

    ignored = roll.IGNORED_ENVIRONMENT
    env_type: Name = key("", "the game: a name of docs/environments.md, a dotted path, gymnasium:ID, or GEM's own id")
    env_config: dict[str, Any] = key({}, "its arguments")
    env_manager_cls: str | None = key(
        None, "ROLL's: with a StepEnvManager every action is a sample of its own, and the past is told as text"
    )
    max_steps: Many = key(10, "most actions of a trajectory")
    max_tokens_per_step: Positive | None = key(None, "most tokens of an action's response")
    agent_system_template: str | None = key(None, "the system message")
    agent_template: str = key(
        "{observation}",
        "a user's turn, of {observation}, {turn_idx}, {actions_left}, {max_response_length}, {suffix}; with a"
        " StepEnvManager of {env_instruction}, {history}, {history_length}, {step_count}, {current_step},"
        " {current_observation}, {max_response_length}",
    )
    pre_step_template: str | None = key(None, "what stands before each observation, in place of agent_template")
    next_step_template: str | None = key(None, "what stands behind it")
    history_length: Positive | None = key(None, "with a StepEnvManager: how many of the last turns are told")
    tool_wrapper: dict[str, Any] | None = key(None, "of games with a Python tool: ROLL's tool_configs and wrapper_args")
    max_env_step_concurrent: Count = key(0, "steps of these games under way at once in a process; 0: any number")
    step_timeout: AboveZero = key(60.0, "seconds that a step of the game may take", OURS)


@dataclass(frozen=True, kw_only=True)
class EnvironmentsPlayed(Section):
    """`train_env_manager`, `val_env_manager`: how many games are played."""

    ignored = roll.IGNORED_WORKER | roll.IGNORED_ENV_MANAGER | keys_of(Worker).keys() - {"generating_args"}
    tags: Texts = key((), "which of custom_envs")
    num_env_groups: Many = key(128, "groups of trajectories before all tags have had their share")
    num_groups_partition: tuple[Count, ...] | None = key(None, "of which so many are each tag's; without it alike")
    group_size: Many = key(1, "trajectories of a group, which begin alike")
    max_env_num_per_worker: Count = key(0, "accepted: processes hold workflow_concurrency trajectories each")
    max_traj_per_env: int = key(-1, "accepted: a step has rollout_batch_size trajectories")
    format_penalty: Number = key(0.0, "for an action that cannot be read, of a game whose env_config says none")
    generating_args: GeneratingArgs = key(
        GeneratingArgs(),
        "how actions are sampled: of train_env_manager where the rollout has no generating_args, of val_env_manager key"
        " by key in their place",
    )


@dataclass(frozen=True, kw_only=True)
class RewardNormalization(Section):
    """`reward_normalization`: what a trajectory's reward is compared with."""

    ignored = frozenset({"global_scale_factor", "global_shift_value"})
    grouping: Literal["state", "batch", "inductive", "traj_group_id", "tags"] = key(
        "batch",
        "the trajectories that are compared: of a group (traj_group_id, or state), of a tag (tags, or inductive), or of"
        " a step (batch)",
    )
    method: Literal["identity", "mean", "mean_std", "asym_clip"] = key(
        "identity",
        "subtract nothing, their mean, or divide by their deviation too; asym_clip then holds it within -1 and 3",
    )
    # in this order as everywhere: typing takes two orders for one type, and the page has that of the first
    norm_mean_type: Literal["group", "batch"] | None = key(None, "whose mean is subtracted, in place of method's")
    norm_std_type: Literal["group", "batch"] | None = key(None, "whose deviation divides, in place of method's")


@dataclass(frozen=True, kw_only=True)
class AgenticKeys(Section):
    """Of runs in environments."""

    custom_envs: dict[str, EnvironmentKeys] | None = key(None, "environments by tag")
    train_env_manager: EnvironmentsPlayed | None = key(None, "how many of which are played")
    val_env_manager: EnvironmentsPlayed | None = key(None, "how many are in validation, always from the same seeds")
    val_batch_size: int = key(-1, "trajectories of a validation; -1: one a place of val_env_manager")
    reward_normalization: RewardNormalization = key(RewardNormalization(), "of a trajectory's reward")
    step_reward_gamma: Fraction = key(0.95, "of gigpo and step_reinforce: discount of the rewards of later steps")
    episode_reward_weight: Number = key(1.0, "of gigpo: weight of what the trajectory is compared with")
    step_reward_weight: Number = key(1.0, "of gigpo: weight of what steps from one state are compared with")


@dataclass(frozen=True, kw_only=True)
class Top(Run, ObjectiveKeys, CriticKeys, RolloutKeys, WorkflowKeys, AgenticKeys):
    """Every key outside the roles, of a run that rolls out."""

    max_steps: Positive = key(500, "steps of the run")
    prompt_length: Positive = key(1024, "most tokens of a prompt")
    response_length: Positive | None = key(None, "most tokens of a response")
    sequence_length: Positive | None = key(None, "most tokens of both; says what response_length does not")
    val_prompt_length: Positive | None = key(None, "most tokens of a prompt of validation")
    val_sequence_length: Positive | None = key(None, "most tokens of a prompt of validation and its answer")
    num_return_sequences_in_group: Many | None = key(None, "responses a prompt")
    validation: Validation | None = key(None, "held-out prompts, answered now and then")
    demonstrations: Demonstrations | None = key(None, "rows with answers that join the student's samples", OURS)
    expert_data_ratio: Fraction | None = key(None, "their share of an update; without it the algorithm's", TRINITY)
    is_pure_opd: bool = key(False, "learn from teachers alone")
    use_opd: bool = key(False, "learn from teachers and rewards together")
    pure_opd_pipeline_type: Literal["rlvr", "agentic"] = key("rlvr", "from prompts or in environments")
    opd_kl_coef: NotNegative = key(1.0, "weight of the teachers' reverse KL")
    opd_use_policy_gradient: bool | None = key(None, "accepted where it says what opd_objective does", OURS)
    allow_self_teacher: bool = key(False, "accept a teacher with the student's weights", OURS)
    teacher_tokenizer_check: Literal["strict", "warn"] = key(
        "strict", "what a token id of the student that is another token to a teacher does: refuse, or warn", OURS
    )
    adv_estimator: str | None = key(None, "how rewards become advantages; without it gae")
    advantage_fn: str | None = key(None, "adv_estimator: a built-in or registered name, or a dotted path", TRINITY)
    advantage_fn_args: dict[str, Any] = key({}, "arguments of the advantage", TRINITY)
    policy_loss: str | None = key(None, "the policy loss; without it ppo, pure: importance_sampling", OURS)
    policy_loss_fn: str | None = key(None, "policy_loss: a built-in or registered name, or a dotted path", TRINITY)
    policy_loss_fn_args: dict[str, Any] = key({}, "arguments of the loss", TRINITY)
    use_pg_clip_range: bool | None = key(
        None,
        "whether pg_clip_low and pg_clip_high count; not written: no as in ROLL, yes where another key names the loss",
    )
    dual_clip_loss: bool | Annotated[float, Field(gt=1)] = key(
        False, "bound a negative advantage's loss: true is 1 + 2 pg_clip, a number is itself"
    )
    enable_old_logprobs_recompute: bool = key(False, "compute log-probs before the update even where it is not needed")
    train_infer_correction: TrainInferCorrection = key(TrainInferCorrection(), "against log-probs that are apart")
    use_kl_loss: bool | None = key(None, "add a KL to the reference policy to the loss")
    kl_loss_fn: str | None = key(
        None, "of the KL loss: none, or a name of algorithms.kl; without it low_var_kl", TRINITY
    )
    add_token_level_kl: bool = key(False, "subtract a KL to the reference policy from each token's reward")
    init_kl_coef: NotNegative = key(0.2, "coefficient of the token-level KL")
    max_running_requests: Positive | None = key(None, "requests under way at once, over all engines")
    is_use_additional_prompts: bool = key(False, "answer more prompts than needed, in case filters reject some")
    max_additional_running_prompts: Annotated[int, Field(ge=0, le=10**6)] = key(
        16, "additional prompts under way at most"
    )
    pg_variant: str | None = key(
        None, "policy loss, where the student's role writes neither pg_variant nor worker_cls; ROLL reads those alone"
    )
    importance_sampling: str | None = key(None, "token, or seq: ratios of whole sequences")


@dataclass(frozen=True, kw_only=True)
class EpochArgs(TrainingArgs):
    """`training_args` of a run over rows that bring their answers. Batch sizes count rows."""

    ignored = roll.IGNORED_TRAINING_ARGS - {"num_train_epochs"}
    num_train_epochs: AboveZero | None = key(None, "passes over the rows, where max_steps is not written or -1")


@dataclass(frozen=True, kw_only=True)
class SupervisedWorker(Worker):
    """The role that learns from rows. Nothing is sampled and there is no teacher."""

    ignored = (
        roll.IGNORED_WORKER | roll.PG_KEYS | {"generating_args", "opd_kl_coef", "tag_included", "num_gpus_per_worker"}
    )
    training_args: EpochArgs = key(EpochArgs(), "the optimizer, its schedule and its batches")


@dataclass(frozen=True, kw_only=True)
class HeldOut(Section):
    """`validation` without generating: the loss on held-out rows."""

    ignored = Validation.ignored | {"generating_args"}
    data_args: DataArgs = key(DataArgs(), "held-out rows")


@dataclass(frozen=True, kw_only=True)
class Supervised(Run):
    """Keys of pipelines that learn from rows; each is a subclass with its own keys and these facts."""

    ignored = roll.IGNORED_TOP | roll.IGNORED_SUPERVISED
    pipeline: ClassVar[str]  # its module in `roll_opd.pipelines`, or a dotted path
    title: ClassVar[str]  # for people
    role: ClassVar[str]  # the section of what learns
    algorithm: ClassVar[str]  # the row of `algorithms.table` whose loss it learns with
    own_keys: ClassVar[frozenset[str]] = frozenset()  # a configuration with one of these means this pipeline
    schema: ClassVar[str] = "sft"  # what a row holds: a name of `data.answers.SCHEMAS`
    answers: ClassVar[int] = 1  # sequences a row, which stay together
    has_reference: ClassVar[bool] = False  # whether the loss compares with a frozen policy
    loss_arguments: ClassVar[tuple[str, ...]] = ()  # keys that are arguments of the policy loss

    max_steps: Annotated[int, Field(ge=-1)] | None = key(None, "steps of the run; -1: from num_train_epochs")
    sequence_length: Positive = key(1024, "most tokens of a prompt and its answer")
    train_batch_size: Many | None = key(None, "rows a step; without it those of one update", OURS)
    validation: HeldOut | None = key(None, "rows on which the loss is measured")

    def __init_subclass__(cls) -> None:
        if "pipeline" in vars(cls):
            SUPERVISED[cls.pipeline] = cls

    def refusals(self) -> Mapping[str, str]:
        """Return key -> why its value cannot be run yet."""
        return {}


SUPERVISED: dict[str, type[Supervised]] = {}  # by pipeline


@dataclass(frozen=True, kw_only=True)
class Sft(Supervised, PromptColumns):
    """Keys of the SFT pipeline outside its role `sft_train`."""

    pipeline = "sft"
    title = "supervised fine-tuning"
    role = "sft_train"
    algorithm = "sft"


@dataclass(frozen=True, kw_only=True)
class Dpo(Supervised):
    """Keys of the DPO pipeline outside its roles `actor_train` and `reference`."""

    pipeline = "dpo"
    title = "direct preference optimization"
    role = "actor_train"
    algorithm = "dpo"
    schema = "dpo"
    own_keys = frozenset({"chosen_key", "rejected_key", "beta", "label_smoothing", "ipo", "use_reference_model"})
    answers = 2
    has_reference = True
    loss_arguments = ("beta", "label_smoothing")

    chosen_key: Name | None = key(None, "column of the better answer")
    rejected_key: Name | None = key(None, "column of the worse answer")
    beta: AboveZero | None = key(None, "how much log-prob a preference is worth; without it 0.1")
    label_smoothing: Annotated[NotNegative, Field(lt=0.5)] | None = key(None, "share of preferences taken to be wrong")
    kl_loss_coef: NotNegative | None = key(
        None, "weight of a KL loss (k2) to the reference; without it 0.001 with algorithm_type: dpo, else 0", TRINITY
    )
    ipo: bool = key(False, "not available yet: the loss of IPO")
    use_reference_model: bool = key(True, "false is not available")

    def refusals(self) -> Mapping[str, str]:
        """See `Supervised`."""
        found = {}
        if self.ipo:
            found["ipo"] = "true is not available yet; remove the key to learn with DPO's own loss"
        if not self.use_reference_model:
            found["use_reference_model"] = "false is not available: DPO compares with a reference policy"
        return found
