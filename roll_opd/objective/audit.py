"""Audit an update in f64: compute token rewards and advantages as columns once per step, and their metrics.

The update computes its advantages in f32, in `objective.loss`; see `objective.external_advantages` for the formulas.

Legend: M tokens of all responses, concatenated.
"""

from collections.abc import Sequence

import numpy as np
import torch

from roll_opd.config.plan import ObjectivePlan, TeacherPlan
from roll_opd.objective.chunk_credit import chunk_penalty
from roll_opd.objective.columns import weighs_parts_apart
from roll_opd.objective.external_advantages import reward_of
from roll_opd.objective.loss import stale_weights
from roll_opd.objective.reference_kl import reference_kl, reference_kl_mean
from roll_opd.objective.returns import discounted_to_go
from roll_opd.objective.token_advantages import clipped, last_action
from roll_opd.samples.alignment import NO_CHUNK
from roll_opd.samples.sample import Sample, with_columns
from roll_opd.samples.sample_columns import chunks_column, end_to_end, logprobs_column, picked, split_by_length
from roll_opd.tracking.metrics import statistics


def audited(samples: Sequence[Sample], teachers: Sequence[TeacherPlan], objective: ObjectivePlan) -> list[Sample]:
    """Set the columns `token_level_rewards` and `total_advantages`, unless all samples have them already.

    Both columns are 0 outside the action mask. The update weights each token by its advantage.
    """
    if all("total_advantages" in sample.columns for sample in samples):
        return list(samples)
    penalty_M = _penalties(samples, teachers, objective)
    return with_columns(
        samples,
        token_level_rewards=_token_level_rewards(samples, penalty_M, objective),
        total_advantages=_total_advantages(samples, penalty_M, teachers, objective),
    )


def _token_level_rewards(
    samples: Sequence[Sample], penalty_M: np.ndarray, objective: ObjectivePlan
) -> list[np.ndarray]:
    rewards = split_by_length(-penalty_M, [sample.response_length for sample in samples])
    for sample, reward in zip(samples, rewards, strict=True):
        if objective.init_kl_coef and not sample.demonstration:
            reward -= sample.metrics["kl_coef"] * reference_kl(sample, objective.kl_penalty).numpy()
        if sample.advantages is not None and not sample.excluded:
            place = last_action(sample.action_mask)
            if place is not None:
                reward[place] += reward_of(sample)
    return rewards


def _total_advantages(
    samples: Sequence[Sample], penalty_M: np.ndarray, teachers: Sequence[TeacherPlan], objective: ObjectivePlan
) -> list[np.ndarray]:
    lengths = [sample.response_length for sample in samples]
    mask_M = torch.from_numpy(end_to_end([sample.action_mask for sample in samples], np.bool_))
    totals_M = discounted_to_go(torch.from_numpy(penalty_M), mask_M, lengths, objective.opd_kl_discount)
    if weighs_parts_apart(teachers, objective):
        totals_M *= _stale_weights(samples)
    for sample, part in zip(samples, totals_M.split(lengths), strict=True):
        external = sample.advantages
        torch.sub(torch.zeros(()) if external is None else torch.from_numpy(external), part, out=part)
    totals_M = torch.where(mask_M, clipped(totals_M, objective.advantage_clip), 0.0)
    return split_by_length(totals_M.numpy(), lengths)


def _stale_weights(samples: Sequence[Sample]) -> torch.Tensor:
    """Return the importance weights of the teachers' part (`objective.loss.stale_weights`), f64 [M]."""
    sampled = [sample.action_mask & (not sample.demonstration) for sample in samples]
    student = [_student_logprobs(sample) for sample in samples]
    rollout = [
        own if s.rollout_logprobs is None else s.rollout_logprobs for s, own in zip(samples, student, strict=True)
    ]
    columns = {
        "mask": torch.from_numpy(end_to_end(sampled, np.bool_)),
        "sampling_logprobs": torch.from_numpy(end_to_end(rollout, np.float64)),
    }
    return stale_weights(torch.from_numpy(end_to_end(student, np.float64)), columns)


