"""Test the engine's samples in each step: the columns of the tested tokens, their sums on a rank, and the verdict.

The test uses the forward pass of the first update of a step. Its weights sampled the current tokens.

Legend: M scored tokens of a pack, R tested tokens, T tokens of a sample, P prompt tokens.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import numpy as np
import torch
from torch import Tensor

from roll_opd.config.plan import EngineCheckPlan
from roll_opd.objective.engine_evidence import CURRENT, OLDER, EngineEvidence, sampling_sums
from roll_opd.samples.call_settings import CALL_SETTINGS, settings_row
from roll_opd.samples.sample import Sample, present

SAMPLED_BY = "sampled_by"  # column: `CURRENT` or `OLDER` at tested tokens, 0 at others; int8 [T-P]
ENGINE_LOGPROBS = "engine_logprobs"  # column: the engine's log-probs, 0 at tokens that are not tested; f32 [T-P]
# column: temperature, top-k and top-p of each token, f32 [T-P, 3]; absent if all tokens have the run's
TESTED_SETTINGS = "tested_settings"
TESTED = (SAMPLED_BY, ENGINE_LOGPROBS, TESTED_SETTINGS)
TESTED_TOKENS = 4096  # maximum tested tokens of a step: more would cost time, and hardly any error needs more
METRICS = "rollout/engine/"
COMPARED = ("compared", "difference", "root_mean_square")  # metrics of a comparison of log-probs
PREFIX = "engine_"  # of the sums of a `TrainResult`


def marked(samples: Sequence[Sample], version: int, plan: EngineCheckPlan) -> list[Sample]:
    """Return the samples with the columns `TESTED`.

    A token is tested if an engine sampled it with known weights and settings and returned its log-prob. At most about
    `TESTED_TOKENS` tokens are tested, at equal intervals.

    Args:
        version: version of the weights that compute the moments.
    """
    own = settings_row(plan.sampling)
    settings = [_settings(sample, own) for sample in samples]
    marks = [_marks(*pair, version, is_current=not plan.is_corrected) for pair in zip(samples, settings, strict=True)]
    stride = max(1, math.ceil(sum(map(np.count_nonzero, marks)) / TESTED_TOKENS))
    seen, made = 0, []
    varies = any(CALL_SETTINGS in sample.columns for sample in samples)
    for sample, mark, rows in zip(samples, marks, settings, strict=True):
        places = np.flatnonzero(mark)
        left_out = places[(np.arange(len(places)) + seen) % stride != 0]
        seen += len(places)
        mark[left_out] = 0
        known = np.zeros(len(mark), np.float32) if sample.rollout_logprobs is None else sample.rollout_logprobs
        columns = {SAMPLED_BY: mark, ENGINE_LOGPROBS: np.where(mark, known, 0).astype(np.float32)}
        if varies:
            columns[TESTED_SETTINGS] = np.ascontiguousarray(rows[:, :3])
        made.append(sample.with_columns(**columns))
    return made


def _settings(sample: Sample, own: np.ndarray) -> np.ndarray:
    """Return the settings with which each token was sampled, f32 [T-P, 4]. `own`: those of the run, f32 [4]."""
    rows = sample.columns.get(CALL_SETTINGS)
    if rows is None:
        return np.broadcast_to(own, (sample.response_length, len(own)))
    return np.where(np.isnan(rows), own, rows)


def _marks(sample: Sample, settings: np.ndarray, version: int, *, is_current: bool) -> np.ndarray:
    """Return the column `SAMPLED_BY` of all tokens that can be tested.

    Tokens with a repetition penalty cannot be tested, nor greedy tokens of older weights: their probability is 1.
    """
    marks = np.zeros(sample.response_length, np.int8)
    if sample.demonstration or sample.rollout_logprobs is None:
        return marks
    start = 0
    for sampled_by, tokens in sample.versions:
        if sampled_by is not None:
            marks[start : start + tokens] = CURRENT if is_current and sampled_by == version else OLDER
        start += tokens
    marks[~(sample.action_mask & np.isfinite(present(sample.rollout_logprobs)))] = 0
    temperature, penalty = settings[:, 0], settings[:, 3]
    marks[(penalty != 1) | ((temperature == 0) & (marks == OLDER))] = 0
    return marks


def tested_settings(columns: Mapping[str, Tensor], plan: EngineCheckPlan, logprobs_M: Tensor) -> Tensor:
    """Return temperature, top-k and top-p of each scored token, f32 [M, 3]."""
    if TESTED_SETTINGS in columns:
        return columns[TESTED_SETTINGS]
    return torch.from_numpy(settings_row(plan.sampling)[:3]).to(logprobs_M.device).expand(len(logprobs_M), -1)


def engine_sums(columns: Mapping[str, Tensor], moments_RX: Tensor, rows_R: Tensor) -> dict[str, Tensor]:
    """Return this pack's sums of `sampling_sums`, with names that begin with `PREFIX`.

    Args:
        moments_RX: the result of `OutputHead.moments` for the tested tokens.
        rows_R: indices of the tested tokens among the M tokens.
    """
    marked = columns[ENGINE_LOGPROBS][rows_R], columns[SAMPLED_BY][rows_R]
    return {PREFIX + name: value for name, value in sampling_sums(moments_RX, *marked).items()}


def evidence_of(samples: Sequence[Sample], moments: Sequence[np.ndarray]) -> EngineEvidence | None:
    """Return the evidence of samples with the columns of `marked`.

    Args:
        moments: result of `Student.moments`, f32 [T-P, X] for each sample.
    """
    marks = np.concatenate([sample.columns[SAMPLED_BY] for sample in samples])
    rollout = np.concatenate([sample.columns[ENGINE_LOGPROBS] for sample in samples])
    tested = np.flatnonzero(marks)
    arrays = (np.concatenate(list(moments))[tested], rollout[tested], marks[tested])
    sums = sampling_sums(*(torch.from_numpy(array) for array in arrays))
    return EngineEvidence.of({name: float(value) for name, value in sums.items()})


def engine_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics `rollout/engine/*` of a step from the sums of `engine_sums`, added over ranks."""
    own = {name.removeprefix(PREFIX): value for name, value in sums.items() if name.startswith(PREFIX)}
    found = EngineEvidence.of(own)
    return {f"rollout/engine/{name}": value for name, value in asdict(found).items()} if found else {}


def compared_metrics(evidence: EngineEvidence) -> dict[str, float]:
    """Return the metrics `rollout/engine/*` of a comparison of log-probs."""
    return {METRICS + name: value for name, value in asdict(evidence).items() if name in COMPARED}


def evidence_in(metrics: Mapping[str, float]) -> EngineEvidence | None:
    """Return the evidence that `engine_metrics` wrote into a step's metrics; None if no token was tested."""
    found = {name.removeprefix(METRICS): value for name, value in metrics.items() if name.startswith(METRICS)}
    return EngineEvidence(**found) if found else None
