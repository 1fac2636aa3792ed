"""The run plan: the parsed and checked configuration of a run.

After planning, code reads only the plan, never the raw configuration. A plan is immutable and picklable, and does not
need torch. Some fields are inherited from `schema`. These are configuration keys that a user can set.

Lengths are in tokens. Numbers of prompts and sequences are totals over all ranks, unless the name states another unit.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

from roll_opd.base.frozen import FrozenDict
from roll_opd.base.hub import Download
from roll_opd.config.role_plans import *
from roll_opd.config.schema import (
    CheckpointKeys,
    Level,
    ObjectiveKeys,
    RewardKeys,
    RolloutKeys,
    RowKeys,
    RunKeys,
    SamplingKeys,
    Top,
    WorkflowKeys,
)


@dataclass(frozen=True)
class FilterPlan:
    """A filter of a step's samples.

    A `query_filter` removes all responses of a prompt. A `response_filter` removes single responses.
    """

    type: str  # a name of `objective.filters.FILTERS`
    args: FrozenDict = field(default_factory=FrozenDict)  # arguments, with ROLL's names


@dataclass(frozen=True)
class RewardTerm:
    """A weighted term of a domain's reward.

    `worker` is the name of a built-in reward, or a dotted path.
    """

    name: str  # name in metrics and samples
    worker: str
    args: FrozenDict = field(default_factory=FrozenDict)
    weight: float = 1.0
    timeout: float | None = None  # time limit per sample, s; None: the reward sets a limit itself


@dataclass(frozen=True)
class RewardPlan(RewardKeys):
    """The reward workers of a domain."""

    domain: str
    terms: tuple[RewardTerm, ...]
    tags: tuple[str, ...] | None = None  # None: every tag
    max_concurrency: int = 256  # concurrent calls of the reward in a worker
    batch_size: int = 16  # maximum number of samples in a call
    query_filter: FilterPlan | None = None  # filter of prompts, by the rewards of all their responses
    response_filter: FilterPlan | None = None  # filter of single responses
    engine: RolloutPlan | None = None  # engines of a local judge

    @property
    def is_weighted(self) -> bool:
        """Whether the reward is a weighted sum; false for a single term with weight 1."""
        return len(self.terms) > 1 or any(term.weight != 1 for term in self.terms)

    def accepts(self, tag: str) -> bool:
        return self.tags is None or tag in self.tags


@dataclass(frozen=True)
class StreamPlan:
    """A stream of rows: all rows with one of the `tags`, or all rows in the `files`.

    `weight` is the fraction of draws that are made from this stream.
    """

    name: str  # reward domain, tag or file name
    weight: float  # the weights of all streams sum to 1
    tags: tuple[str, ...] | None = None  # None: every tag
    files: tuple[str, ...] | None = None  # None: every file


@dataclass(frozen=True)
class DataPlan(RowKeys):
    """The files of a data set, how to read their rows, and what to do with unusable rows."""

    files: tuple[str, ...]
    # maximum tokens of a prompt; for rows with answers, maximum tokens of a prompt plus its longest answer
    prompt_length: int
    template: str = "native"  # "native": the tokenizer's own chat template
    limit: int | None = None  # use only the first N rows
    system_prompt: str | None = None  # system message of conversations that have none
    # tag -> template, for tags whose template is not `template`
    tag_templates: FrozenDict = field(default_factory=FrozenDict)
    columns: FrozenDict = field(default_factory=FrozenDict)  # messages, prompt, … -> column of the file, if another
    streams: tuple[StreamPlan, ...] = ()  # empty: every row is drawn once per epoch
    schema: str = "experience"  # content of a row: `experience`, `task`, `sft` or `dpo`
    length_key: str = "prompt_length"  # the user's key that limits the length of rows
    contexts: tuple[ContextPlan, ...] = ()  # contexts of the teachers that read another prompt than the student
    environments: FrozenDict = field(default_factory=FrozenDict)  # tag -> fraction of draws, for games

    def draws(self, tag: str) -> bool:
        """Return whether rows with a tag can be drawn."""
        drawn = [stream.tags for stream in self.streams if stream.weight]
        return not drawn or any(tags is None or tag in tags for tags in drawn)


@dataclass(frozen=True)
class ValidationPlan:
    """Validation: rewards of answers to held-out prompts, or the loss on held-out rows."""

    data: DataPlan
    sampling: SamplingPlan = field(default_factory=SamplingPlan)
    evaluate_teacher: bool = False


@dataclass(frozen=True)
class TokenFilterPlan:
    """A filter that keeps tokens with low <= measure <= high, and masks all other tokens.

    If a bound is None, it does not apply.
    """

    measure: Literal["ratio", "difference"]  # ratio or difference of train and infer probabilities
    level: Level
    low: float | None
    high: float | None


@dataclass(frozen=True)
class CorrectionPlan:
    """The correction for the difference between the log-probs of the training engine and of the inference engine.

    The formulas are in `objective.corrections`.
    """

    weight: Literal["tis", "icepop"] | None = None  # weights of the policy loss; None: no weights
    level: Level = "token"  # level of the weights
    low: float | None = None  # lower bound of icepop
    high: float | None = None
    filters: tuple[TokenFilterPlan, ...] = ()
    negatives_delta: float | None = None  # bound of `negatives_near`; None: not used


@dataclass(frozen=True)
class EngineCheckPlan:
    """Test of the engine's samples against the student's distribution (`objective.engine_evidence`)."""

    sampling: SamplingKeys = field(default_factory=SamplingKeys)  # of the run; a workflow's call may have its own
    # the engine rounds weights or KV cache, and a correction weights its tokens: log-probs are not compared
    is_corrected: bool = False


@dataclass(frozen=True)
class ObjectivePlan(ObjectiveKeys):
    """The objective: its keys, and the values that are derived from them for the run's mode."""

    adv_estimator: str = "on_policy_distill"  # a name of `objective.registry.ADVANTAGES`, or a dotted path
    advantage_args: FrozenDict = field(default_factory=FrozenDict)  # its arguments
    reward_groups: Literal["prompt", "tag"] = "prompt"  # rewards that form a group at level `group`
    reward_bounds: tuple[float, float] | None = None  # bounds of normalised rewards, before reward_clip
    policy_loss: str = "importance_sampling"  # a name of `objective.registry.POLICY_LOSSES`, or a dotted path
    policy_loss_args: FrozenDict = field(default_factory=FrozenDict)  # its arguments
    dual_clip: float | None = 3.0  # bound in losses with a clipped ratio; None: no bound
    paired: bool = False  # whether the loss compares sequences 2i and 2i+1
    loss_agg_mode: str = "token-mean"
    loss_normaliser: float | None = None  # divisor of seq-mean-token-sum-norm: the response length
    kl_loss: str = "low_var_kl"  # estimator of the KL loss (k3 in ROLL)
    init_kl_coef: float = 0.0  # coefficient of the token-level KL; 0: off
    opd_advantage_fn_args: FrozenDict = field(default_factory=FrozenDict)
    opd_vocab_size: int | None = None  # for topk and full: number of token ids that student and teachers have in common
    correction: CorrectionPlan | None = None
    max_age: int = 0  # number of weight versions by which trained tokens may be behind the student
    # False only with one update per step, where log-probs before and during the update are equal
    recompute_old_logprobs: bool = False
    engine_check: EngineCheckPlan | None = None  # None: the engine's samples are not tested


