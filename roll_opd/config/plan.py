"""The run plan: what a run is, once everything a user wrote has been parsed and checked.

Every other room reads this and nothing else; nothing reads raw configuration after the plan exists. All of it
is immutable, picklable and free of torch. Lengths are in tokens, counts of prompts and sequences are global
(over all ranks) unless a name says otherwise.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from roll_opd.config.algorithms import ADVANTAGES, LOSSES, AdvantageFacts, Answered, LossFacts, Schema
from roll_opd.config.frozen import FrozenDict

Mode = Literal["pure", "mixed", "rl", Answered]


@dataclass(frozen=True)
class Layout:
    """How one Megatron role is spread over its devices."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    sequence_parallel: bool = False
    vpp: int | None = None

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp


@dataclass(frozen=True)
class ModelPlan:
    """A Hugging Face model directory and the precision it runs in."""

    path: str
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"


@dataclass(frozen=True)
class MicroBatchLimits:
    """What one packed micro-batch on one data-parallel rank may hold; None is no limit."""

    sequences: int | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class MegatronPlan:
    """A Megatron role: the weights, where they live, and how much goes through at once."""

    name: str
    model: ModelPlan
    devices: tuple[int, ...]
    layout: Layout
    forward_limits: MicroBatchLimits
    megatron_args: FrozenDict = field(default_factory=FrozenDict)  # extra TransformerConfig fields
    env: FrozenDict = field(default_factory=FrozenDict)  # environment of the worker processes


@dataclass(frozen=True)
class OptimizerPlan:
    """AdamW, its schedule and gradient clipping. Steps count optimizer updates."""

    learning_rate: float
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    total_steps: int = 1
    min_learning_rate: float = 0.0
    use_distributed_optimizer: bool = True


@dataclass(frozen=True)
class TrainPlan(MegatronPlan):
    """The student's training role."""

    train_limits: MicroBatchLimits = field(default_factory=MicroBatchLimits)
    mini_batch_sequences: int = 1  # sequences behind one optimizer update, over all data-parallel ranks
    optimizer: OptimizerPlan = field(default_factory=lambda: OptimizerPlan(learning_rate=1e-6))


@dataclass(frozen=True)
class CriticPlan(TrainPlan):
    """The critic's training role."""

    value_clip: float | None = None  # how far a value may move from the one before the update
    epochs: int = 1  # passes over a step's samples
    warmup_steps: int = 0  # first steps, in which the critic alone learns


@dataclass(frozen=True)
class TeacherPlan:
    """A frozen teacher, how much it counts, and whose samples it scores."""

    name: str
    worker: MegatronPlan
    opd_kl_coef: float
    tags: tuple[str, ...] | None = None  # None: every tag

    def accepts(self, tag: str) -> bool:
        return self.tags is None or tag in self.tags


@dataclass(frozen=True)
class SamplingPlan:
    """How the student samples. `n` responses a prompt; `top_k` -1 is off."""

    n: int = 1
    max_new_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class RolloutPlan:
    """An inference role, the student's or a judge's: `engines` vLLM engines of `tp` devices each."""

    name: str
    model: ModelPlan
    devices: tuple[int, ...]
    tp: int
    engines: int
    sampling: SamplingPlan
    max_model_len: int
    engine_args: FrozenDict = field(default_factory=FrozenDict)  # passed to vLLM untouched
    max_running_requests: int | None = None  # requests under way at once, over all engines; None: no limit
    env: FrozenDict = field(default_factory=FrozenDict)


@dataclass(frozen=True)
class FilterPlan:
    """Which groups (`query_filter`) or single responses (`response_filter`) are left out of a step.

    `mean_filter`: keeps threshold_down < mean reward < threshold_up; `std_filter`: keeps std of rewards >
    std_threshold. `args` holds these numbers under ROLL's names.
    """

    type: Literal["mean_filter", "std_filter"]
    args: FrozenDict = field(default_factory=FrozenDict)


