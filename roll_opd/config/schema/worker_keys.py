"""Keys of a role: its model, optimizer, rows, sampling, engine and devices."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from roll_opd.config import roll_keys as roll
from roll_opd.config.schema.key_types import (
    AboveZero,
    Count,
    Dtype,
    Environment,
    Fraction,
    Many,
    Name,
    Names,
    NotNegative,
    Number,
    Positive,
    Probabilities,
    RoutingMode,
    Several,
    Temperature,
    Texts,
)
from roll_opd.config.schema.section import OURS, Section, key, keys_of

PURE_ROLES = ("student_train", "student_infer")  # names of the student's training and sampling roles
MIXED_ROLES = ("actor_train", "actor_infer")  # names of these roles in mixed mode


@dataclass(frozen=True, kw_only=True)
class ModelArgs(Section):
    """`model_args`."""

    ignored = roll.IGNORED_MODEL_ARGS
    model_name_or_path: str | None = key(None, "directory of a Hugging Face model, or the name of a downloaded model")
    dtype: Dtype | None = key(None, "precision; default: bf16; for a rollout, the student's precision")
    lora_target: Several[str] | str | None = key(
        None, "LoRA: linear layers that get an adapter, as a list or separated by commas; all-linear: all linear layers"
    )
    lora_rank: Annotated[int, Field(ge=0)] | None = key(None, "rank of the adapters; default 8; 0: no LoRA")
    lora_alpha: AboveZero | None = key(None, "adapters are scaled by lora_alpha / lora_rank; default: twice the rank")
    lora_dropout: NotNegative = key(0.0, "only 0: log-probs of a model under dropout are not defined")
    additional_target: Any = key(None, "not available yet: modules that are trained in addition to the adapters")
    ulysses_size: Positive | None = key(
        None, "number of devices that share a sequence (fsdp2); used as tensor-parallel size"
    )
    adapter_name_or_path: str | None = key(None, "directory of an initial LoRA adapter, in peft's format")
    freeze_module_prefix: Any = key(None, "not available yet: modules that are not trained")


@dataclass(frozen=True, kw_only=True)
class SchedulerArgs(Section):
    """`lr_scheduler_kwargs`."""

    min_lr: NotNegative = key(0.0, "final learning rate of a schedule")
    max_lr: AboveZero | None = key(None, "learning rate after the warm-up, instead of learning_rate")
    init_lr: NotNegative = key(0.0, "initial learning rate of the warm-up")
    lr_decay_steps: Positive | None = key(
        None, "number of updates until the learning rate reaches min_lr; default: all"
    )
    wsd_decay_steps: Positive | None = key(
        None, "number of updates in which the learning rate decays (warmup_stable_decay)"
    )
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] | None = key(
        None, "form of the decay (warmup_stable_decay); default: exponential"
    )


@dataclass(frozen=True, kw_only=True)
class OptimizerKeys(Section):
    """AdamW."""

    learning_rate: NotNegative = key(5e-5, "learning rate after the warm-up")
    weight_decay: NotNegative = key(0.0, "decoupled weight decay")
    adam_beta1: Fraction = key(0.9, "decay of the moving average of gradients")
    adam_beta2: Fraction = key(0.999, "decay of the moving average of squared gradients")
    adam_epsilon: NotNegative = key(1e-8, "added to the square root of the moving average of squared gradients")


@dataclass(frozen=True, kw_only=True)
class TrainingArgs(OptimizerKeys):
    """`training_args`: optimizer and schedule. Batch sizes are per data-parallel rank; steps are updates."""

    ignored = roll.IGNORED_TRAINING_ARGS
    per_device_train_batch_size: Many = key(8, "number of sequences in a micro-batch, unless tokens limit it")
    gradient_accumulation_steps: Many = key(1, "micro-batches in an update")
    warmup_steps: Count = key(0, "number of updates in which the learning rate rises from 0")
    warmup_ratio: Fraction = key(0.0, "warm-up as a fraction of all updates, if warmup_steps is 0")
    lr_scheduler_type: Literal[
        "linear",
        "constant",
        "constant_with_warmup",
        "cosine",
        "cosine_with_min_lr",
        "cosine_warmup_with_min_lr",
        "inverse_sqrt",
        "warmup_stable_decay",
    ] = key("linear", "course of the learning rate after the warm-up; linear: falls to min_lr at the last update")
    lr_scheduler_kwargs: SchedulerArgs = key(SchedulerArgs(), "arguments of the schedule")
    max_grad_norm: NotNegative | None = key(None, "maximum gradient norm, overrides the top-level key; 0: no clipping")


@dataclass(frozen=True, kw_only=True)
class DataArgs(Section):
    """`data_args`."""

    ignored = roll.IGNORED_DATA_ARGS
    file_name: Texts = key((), "files (JSONL, Parquet), directories or patterns")
    dataset_dir: str | None = key(None, "further directory in which the files are looked up")
    domain_interleave_probs: dict[str, NotNegative] = key(
        {}, "fraction of draws from each domain or tag; the fractions sum to 1"
    )
    interleave_probs: Probabilities = key((), "fraction of draws from each entry of file_name; the fractions sum to 1")
    template: str | None = key(None, "template of a prompt's text; default: the tokenizer's chat template")
    messages: Name | None = key(
        None, "column of the prompt as a list of messages, or as its JSON text; for plain text use prompt"
    )
    prompt: Name | None = key(None, "column of the prompt as plain text; takes precedence over messages")
    tag: Name | None = key(None, "column of the tag that selects teachers and rewards")
    id: Name | None = key(None, "column of the row's id")
    limit: Positive | None = key(None, "use only the first N rows", OURS)


@dataclass(frozen=True, kw_only=True)
class SamplingKeys(Section):
    """Keys of the distribution from which tokens are sampled."""

    top_p: Annotated[Number, Field(gt=0, le=1)] = key(
        1.0, "nucleus sampling: sample from the most likely tokens with this total probability"
    )
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] = key(
        -1, "sample from the k most likely tokens; 0 or -1: from all"
    )
    temperature: Temperature = key(1.0, "divisor of the logits, 0.01 or more; 0: greedy")
    repetition_penalty: AboveZero = key(1.0, "vLLM's repetition penalty; 1: none")


@dataclass(frozen=True, kw_only=True)
class GeneratingArgs(SamplingKeys):
    """`generating_args`."""

    ignored = roll.IGNORED_GENERATING_ARGS
    max_new_tokens: Positive | None = key(None, "maximum tokens of a response; default: response_length")
    num_return_sequences: Many | None = key(None, "responses per prompt; default: num_return_sequences_in_group")
    stop_strings: Names | None = key(None, "texts that end a response")


@dataclass(frozen=True, kw_only=True)
class StrategyArgs(Section):
    """`strategy_args`."""

    strategy_name: str = key(
        "", "megatron_train, megatron_infer or vllm; other strategies of ROLL are replaced by the nearest of these"
    )
    strategy_config: dict[str, Any] | None = key(
        None,
        "options of the engine: parallel sizes and fields of TransformerConfig for Megatron-core, engine"
        " arguments for vLLM",
    )


@dataclass(frozen=True, kw_only=True)
class SequencePackingArgs(Section):
    """`sequence_packing_args`."""

    ignored = roll.IGNORED_SEQUENCE_PACKING
    max_packed_sequence_length_forward: Positive | None = key(None, "maximum tokens in a micro-batch for log-probs")
    max_packed_sequence_length_train: Positive | None = key(None, "maximum tokens in a micro-batch for training")


@dataclass(frozen=True, kw_only=True)
class RouterReplay(Section):
    """`router_replay`."""

    mode: RoutingMode = key(
        "disable",
        "R3: training routes each token to the experts that the inference engine chose; measure (ours): only count"
        " the tokens whose experts differ",
    )


@dataclass(frozen=True, kw_only=True)
class Worker(Section):
    """A role: student, rollout, teacher, reference policy, critic, or a judge with local engines."""

    ignored = roll.IGNORED_WORKER
    model_args: ModelArgs = key(ModelArgs(), "the model")
    training_args: TrainingArgs = key(TrainingArgs(), "optimizer and schedule, for trained roles")
    data_args: DataArgs = key(DataArgs(), "rows, for the trained role")
    generating_args: GeneratingArgs = key(GeneratingArgs(), "sampling, for roles that generate")
    strategy_args: StrategyArgs | None = key(None, "the engine, and the model's layout on devices")
    device_mapping: str | int | Several[int] | None = key(
        None,
        'devices, such as "list(range(0,8))"; without GPUs, devices are slots that share the cores; default: all'
        " devices for the student, the student's devices for other roles",
    )
    num_gpus_per_worker: Count | None = key(None, "number of devices per engine (sglang, hf_infer)")
    worker_cls: str | None = key(None, "ROLL's class of the role; the student's ActorPGWorker reads pg_variant")
    pg_variant: str | None = key(None, "policy loss of the student, read with ROLL's ActorPGWorker")
    topr_positive_weight: NotNegative = key(1.0, "weight of samples with a reward above 0 (pg_variant topr)")
    topr_negative_weight: NotNegative = key(1.0, "weight of the other samples (pg_variant topr)")
    infer_batch_size: Many = key(16, "number of sequences in a micro-batch for log-probs, unless tokens limit it")
    use_sequence_packing: bool = key(False, "limit micro-batches by tokens, as set in sequence_packing_args")
    sequence_packing_args: SequencePackingArgs = key(SequencePackingArgs(), "limits by tokens")
    router_replay: RouterReplay = key(RouterReplay(), "replay of expert routing, for a mixture-of-experts student")
    use_dynamic_batching_in_train: bool = key(False, "limit micro-batches for training by tokens")
    use_dynamic_batching_in_infer: bool = key(False, "limit micro-batches for log-probs by tokens")
    max_tokens_per_microbatch_in_train: Count | None = key(None, "maximum tokens in a micro-batch for training")
    max_tokens_per_microbatch_in_infer: Count | None = key(None, "maximum tokens in a micro-batch for log-probs")
    opd_kl_coef: NotNegative | None = key(None, "weight of this teacher; overrides the top-level key")
    tag_included: Texts | None = key(None, "tags of the rows that this teacher scores; default: all")
    system_envs: Environment = key({}, "environment variables of the role's processes")


@dataclass(frozen=True, kw_only=True)
class ContextKeys(Section):
    """The teacher's context, which replaces the student's prompt."""

    system_prompt: str | None = key(None, "system message for the teacher; replaces the row's", OURS)
    hint: str | None = key(
        None,
        "text for the teacher only, appended to the user's last message or, if it has {prompt}, placed around that"
        " message; {ground_truth} and {NAME} are replaced by columns of the row",
        OURS,
    )
    template: str | None = key(None, "the teacher's template; native: the chat template of its tokenizer", OURS)


@dataclass(frozen=True, kw_only=True)
class FollowKeys(Section):
    """`follows_student`: a teacher that starts with the student's weights and is updated from them during training."""

    update_interval: Positive = key(
        1, "number of steps between two updates of the teacher's weights", OURS, formerly="every"
    )
    ema_decay: Annotated[NotNegative, Field(lt=1)] = key(
        0.0,
        "decay of an exponential moving average of the student's weights; 0: a copy of the weights",
        OURS,
        formerly="decay",
    )