@dataclass(frozen=True)
class CheckpointPlan(CheckpointKeys):
    """How often checkpoints are written, how many are kept, and from which checkpoint a run resumes."""

    resume: bool | str = False  # True: the newest checkpoint of this experiment; a path: that run or checkpoint


@dataclass(frozen=True)
class DemonstrationPlan:
    """Demonstrations: prompts with given answers. They are added to the student's samples in each update."""

    data: DataPlan
    rows_per_update: int
    updates: int  # updates per pass over a step's samples

    @property
    def rows_per_step(self) -> int:
        return self.rows_per_update * self.updates


@dataclass(frozen=True)
class AuxiliaryPlan:
    """A model that workflows call and that is not trained.

    The model runs in an engine of the run (`engine`) or on a server (`base_url`).
    """

    name: str
    engine: RolloutPlan | None = None
    base_url: str = ""
    api_key: str = field(default="", repr=False)
    model_name: str = ""


@dataclass(frozen=True, kw_only=True)
class WorkflowPlan(WorkflowKeys):
    """The workflow of a run, and the processes that execute it."""

    system_prompt: str | None = None
    auxiliary_models: tuple[AuxiliaryPlan, ...] = ()
    is_scored: bool = False  # `rewards` score the samples that come without a reward


@dataclass(frozen=True, kw_only=True)
class RunPlan(RunKeys, RolloutKeys):
    """The plan of a run.

    `rollout_batch_size` is the number of prompts per step. Without a rollout, it is the number of rows with answers. If
    `eval_steps` is 0, there is no validation.
    """

    mode: str  # pure, mixed or rl; for a supervised pipeline its name
    pipeline: str  # a module of `roll_opd.pipelines`, or the path of a user's module
    pipeline_args: FrozenDict = field(default_factory=FrozenDict)  # keys that only this pipeline has
    title: str  # display name of the mode
    exp_name: str
    max_steps: int
    num_nodes: int
    devices_per_node: int
    student: TrainPlan
    rollout: RolloutPlan | None = None  # None if the rows have answers
    teachers: tuple[TeacherPlan, ...] = ()
    rewards: tuple[RewardPlan, ...] = ()
    data: DataPlan
    objective: ObjectivePlan
    checkpoint: CheckpointPlan
    reference: MegatronPlan | None = None  # frozen policy of the KL loss, the token-level KL, or the supervised loss
    critic: CriticPlan | None = None  # for adv_estimator gae
    demonstrations: DemonstrationPlan | None = None  # for policy losses mix and mix_chord
    epochs: float | None = None  # number of epochs over all rows, if max_steps was computed from it
    extra_prompts: int = 0  # prompts answered in addition to rollout_batch_size, in case filters reject some
    workflow: WorkflowPlan | None = None  # None: one response per sample
    validation: ValidationPlan | None = None
    trackers: tuple[str, ...] = ("tensorboard",)
    tracker_args: FrozenDict = field(default_factory=FrozenDict)  # tracker -> its keyword arguments
    env: FrozenDict = field(default_factory=FrozenDict)  # system_envs
    chat_template_kwargs: FrozenDict = field(default_factory=FrozenDict)  # variables of the chat templates
    warnings: tuple[str, ...] = ()
    plain_prompts: str = ""  # that one of `warnings` about prompts which no chat template renders
    refusals: tuple[str, ...] = ()  # why a run of this plan is refused on every machine; also in `warnings`
    memory: FrozenDict = field(default_factory=FrozenDict)  # role -> {part: estimated bytes per rank} for each stage
    flops: FrozenDict = field(default_factory=FrozenDict)  # role -> forward FLOPs per token of the longest sequence
    hub: FrozenDict = field(default_factory=FrozenDict)  # name on a hub -> `hub.Use`
    downloads: tuple[Download, ...] = ()  # models by name whose weights are not in the cache
    config_yaml: str = ""  # the composed configuration, for the run directory

    @property
    def kind(self) -> str:
        """The kind of the run: agentic, workflow, or the name of the pipeline."""
        if self.pipeline != Top.pipeline:
            return self.pipeline
        return "agentic" if self.is_agentic else "workflow" if self.workflow else self.pipeline

    @property
    def heading(self) -> str:
        """The experiment, the mode and the pipeline of the run. A pure run over prompts is the pipeline `distill`."""
        pipeline = "distill" if self.mode == "pure" and self.kind == Top.pipeline else self.kind
        return f"{self.exp_name}: {self.title}, {pipeline} pipeline"

    @property
    def is_agentic(self) -> bool:
        """Whether the prompts are initial states of games."""
        return bool(self.data.environments)

    @property
    def training_engines(self) -> int:
        """Number of the student's engines that generate for training.

        It is at least 1, also if the planner reports that `validation_engines` is too large.
        """
        return max(1, self.rollout.engines - self.validation_engines) if self.rollout else 0

    @property
    def rewards_are_monitored(self) -> bool:
        """Whether rewards are only logged and used in validation, and have no effect on training."""
        return self.mode == "pure"

    @property
    def update_reads_rewards(self) -> bool:
        """Whether an update needs the rewards of its samples. Advantages and sample masks can depend on them."""
        return not self.rewards_are_monitored or self.objective.difficulty_mask or self.objective.error_max_len_clip

    @property
    def advantage_teachers(self) -> tuple[TeacherPlan, ...]:
        """The teachers that contribute to the advantage.

        If `opd_objective` is `topk` or `full`, there are none, because the teachers then contribute to the loss.
        """
        return self.teachers if self.objective.opd_objective == "sampled" else ()

    @property
    def answers_per_prompt(self) -> int:
        """Number of sequences per prompt: the sampled responses, or the answers in a row."""
        if self.rollout:
            return self.rollout.sampling.n
        return 2 if self.objective.paired else 1

    @property
    def sequences_per_step(self) -> int:
        return self.rollout_batch_size * self.answers_per_prompt

    def roles(self) -> dict[str, "MegatronPlan | RolloutPlan"]:
        """Return a map from the name of each role to the role. The student and its engines come first."""
        first = {role.name: role for role in (self.student, self.rollout) if role}
        return {**first, **self.megatron_roles(), **self.inference_roles()}

    def serving(self, role: MegatronPlan) -> MegatronPlan:
        """Return the role whose processes compute the log-probs of a frozen role. In most cases, it is the same role.

        Teachers with the same weights, devices and layout are loaded once, under the name of the first teacher.

        A LoRA student can also compute the log-probs, with its adapter switched off. This is possible if the frozen
        role has the initial weights of the student and uses only devices of the student.
        """
        if self.is_base(role):
            return self.student
        return next((other for other in self.frozen_roles() if replace(other, name=role.name) == role), role)

    def is_base(self, role: MegatronPlan) -> bool:
        """Return whether a LoRA student computes the log-probs of a frozen role, with its adapter switched off."""
        student = self.student
        same = role.model == student.model and role.vocab_size == student.vocab_size
        at_hand = set(role.devices) <= set(student.devices) and not isinstance(role, TrainPlan | FollowingPlan)
        return student.lora is not None and same and at_hand

    def frozen_roles(self) -> list[MegatronPlan]:
        """Return the Megatron roles of the teachers, followed by the reference policy."""
        return [role for role in (*(teacher.role for teacher in self.teachers), self.reference) if role]

    def megatron_roles(self) -> dict[str, MegatronPlan]:
        """Return a map from the name of each Megatron role to the role. The student comes first."""
        roles = (self.student, *(teacher.role for teacher in self.teachers), self.critic, self.reference)
        return {role.name: role for role in roles if role}

    def inference_roles(self) -> dict[str, RolloutPlan]:
        """Return a map from the name of each inference role to the role.

        The inference roles are the student's rollout, the judges, and the auxiliary models with engines.
        """
        auxiliary = self.workflow.auxiliary_models if self.workflow else ()
        roles = (self.rollout, *(reward.engine for reward in self.rewards), *(model.engine for model in auxiliary))
        return {role.name: role for role in roles if role}
