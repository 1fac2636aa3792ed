"""Compare the log-probs of training and rollout: metrics, importance weights, token masks, stale samples.

p_train and p_infer are the probabilities of a sampled token in the training engine and in the inference engine. The
ratio is p_train / p_infer, and the difference is p_train - p_infer. Both can be computed at four levels:

    token      the value of the token itself
    geometric  the mean over the sequence; for ratios, this is the geometric mean
    segment    the same mean over an unbroken run of action tokens
    sequence   the product of the ratios of the sequence, or the sum of its differences

Legend: M scored tokens of all sequences, concatenated. `lengths` has the number of scored tokens of each sequence.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from roll_opd.base.failures import RunError
from roll_opd.config.plan import CorrectionPlan, ObjectivePlan, TeacherPlan
from roll_opd.objective.columns import with_total_advantages
from roll_opd.objective.losses.batch import MAX_LOG_RATIO, on_tokens, sequence_means, sequence_numbers, sequence_sums
from roll_opd.samples.sample import Sample, end_to_end, present, with_columns
from roll_opd.samples.versions import sampling_versions

Level = Literal["token", "segment", "geometric", "sequence"]
ICEPOP_LOW, ICEPOP_HIGH = 0.5, 5.0  # defaults of verl and rLLM
TAIL = 0.99  # quantile of the ratios
PIECE = 2**15  # tokens that metrics process at a time, to stay in a core's cache


@dataclass(frozen=True)
class Mismatch:
    """Log-probs [M] of sampled tokens from two engines with the same weights, without gradients."""

    train_M: Tensor
    infer_M: Tensor
    mask_M: Tensor  # bool; values outside the mask are arbitrary
    lengths: tuple[int, ...]

    def log_ratio(self, level: Level = "token") -> Tensor:
        """Return log(p_train / p_infer) [M] at `level`, clamped to ±20; 0 outside the mask."""
        values_M = self._at((self.train_M - self.infer_M).masked_fill_(~self.mask_M, 0), level)
        return values_M.clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def ratio(self, level: Level = "token") -> Tensor:
        """Return the ratio p_train / p_infer [M] at `level`; 1 outside the mask."""
        return self.log_ratio(level).exp_()

    def difference(self, level: Level = "token") -> Tensor:
        """Return the difference p_train - p_infer [M] at `level`; 0 outside the mask."""
        return self._at(self.train_M.exp().sub_(self.infer_M.exp()).masked_fill_(~self.mask_M, 0), level)

    def _at(self, values_M: Tensor, level: Level) -> Tensor:
        if level == "token":
            return values_M
        if level == "segment":
            return _segment_means(values_M, self.mask_M, self.lengths) * self.mask_M
        if level == "geometric":
            return on_tokens(sequence_means(values_M, self.mask_M, self.lengths), self.lengths) * self.mask_M
        if level == "sequence":
            return on_tokens(sequence_sums(values_M, self.lengths), self.lengths) * self.mask_M
        raise ValueError(f"level {level!r} of a ratio is unknown; use token, segment, geometric or sequence")


def importance_weights(mismatch: Mismatch, *, level: Level = "token", upper_bound: float | None = 1.2) -> Tensor:
    """Return the weights of truncated importance sampling, [M]: min(ratio, upper_bound).

    Outside the mask, the weight is 1. The weights multiply the loss, so that its expectation is taken under the
    training engine's distribution. Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
    (2025).
    """
    ratio_M = mismatch.ratio(level)
    return ratio_M if upper_bound is None else torch.where(mismatch.mask_M, ratio_M.clamp(max=upper_bound), 1.0)


def icepop_weights(
    mismatch: Mismatch, *, level: Level = "token", low: float | None = ICEPOP_LOW, high: float | None = ICEPOP_HIGH
) -> Tensor:
    """Return the weights of IcePop, [M]: the ratio if low <= ratio <= high, and 0 otherwise.

    Outside the mask, the weight is 1. arXiv 2510.18855.
    """
    return mismatch.ratio(level) * ratio_within(mismatch, level=level, low=low, high=high)


def ratio_within(
    mismatch: Mismatch, *, level: Level = "token", low: float | None = 0.8, high: float | None = 1.2
) -> Tensor:
    """Return a mask of tokens with low <= ratio <= high, bool [M].

    A bound of None has no effect. The result is True at tokens outside the mask of `mismatch`.
    """
    return _within(mismatch.ratio(level), low, high) | ~mismatch.mask_M


def difference_within(
    mismatch: Mismatch, *, level: Level = "token", low: float | None = -0.2, high: float | None = 0.2
) -> Tensor:
    """Return a mask of the tokens with low <= difference <= high, bool [M].

    The difference is p_train - p_infer. A bound of None has no effect. The result is True outside the mask of
    `mismatch`.
    """
    return _within(mismatch.difference(level), low, high) | ~mismatch.mask_M


def negatives_near(mismatch: Mismatch, advantages_M: Tensor, *, delta: float = 0.1) -> Tensor:
    """Return a mask, bool [M], without the negative advantages of sequences that are unlikely in training.

    A token is excluded if its advantage is negative and the mean of log(p_infer / p_train) over its sequence is above
    `delta`. Negative advantages in such sequences are harmful. DeepSeek-V3.2, arXiv 2512.02556.
    """
    far_M = -mismatch.log_ratio("geometric") > delta
    return ~(far_M & (advantages_M < 0) & mismatch.mask_M)


def mismatch_metrics(mismatch: Mismatch) -> dict[str, float]:
    """Return the metrics of the mismatch, before any correction. If the mask has no token, the dict is empty.

    Keys of the dict:
        logprob_diff_mean, logprob_diff_max: mean and maximum of |log p_train - log p_infer| over tokens.
        prob_diff_mean, prob_diff_max: mean and maximum of |p_train - p_infer| over tokens.
        k1, k3: estimates of KL(infer || train).
        ratio_mean, ratio_min, ratio_max, ratio_p99: mean, minimum, maximum and 99 % quantile of the ratios of tokens.
        ess: effective sample size of the ratios of tokens, as a fraction of the number of tokens; see
            `effective_share`.
        ess_sequence: effective sample size of sequences, as a fraction of their number. The weight of a sequence is the
            product of its ratios.
    """
    kept = mismatch.mask_M
    if not kept.any():
        return {}
    every = bool(kept.all())
    train_K, infer_K = (logprobs if every else logprobs[kept] for logprobs in (mismatch.train_M, mismatch.infer_M))
    pieces = zip(train_K.split(PIECE), infer_K.split(PIECE), strict=True)
    sums, extremes = zip(*(_sums_and_extremes(train.double(), infer.double()) for train, infer in pieces), strict=True)
    log_ratio, apart, k3, ratio, square, difference = (torch.stack(sums).sum(0) / int(kept.sum())).tolist()
    most_apart, largest, least, most_different = torch.stack(extremes).amax(0).tolist()
    return {
        "logprob_diff_mean": apart,
        "logprob_diff_max": most_apart,
        "prob_diff_mean": difference,
        "prob_diff_max": most_different,
        "k1": -log_ratio,
        "k3": k3,
        "ratio_mean": ratio,
        "ratio_min": -least,
        "ratio_max": largest,
        "ratio_p99": float(_quantile((train_K - infer_K).clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO), TAIL).exp()),
        "ess": ratio**2 / square,
        "ess_sequence": effective_share(_sequence_log_ratios(mismatch).softmax(0)),
    }


def effective_share(weights_N: Tensor) -> float:
    """Return the effective sample size of weights, as a fraction of the number of weights: (Σw)² / (N · Σw²).

    For equal weights, the result is 1. If only one weight is not 0, the result is 1/N. If all weights are 0, the result
    is 0. A common factor of all weights has no effect. Kong, "A Note on Importance Sampling using Standardized Weights"
    (1992).
    """
    squares = float(weights_N.square().sum())
    return float(weights_N.sum()) ** 2 / squares / len(weights_N) if squares else 0.0


def _sequence_log_ratios(mismatch: Mismatch) -> Tensor:
    """Return the sum of the log-ratios of each sequence, f64.

    Sequences without action tokens are left out.
    """
    gaps_M = (mismatch.train_M - mismatch.infer_M).double().masked_fill_(~mismatch.mask_M, 0)
    acted_B = sequence_sums(mismatch.mask_M.double(), mismatch.lengths) > 0
    return sequence_sums(gaps_M, mismatch.lengths)[acted_B]


def _quantile(values_N: Tensor, share: float) -> Tensor:
    """Return the smallest value v such that at least the fraction `share` of the values is <= v."""
    return values_N.kthvalue(math.ceil(share * len(values_N))).values


def _sums_and_extremes(train_K: Tensor, infer_K: Tensor) -> tuple[Tensor, Tensor]:
    """Return (sums, maxima) over tokens, for the metrics.

    There is a sum for each of log-ratio, |log-ratio|, k3, ratio, ratio² and |difference|. There is a maximum for each
    of |log-ratio|, ratio, -ratio and |difference|.
    """
    log_ratio = (train_K - infer_K).clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio, apart = log_ratio.exp(), log_ratio.abs()
    difference = train_K.exp().sub_(infer_K.exp()).abs_()
    k3 = (ratio - 1).sub_(log_ratio)
    sums = [values.sum() for values in (log_ratio, apart, k3, ratio, ratio.square(), difference)]
    return torch.stack(sums), torch.stack([apart.max(), ratio.max(), -ratio.min(), difference.max()])


def _within(values_M: Tensor, low: float | None, high: float | None) -> Tensor:
    kept_M = torch.ones_like(values_M, dtype=torch.bool)
    if low is not None:
        kept_M &= values_M >= low
    if high is not None:
        kept_M &= values_M <= high
    return kept_M


def _segment_means(values_M: Tensor, mask_M: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return, for each token, the mean of the values in the token's segment.

    A segment is an unbroken run of tokens of one sequence that are all in the mask or all outside it.
    """
    if not len(values_M):
        return values_M
    sequence_M = sequence_numbers(lengths, values_M.device)
    begins_M = torch.ones_like(mask_M)
    begins_M[1:] = (mask_M[1:] != mask_M[:-1]) | (sequence_M[1:] != sequence_M[:-1])
    segment_M = begins_M.long().cumsum(0) - 1
    sums_S = values_M.new_zeros(int(segment_M[-1]) + 1).index_add(0, segment_M, values_M)
    return (sums_S / torch.bincount(segment_M))[segment_M]


