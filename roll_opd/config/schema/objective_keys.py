"""Keys of the objective: rewards, distillation, sample masks, corrections, the critic."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from roll_opd.config.schema.key_types import AboveZero, Count, Fraction, Level, NotNegative, Number, Positive, Several
from roll_opd.config.schema.section import Section, key, ours


@dataclass(frozen=True, kw_only=True)
class ReinforcementKeys(Section):
    """Keys of the part of the objective that depends on rewards.

    In each reward domain, rewards are first normalised (`norm_mean_type`, `norm_std_type`) and then clipped
    (`reward_clip`). The advantages that are computed from these rewards are whitened (`whiten_advantages`). The
    teachers' term is added to the whitened advantages. Pure distillation uses none of these keys.
    """

    read_if: ClassVar[Mapping[str, str]] = {
        "rewards": "*",
        "adv_estimator: gae": "lambd",
        "advantage: mean_cal_level": "norm_mean_type",
        "advantage: std_cal_level": "norm_std_type",
        "use_kl_loss": "kl_loss_coef",
        "add_token_level_kl": "target_kl kl_horizon",
        "target_kl": "kl_horizon",
    }

    gamma: Fraction = key(1.0, "discount of later rewards")
    lambd: Fraction = key(0.95, "lambda of gae")
    whiten_rewards: bool = key(
        False, "shift and scale token rewards to mean 0 and standard deviation 1 over a domain's samples"
    )
    whiten_advantages: bool = key(
        False, "shift and scale advantages to mean 0 and standard deviation 1 over a domain's samples"
    )
    norm_mean_type: Literal["batch", "group", "running"] | None = key(
        None, "set of samples over which the mean reward is computed; the mean is subtracted from each reward"
    )
    norm_std_type: Literal["batch", "group", "running"] | None = key(
        None, "set of samples over which the standard deviation of rewards is computed; each reward is divided by it"
    )
    reward_clip: AboveZero | None = key(None, "bound on the absolute value of normalised rewards and of token rewards")
    kl_loss_coef: NotNegative = key(0.0, "weight of the KL to the reference policy in the loss, with use_kl_loss")
    kl_penalty: str = key("kl", "estimator of the token-level KL: kl (k1), mse (k2), low_var_kl (k3), abs, full")
    target_kl: AboveZero | None = key(
        None,
        "target of the token-level KL; the coefficient of the KL is adapted to reach it. null: the coefficient"
        " is fixed",
    )
    kl_horizon: Positive = key(
        10000, "speed of the adaptive coefficient: it changes by at most 20 % in this number of samples (target_kl)"
    )


@dataclass(frozen=True, kw_only=True)
class DistillationKeys(Section):
    """Keys of the part of the objective that depends on the teachers."""

    read_if: ClassVar[Mapping[str, str]] = {
        "teachers": "*",
        "opd_objective: topk": "opd_topk opd_topk_source",
        "opd_divergence: jsd": "opd_jsd_beta",
        "opd_divergence: skewed_reverse_kl|skewed_forward_kl": "opd_skew_alpha",
    }

    opd_objective: Literal["sampled", "topk", "full"] = ours(
        "sampled",
        "form of the teachers' term; sampled: an advantage that is computed from the sampled tokens; topk: a"
        " term of the loss over the top-k tokens of each position; full: a term of the loss over the whole"
        " vocabulary",
    )
    opd_divergence: str = ours("reverse_kl", "divergence in the loss (topk and full): a name in objective.divergences")
    opd_topk: Positive = ours(64, "with opd_objective topk: number of tokens that are compared in each position")
    opd_topk_source: Literal["teacher", "student"] = ours(
        "teacher", "with opd_objective topk: the model whose most likely tokens are compared"
    )
    opd_jsd_beta: Fraction = ours(
        0.5, "with divergence jsd: weight of the teacher in the mixture of teacher and student"
    )
    opd_skew_alpha: Annotated[NotNegative, Field(lt=1)] = ours(
        0.1, "with a skewed divergence KL(p || m): weight of p in the mixture m of student and teacher"
    )


@dataclass(frozen=True, kw_only=True)
class SampleKeys(Section):
    """Masks and weights of a step's samples; the formulas are in `objective.filters`.

    ROLL's environments read none of these keys.
    """

    read_if: ClassVar[Mapping[str, str]] = {
        "prompts": "*",
        "difficulty_mask": "difficulty_low_threshold difficulty_high_threshold",
        "error_max_len_clip": "error_max_len_threshold",
    }

    max_len_mask: bool = key(False, "mask responses of the maximum length")
    difficulty_mask: bool = key(
        False, "mask prompts whose mean reward is not between difficulty_low_threshold and difficulty_high_threshold"
    )
    difficulty_low_threshold: Number = key(
        0.0, "with difficulty_mask: the mean reward of a prompt must be above this value"
    )
    difficulty_high_threshold: Number = key(
        1.0, "with difficulty_mask: the mean reward of a prompt must be below this value"
    )
    error_max_len_clip: bool = key(
        False, "mask samples with a reward other than 1; short responses with a reward of 0 are not masked"
    )
    error_max_len_threshold: Annotated[int, Field(ge=1)] = key(
        9999999999, "with error_max_len_clip: a response with fewer tokens than this number counts as short"
    )
    difficulty_loss_weight: bool = key(
        False,
        "weight each sample's policy loss by 0.5 + 1.5 x difficulty; the difficulty, from 0 to 1, is read from"
        " the sample's row",
    )
    length_loss_weight: bool = key(
        False,
        "weight each sample's policy loss by the length of its response: from 1.5 for the shortest response of"
        " an update to 0.5 for the longest response",
    )
    rl_loss_coef: Number = key(
        1.0,
        "weight of the policy loss and of the KL loss; the entropy and the teachers' divergence do not get this weight",
    )


@dataclass(frozen=True, kw_only=True)
class StepKeys(Section):
    """Keys of advantages that compare the steps of a trajectory."""

    read_if: ClassVar[Mapping[str, str]] = {
        "advantage: step_reward_gamma": "step_reward_gamma",
        "advantage: episode_reward_weight": "episode_reward_weight",
        "advantage: step_reward_weight": "step_reward_weight",
    }

    step_reward_gamma: Fraction = key(
        0.95, "with gigpo or step_reinforce: discount factor of the rewards of later steps"
    )
    episode_reward_weight: Number = key(1.0, "with gigpo: weight of the advantage that compares whole trajectories")
    step_reward_weight: Number = key(1.0, "with gigpo: weight of the advantage that compares steps from the same state")


@dataclass(frozen=True, kw_only=True)
class ObjectiveKeys(ReinforcementKeys, SampleKeys, DistillationKeys):
    """Keys of the objective; the formulas are in `roll_opd.objective`."""

    read_if: ClassVar[Mapping[str, str]] = {
        "advantages": "advantage_clip",
        "teachers": "opd_kl_discount opd_chunk_credit opd_advantage_fn opd_advantage_fn_args",
    }

    advantage_clip: AboveZero | None = key(
        None, "bound on the absolute value of advantages; applied after the teachers' term is added"
    )
    entropy_loss_coef: Number = key(0.0, "weight of the entropy in the loss")
    pg_clip: NotNegative = key(0.2, "distance from 1 at which the ratio is clipped")
    pg_clip_low: NotNegative | None = key(None, "distance below 1 at which the ratio is clipped; default: pg_clip")
    pg_clip_high: NotNegative | None = key(None, "distance above 1 at which the ratio is clipped; default: pg_clip")
    opd_kl_discount: Fraction = ours(
        0.0,
        "discount factor with which the reverse KL of later tokens is added to a token's reverse KL; 0: later"
        " tokens are not added",
    )
    opd_chunk_credit: Literal["prefix", "whole", "with_previous", "mean", "share"] = ours(
        "prefix",
        "credit of a token if the teacher has another tokenizer; prefix: compare student and teacher in every"
        " token; other values: compare them in chunks of tokens, and assign the reverse KL of a chunk to its"
        " tokens (see objective.reverse_kl)",
    )
    opd_advantage_fn: str = ours(
        "reverse_kl",
        "function that subtracts the teachers' reverse KL from the advantages: reverse_kl, a registered name, or a"
        " dotted path",
    )
    opd_advantage_fn_args: dict[str, Any] = ours({}, "arguments of opd_advantage_fn")
    ppo_epochs: Positive = key(1, "number of passes over a step's samples")


@dataclass(frozen=True, kw_only=True)
class CriticKeys(Section):
    """Keys of the critic's training."""

    read_if: ClassVar[Mapping[str, str]] = {"rewards": "*", "adv_estimator: gae": "*"}

    critic_warmup: Count = key(0, "number of steps at the start of a run that train only the critic")
    critic_epochs: Positive = ours(1, "number of passes of the critic over a step's samples")
    value_clip: AboveZero | None = key(
        None,
        "clip the critic's values in the loss to at most this distance from the values before the update; null:"
        " not clipped",
    )


