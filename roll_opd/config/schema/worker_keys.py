"""Keys of a role: its model, optimizer, rows, sampling, engine and devices."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

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
from roll_opd.config.schema.section import OURS, Section, key

PURE_ROLES = ("student_train", "student_infer")  # the student: who learns, who samples
MIXED_ROLES = ("actor_train", "actor_infer")  # and its names in mixed mode


@dataclass(frozen=True, kw_only=True)
class ModelArgs(Section):
    """`model_args`."""

    ignored = roll.IGNORED_MODEL_ARGS
    model_name_or_path: str | None = key(None, "directory of a Hugging Face model, or the name of a downloaded one")
    dtype: Dtype | None = key(None, "precision; without it bf16, a rollout's as its student's")
    lora_target: Several[str] | str | None = key(
        None, "LoRA: linear layers with an adapter, as names or separated by commas; all-linear: all of them"
    )
    lora_rank: Annotated[int, Field(ge=0)] | None = key(None, "rank of the adapters; without it 8; 0: no LoRA")
    lora_alpha: AboveZero | None = key(None, "adapters count lora_alpha / lora_rank; without it twice the rank")
    lora_dropout: NotNegative = key(0.0, "only 0: log-probs of a model under dropout are not defined")
    additional_target: Any = key(None, "not available yet: modules that are trained in addition to the adapters")
    ulysses_size: Positive | None = key(None, "of fsdp2: devices that share a sequence; here its tensor-parallel size")
    adapter_name_or_path: str | None = key(None, "directory of an initial LoRA adapter, in peft's format")
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
    adam_epsilon: NotNegative = key(1e-8, "added to the square root of the mean of squared gradients")


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
    dataset_dir: str | None = key(None, "a further directory in which to look for them")
    domain_interleave_probs: dict[str, NotNegative] = key({}, "share of the draws by domain or tag; sum 1")
    interleave_probs: Probabilities = key((), "share of the draws of each entry of file_name; the sum is 1")
    template: str | None = key(None, "template of a prompt's text; without it the tokenizer's chat template")
    messages: Name | None = key(
        None, "column of the prompt, as a list of messages or a JSON text of one; of a plain text: write prompt"
    )
    prompt: Name | None = key(None, "column of the prompt, whatever else the rows have")
    tag: Name | None = key(None, "column of the tag by which teachers and rewards are chosen")
    id: Name | None = key(None, "column of the row's id")
    limit: Positive | None = key(None, "use only the first so many rows", OURS)


@dataclass(frozen=True, kw_only=True)
class SamplingKeys(Section):
    """Sampling distribution of tokens."""

    top_p: Annotated[Number, Field(gt=0, le=1)] = key(1.0, "share of the mass")
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
        None, "options of the engine: Megatron-core's TransformerConfig and sizes, or vLLM's engine arguments"
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
    training_args: TrainingArgs = key(TrainingArgs(), "of trained roles")
    data_args: DataArgs = key(DataArgs(), "rows; of the trained role")
    generating_args: GeneratingArgs = key(GeneratingArgs(), "of roles that generate")
    strategy_args: StrategyArgs | None = key(None, "the engine, and the model's layout on devices")
    device_mapping: str | int | Several[int] | None = key(
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
    router_replay: RouterReplay = key(RouterReplay(), "expert routes, of a mixture-of-experts student")
    use_dynamic_batching_in_train: bool = key(False, "limit micro-batches of training by tokens")
    use_dynamic_batching_in_infer: bool = key(False, "limit micro-batches of log-probs by tokens")
    max_tokens_per_microbatch_in_train: Count | None = key(None, "limit of a training micro-batch")
    max_tokens_per_microbatch_in_infer: Count | None = key(None, "limit of a log-prob micro-batch")
    opd_kl_coef: NotNegative | None = key(None, "of a teacher: its weight, instead of the top-level key")
    tag_included: Texts | None = key(None, "of a teacher: tags of the rows it teaches; without it all")
    system_envs: Environment = key({}, "environment variables of the role's processes")


@dataclass(frozen=True, kw_only=True)
class ContextKeys(Section):
    """The teacher's context, which replaces the student's prompt."""

    system_prompt: str | None = key(None, "the teacher's system message, in place of the row's", OURS)
    hint: str | None = key(
        None,
        "a text for the teacher only, after the user's last message or around {prompt}; {ground_truth} and {NAME}"
        " are the row's columns",
        OURS,
    )
    template: str | None = key(None, "the teacher's template; native: the chat template of its tokenizer", OURS)


@dataclass(frozen=True, kw_only=True)
class FollowKeys(Section):
    """`follows_student`: a teacher with the student's initial weights, updated from the student's as it trains."""

    update_interval: Positive = key(1, "steps between two updates of its weights", OURS, formerly="every")
    ema_decay: Annotated[NotNegative, Field(lt=1)] = key(
        0.0,
        "decay of an exponential moving average of the student's weights; 0: a copy of them",
        OURS,
        formerly="decay",
    )


@dataclass(frozen=True, kw_only=True)
class TeacherWorker(Worker, ContextKeys):
    """A teacher has all keys of a role, and these."""

    prompt_length: Positive | None = key(
        None, "most tokens of the teacher's prompt; without it prompt_length + response_length", OURS
    )
    follows_student: FollowKeys | None = key(
        None, "update the teacher from the student's weights; without it the teacher is frozen", OURS
    )