@dataclass(frozen=True, kw_only=True)
class ExternalKeys(Section):
    """A section of a teacher that names a source of its log-probs other than Megatron processes of the run."""

    needs_model: ClassVar[bool] = False  # whether the source reads the weights in model_args.model_name_or_path


@dataclass(frozen=True, kw_only=True)
class HttpKeys(ExternalKeys):
    """`http`: a teacher on a server that gets token ids and returns log-probs."""

    url: Names = key(
        (), "address of the server; or a list of servers with the same model, among which requests are divided", OURS
    )
    server: Literal["vllm", "vllm_tokens", "sglang", "openai", "tinker"] = key(
        "vllm",
        "protocol: vllm (completions with prompt_logprobs), vllm_tokens (/inference/v1/generate, exact log-probs of the"
        " student's top-k), sglang (/generate), openai (completions with echo), tinker (with the package tinker)",
        OURS,
    )
    model_name: Name | None = key(
        None,
        "name of the model on the server, with tinker also a path tinker://...; default: the only model that it lists",
        OURS,
    )
    api_key_env: Name | None = key(None, "environment variable with the API key", OURS)
    concurrency: Many = key(16, "maximum concurrent requests", OURS)
    request_seconds: AboveZero = key(300.0, "timeout of a request", OURS)
    retry_seconds: NotNegative | None = key(
        None, "time of continuous failures after which the run ends, s; default: wait and warn", OURS
    )


@dataclass(frozen=True, kw_only=True)
class TeacherWorker(Worker, ContextKeys):
    """Keys of a teacher: the keys of a role, and the teacher's context."""

    prompt_length: Positive | None = key(
        None, "maximum tokens of the teacher's prompt; default: prompt_length + response_length", OURS
    )
    follows_student: FollowKeys | None = key(
        None, "update the teacher's weights from the student's; default: the teacher is frozen", OURS
    )
    http: HttpKeys | None = key(
        None,
        "request the log-probs from a server; model_args.model_name_or_path is then the directory of the teacher's"
        " tokenizer, without weights; default: the student's tokenizer",
        OURS,
    )

    @property
    def sources(self) -> dict[str, ExternalKeys]:
        """Key -> section, for sections that name a source of log-probs; empty: Megatron processes of the run."""
        sections = {name: getattr(self, name) for name in keys_of(type(self))}
        return {name: section for name, section in sections.items() if isinstance(section, ExternalKeys)}