@dataclass(frozen=True, kw_only=True)
class ImportanceWeight(Section):
    """`is_weight`: importance weights. A bound of null is no bound."""

    enabled: bool = key(
        False, "multiply the policy loss by the ratio of the training engine's and the inference engine's probabilities"
    )
    method: Literal["tis", "icepop"] = ours(
        "tis", "tis: truncate weights at the upper bound; icepop: mask tokens whose weight is outside the bounds"
    )
    weight_type: Level = key("token", "level at which weights are computed")
    lower_bound: NotNegative | None = ours(None, "lower bound of the weights, used only by icepop; default: 0.5")
    upper_bound: AboveZero | None = key(None, "upper bound of the weights; default: 1.2 with tis, 5 with icepop")
    detach: bool = key(True, "accepted, no effect: weights never have a gradient")


@dataclass(frozen=True, kw_only=True)
class TokenFilter(Section):
    """An entry of `filters`, which masks tokens outside the bounds. A bound of null is no bound."""

    enabled: bool = key(False, "whether the filter is applied")
    agg_type: Level = key("token", "level at which the two engines' probabilities are compared")
    ratio_enabled: bool = key(
        True, "whether to mask tokens by the ratio of the probabilities: training engine / inference engine"
    )
    ratio_low: NotNegative | None = key(0.8, "lower bound")
    ratio_high: NotNegative | None = key(1.2, "upper bound")
    diff_enabled: bool = key(
        False, "whether to mask tokens by the difference of the probabilities: training engine - inference engine"
    )
    diff_low: Number | None = key(-0.2, "lower bound")
    diff_high: Number | None = key(0.2, "upper bound")


@dataclass(frozen=True, kw_only=True)
class TrainInferCorrection(Section):
    """`train_infer_correction`: correction for log-probs that differ between the training and the inference engine."""

    is_weight: ImportanceWeight = key(ImportanceWeight(), "weights of the policy loss")
    filters: Several[TokenFilter] = key((), "masks of tokens")
    negatives_delta: AboveZero | None = ours(
        None,
        "mask tokens with a negative advantage if, on average over the sequence, the inference engine's"
        " log-prob exceeds the training engine's by more than this value; null: not used",
    )
