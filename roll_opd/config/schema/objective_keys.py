"""Keys of the objective: rewards, distillation, sample masks, corrections, the critic."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from roll_opd.config.schema.key_types import AboveZero, Count, Fraction, Level, NotNegative, Number, Positive, Several
from roll_opd.config.schema.section import OURS, Section, key


@dataclass(frozen=True, kw_only=True)
class ReinforcementKeys(Section):
    """The reward's part of the objective.

    In each reward domain, rewards are normalised by `norm_mean_type` and `norm_std_type` and clipped, and advantages
    are whitened; then the teachers' term is added. In pure distillation all of it is off.
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
    """The teachers' part of the objective."""

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
    """Masks and weights of a step's samples; the formulas are in `algorithms.sample_masks`."""

    max_len_mask: bool = key(False, "leave out responses that have all the tokens they may have")
    difficulty_mask: bool = key(False, "leave out prompts whose mean reward is not between the two thresholds")
    difficulty_low_threshold: Number = key(0.0, "of difficulty_mask: the mean reward must be above it")
    difficulty_high_threshold: Number = key(1.0, "of difficulty_mask: the mean reward must be below it")
    error_max_len_clip: bool = key(False, "mask rewards below 1, except a reward of 0 with a short enough response")
    error_max_len_threshold: Annotated[int, Field(ge=1)] = key(
        9999999999, "of error_max_len_clip: fewer tokens are short enough"
    )
    difficulty_loss_weight: bool = key(False, "weigh a sample's policy loss with 0.5 + 1.5 times its row's difficulty")
    length_loss_weight: bool = key(False, "weigh a sample's policy loss with 1.5 down to 0.5, the longest least")
    rl_loss_coef: Number = key(
        1.0, "weight of the policy and KL losses relative to entropy and the teachers' divergence"
    )


@dataclass(frozen=True, kw_only=True)
class ObjectiveKeys(ReinforcementKeys, SampleKeys, DistillationKeys):
    """Keys of the objective; the formulas are in `roll_opd.algorithms`."""

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
class ImportanceWeight(Section):
    """`is_weight`: importance weights. null: no bound."""

    enabled: bool = key(False, "weigh the policy loss with train / infer probabilities")
    method: Literal["tis", "icepop"] = key("tis", "truncate weights, or mask tokens outside", OURS)
    weight_type: Level = key("token", "level of a weight")
    lower_bound: NotNegative | None = key(None, "of icepop; not written: 0.5", OURS)
    upper_bound: AboveZero | None = key(None, "not written: 1.2 of tis, 5 of icepop")
    detach: bool = key(True, "accepted: weights never have a gradient")


@dataclass(frozen=True, kw_only=True)
class TokenFilter(Section):
    """An entry of `filters`: tokens outside its bounds are masked. null: no bound."""

    enabled: bool = key(False, "whether it counts")
    agg_type: Level = key("token", "level of the measured probabilities")
    ratio_enabled: bool = key(True, "bound train / infer")
    ratio_low: NotNegative | None = key(0.8, "lowest train / infer")
    ratio_high: NotNegative | None = key(1.2, "highest")
    diff_enabled: bool = key(False, "bound train - infer")
    diff_low: Number | None = key(-0.2, "lowest train - infer")
    diff_high: Number | None = key(0.2, "highest")


@dataclass(frozen=True, kw_only=True)
class TrainInferCorrection(Section):
    """`train_infer_correction`: correction for different log-probs of training and inference engine."""

    is_weight: ImportanceWeight = key(ImportanceWeight(), "weights of the policy loss")
    filters: Several[TokenFilter] = key((), "masks of tokens")
    negatives_delta: AboveZero | None = key(None, "mask negative advantages where infer - train is above this", OURS)