def _penalties(samples: Sequence[Sample], teachers: Sequence[TeacherPlan], objective: ObjectivePlan) -> np.ndarray:
    """Return Σ opd_kl_coef · reverse_kl, f64 [M], 0 outside the action mask."""
    mask_M = end_to_end([sample.action_mask for sample in samples], np.bool_)
    penalty_M = np.zeros(len(mask_M))
    student = [_student_logprobs(sample) for sample in samples]
    student_M = end_to_end(student, np.float64)
    for teacher in teachers:
        # samples that the teacher has not scored have no penalty
        name = logprobs_column(teacher.name)
        read = [sample.columns.get(name, own) for sample, own in zip(samples, student, strict=True)]
        gap_M = np.subtract(student_M, end_to_end(read, np.float32))
        if any(chunks_column(teacher.name) in sample.columns for sample in samples):
            gap_M = _of_chunks(gap_M, student_M, samples, teacher.name, objective)
        penalty_M += np.multiply(gap_M, teacher.opd_kl_coef, out=gap_M)
    penalty_M[~mask_M] = 0.0
    return penalty_M


def _of_chunks(
    gap_M: np.ndarray, student_M: np.ndarray, samples: Sequence[Sample], teacher: str, objective: ObjectivePlan
) -> np.ndarray:
    """Return each token's reverse KL from a teacher with another tokenizer, f64 [M].

    The reverse KL is computed for each chunk, and credited to the tokens of the chunk.
    """
    none = [np.full(sample.response_length, NO_CHUNK, np.int32) for sample in samples]
    chunks = [sample.columns.get(chunks_column(teacher), no) for sample, no in zip(samples, none, strict=True)]
    chunks_M = torch.from_numpy(end_to_end(chunks, np.int32))
    lengths = [sample.response_length for sample in samples]
    given = torch.from_numpy(gap_M), torch.from_numpy(student_M)
    return chunk_penalty(*given, chunks_M, lengths, objective.opd_chunk_credit).numpy()


def _student_logprobs(sample: Sample) -> np.ndarray:
    """Return the student's log-probs, f32 [T-P].

    The log-probs of a demonstration are 0 if the step has no update.
    """
    if sample.demonstration and sample.old_logprobs is None:
        return np.zeros(sample.response_length, np.float32)
    return sample.student_logprobs


def advantage_metrics(samples: Sequence[Sample], objective: ObjectivePlan) -> dict[str, float]:
    """Return mean, max and min of `critic/rewards` and `critic/advantages`.

    The reward of a sample is the sum of its token rewards. Advantages are taken per token. Excluded samples are left
    out.

    With a token-level KL, `critic/kl_coef` and `critic/reference_kl` are added. `critic/reference_kl` is the mean over
    samples of each sample's mean KL over tokens.
    """
    samples = [sample for sample in samples if not sample.excluded]
    rewards = [sample.columns["token_level_rewards"].sum() for sample in samples]
    totals_M = end_to_end([sample.columns["total_advantages"] for sample in samples], np.float64)
    mask_M = end_to_end([sample.action_mask for sample in samples], np.bool_)
    kinds = ("mean", "max", "min")
    return {
        **statistics("critic/rewards", rewards, kinds),
        **statistics("critic/advantages", picked(totals_M, mask_M), kinds),
        **(_reference_metrics(samples, objective) if objective.init_kl_coef else {}),
    }


def _reference_metrics(samples: Sequence[Sample], objective: ObjectivePlan) -> dict[str, float]:
    acted = [sample for sample in samples if sample.action_mask.any()]
    if not acted:
        return {}
    return {
        "critic/kl_coef": acted[0].metrics["kl_coef"],
        "critic/reference_kl": reference_kl_mean(samples, objective),
    }
