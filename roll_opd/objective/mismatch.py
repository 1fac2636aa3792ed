"""Compare the log-probs of the training and the inference engine: metrics, correction, and check of stale samples."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from roll_opd.base.failures import RunError
from roll_opd.config.plan import CorrectionPlan, ObjectivePlan, TeacherPlan
from roll_opd.objective.columns import with_total_advantages
from roll_opd.objective.corrections import (
    Mismatch,
    difference_within,
    effective_share,
    icepop_weights,
    importance_weights,
    mismatch_metrics,
    negatives_near,
    ratio_within,
)
from roll_opd.samples.sample import Sample, present, with_columns
from roll_opd.samples.sample_columns import end_to_end
from roll_opd.samples.versions import sampling_versions

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
