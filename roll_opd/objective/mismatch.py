"""How far training and inference are apart, over a step's samples: measured whether or not it is corrected."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from roll_opd.algorithms.corrections import (
    Mismatch,
    difference_within,
    icepop_weights,
    importance_weights,
    mismatch_metrics,
    negatives_near,
    ratio_within,
)
from roll_opd.base.failures import RunError
from roll_opd.config.plan import CorrectionPlan, ObjectivePlan, TeacherPlan
from roll_opd.objective.audit import advantages
from roll_opd.samples.experience import Experience, changed, present
from roll_opd.samples.versions import sampling_versions

_WITHIN: dict[str, Callable[..., Tensor]] = {"ratio": ratio_within, "difference": difference_within}


def mismatch_of(experiences: Sequence[Experience]) -> Mismatch:
    """Return the samples whose log-probs the training engine has computed, end to end; f64."""
    computed = [experience for experience in experiences if experience.old_logprobs is not None]
    return Mismatch(
        _joined([present(e.old_logprobs) for e in computed], np.float64),
        _joined([present(e.rollout_logprobs) for e in computed], np.float64),
        _joined([e.action_mask for e in computed], np.bool_),
        tuple(e.response_length for e in computed),
    )


def corrected(
    experiences: Sequence[Experience], teachers: Sequence[TeacherPlan], objective: ObjectivePlan
) -> list[Experience]:
    """Fill in `loss_mask` and `importance_weights`, from `old_logprobs`, which all must have, and `rollout_logprobs`.

    Every rule sees all action tokens, whatever the others mask. A token without finite log-probs stays, with a weight
    of NaN: masked, it would hide what is wrong.
    """
    plan = objective.correction
    assert plan is not None
    mismatch = mismatch_of(experiences)
    kept_M = mismatch.mask_M.clone()
    for rule in plan.filters:
        kept_M &= _WITHIN[rule.measure](mismatch, level=rule.level, low=rule.low, high=rule.high)
    if plan.negatives_delta is not None:
        every = advantages(experiences, teachers, objective.opd_kl_discount, objective.advantage_clip)
        advantages_M = _joined(every, np.float64)
        kept_M &= negatives_near(mismatch, advantages_M, delta=plan.negatives_delta)
    broken_M = mismatch.mask_M & ~torch.isfinite(mismatch.train_M - mismatch.infer_M)
    weights_M = torch.where(broken_M, torch.nan, _weights(mismatch, plan)).float()
    masks, weights = ((kept_M | broken_M).split(mismatch.lengths), weights_M.split(mismatch.lengths))
    return [
        changed(
            experience,
            loss_mask=mask.numpy() if experience.loss_mask is None else mask.numpy() & experience.loss_mask,
            importance_weights=weight.numpy(),
        )
        for experience, mask, weight in zip(experiences, masks, weights, strict=True)
    ]


def check_current(samples: Sequence[Experience], version: int, updates: int) -> None:
    """Raise RunError for samples whose ratio to the weights that sampled them would silently be taken for 1.

    Without old log-probs the loss takes the current ones, and old log-probs are those of the step's first weights. So
    other weights may have sampled only where a correction's importance weights account for them.

    Args:
        samples: of a mini-batch.
        version: of the weights at the beginning of the step.
        updates: of the step, before this one.
    """
    sampled = [s for s in samples if s.rollout_logprobs is not None and not s.demonstration and s.learned_tokens]
    others = [s for s in sampled if s.importance_weights is None and sampling_versions(s.versions) != {version}]
    if others:
        known = sorted(set().union(*(sampling_versions(s.versions) for s in others)))
        raise RunError(
            f"{len(others)} of {len(sampled)} samples of an update were sampled by weights of version"
            f" {', '.join(map(str, known)) or '(unknown)'}, and the student is at version {version}: their ratio is not"
            " 1. Set train_infer_correction, whose importance weights account for it, or sample with current weights"
        )
    if updates and any(s.old_logprobs is None for s in sampled):
        raise RunError(
            f"samples of update {updates + 1} of a step have no old log-probs, and the weights have changed since they"
            " were sampled; set enable_old_logprobs_recompute: true"
        )


def train_infer_metrics(experiences: Sequence[Experience]) -> dict[str, float]:
    """Return `rollout/mismatch/*`, see `mismatch_metrics`, and what a correction did: `rollout/correction/*`."""
    return {
        **{f"rollout/mismatch/{name}": value for name, value in mismatch_metrics(mismatch_of(experiences)).items()},
        **_correction_metrics([e for e in experiences if e.importance_weights is not None]),
    }


def _correction_metrics(experiences: Sequence[Experience]) -> dict[str, float]:
    """Return the share of the action tokens that are masked, and the mean weight of the others."""
    acted = sum(e.action_tokens for e in experiences)
    kept = np.concatenate([np.zeros(0), *[present(e.importance_weights)[e.loss_mask] for e in experiences]])
    if not acted:
        return {}
    metrics = {"rollout/correction/masked_rate": 1 - len(kept) / acted}
    return metrics | ({"rollout/correction/weight_mean": float(kept.mean())} if len(kept) else {})


def _weights(mismatch: Mismatch, plan: CorrectionPlan) -> Tensor:
    if plan.weight == "tis":
        return importance_weights(mismatch, level=plan.level, upper_bound=plan.high)
    if plan.weight == "icepop":
        return icepop_weights(mismatch, level=plan.level, low=plan.low, high=plan.high)
    return torch.ones_like(mismatch.train_M)


def _joined(arrays: Sequence[np.ndarray], dtype: type) -> Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype, copy=False))