@dataclass(frozen=True)
class RewardTerm:
    """One of the rewards whose weighted sum a domain's reward is. `worker` is a registered name or a dotted path."""

    name: str  # of its part in metrics and samples
    worker: str
    args: FrozenDict = field(default_factory=FrozenDict)
    weight: float = 1.0
    timeout: float | None = None  # seconds a sample may take; None: the reward limits itself


@dataclass(frozen=True)
class RewardPlan:
    """Reward workers of one domain."""

    domain: str
    terms: tuple[RewardTerm, ...]
    tags: tuple[str, ...] | None = None  # None: every tag
    world_size: int = 1
    on_error: Literal["zero", "drop", "stop"] = "stop"  # what becomes of a sample whose reward fails
    max_concurrency: int = 256  # calls of the reward that a worker has under way
    batch_size: int = 16  # most samples in a call
    query_filter: FilterPlan | None = None  # of a prompt's rewards together
    response_filter: FilterPlan | None = None  # of each reward alone
    engine: RolloutPlan | None = None  # of a judge that runs here

    @property
    def is_weighted(self) -> bool:
        """Whether the reward is more than what its one term says."""
        return len(self.terms) > 1 or any(term.weight != 1 for term in self.terms)

    def accepts(self, tag: str) -> bool:
        return self.tags is None or tag in self.tags


@dataclass(frozen=True)
class StreamPlan:
    """A share of the draws: `weight` of them come from the rows with one of `tags`, or from `files`."""

    name: str  # reward domain, tag or file name
    weight: float  # the weights of all streams sum to 1
    tags: tuple[str, ...] | None = None  # None: every tag
    files: tuple[str, ...] | None = None  # None: every file


@dataclass(frozen=True)
class DataPlan:
    """Prompt files and what to do with rows that cannot be used."""

    files: tuple[str, ...]
    prompt_length: int  # rows with answers: of the prompt and the longest answer together
    template: str = "native"  # "native": the tokenizer's own chat template
    on_bad_row: Literal["drop", "refuse"] = "refuse"
    on_long_prompt: Literal["drop", "refuse"] = "drop"
    limit: int | None = None  # use only the first so many rows
    tag_templates: FrozenDict = field(default_factory=FrozenDict)  # tag -> template, where it is not `template`
    columns: FrozenDict = field(default_factory=FrozenDict)  # messages, prompt, tag, id -> the file's name, if another
    streams: tuple[StreamPlan, ...] = ()  # no stream: every row is drawn once an epoch
    schema: Schema = "experience"
    length_key: str = "prompt_length"  # what the user limits the length of rows with


@dataclass(frozen=True)
class ValidationPlan:
    """Greedy (or sampled) answers to held-out prompts, scored by the reward workers; or the loss on held-out rows."""

    data: DataPlan
    sampling: SamplingPlan = field(default_factory=SamplingPlan)
    measure_teacher: bool = False


@dataclass(frozen=True)
class EnvironmentsPlan:
    """Environments of one phase: `groups` holds how many groups of `group_size` each tag has."""

    tags: tuple[str, ...]
    groups: tuple[int, ...]
    group_size: int = 1
    max_env_num_per_worker: int = 0  # 0: all in one worker
    max_traj_per_env: int = -1  # -1: as many as a step needs

    @property
    def environments(self) -> int:
        return sum(self.groups) * self.group_size


@dataclass(frozen=True)
class AgenticPlan:
    """What an agentic run plays: environment tag -> its definition, and how many of each."""

    environments: FrozenDict
    train: EnvironmentsPlan
    validation: EnvironmentsPlan | None
    reward_grouping: str = "state"
    reward_method: str = "identity"


Level = Literal["token", "segment", "geometric", "sequence"]


@dataclass(frozen=True)
class TokenFilterPlan:
    """Tokens outside low <= measure <= high are not learned from; a bound of None is none."""

    measure: Literal["ratio", "difference"]  # of train and infer probabilities
    level: Level
    low: float | None
    high: float | None


@dataclass(frozen=True)
class CorrectionPlan:
    """What is done about log-probs of training and inference engine being apart: `algorithms.corrections`."""

    weight: Literal["tis", "icepop"] | None = None  # of the policy loss; None: no weights
    level: Level = "token"  # of the weights
    low: float | None = None  # of icepop
    high: float | None = None
    filters: tuple[TokenFilterPlan, ...] = ()
    negatives_delta: float | None = None  # of `negatives_near`; None: off


