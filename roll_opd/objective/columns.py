"""The columns that losses read.

The driver computes the columns before a mini-batch is split into shards. A rank packs the columns and computes the loss
from them, so it needs neither teachers nor rewards.

Legend: T tokens of a sample, P prompt tokens.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from roll_opd.config.plan import ObjectivePlan, TeacherPlan
from roll_opd.objective.aggregation import loss_scales, value_scales
from roll_opd.objective.algorithms import loss_facts
from roll_opd.objective.engine_evidence import TESTED
from roll_opd.objective.filters import sample_weights
from roll_opd.objective.reverse_kl import advantages
from roll_opd.samples.byte_alignment import NO_CHUNK
from roll_opd.samples.sample import Sample, as_columns, chunks_column, present, with_columns


def loss_columns(samples: Sequence[Sample], teachers: Sequence[TeacherPlan], objective: ObjectivePlan) -> list[Sample]:
    """Return the samples of a mini-batch with all columns of the policy loss except teacher targets.

    The teachers' term can be in the advantage or in the loss:

    - In the advantage (`opd_objective: sampled`), the teachers' log-probs are merged into the columns
      `opd_coefficients` and `opd_teacher`. A teacher with another tokenizer has three separate columns instead (see
      `_chunked_part`).
    - In the loss, `opd_coefficients` and `opd_teacher` are 0, and each teacher has a `share` column.

    If `weighs_parts_apart` returns True, the reward's part of the advantages is multiplied by the importance weights
    of the correction, and the column `sampling_logprobs` is added for the weights of the teachers' part. Raises
    ValueError if only some samples of the student have a column that the loss reads.
    """
    apart = weighs_parts_apart(teachers, objective)
    if apart:
        samples = [_with_weighted_advantages(sample) for sample in samples]
    masks = [sample.in_loss for sample in samples]
    demonstrations = [sample.demonstration for sample in samples]
    scales = loss_scales([int(np.count_nonzero(mask)) for mask in masks], demonstrations, objective)
    weights = _sample_weights(samples, objective)
    is_scored = all(s.reward is not None or s.excluded or s.demonstration for s in samples)
    optional = [
        _optional(s, weight, is_scored=is_scored, is_stale=apart) for s, weight in zip(samples, weights, strict=True)
    ]
    names = _common_names(samples, optional)
    is_sampled = objective.opd_objective == "sampled"
    # teachers with the coefficient 0 are included: a log-prob that is not finite makes the product NaN
    coefficients = {t.name: np.float32(t.opd_kl_coef if is_sampled else 0) for t in teachers}
    shares = {t.name: np.float32(t.opd_kl_coef) for t in teachers}
    targeted = () if is_sampled else tuple(dict.fromkeys(name for s in samples for name in s.teacher_targets))
    chunked = tuple(t.name for t in teachers if any(chunks_column(t.name) in s.columns for s in samples))
    made = []
    for sample, mask, scale, arrays in zip(samples, masks, scales, optional, strict=True):
        columns = {
            "mask": mask,
            "weight": np.where(mask, np.float32(scale), np.float32(0)),
            "advantages": _advantages(sample),
            **_teachers_part(sample, coefficients),
        }
        for name in chunked:
            columns |= _chunked_part(sample, name, coefficients[name])
        if objective.opd_kl_discount:
            columns["actions"] = sample.action_mask
        if any(demonstrations):
            columns["demonstration"] = np.full(len(mask), sample.demonstration)
        if sample.demonstration:  # no loss reads these columns at the tokens of demonstrations; the weight is 1
            columns |= {name: np.full(len(mask), name == "importance_weights", np.float32) for name in names}
        columns |= arrays
        columns |= {name: sample.columns[name] for name in TESTED if name in sample.columns}
        for name in targeted:
            columns[f"{name}/share"] = mask * (shares[name] if name in sample.teacher_targets else np.float32(0))
        made.append(Sample(sample.tokens, sample.prompt_length, columns, sample.routes))
    return made


def with_total_advantages(
    samples: Sequence[Sample], teachers: Sequence[TeacherPlan], objective: ObjectivePlan
) -> list[Sample]:
    """Return the samples with `total_advantages` and `reverse_kl`, the columns that an update returns.

    They are computed here for samples without an update, and for rules that read advantages before it.
    """
    if all("total_advantages" in sample.columns for sample in samples):
        return list(samples)
    made = [sample.columns for sample in loss_columns(samples, teachers, objective)]
    columns = {name: torch.from_numpy(np.concatenate([each[name] for each in made])) for name in made[0]}
    student_M = torch.from_numpy(np.concatenate([_student_logprobs(sample) for sample in samples]))
    lengths = [sample.response_length for sample in samples]
    found = [values_M.split(lengths) for values_M in advantages(student_M, columns, lengths, objective)]
    totals, reverse_kls = ([part.numpy() for part in parts] for parts in found)
    return with_columns(samples, total_advantages=totals, reverse_kl=reverse_kls)


def _student_logprobs(sample: Sample) -> np.ndarray:
    """Return the student's log-probs, f32 [T-P]; those of a demonstration are 0 without an update."""
    if sample.demonstration and sample.old_logprobs is None:
        return np.zeros(sample.response_length, np.float32)
    return sample.student_logprobs