_WITHIN: dict[str, Callable[..., Tensor]] = {"ratio": ratio_within, "difference": difference_within}


def mismatch_of(samples: Sequence[Sample]) -> Mismatch:
    """Return the log-probs of the training engine and of the inference engine, f64.

    They are concatenated over the samples that have `old_logprobs`.
    """
    computed = [sample for sample in samples if sample.old_logprobs is not None]
    return Mismatch(
        _joined([present(s.old_logprobs) for s in computed], np.float64),
        _joined([present(s.rollout_logprobs) for s in computed], np.float64),
        _joined([s.action_mask for s in computed], np.bool_),
        tuple(s.response_length for s in computed),
    )


def corrected(samples: Sequence[Sample], teachers: Sequence[TeacherPlan], objective: ObjectivePlan) -> list[Sample]:
    """Return the samples with `loss_mask` and `importance_weights`, computed from `old_logprobs`.

    All samples must have `old_logprobs`. Every rule reads all action tokens, including tokens that another rule masks.
    A token without finite log-probs stays in the loss with the weight NaN, so that the error becomes visible.
    """
    plan = objective.correction
    assert plan is not None
    mismatch = mismatch_of(samples)
    kept_M = mismatch.mask_M.clone()
    for rule in plan.filters:
        kept_M &= _WITHIN[rule.measure](mismatch, level=rule.level, low=rule.low, high=rule.high)
    if plan.negatives_delta is not None:
        valued = with_total_advantages(samples, teachers, objective)
        totals_M = _joined([sample.total_advantages for sample in valued], np.float32)
        kept_M &= negatives_near(mismatch, totals_M, delta=plan.negatives_delta)
    broken_M = mismatch.mask_M & ~torch.isfinite(mismatch.train_M - mismatch.infer_M)
    weights_M = torch.where(broken_M, torch.nan, _weights(mismatch, plan)).float()
    masks = [mask.numpy() for mask in (kept_M | broken_M).split(mismatch.lengths)]
    return with_columns(
        samples,
        loss_mask=[m if s.loss_mask is None else m & s.loss_mask for s, m in zip(samples, masks, strict=True)],
        importance_weights=[weight.numpy() for weight in weights_M.split(mismatch.lengths)],
    )


