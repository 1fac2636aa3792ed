"""The plans of roles: model, devices, layout, limits and engine options.

`plan.py` also exports these types.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from roll_opd.base.frozen import FrozenDict
from roll_opd.config.roll_keys import Schedule
from roll_opd.config.schema import (
    ContextKeys,
    CriticKeys,
    Dtype,
    FollowKeys,
    HttpKeys,
    OptimizerKeys,
    RoutingMode,
    SamplingKeys,
    shared,
)


@dataclass(frozen=True)
class Layout:
    """The parallel layout of a Megatron role."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    sequence_parallel: bool = False  # always True for models with experts and tp > 1
    vpp: int | None = None
    etp: int | None = None  # ranks among which an expert is split; None: tp

    @property
    def expert_tp(self) -> int:
        """Number of ranks that share one expert."""
        return self.etp or self.tp

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp


@dataclass(frozen=True)
class ModelPlan:
    """The model of a role: its Hugging Face directory and its precision."""

    path: str
    dtype: Dtype = "fp32"


@dataclass(frozen=True)
class LoraPlan:
    """LoRA: each linear layer in `targets` gets two low-rank matrices. Only these matrices are trained."""

    targets: tuple[str, ...]  # Hugging Face's names, such as q_proj
    rank: int
    alpha: float  # their product is scaled by alpha / rank
    path: str | None = None  # initial adapter in peft's format; None: the product starts as zero


@dataclass(frozen=True)
class MicroBatchLimits:
    """Limits of a packed micro-batch on a data-parallel rank. None means no limit."""

    sequences: int | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class MegatronPlan:
    """A Megatron role: its model, devices, layout and limits of micro-batches."""

    name: str
    model: ModelPlan
    devices: tuple[int, ...]
    layout: Layout
    forward_limits: MicroBatchLimits
    megatron_args: FrozenDict = field(default_factory=FrozenDict)  # extra TransformerConfig fields
    env: FrozenDict = field(default_factory=FrozenDict)  # environment of the worker processes
    vocab_size: int | None = None  # number of token ids in the normalisation of log-probs; None: all

    @property
    def kind(self) -> str:
        return "megatron"

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The arguments of the kind."""
        return {}

    @property
    def location(self) -> str:
        """The directory of the model."""
        return self.model.path


@dataclass(frozen=True)
class OptimizerPlan(OptimizerKeys):
    """AdamW, the learning-rate schedule and gradient clipping. A step is one optimizer update."""

    max_grad_norm: float = 1.0
    lr_scheduler_type: Schedule = "constant"
    warmup_steps: int = 0
    total_steps: int = 1
    decay_steps: int | None = None  # number of updates until min_learning_rate is reached; None: all
    initial_learning_rate: float = 0.0  # learning rate at the start of the warm-up
    min_learning_rate: float = 0.0
    wsd_decay_steps: int | None = None  # updates of the decay, for schedule WSD
    wsd_decay_style: str | None = None
    use_distributed_optimizer: bool = True
    overlap_grad_reduce: bool = False  # reduce gradients during the backward pass of the last micro-batch
    overlap_param_gather: bool = False  # gather parameters during the next forward pass


@dataclass(frozen=True)
class TrainPlan(MegatronPlan):
    """The student's training role."""

    train_limits: MicroBatchLimits = field(default_factory=MicroBatchLimits)
    mini_batch_sequences: int = 1  # sequences per optimizer update, over all data-parallel ranks
    optimizer: OptimizerPlan = field(default_factory=OptimizerPlan)
    lora: LoraPlan | None = None  # None: all weights are trained
    router_replay: RoutingMode = "disable"


@dataclass(frozen=True)
class CriticPlan(TrainPlan, CriticKeys):
    """The critic's training role."""


@dataclass(frozen=True)
class FollowingPlan(MegatronPlan, FollowKeys):
    """A teacher whose weights are an exponential moving average of the student's weights.

    The average is updated every `update_interval` steps. Teachers with the same weights, devices and layout are loaded
    once; see `RunPlan.serving`.
    """

    @property
    def is_live(self) -> bool:
        """Whether the teacher has exactly the weights of the student before the step."""
        return self.update_interval == 1 and not self.ema_decay


@dataclass(frozen=True, kw_only=True)
class ContextPlan(ContextKeys):
    """The context that a teacher gets instead of the student's prompt."""

    name: str  # name of the teacher
    key: str  # section of the teacher
    prompt_length: int  # maximum tokens of the prompt
    tokenizer: str | None = None  # directory of the teacher's tokenizer; None: the student's
    tags: tuple[str, ...] | None = None  # None: every tag