def weighs_parts_apart(teachers: Sequence[TeacherPlan], objective: ObjectivePlan) -> bool:
    """Return whether the two parts of a stale token's advantage have separate importance weights.

    The correction of the run weights the reward's part. The teachers' part is computed from current log-probs, so its
    only bias is that older weights sampled the token; `objective.reverse_kl.stale_weights` corrects this bias.
    """
    if not objective.max_age or not teachers or objective.opd_objective != "sampled":
        return False
    return loss_facts(objective.policy_loss).reads_advantages


def _with_weighted_advantages(sample: Sample) -> Sample:
    """Return the sample with its advantages multiplied by its importance weights.

    The advantages contain only the reward's part. The column `importance_weights` is removed, so that the loss does not
    apply the weights again.
    """
    weights = sample.importance_weights
    if weights is None or sample.advantages is None:
        return sample
    return sample.with_columns(advantages=sample.advantages * weights, importance_weights=None)


def value_columns(samples: Sequence[Sample]) -> list[Sample]:
    """Return a mini-batch's samples for sharding, with the columns of the value loss."""
    masks = [sample.action_mask & sample.is_learned_from for sample in samples]
    scales = value_scales([int(np.count_nonzero(mask)) for mask in masks])
    return [
        Sample(
            sample.tokens,
            sample.prompt_length,
            {
                "mask": mask,
                "weight": np.where(mask, np.float32(scale), np.float32(0)),
                "old_values": present(sample.values),
                "returns": present(sample.returns).astype(np.float32),
            },
        )
        for sample, mask, scale in zip(samples, masks, scales, strict=True)
    ]


def _teachers_part(sample: Sample, coefficients: Mapping[str, np.float32]) -> dict[str, np.ndarray]:
    """Return the columns `opd_coefficients` and `opd_teacher`, f32 [T-P].

    Both columns are sums over the teachers of the sample (see `objective.reverse_kl`). Teachers with another tokenizer
    are not included.
    """
    mask = sample.action_mask
    by_teacher = {n: values for n, values in sample.teacher_logprobs.items() if chunks_column(n) not in sample.columns}
    total = np.float32(sum(coefficients[name] for name in by_teacher))
    with np.errstate(invalid="ignore"):
        weighted = sum(
            (coefficients[name] * logprobs for name, logprobs in by_teacher.items()), np.zeros(len(mask), np.float32)
        )
    return {
        "opd_coefficients": total * mask.astype(np.float32),
        # `where` instead of a product, since a masked log-prob may be infinite
        "opd_teacher": np.where(mask, weighted, np.float32(0)).astype(np.float32),
    }