@dataclass(frozen=True)
class ObjectivePlan:
    """What is optimised; the formulas are in `roll_opd.algorithms`.

    Outside pure distillation, what nobody writes has the default of ROLL's PPOConfig (roll/configs/base_config.py):
    gamma 1, adv_estimator gae, and the values below. Rewards are normalised by `norm_mean_type` and `norm_std_type`,
    then clipped to +-`reward_clip`; advantages are whitened over the batch, then clipped to +-`advantage_clip`; the
    teacher's term is added after that. In pure distillation nothing of this exists, and all of it is off.
    """

    adv_estimator: str = "on_policy_distill"  # of `algorithms.ADVANTAGES`, or a dotted path
    advantage_args: FrozenDict = field(default_factory=FrozenDict)  # beyond those that other fields decide
    gamma: float = 0.0
    lambd: float = 0.95
    whiten_rewards: bool = False
    whiten_advantages: bool = False
    norm_mean_type: Literal["batch", "group"] | None = None  # None: no mean is subtracted
    norm_std_type: Literal["batch", "group"] | None = None  # None: nothing is divided
    reward_clip: float | None = None
    advantage_clip: float | None = None
    kl_loss_coef: float = 0.0  # of the KL to the reference policy in the loss; 0 unless switched on
    kl_penalty: str = "kl"  # estimator of the token-level KL: kl (k1), mse (k2), low_var_kl (k3)
    entropy_loss_coef: float = 0.0
    init_kl_coef: float = 0.0  # of the KL to the reference policy in each token's reward; 0 unless switched on
    target_kl: float | None = None  # of that KL, towards which its coefficient adapts; None: it stays
    kl_horizon: int = 10000  # samples in which the coefficient changes by a fifth at most
    kl_loss: str = "k3"  # estimator of the KL loss
    policy_loss: str = "importance_sampling"  # of `algorithms.LOSSES`, or a dotted path
    policy_loss_args: FrozenDict = field(default_factory=FrozenDict)  # beyond those that other fields decide
    paired: bool = False  # the loss reads sequences 2i and 2i+1 together
    pg_clip_low: float = 0.2
    pg_clip_high: float = 0.2
    dual_clip: float | None = 3.0
    loss_agg_mode: str = "token-mean"
    loss_normaliser: float | None = None  # of seq-mean-token-sum-norm: the response length
    opd_objective: Literal["sampled", "topk", "full"] = "sampled"  # sampled: an advantage; others: a part of the loss
    opd_divergence: str = "reverse_kl"  # of topk and full; a key of algorithms.divergences.DIVERGENCES
    opd_topk: int = 64
    opd_topk_source: Literal["teacher", "student"] = "teacher"  # whose most likely tokens
    opd_jsd_beta: float = 0.5
    opd_skew_alpha: float = 0.1
    opd_vocab_size: int | None = None  # token ids that student and teachers all have; None: the student's
    opd_kl_discount: float = 0.0
    ppo_epochs: int = 1
    correction: CorrectionPlan | None = None
    # False only where one update follows one rollout: log-probs before and during the update are the same
    recompute_old_logprobs: bool = False

    @property
    def advantage_arguments(self) -> dict[str, Any]:
        """What the advantage function is called with; the rest has its defaults."""
        levels = {"mean_cal_level": self.norm_mean_type, "std_cal_level": self.norm_std_type}
        facts = ADVANTAGES.get(self.adv_estimator, AdvantageFacts())
        return {**(levels if levels.keys() <= facts.defaults.keys() else {}), **self.advantage_args}

    @property
    def policy_loss_arguments(self) -> dict[str, Any]:
        """What the policy loss is called with; the rest has its defaults."""
        clips = {"clip_low": self.pg_clip_low, "clip_high": self.pg_clip_high, "dual_clip": self.dual_clip}
        return {**(clips if LOSSES.get(self.policy_loss, LossFacts()).clips else {}), **self.policy_loss_args}