class ExternalPlan:
    """A source of a teacher's log-probs outside the run's Megatron processes, for example a server or files."""

    name: str  # dotted key of the teacher's section

    @property
    def kind(self) -> str:
        """The name of the kind in `teachers.teacher_registry.TEACHERS`."""
        raise NotImplementedError(f"{type(self).__name__} has no property `kind`; write it")

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The arguments of the kind."""
        return {}

    @property
    def location(self) -> str:
        """The place of the source: a directory, an address or a file."""
        raise NotImplementedError(f"{type(self).__name__} has no property `location`; write it")

    @property
    def shown(self) -> dict[str, Any]:
        """The teacher's row in the output of `roll-opd plan`.

        It has the fields `strategy` (the kind of source), `model`, and the settings of the source.
        """
        raise NotImplementedError(f"{type(self).__name__} has no property `shown`; write it")


@dataclass(frozen=True, kw_only=True)
class HttpPlan(HttpKeys, ExternalPlan):
    """A teacher that is reached over HTTP."""

    name: str
    tokenizer: str | None = None  # directory of the teacher's tokenizer; None: the student's
    vocab_size: int | None = None  # number of token ids in that directory's config.json

    @property
    def kind(self) -> str:
        return "http"

    @property
    def location(self) -> str:
        """The addresses of the server."""
        return ", ".join(self.url)

    @property
    def shown(self) -> dict[str, Any]:
        return {"strategy": f"http, {self.server}", "model": self.location, "http": shared(HttpKeys, self)}


@dataclass(frozen=True)
class ScorerPlan(ExternalPlan):
    """A teacher whose log-probs a class of the user computes."""

    name: str
    scorer: str  # registered name or dotted path
    args: FrozenDict = field(default_factory=FrozenDict)
    model: str | None = None  # directory of model_args.model_name_or_path

    @property
    def kind(self) -> str:
        return self.scorer

    @property
    def arguments(self) -> Mapping[str, Any]:
        return self.args

    @property
    def location(self) -> str:
        """The class."""
        return self.scorer

    @property
    def shown(self) -> dict[str, Any]:
        return {"strategy": f"scorer, {self.scorer}", "model": self.model or "", "scorer": dict(self.args)}


@dataclass(frozen=True)
class FilePlan(ExternalPlan):
    """A teacher whose scores of given answers are stored in parquet files; see `data.teacher_scores`."""

    name: str
    files: tuple[str, ...]
    compression: str | None = None  # DistillKit's configuration; None: next to the files
    teacher: str | None = None  # name of the teacher that every row must have; None: any
    sft_teacher: str | None = None  # name of the teacher of the student's fine-tuning, if known

    @property
    def kind(self) -> str:
        return "files"

    @property
    def location(self) -> str:
        """The first file."""
        return self.files[0]

    @property
    def shown(self) -> dict[str, Any]:
        return {"strategy": "files", "model": ", ".join(self.files)}


# The source of a teacher's log-probs; each kind has `name` and `location`. Other code uses `TeacherPlan.role` or
# `RunPlan.megatron_roles()`, or checks the type.
TeacherSource = MegatronPlan | ExternalPlan


@dataclass(frozen=True)
class TeacherPlan:
    """A teacher: the source of its log-probs, its coefficient, its prompt, and the tags of the samples to score."""

    name: str
    source: TeacherSource
    opd_kl_coef: float
    tags: tuple[str, ...] | None = None  # None: every tag
    context: ContextPlan | None = None  # None: the student's prompt
    # directory of the teacher's tokenizer, if tokens are aligned by bytes; None: the student's
    tokenizer: str | None = None
    prefix_topk: int = 0  # size of the teacher's top-k for log-probs of single student tokens; 0: log-probs of chunks

    def accepts(self, tag: str) -> bool:
        return self.tags is None or tag in self.tags

    @property
    def role(self) -> MegatronPlan | None:
        """The Megatron role that computes the log-probs; None if the source is not a Megatron role."""
        return self.source if isinstance(self.source, MegatronPlan) else None

    @property
    def following(self) -> FollowingPlan | None:
        """The teacher's Megatron role if its weights follow the student's weights, otherwise None."""
        return self.source if isinstance(self.source, FollowingPlan) else None

    @property
    def model(self) -> ModelPlan | None:
        """The teacher's model; None if the source is not a Megatron role.

        vLLM can use this model to sample answers of the teacher.
        """
        return self.role.model if self.role else None


@dataclass(frozen=True)
class SamplingPlan(SamplingKeys):
    """Sampling settings.

    `n` is the number of responses per prompt. If `top_k` is -1, all tokens can be sampled.
    """

    n: int = 1
    max_new_tokens: int = 16
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class RolloutPlan:
    """An inference role: the student's rollout, a judge or an auxiliary model.

    The role has a number of vLLM engines (`engines`). Each engine uses `tp` devices.
    """

    name: str
    model: ModelPlan
    devices: tuple[int, ...]
    tp: int
    engines: int
    sampling: SamplingPlan
    max_model_len: int
    engine_args: FrozenDict = field(default_factory=FrozenDict)  # passed to vLLM unchanged
    max_running_requests: int | None = None  # concurrent requests, over all engines; None: no limit
    returns_routes: bool = False  # whether engines return the experts of each token
    # how running requests are treated
    on_weight_update: Literal["wait", "continue"] = "wait"
    # vLLM's sleep level while other roles use the devices; 2: discard the weights and load them again
    sleep_level: int = 2
    env: FrozenDict = field(default_factory=FrozenDict)
    # the student's adapter, which the engines hold separately from the base; None: updates have merged or whole weights
    adapter: LoraPlan | None = None

    @property
    def speculates(self) -> bool:
        """Whether the engines draw several tokens together, from drafts."""
        return "speculative_config" in self.engine_args

    @property
    def layout(self) -> Layout:
        """The layout of the role's devices. Its data-parallel size is the number of engines."""
        return Layout(tp=self.tp, dp=self.engines)