def _chunked_part(sample: Sample, teacher: str, coefficient: np.float32) -> dict[str, np.ndarray]:
    """Return the three columns of a teacher with another tokenizer, [T-P] each.

    A sample that the teacher does not score gets these columns too, but without chunks.
    """
    chunks = sample.columns.get(chunks_column(teacher), np.full(sample.response_length, NO_CHUNK, np.int32))
    credited = chunks != NO_CHUNK
    logprobs = sample.teacher_logprobs.get(teacher, np.zeros(sample.response_length, np.float32))
    return {
        f"{teacher}/chunks": chunks,
        f"{teacher}/chunk_coefficients": coefficient * credited.astype(np.float32),
        f"{teacher}/chunk_teacher": np.where(credited, coefficient * logprobs, np.float32(0)).astype(np.float32),
    }


def _advantages(sample: Sample) -> np.ndarray:
    if sample.advantages is None:  # in pure distillation, or for a demonstration
        return np.zeros(sample.response_length, np.float32)
    return sample.advantages.astype(np.float32)


def _optional(sample: Sample, weight: float | None, *, is_scored: bool, is_stale: bool) -> dict[str, np.ndarray]:
    """Return the columns that only some objectives use.

    Args:
        sample: a sample of the mini-batch.
        weight: the sample's weight; None means 1.
        is_scored: whether every sample of the mini-batch has a reward, is excluded, or is a demonstration.
        is_stale: whether the teachers' part has importance weights.
    """
    reward = (0.0 if sample.excluded else sample.reward) if is_scored else None
    return as_columns(
        old_logprobs=sample.old_logprobs,
        ref_logprobs=sample.ref_logprobs,
        rewards=None if reward is None else np.full(sample.response_length, reward, np.float32),
        importance_weights=_importance_weights(sample, weight),
        sampling_logprobs=_sampling_logprobs(sample) if is_stale and not sample.demonstration else None,
    )


def _sampling_logprobs(sample: Sample) -> np.ndarray:
    """Return the log-probs of the sampling distribution, f32 [T-P]; zeros if no token was sampled."""
    sampled = sample.rollout_logprobs
    return np.zeros(sample.response_length, np.float32) if sampled is None else sampled


def _common_names(samples: Sequence[Sample], optional: Sequence[dict[str, np.ndarray]]) -> list[str]:
    """Return the names of the optional columns of the student's samples.

    Raises ValueError if only some of these samples have a column. Demonstrations may lack it.
    """
    sampled = [arrays for s, arrays in zip(samples, optional, strict=True) if not s.demonstration]
    names = list(dict.fromkeys(name for arrays in sampled for name in arrays))
    for name in names:
        missing = sum(name not in arrays for arrays in sampled)
        if missing:
            raise ValueError(
                f"{missing} of {len(sampled)} samples of an update have no {name}; either all samples or none must"
                " have it"
            )
    return names


def _sample_weights(samples: Sequence[Sample], objective: ObjectivePlan) -> list[float | None]:
    """Return the weight of each sample in its mini-batch's policy loss; None means 1."""
    weights: list[float | None] = [None] * len(samples)
    if not (objective.difficulty_loss_weight or objective.length_loss_weight):
        return weights
    sampled = [number for number, s in enumerate(samples) if not s.demonstration]
    lengths = [samples[number].action_tokens for number in sampled]
    difficulties = [samples[number].difficulty for number in sampled] if objective.difficulty_loss_weight else None
    found = sample_weights(lengths, difficulties, by_length=objective.length_loss_weight)
    for number, weight in zip(sampled, found, strict=True):
        weights[number] = weight
    return weights


def _importance_weights(sample: Sample, weight: float | None) -> np.ndarray | None:
    """Return the token weights of the policy loss, f32 [T-P].

    A token weight is the importance weight of the correction times the weight of the sample.
    """
    corrected = sample.importance_weights
    if weight is None:
        return corrected
    return np.float32(weight) * (np.ones(sample.response_length, np.float32) if corrected is None else corrected)
