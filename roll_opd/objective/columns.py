"""The columns that losses read, computed on the driver before a mini-batch is cut into shards.

`samples.sample` has the table of their names. A rank packs and computes the loss from these alone: it knows neither
teachers nor rewards. Legend: T tokens of a sample, P of them prompt.
"""

from collections.abc import Sequence

import numpy as np

from roll_opd.algorithms.aggregation import loss_scales, value_scales
from roll_opd.algorithms.sample_masks import sample_weights
from roll_opd.config.plan import ObjectivePlan, TeacherPlan
from roll_opd.samples.experience import Experience, present
from roll_opd.samples.sample import Sample


def loss_columns(
    experiences: Sequence[Experience], teachers: Sequence[TeacherPlan], objective: ObjectivePlan
) -> list[Sample]:
    """Return the samples of one mini-batch with every column that the policy loss reads, except teacher targets.

    If the teachers are a part of the advantage (`opd_objective: sampled`), their log-probs are merged into
    `opd_coefficients` and `opd_teacher`. If they are a part of the loss, these are 0 and each teacher has a `share`
    column. ValueError if only some of the sampled experiences have an array that the loss reads.
    """
    masks = [e.action_mask if e.loss_mask is None else e.loss_mask for e in experiences]
    demonstrations = [e.demonstration for e in experiences]
    scales = loss_scales([int(np.count_nonzero(mask)) for mask in masks], demonstrations, objective)
    weights = _sample_weights(experiences, objective)
    is_scored = all(e.reward is not None or e.excluded or e.demonstration for e in experiences)
    optional = [_optional(e, weight, is_scored=is_scored) for e, weight in zip(experiences, weights, strict=True)]
    names = _common_names(experiences, optional)
    is_sampled = objective.opd_objective == "sampled"
    # a coefficient of 0 takes part: a value that is not finite shows, because 0 times it is NaN
    coefficients = {t.name: np.float32(t.opd_kl_coef if is_sampled else 0) for t in teachers}
    shares = {t.name: np.float32(t.opd_kl_coef) for t in teachers}
    targeted = () if is_sampled else tuple(dict.fromkeys(name for e in experiences for name in e.teacher_targets))
    samples = []
    for e, mask, scale, arrays in zip(experiences, masks, scales, optional, strict=True):
        columns = {
            "mask": mask,
            "weight": np.where(mask, np.float32(scale), np.float32(0)),
            "advantages": _advantages(e),
            **_teachers_part(e, coefficients),
        }
        if objective.opd_kl_discount:
            columns["actions"] = e.action_mask
        if any(demonstrations):
            columns["demonstration"] = np.full(len(mask), e.demonstration)
        if e.demonstration:  # no loss reads these at its tokens; a weight of 1
            columns |= {name: np.full(len(mask), name == "importance_weights", np.float32) for name in names}
        columns |= arrays
        for name in targeted:
            columns[f"{name}/share"] = mask * (shares[name] if name in e.teacher_targets else np.float32(0))
        samples.append(Sample(e.tokens, e.prompt_length, columns, e.routes))
    return samples


def value_columns(experiences: Sequence[Experience]) -> list[Sample]:
    """Return the samples of one mini-batch with the columns of the value loss; each has its values and returns."""
    masks = [e.action_mask & e.is_learned_from for e in experiences]
    scales = value_scales([int(np.count_nonzero(mask)) for mask in masks])
    return [
        Sample(
            e.tokens,
            e.prompt_length,
            {
                "mask": mask,
                "weight": np.where(mask, np.float32(scale), np.float32(0)),
                "old_values": present(e.values),
                "returns": present(e.returns).astype(np.float32),
            },
        )
        for e, mask, scale in zip(experiences, masks, scales, strict=True)
    ]


def _teachers_part(e: Experience, coefficients: dict[str, np.float32]) -> dict[str, np.ndarray]:
    """Return `opd_coefficients` and `opd_teacher`, f32 [T-P]: Σ over the sample's teachers; see `algorithms.opd`."""
    mask = e.action_mask
    total = np.float32(sum(coefficients[name] for name in e.teacher_logprobs))
    with np.errstate(invalid="ignore"):
        weighted = sum(
            (coefficients[name] * logprobs for name, logprobs in e.teacher_logprobs.items()),
            np.zeros(len(mask), np.float32),
        )
    return {
        "opd_coefficients": total * mask.astype(np.float32),
        # where, not a product: a masked log-prob may be infinite
        "opd_teacher": np.where(mask, weighted, np.float32(0)).astype(np.float32),
    }


def _advantages(e: Experience) -> np.ndarray:
    if e.advantages is None:  # pure distillation, or a demonstration
        return np.zeros(e.response_length, np.float32)
    return e.advantages.astype(np.float32)


def _optional(e: Experience, weight: float | None, *, is_scored: bool) -> dict[str, np.ndarray]:
    """Return the columns that only some objectives have; `is_scored`: every sample of the mini-batch has a reward."""
    reward = (0.0 if e.excluded else e.reward) if is_scored else None
    arrays = {
        "old_logprobs": e.old_logprobs,
        "ref_logprobs": e.ref_logprobs,
        "rewards": None if reward is None else np.full(e.response_length, reward, np.float32),
        "importance_weights": _importance_weights(e, weight),
    }
    return {name: array for name, array in arrays.items() if array is not None}


def _common_names(experiences: Sequence[Experience], optional: Sequence[dict[str, np.ndarray]]) -> list[str]:
    """Return the names of the optional columns, which all experiences but demonstrations have, or none."""
    sampled = [arrays for e, arrays in zip(experiences, optional, strict=True) if not e.demonstration]
    names = list(dict.fromkeys(name for arrays in sampled for name in arrays))
    for name in names:
        missing = sum(name not in arrays for arrays in sampled)
        if missing:
            raise ValueError(
                f"{missing} of {len(sampled)} samples of an update have no {name}, the others have; the loss reads it"
                " of all or of none"
            )
    return names


def _sample_weights(experiences: Sequence[Experience], objective: ObjectivePlan) -> list[float | None]:
    """Return the weight of each sample in the policy loss of its mini-batch; None: 1."""
    weights: list[float | None] = [None] * len(experiences)
    if not (objective.difficulty_loss_weight or objective.length_loss_weight):
        return weights
    sampled = [number for number, e in enumerate(experiences) if not e.demonstration]
    lengths = [experiences[number].action_tokens for number in sampled]
    difficulties = [experiences[number].difficulty for number in sampled] if objective.difficulty_loss_weight else None
    found = sample_weights(lengths, difficulties, by_length=objective.length_loss_weight)
    for number, weight in zip(sampled, found, strict=True):
        weights[number] = weight
    return weights


def _importance_weights(e: Experience, weight: float | None) -> np.ndarray | None:
    """Return token weights of the policy loss, f32 [T-P]: those of a correction, times that of the sample."""
    corrected = e.importance_weights
    if weight is None:
        return corrected
    return np.float32(weight) * (np.ones(e.response_length, np.float32) if corrected is None else corrected)
