"""The columns of a sample: arrays over its response, described in one table.

Entry t of every column belongs to token `tokens[P+t]`. A stage sets a column of a whole batch with
`samples.sample.with_columns`. The samples in a rank's shard have only the columns whose `shard` dtype is set. The
module `objective.columns` computes the columns that a loss reads. The ranks add the teachers' targets.

Legend: T tokens of a sample, P prompt tokens, K tokens of a top-k, F hidden size, M tokens of a batch, concatenated.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

TEACHER = "TEACHER"  # placeholder for a teacher's name in the table
_LOGPROBS = "/logprobs"
CHUNKS = "/chunks"  # suffix of the columns that hold chunks


@dataclass(frozen=True)
class Column:
    """One row of the table.

    If `dtype` is empty, the column does not exist on the driver. If `shard` is empty, the column does not exist in the
    shards of the ranks.
    """

    meaning: str
    filled_by: str
    read_by: str
    dtype: str = ""  # dtype on the driver
    shard: str = ""  # dtype in a shard
    shape: str = "[T-P]"


COLUMNS = {
    "action_mask": Column(
        "true for tokens that the student sampled, and for tokens of a demonstration's answer",
        "workflows",
        "all stages",
        "bool",
    ),
    "rollout_logprobs": Column(
        "log-probs of the sampling distribution; absent if no token was sampled", "inference engine", "mismatch", "f32"
    ),
    "old_logprobs": Column(
        "log-probs of the training engine before the update, at the sampling temperature",
        "Student.compute_old_logprobs, or Student.learn",
        "policy loss, mismatch, audit, metrics",
        "f32",
        "f32",
    ),
    "ref_logprobs": Column(
        "log-probs of the frozen reference policy", "Scorers", "KL loss, token-level KL", "f32", "f32"
    ),
    "TEACHER/logprobs": Column(
        "log-probs of a teacher, for samples with its tags",
        "Scorers, or a workflow",
        "objective.columns, audit, metrics",
        "f32",
    ),
    "TEACHER/chunks": Column(
        "if tokenizers differ: index of the first token that shares the token's credit; -1 without credit",
        "Scorers",
        "objective.columns, audit, policy loss, metrics",
        "i32",
        "i32",
    ),
    "values": Column(
        "critic's value of the state before each token",
        "Critic.compute_values",
        "external_advantages, value_columns",
        "f32",
    ),
    "old_values": Column("the column `values` in a shard", "value_columns", "value loss", shard="f32"),
    "returns": Column(
        "training targets of the values; 0 outside the action mask",
        "external_advantages",
        "value loss, metrics",
        "f64",
        "f32",
    ),
    "advantages": Column(
        "advantages from the external reward, without the teachers' part; 0 outside the action mask",
        "external_advantages",
        "policy loss, audit, critic",
        "f64",
        "f32",
    ),
    "loss_mask": Column(
        "true for action tokens in the loss; if absent, all action tokens are in the loss",
        "objective.filters, objective.mismatch",
        "objective.columns, objective.advantages",
        "bool",
    ),
    "importance_weights": Column(
        "weight of each token in the policy loss; if absent, all weights are 1",
        "objective.mismatch",
        "policy loss",
        "f32",
        "f32",
    ),
    "token_level_rewards": Column(
        "reward minus the penalties from the teachers and from the reference policy",
        "objective.audit",
        "metrics, records",
        "f64",
    ),
    "total_advantages": Column(
        "advantages including the teachers' part, clipped", "objective.audit", "mismatch, metrics, records", "f64"
    ),
    "mask": Column("tokens in the loss", "objective.columns", "losses", shard="bool"),
    "weight": Column("weight of a token in the mini-batch's mean", "objective.columns", "losses", shard="f32"),
    "opd_coefficients": Column(
        "sum of opd_kl_coef over the sample's teachers", "objective.columns", "policy loss", shard="f32"
    ),
    "opd_teacher": Column(
        "sum of opd_kl_coef · log-prob over the sample's teachers", "objective.columns", "policy loss", shard="f32"
    ),
    "TEACHER/chunk_coefficients": Column(
        "opd_kl_coef of a teacher with another tokenizer, at tokens that have a chunk",
        "objective.columns",
        "policy loss",
        shard="f32",
    ),
    "TEACHER/chunk_teacher": Column(
        "opd_kl_coef · log-probs of a teacher with another tokenizer, at tokens that have a chunk",
        "objective.columns",
        "policy loss",
        shard="f32",
    ),
    "sampling_logprobs": Column(
        "the column `rollout_logprobs`; present only if samples may be stale and teachers are in the advantage",
        "objective.columns",
        "policy loss",
        shard="f32",
    ),
    "sampled_by": Column(
        "1 at tokens that the engine check tests and the current weights sampled, 2 at those of older weights",
        "objective.engine_columns",
        "engine check",
        shard="i8",
    ),
    "engine_logprobs": Column(
        "the column `rollout_logprobs`, at tokens that the engine check tests",
        "objective.engine_columns",
        "engine check",
        shard="f32",
    ),
    "actions": Column(
        "the column `action_mask`; present only if opd_kl_discount needs it",
        "objective.columns",
        "policy loss",
        shard="bool",
    ),
    "demonstration": Column("tokens of demonstrations", "objective.columns", "policy loss", shard="bool"),
    "rewards": Column("the sample's reward, at each token", "objective.columns", "policy loss", shard="f32"),
    "TEACHER/share": Column(
        "a teacher's opd_kl_coef; 0 in samples that the teacher did not score",
        "objective.columns",
        "distillation loss",
        shard="f32",
    ),
    "TEACHER/topk_ids": Column("a teacher's top-k", "target_refs", "distillation loss", shard="i32", shape="[T-P, K]"),
    "TEACHER/topk_logprobs": Column(
        "log-probs of a teacher's top-k", "target_refs", "distillation loss", shard="f32", shape="[T-P, K]"
    ),
    "TEACHER/topk_rest": Column(
        "log-prob of all other tokens together", "target_refs", "distillation loss", shard="f32"
    ),
    "TEACHER/hidden": Column(
        "a teacher's final hidden states", "target_refs", "distillation loss", shard="model", shape="[T-P, F]"
    ),
    "topk_ids": Column(
        "tokens to score", "MegatronEngine.compute_targets", "log-probs of given tokens", shard="i32", shape="[T-P, K]"
    ),
}


def as_columns(**arrays: np.ndarray | None) -> dict[str, np.ndarray]:
    """Return a map from column names to arrays. Arrays that are None are left out."""
    return {name: array for name, array in arrays.items() if array is not None}


def logprobs_column(teacher: str) -> str:
    """Return the name of the column that holds a teacher's log-probs."""
    return teacher + _LOGPROBS


def teacher_columns(logprobs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the log-prob columns of teachers: a map from column names to arrays.

    Args:
        logprobs: map from teacher names to log-probs.
    """
    return {logprobs_column(name): array for name, array in logprobs.items()}


def chunks_column(teacher: str) -> str:
    """Return the name of the column that holds the chunks of a teacher with another tokenizer."""
    return teacher + CHUNKS


def teacher_logprobs(columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return a map from teacher names to log-probs, taken from the columns `TEACHER/logprobs` in their order."""
    return {name.removesuffix(_LOGPROBS): array for name, array in columns.items() if name.endswith(_LOGPROBS)}


def end_to_end(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    """Return the concatenation [M] of the samples' arrays [T-P]. The result is empty if there are no samples."""
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype, copy=False)


def split_by_length(values_M: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    """Return each sample's part of a concatenated array [M], as views [T-P]."""
    ends = itertools.accumulate(lengths)
    return [values_M[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def picked(values_M: np.ndarray, mask_M: np.ndarray) -> np.ndarray:
    """Return the values at which the mask is true. If the mask is true everywhere, the values are not copied."""
    return values_M if mask_M.all() else values_M[mask_M]