def check_staleness(samples: Sequence[Sample], version: int, updates: int, max_age: int = 0) -> None:
    """Raise RunError for samples that were drawn with other weights and are not corrected for this.

    The loss compares current log-probs with old log-probs. The old log-probs are computed with the weights at the
    beginning of the step, not with the weights that drew the sample. The ratio of the two therefore does not correct
    for a sample that was drawn with weights of an earlier step: such a sample needs importance weights of a correction.
    There is one exception. With async rollouts, samples whose advantage contains no reward are
    allowed, because the teachers' part of an advantage is computed from current log-probs.

    If a sample has no old log-probs, the loss uses the current log-probs in their place, so the ratio is 1. This is an
    error after the first update of a step.

    Args:
        samples: the samples of a mini-batch.
        version: version of the weights at the beginning of the step.
        updates: number of earlier updates in the step.
        max_age: largest age of a token, in versions; above 0 with async rollouts.
    """
    sampled = [s for s in samples if s.rollout_logprobs is not None and not s.demonstration and s.learned_tokens]
    others = [s for s in sampled if s.importance_weights is None and sampling_versions(s.versions) != {version}]
    if max_age:
        _check_ages(sampled, version, max_age)
        others = [s for s in others if s.advantages is not None]
    if others:
        known = sorted(set().union(*(sampling_versions(s.versions) for s in others)))
        raise RunError(
            f"{len(others)} of {len(sampled)} samples of an update were sampled by weights of version"
            f" {', '.join(map(str, known)) or '(unknown)'}, but the student is at version {version}, so their ratio is"
            " not 1. Set train_infer_correction, whose importance weights account for the ratio, or sample with"
            " current weights"
        )
    if updates and any(s.old_logprobs is None for s in sampled):
        raise RunError(
            f"samples of update {updates + 1} of a step have no old log-probs, but the weights have changed since the"
            " samples were drawn; set enable_old_logprobs_recompute: true"
        )


