"""Keys of the objective: rewards, distillation, sample masks, corrections, the critic."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from roll_opd.config.schema.key_types import AboveZero, Count, Fraction, Level, NotNegative, Number, Positive, Several
from roll_opd.config.schema.section import OURS, Section, key


@dataclass(frozen=True, kw_only=True)
class ReinforcementKeys(Section):
    """The reward's part of the objective.

    In each reward domain, rewards are normalised by `norm_mean_type` and `norm_std_type`, then clipped, and the
    advantages are whitened. After that, the teachers' term is added. Pure distillation uses none of these keys.
    """

    gamma: Fraction = key(1.0, "discount of later rewards")
    lambd: Fraction = key(0.95, "lambda of gae")
    whiten_rewards: bool = key(
        False, "shift and scale token rewards to mean 0 and standard deviation 1 over a domain's samples"
    )
    whiten_advantages: bool = key(
        False, "shift and scale advantages to mean 0 and standard deviation 1 over a domain's samples"
    )
    norm_mean_type: Literal["batch", "group", "running"] | None = key(
        None, "samples whose mean is subtracted from a reward"
    )
    norm_std_type: Literal["batch", "group", "running"] | None = key(
        None, "samples whose standard deviation is the divisor"
    )
    reward_clip: AboveZero | None = key(None, "bound on the absolute value of normalised rewards and of token rewards")
    kl_loss_coef: NotNegative = key(0.0, "weight of the KL to the reference policy in the loss, with use_kl_loss")
    kl_penalty: str = key("kl", "estimator of the token-level KL: kl (k1), mse (k2), low_var_kl (k3), abs, full")
    target_kl: AboveZero | None = key(None, "target of the token-level KL, to which the coefficient adapts")
    kl_horizon: Positive = key(10000, "number of samples over which the coefficient changes by at most a fifth")


@dataclass(frozen=True, kw_only=True)
class DistillationKeys(Section):
    """The teachers' part of the objective."""

    opd_objective: Literal["sampled", "topk", "full"] = key(
        "sampled",
        "sampled: an advantage computed from the sampled tokens; topk, full: a term of the loss over the top-k tokens"
        " or the whole vocabulary",
        OURS,
    )
    opd_divergence: str = key("reverse_kl", "divergence of topk and full: a name in algorithms.divergences", OURS)
    opd_topk: Positive = key(64, "number of tokens per position (topk)", OURS)
    opd_topk_source: Literal["teacher", "student"] = key(
        "teacher", "model whose most likely tokens are used (topk)", OURS
    )
    opd_jsd_beta: Fraction = key(0.5, "weight of the teacher in the mixture (jsd)", OURS)
    opd_skew_alpha: Annotated[NotNegative, Field(lt=1)] = key(
        0.1, "weight of the first distribution in the mixture (skewed divergences)", OURS
    )


@dataclass(frozen=True, kw_only=True)
class SampleKeys(Section):
    """Masks and weights of a step's samples; the formulas are in `algorithms.sample_masks`."""

    max_len_mask: bool = key(False, "mask responses of the maximum length")
    difficulty_mask: bool = key(
        False, "mask prompts whose mean reward is not between difficulty_low_threshold and difficulty_high_threshold"
    )
    difficulty_low_threshold: Number = key(0.0, "lower bound of the mean reward, exclusive (difficulty_mask)")
    difficulty_high_threshold: Number = key(1.0, "upper bound of the mean reward, exclusive (difficulty_mask)")
    error_max_len_clip: bool = key(
        False, "mask samples with a reward below 1, except short responses with a reward of 0"
    )
    error_max_len_threshold: Annotated[int, Field(ge=1)] = key(
        9999999999, "a response with fewer tokens is short (error_max_len_clip)"
    )
    difficulty_loss_weight: bool = key(
        False, "multiply a sample's policy loss by 0.5 + 1.5 times the difficulty in its row"
    )
    length_loss_weight: bool = key(
        False, "multiply a sample's policy loss by a factor from 1.5 (shortest response) to 0.5 (longest)"
    )
    rl_loss_coef: Number = key(
        1.0, "weight of the policy loss and the KL loss, relative to the entropy and the teachers' divergence"
    )


@dataclass(frozen=True, kw_only=True)
class ObjectiveKeys(ReinforcementKeys, SampleKeys, DistillationKeys):
    """Keys of the objective; the formulas are in `roll_opd.algorithms`."""

    advantage_clip: AboveZero | None = key(
        None, "bound on the absolute value of advantages, including the teachers' part"
    )
    entropy_loss_coef: Number = key(0.0, "weight of the entropy in the loss")
    pg_clip: NotNegative = key(0.2, "clip range of the ratio around 1")
    pg_clip_low: NotNegative | None = key(None, "clip range of the ratio below 1; default: pg_clip")
    pg_clip_high: NotNegative | None = key(None, "clip range of the ratio above 1; default: pg_clip")
    opd_kl_discount: Fraction = key(
        0.0, "discount factor of later tokens' reverse KL; 0: only the token's own term", OURS
    )
    opd_chunk_credit: Literal["prefix", "whole", "with_previous", "mean", "share"] = key(
        "prefix",
        "for a teacher with another tokenizer; prefix: compare the log-probs of each token; other values: assign each"
        " token a part of its chunk's reverse KL, see algorithms.chunk_credit",
        OURS,
    )
    ppo_epochs: Positive = key(1, "number of passes over a step's samples")


@dataclass(frozen=True, kw_only=True)
class CriticKeys(Section):
    """The critic's training."""

    critic_warmup: Count = key(0, "number of first steps that train only the critic")
    critic_epochs: Positive = key(1, "number of passes of the critic over a step's samples", OURS)
    value_clip: AboveZero | None = key(None, "maximum change of a value in an update")


@dataclass(frozen=True, kw_only=True)
class ImportanceWeight(Section):
    """`is_weight`: importance weights. null: no bound."""

    enabled: bool = key(False, "multiply the policy loss by the ratio of train / infer probabilities")
    method: Literal["tis", "icepop"] = key("tis", "tis: truncate weights; icepop: mask tokens outside the bounds", OURS)
    weight_type: Level = key("token", "level of a weight")
    lower_bound: NotNegative | None = key(None, "lower bound (icepop); default 0.5", OURS)
    upper_bound: AboveZero | None = key(None, "upper bound; default 1.2 (tis) or 5 (icepop)")
    detach: bool = key(True, "accepted, no effect: weights never have a gradient")


@dataclass(frozen=True, kw_only=True)
class TokenFilter(Section):
    """An entry of `filters`: masks tokens outside the bounds. null: no bound."""

    enabled: bool = key(False, "whether the filter is applied")
    agg_type: Level = key("token", "level at which the probabilities are compared")
    ratio_enabled: bool = key(True, "bound the ratio train / infer")
    ratio_low: NotNegative | None = key(0.8, "lower bound")
    ratio_high: NotNegative | None = key(1.2, "upper bound")
    diff_enabled: bool = key(False, "bound the difference train - infer")
    diff_low: Number | None = key(-0.2, "lower bound")
    diff_high: Number | None = key(0.2, "upper bound")


@dataclass(frozen=True, kw_only=True)
class TrainInferCorrection(Section):
    """`train_infer_correction`: correction for log-probs that differ between training and inference engine."""

    is_weight: ImportanceWeight = key(ImportanceWeight(), "weights of the policy loss")
    filters: Several[TokenFilter] = key((), "masks of tokens")
    negatives_delta: AboveZero | None = key(
        None, "mask negative advantages of sequences whose mean infer - train log-prob is above this", OURS
    )
