"""Keys of a role: its model, optimizer, rows, sampling, engine and devices."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

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
from roll_opd.config.schema.section import Section, derived, key, ours

if TYPE_CHECKING:
    from roll_opd.config.role_plans import Layout, LoraPlan
    from roll_opd.config.schema.teacher_keys import ExternalKeys
    from roll_opd.models.model_info import ModelInfo
else:  # types of derived values, which pydantic does not validate
    Layout = LoraPlan = ModelInfo = Any

PURE_ROLES = ("student_train", "student_infer")  # names of the student's training and sampling roles
MIXED_ROLES = ("actor_train", "actor_infer")  # names of these roles in mixed mode
Job = Literal["train", "frozen", "rollout"]


@dataclass(frozen=True, kw_only=True)
class ModelArgs(Section):
    """`model_args`."""

    ignored = roll.IGNORED_MODEL_ARGS
    model_name_or_path: str | None = key(
        None, "directory of a Hugging Face model, or its name on the hub: owner/name or owner/name@revision"
    )
    dtype: Dtype | None = key(
        None, "precision of the weights; default: the student's precision for a rollout, bf16 for other roles"
    )
    lora_target: Several[str] | str | None = key(
        None,
        "linear layers that get a LoRA adapter, as a list or as names separated by commas; all-linear: all"
        " linear layers",
    )
    lora_rank: Annotated[int, Field(ge=0)] | None = key(None, "rank of the LoRA adapters; 0: no LoRA; default: 8")
    lora_alpha: AboveZero | None = key(
        None, "scale of the LoRA adapters, which are multiplied by lora_alpha / lora_rank; default: twice the rank"
    )
    lora_dropout: NotNegative = key(0.0, "must be 0, because log-probs of a model with dropout are not defined")
    additional_target: Any = key(None, "not available yet: modules that are trained in addition to the adapters")
    ulysses_size: Positive | None = key(
        None,
        "with ROLL's strategy fsdp2: number of devices that share a sequence; used here as the tensor-parallel size",
    )
    adapter_name_or_path: str | None = key(None, "directory of an initial LoRA adapter, in peft's format")
    freeze_module_prefix: Any = key(None, "not available yet: modules that are not trained")


@dataclass(frozen=True, kw_only=True)
class SchedulerArgs(Section):
    """`lr_scheduler_kwargs`."""

    min_lr: NotNegative = key(0.0, "learning rate at the end of the schedule")
    max_lr: AboveZero | None = key(None, "learning rate after the warm-up; takes precedence over learning_rate")
    init_lr: NotNegative = key(0.0, "initial learning rate of the warm-up")
    lr_decay_steps: Positive | None = key(
        None, "number of updates until the learning rate reaches min_lr; default: all updates of the run"
    )
    wsd_decay_steps: Positive | None = key(
        None, "with warmup_stable_decay: number of updates in which the learning rate decays"
    )
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] | None = key(
        None, "with warmup_stable_decay: form of the decay; default: exponential"
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
    """`training_args`: optimizer and schedule.

    Batch sizes are sizes per data-parallel rank. A step in these keys is one update of the weights.
    """

    ignored = roll.IGNORED_TRAINING_ARGS
    per_device_train_batch_size: Many = key(
        8, "number of sequences in a micro-batch; ignored if micro-batches are limited by tokens"
    )
    gradient_accumulation_steps: Many = key(1, "micro-batches in an update")
    warmup_steps: Count = key(0, "number of updates of the warm-up, in which the learning rate rises")
    warmup_ratio: Fraction = key(
        0.0, "length of the warm-up as a fraction of all updates; refused if warmup_steps is set as well"
    )
    lr_scheduler_type: Literal[
        "linear",
        "constant",
        "constant_with_warmup",
        "cosine",
        "cosine_with_min_lr",
        "cosine_warmup_with_min_lr",
        "inverse_sqrt",
        "warmup_stable_decay",
    ] = key(
        "linear",
        "schedule of the learning rate after the warm-up; linear and cosine reach min_lr at the last update or, if"
        " min_lr is 0, 0 after the last update",
    )
    bf16: bool | None = key(None, "true: the role computes in bf16, as with model_args.dtype: bf16")
    fp16: bool | None = key(None, "true: the role computes in fp16, as with model_args.dtype: fp16")
    lr_scheduler_kwargs: SchedulerArgs = key(SchedulerArgs(), "arguments of the schedule")
    max_grad_norm: NotNegative | None = key(
        None, "maximum gradient norm of this role; overrides the top-level key; 0: no clipping"
    )


@dataclass(frozen=True, kw_only=True)
class DataArgs(Section):
    """`data_args`."""

    ignored = roll.IGNORED_DATA_ARGS
    file_name: Texts = key(
        (),
        "files of rows (JSONL or Parquet), directories with such files, glob patterns, or data sets on the Hugging Face"
        " Hub: owner/name or owner/name@revision",
    )
    subset: Texts = ours((), "subsets of the named data sets; default: the only subset, default or main")
    split: str | None = ours(None, "split of the named data sets; default: train, and test for validation")
    dataset_dir: str | None = key(None, "directory in which files that do not exist elsewhere are looked up")
    domain_interleave_probs: dict[str, NotNegative] = key(
        {}, "fraction of draws from each domain or tag; the fractions sum to 1"
    )
    interleave_probs: Probabilities = key((), "fraction of draws from each entry of file_name; the fractions sum to 1")
    template: str | None = key(
        None, "template with which a prompt is written as text; default: the tokenizer's chat template"
    )
    messages: Name | None = key(
        None,
        "column with the prompt as a list of messages, or as the JSON text of such a list; for plain text use prompt",
    )
    prompt: Name | None = key(None, "column with the prompt as plain text; takes precedence over messages")
    tag: Name | None = key(None, "column with the tag of a row; the tag selects the row's teachers and rewards")
    id: Name | None = key(None, "column with the id of a row")
    ground_truth: Name | None = ours(
        None, "column with the ground truth of a row, which rewards compare with the answer"
    )
    limit: Positive | None = ours(None, "use only the first N rows")


@dataclass(frozen=True, kw_only=True)
class SamplingKeys(Section):
    """Keys of the distribution from which tokens are sampled."""

    top_p: Annotated[Number, Field(gt=0, le=1)] = key(
        1.0, "nucleus sampling: sample from the most likely tokens with this total probability"
    )
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] = key(
        -1, "sample from the k most likely tokens; 0 or -1: sample from all tokens"
    )
    temperature: Temperature = key(1.0, "number by which the logits are divided, at least 0.01; 0: greedy decoding")
    repetition_penalty: AboveZero = key(1.0, "vLLM's repetition penalty; 1: none")


@dataclass(frozen=True, kw_only=True)
class GeneratingArgs(SamplingKeys):
    """`generating_args`."""

    ignored = roll.IGNORED_GENERATING_ARGS
    max_new_tokens: Positive | None = key(None, "maximum tokens of a response; default: response_length")
    num_return_sequences: Many | None = key(
        None, "number of responses per prompt; default: num_return_sequences_in_group"
    )
    stop_strings: Names | None = key(None, "texts that end a response")


@dataclass(frozen=True, kw_only=True)
class StrategyArgs(Section):
    """`strategy_args`."""

    strategy_name: str = key(
        "",
        "megatron_train, megatron_infer or vllm; any other strategy of ROLL is replaced by the nearest of these three",
    )
    strategy_config: dict[str, Any] | None = key(
        None,
        "options of the engine; Megatron-core: parallel sizes and fields of TransformerConfig; vLLM: engine arguments",
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
        "R3: training routes each token to the experts that the inference engine chose; measure (a mode that"
        " ROLL does not have): routing is unchanged, and tokens whose experts differ are counted",
    )


@dataclass(frozen=True, kw_only=True)
class Worker(Section):
    """A role: student, rollout, teacher, reference policy, critic, or a judge with local engines.

    The planner fills in the derived values. A derived value is None if it could not be read.
    """

    ignored = roll.IGNORED_WORKER
    # "elsewhere": a teacher that uses no device of the run
    read_if: ClassVar[Mapping[str, str]] = {
        "kind: train": "data_args pg_variant topr_positive_weight topr_negative_weight",
        "kind: train|critic": "training_args use_dynamic_batching_in_train max_tokens_per_microbatch_in_train",
        "kind: train|critic|teacher|frozen": "infer_batch_size use_sequence_packing sequence_packing_args"
        " use_dynamic_batching_in_infer max_tokens_per_microbatch_in_infer",
        "kind: reward": "worker_cls",  # of a role, it only selects how pg_variant is read
        "kind: rollout": "generating_args num_gpus_per_worker",
        "kind: train|critic|teacher|frozen|rollout": "strategy_args device_mapping system_envs",
        "kind: teacher|elsewhere": "opd_kl_coef tag_included",
        "pg_variant: topr": "topr_positive_weight topr_negative_weight",
    }
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
    num_gpus_per_worker: Count | None = key(
        None, "with ROLL's strategies sglang and hf_infer: number of devices per engine"
    )
    worker_cls: str | None = key(
        None, "ROLL's class of the role; if the student's class is ActorPGWorker, pg_variant selects the loss"
    )
    pg_variant: str | None = key(None, "policy loss of the student; read only if worker_cls is ROLL's ActorPGWorker")
    topr_positive_weight: NotNegative = key(1.0, "with pg_variant topr: weight of the samples whose reward is above 0")
    topr_negative_weight: NotNegative = key(
        1.0, "with pg_variant topr: weight of the samples whose reward is not above 0"
    )
    infer_batch_size: Many = key(
        16, "number of sequences in a micro-batch for log-probs; ignored if micro-batches are limited by tokens"
    )
    use_sequence_packing: bool = key(
        False, "limit the number of tokens in a micro-batch, to the values in sequence_packing_args"
    )
    sequence_packing_args: SequencePackingArgs = key(
        SequencePackingArgs(), "maximum numbers of tokens for use_sequence_packing"
    )
    router_replay: RouterReplay = key(RouterReplay(), "replay of expert routing, for a mixture-of-experts student")
    use_dynamic_batching_in_train: bool = key(False, "limit the number of tokens in a micro-batch for training")
    use_dynamic_batching_in_infer: bool = key(False, "limit the number of tokens in a micro-batch for log-probs")
    max_tokens_per_microbatch_in_train: Count | None = key(None, "maximum tokens in a micro-batch for training")
    max_tokens_per_microbatch_in_infer: Count | None = key(None, "maximum tokens in a micro-batch for log-probs")
    opd_kl_coef: NotNegative | None = key(None, "weight of this teacher; overrides the top-level key")
    tag_included: Texts | None = key(None, "tags of the rows that this teacher scores; default: all tags")
    system_envs: Environment = key({}, "environment variables of the role's processes")

    job: Job = derived("frozen")
    info: ModelInfo | None = derived(None)
    dtype: Dtype = derived("bf16")
    lora: LoraPlan | None = derived(None)  # adapter of the student
    is_aligned: bool = derived(False)  # the role is a teacher with another tokenizer, aligned by bytes
    devices: tuple[int, ...] | None = derived(None)
    # None also if devices and sizes do not match; for vLLM, dp is the number of engines
    layout: Layout | None = derived(None)
    engine_args: dict[str, Any] = derived({})  # options that are passed to the engine
    engine_dtype: Dtype | None = derived(None)  # precision that the options of Megatron set
    use_distributed_optimizer: bool = derived(True)
    overlaps: tuple[str, ...] = derived(())  # names in `layouts_and_devices.OVERLAPS` that are enabled
    max_model_len: int | None = derived(None)  # of vLLM, as written
    sleep_level: int = derived(2)  # of vLLM
    mini_batch: int | None = derived(None)  # sequences of an update

    @property
    def path(self) -> str:
        """The dotted key of the section."""
        return self.diag.path

    @property
    def external(self) -> "ExternalKeys | None":
        """The section that names an external source of a teacher's log-probs; None if the role runs on devices."""
        return None

    @property
    def has_context(self) -> bool:
        """Whether the role is a teacher whose context differs from the student's."""
        return False

    @property
    def follows(self) -> bool:
        """Whether the role is a teacher whose weights follow the student's."""
        return False