def _check_ages(samples: Sequence[Sample], version: int, max_age: int) -> None:
    """Raise RunError if a token is older than `max_age`, is newer than `version`, or has no known age."""
    for sample in samples:
        known = sampling_versions(sample.versions)
        if not known or version - min(known) > max_age or max(known) > version:
            of = ", ".join(map(str, sorted(known))) or "(unknown)"
            raise RunError(
                f"sample {sample.id} was sampled by weights of version {of}, but the student is at version {version};"
                f" async_generation_ratio guarantees an age of at most {max_age}. This is a bug of roll_opd, or of a"
                " workflow that sets versions itself"
            )


def train_infer_metrics(samples: Sequence[Sample], correction: CorrectionPlan | None = None) -> dict[str, float]:
    """Return the metrics `rollout/mismatch/*` (see `mismatch_metrics`).

    Corrected samples also have the metrics `rollout/correction/*`.
    """
    return {
        **{f"rollout/mismatch/{name}": value for name, value in mismatch_metrics(mismatch_of(samples)).items()},
        **_correction_metrics([s for s in samples if s.importance_weights is not None], correction),
    }


def _correction_metrics(samples: Sequence[Sample], plan: CorrectionPlan | None) -> dict[str, float]:
    """Return the metrics of the correction.

    - `masked_rate`: fraction of action tokens that are masked.
    - `clipped_rate`: fraction of action tokens whose weight differs from their importance ratio.
    - `weight_mean`: mean weight of the tokens that are not masked.
    - `ess`: effective sample size as a fraction of all action tokens. A masked token has the weight 0.
    """
    acted = sum(s.action_tokens for s in samples)
    kept = np.concatenate([np.zeros(0), *[present(s.importance_weights)[s.loss_mask] for s in samples]])
    if not acted:
        return {}
    metrics = {"rollout/correction/masked_rate": 1 - len(kept) / acted}
    if plan and plan.weight:
        mismatch = mismatch_of(samples)
        weights_M, ratio_M = _weights(mismatch, plan), mismatch.ratio(plan.level)
        clipped_M = (weights_M != ratio_M) & mismatch.mask_M
        metrics["rollout/correction/clipped_rate"] = float(clipped_M.sum()) / acted
    if not len(kept):
        return metrics
    effective = effective_share(torch.from_numpy(kept)) * len(kept) / acted
    return metrics | {"rollout/correction/weight_mean": float(kept.mean()), "rollout/correction/ess": effective}


def _weights(mismatch: Mismatch, plan: CorrectionPlan) -> Tensor:
    if plan.weight == "tis":
        return importance_weights(mismatch, level=plan.level, upper_bound=plan.high)
    if plan.weight == "icepop":
        return icepop_weights(mismatch, level=plan.level, low=plan.low, high=plan.high)
    return torch.ones_like(mismatch.train_M)


def _joined(arrays: Sequence[np.ndarray], dtype: type) -> Tensor:
    return torch.from_numpy(end_to_end(arrays, dtype))
