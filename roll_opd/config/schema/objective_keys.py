"""Keys of the objective: rewards, distillation, sample masks, corrections, the critic."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from roll_opd.config.schema.key_types import AboveZero, Count, Fraction, Level, NotNegative, Number, Positive, Several
from roll_opd.config.schema.section import OURS, Section, key


@dataclass(frozen=True, kw_only=True)
class ReinforcementKeys(Section):
    """The reward's part of the objective.

    In each reward domain, rewards are normalised by `norm_mean_type` and `norm_std_type` and then clipped; advantages
    are whitened. Then the teachers' term is added. In pure distillation, none of this applies.
    """

    gamma: Fraction = key(1.0, "discount of later rewards")
    lambd: Fraction = key(0.95, "lambda of gae")
    whiten_rewards: bool = key(False, "give token rewards mean 0 and deviation 1 over a domain's samples")
    whiten_advantages: bool = key(False, "give advantages mean 0 and deviation 1 over a domain's samples")
    norm_mean_type: Literal["batch", "group", "running"] | None = key(
        None, "samples whose mean is subtracted from a reward"
    )
    norm_std_type: Literal["batch", "group", "running"] | None = key(None, "samples whose deviation is the divisor")
    reward_clip: AboveZero | None = key(None, "bound of normalised rewards, and of token rewards")
    kl_loss_coef: NotNegative = key(0.0, "weight of the KL to the reference policy in the loss, with use_kl_loss")
    kl_penalty: str = key("kl", "estimator of the token-level KL: kl (k1), mse (k2), low_var_kl (k3), abs, full")
    target_kl: AboveZero | None = key(None, "target of the token-level KL; its coefficient adapts to it")
    kl_horizon: Positive = key(10000, "samples after which the coefficient has changed by at most a fifth")


@dataclass(frozen=True, kw_only=True)
class DistillationKeys(Section):
    """The teachers' part of the objective."""

    opd_objective: Literal["sampled", "topk", "full"] = key(
        "sampled",
        "sampled: an advantage from sampled tokens; topk, full: a term of the loss, over the top-k tokens or the"
        " vocabulary",
        OURS,
    )
    opd_divergence: str = key("reverse_kl", "divergence of topk and full: a name of algorithms.divergences", OURS)
    opd_topk: Positive = key(64, "number of tokens of topk", OURS)
    opd_topk_source: Literal["teacher", "student"] = key("teacher", "model whose most likely tokens topk uses", OURS)
    opd_jsd_beta: Fraction = key(0.5, "the teacher's weight in the mixture of jsd", OURS)
    opd_skew_alpha: Annotated[NotNegative, Field(lt=1)] = key(0.1, "share of the mixture in skewed divergences", OURS)


@dataclass(frozen=True, kw_only=True)
class SampleKeys(Section):
    """Masks and weights of a step's samples; the formulas are in `algorithms.sample_masks`."""

    max_len_mask: bool = key(False, "mask responses of the maximum length")
    difficulty_mask: bool = key(False, "mask prompts whose mean reward is not between the two thresholds")
    difficulty_low_threshold: Number = key(0.0, "lower bound of the mean reward, exclusive (difficulty_mask)")
    difficulty_high_threshold: Number = key(1.0, "upper bound of the mean reward, exclusive (difficulty_mask)")
    error_max_len_clip: bool = key(
        False, "mask samples with a reward below 1, unless it is 0 and the response is short"
    )
    error_max_len_threshold: Annotated[int, Field(ge=1)] = key(
        9999999999, "a response with fewer tokens is short (error_max_len_clip)"
    )
    difficulty_loss_weight: bool = key(False, "weigh a sample's policy loss with 0.5 + 1.5 times its row's difficulty")
    length_loss_weight: bool = key(False, "weigh a sample's policy loss with 1.5 (shortest response) to 0.5 (longest)")
    rl_loss_coef: Number = key(
        1.0, "weight of the policy and KL losses relative to entropy and the teachers' divergence"
    )


@dataclass(frozen=True, kw_only=True)
class ObjectiveKeys(ReinforcementKeys, SampleKeys, DistillationKeys):
    """Keys of the objective; the formulas are in `roll_opd.algorithms`."""

    advantage_clip: AboveZero | None = key(None, "bound of advantages, the teachers' part included")
    entropy_loss_coef: Number = key(0.0, "weight of the entropy in the loss")
    pg_clip: NotNegative = key(0.2, "clip range of the ratio around 1")
    pg_clip_low: NotNegative | None = key(None, "clip range of the ratio downwards; without it pg_clip")
    pg_clip_high: NotNegative | None = key(None, "clip range of the ratio upwards; without it pg_clip")
    opd_kl_discount: Fraction = key(0.0, "discount of later tokens' reverse KL; 0: only the token's own term", OURS)
    opd_chunk_credit: Literal["prefix", "whole", "with_previous", "mean", "share"] = key(
        "prefix",
        "with a teacher of another tokenizer: prefix compares each token's log-prob, the others give it a part of the"
        " reverse KL of its chunk, see algorithms.chunk_credit",
        OURS,
    )
    ppo_epochs: Positive = key(1, "passes over a step's samples")


@dataclass(frozen=True, kw_only=True)
class CriticKeys(Section):
    """The critic's training."""

    critic_warmup: Count = key(0, "number of first steps that train only the critic")
    critic_epochs: Positive = key(1, "passes of the critic over a step's samples", OURS)
    value_clip: AboveZero | None = key(None, "maximum change of a value in an update")


@dataclass(frozen=True, kw_only=True)
class ImportanceWeight(Section):
    """`is_weight`: importance weights. null: no bound."""

    enabled: bool = key(False, "weigh the policy loss with train / infer probabilities")
    method: Literal["tis", "icepop"] = key("tis", "tis: truncate weights; icepop: mask tokens outside the bounds", OURS)
    weight_type: Level = key("token", "level of a weight")
    lower_bound: NotNegative | None = key(None, "lower bound (icepop); default 0.5", OURS)
    upper_bound: AboveZero | None = key(None, "upper bound; default 1.2 (tis) or 5 (icepop)")
    detach: bool = key(True, "accepted: weights never have a gradient")


@dataclass(frozen=True, kw_only=True)
class TokenFilter(Section):
    """An entry of `filters`: tokens outside its bounds are masked. null: no bound."""

    enabled: bool = key(False, "whether the filter is applied")
    agg_type: Level = key("token", "level of the measured probabilities")
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
    negatives_delta: AboveZero | None = key(None, "mask negative advantages where infer - train is above this", OURS)