@dataclass(frozen=True)
class CheckpointPlan:
    """When state is saved, how many checkpoints stay, and where a run resumes from."""

    save_steps: int  # 0: only at the end
    max_ckpt_to_keep: int  # 0: all
    resume: bool | str = False  # True: the newest of this experiment; a path: that run or checkpoint


@dataclass(frozen=True)
class DemonstrationPlan:
    """Rows that an expert wrote, prompts with answers; they join the student's samples, a share of each update."""

    data: DataPlan
    rows_per_update: int
    updates: int  # of one pass over a step's samples

    @property
    def rows_per_step(self) -> int:
        return self.rows_per_update * self.updates


@dataclass(frozen=True)
class RunPlan:
    """A whole run."""

    mode: Mode
    pipeline: Literal["rlvr", "agentic", Answered]
    exp_name: str
    output_dir: str
    seed: int
    deterministic: bool
    max_steps: int
    eval_steps: int  # 0: never
    logging_steps: int
    rollout_batch_size: int  # prompts (or rows with answers) a step
    num_nodes: int
    devices_per_node: int
    student: TrainPlan
    rollout: RolloutPlan | None  # None: the rows bring their answers
    teachers: tuple[TeacherPlan, ...]
    rewards: tuple[RewardPlan, ...]
    data: DataPlan
    objective: ObjectivePlan
    checkpoint: CheckpointPlan
    reference: MegatronPlan | None = None  # frozen policy of use_kl_loss and add_token_level_kl
    critic: CriticPlan | None = None  # of adv_estimator gae
    demonstrations: DemonstrationPlan | None = None  # of policy losses mix and mix_chord
    epochs: float | None = None  # over all rows of the files, where max_steps was counted from them
    extra_prompts: int = 0  # prompts answered beyond rollout_batch_size, in case filters reject some
    async_generation_ratio: float = 0.0  # steps that generation may run ahead; 0: in turn
    agentic: AgenticPlan | None = None
    validation: ValidationPlan | None = None
    trackers: tuple[str, ...] = ("tensorboard",)
    tracker_args: FrozenDict = field(default_factory=FrozenDict)  # tracker -> its keyword arguments
    samples_per_step: int = 4  # rollouts a step written to samples.jsonl
    env: FrozenDict = field(default_factory=FrozenDict)  # system_envs
    warnings: tuple[str, ...] = ()
    memory: FrozenDict = field(default_factory=FrozenDict)  # role name -> {part: estimated bytes a rank}
    config_yaml: str = ""  # the composed configuration, for the run directory

    @property
    def advantage_teachers(self) -> tuple[TeacherPlan, ...]:
        """The teachers whose part is an advantage; with a live gradient it is a part of the loss."""
        return self.teachers if self.objective.opd_objective == "sampled" else ()

    @property
    def rewards_are_monitored(self) -> bool:
        """Whether rewards validate and are logged, and nothing is learned from them."""
        return self.mode == "pure"

    @property
    def answers_per_prompt(self) -> int:
        """Sampled ones, or those of a row."""
        return self.rollout.sampling.n if self.rollout else 2 if self.objective.paired else 1

    @property
    def sequences_per_step(self) -> int:
        return self.rollout_batch_size * self.answers_per_prompt

    @property
    def chunk_samples(self) -> int:
        """Finished samples that an inference engine hands over together.

        Enough to fill a micro-batch on every rank of the first teacher, but at most half of an engine's share of the
        step, so that scoring starts while the other half is still being generated. Smaller chunks cost more where
        teacher and engine share a device: the samples of a step end close together, and scoring slows the last ones.
        """
        assert self.rollout is not None
        half = -(-self.sequences_per_step // (2 * self.rollout.engines))
        if not self.teachers:
            return half
        worker = self.teachers[0].worker
        limits = worker.forward_limits
        by_tokens = limits.tokens // self.rollout.max_model_len if limits.tokens else half
        return max(1, min(half, min(limits.sequences or by_tokens, by_tokens) * worker.layout.dp))
