"""Test whether an inference engine draws its samples from the student's distribution.

Let p_t be the student's distribution of token t, after temperature, top-k and top-p, and let f = log p without top-k
and top-p. If the engine draws x_t from p_t, then

    d_t    = f(x_t) - E[f]                     has mean 0 and variance Var[f]
    e_t(λ) = exp(λ f(x_t)) / E[exp(λ f)]       has mean 1, for every λ

The product of e_t over tokens is a test martingale: with samples of the student, the probability that it ever exceeds
1/α is at most α (Ville's inequality). This holds for any number of tokens and any distribution, also where a normal
approximation of Σ d_t fails, as for a student whose distributions are nearly deterministic. λ > 0 finds samples that
are too likely (a lower temperature, top-p), λ < 0 samples that are too unlikely (wrong speculation, other weights).

Older weights draw x_t from q_t instead, and only q_t(x_t) is known. With w = p_t(x_t) / q_t(x_t), the mean of w · e_t
is at most 1, so (1 + w · e_t) / 2 takes the place of e_t.

`marked` selects the tokens of a step that are tested, a rank sums their evidence, and `evidence_in` reads the sums. The
test uses the forward pass of the first update of a step. Its weights sampled the current tokens.

Legend: M scored tokens of a pack, R tested tokens, X quantities of `moments`, L values of λ, T tokens of a sample, P
prompt tokens.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from roll_opd.config.plan import EngineCheckPlan
from roll_opd.samples.call_settings import CALL_SETTINGS, settings_row
from roll_opd.samples.sample import Sample, present

LAMBDAS = (-0.5, -0.25, -0.125, 0.125, 0.25, 0.5, 1.0)
MOMENTS = ("logprob", "log_mass", "mean", "variance")  # of f; then log E[exp(λ f)] for each λ
FALSE_ALARMS = 1e-4  # largest probability of an alarm in a run whose engine samples from the student
# nats per token: a smaller mean of d_t is no fault, because two engines round differently
MATERIAL = {"fp32": 1e-3, "bf16": 0.01, "fp16": 0.01}
# nats by which the log-probs of engine and student may differ: mean, and root mean square. In bf16, means up to 0.05
# were measured. A mean hides errors of few tokens: with top-p 0.9, most tokens have nearly the same log-prob as without
DIFFERENCE = {"fp32": 1e-3, "bf16": 0.1, "fp16": 0.1}
ROOT_MEAN_SQUARE = {"fp32": 2e-3, "bf16": 0.5, "fp16": 0.5}
CURRENT, OLDER = 1, 2  # marks of tested tokens: sampled by the weights that compute the moments, or by older weights


def kept_tokens(logprobs_MV: Tensor, top_k_M: Tensor, top_p_M: Tensor) -> Tensor:
    """Return a mask of the tokens that top-k and then top-p keep, as in vLLM, bool [M, V].

    If top-k is below 1, it keeps all tokens.
    """
    ordered_MV, order_MV = logprobs_MV.sort(dim=1, descending=True)
    columns = ordered_MV.size(1)
    last_M1 = torch.where(top_k_M < 1, columns, top_k_M.long()).clamp(max=columns)[:, None] - 1
    ordered_MV = ordered_MV.masked_fill(ordered_MV < ordered_MV.gather(1, last_M1), -math.inf)
    chances_MV = ordered_MV.softmax(1)
    kept_MV = (chances_MV.cumsum(1) - chances_MV < top_p_M[:, None]) | (top_p_M[:, None] >= 1)
    kept_MV &= ordered_MV > -math.inf
    return torch.zeros_like(kept_MV).scatter_(1, order_MV, kept_MV)


def sampling_sums(moments_MX: Tensor, rollout_M: Tensor, marks_M: Tensor) -> dict[str, Tensor]:
    """Return the sums over tokens from which `EngineEvidence` is computed, each f64 [].

    Args:
        moments_MX: `MOMENTS` and the log E[exp(λ f)] of each token, f32. `log_mass` is the log of the total probability
            of the tokens that top-k and top-p keep; it is inf if they exclude the sampled token.
        rollout_M: the engine's log-probs, f32.
        marks_M: `CURRENT` or `OLDER` for each token.
    """
    values_MX = moments_MX.double()
    logprob_M, log_mass_M, mean_M, variance_M = values_MX[:, : len(MOMENTS)].unbind(1)
    train_M, rollout_M, current_M = logprob_M - log_mass_M, rollout_M.double(), marks_M == CURRENT
    lambdas_L = torch.tensor(LAMBDAS, dtype=torch.float64, device=values_MX.device)
    log_e_ML = logprob_M[:, None] * lambdas_L - values_MX[:, len(MOMENTS) :]
    log_w_M = torch.where(current_M, 0.0, train_M - rollout_M)
    older_ML = torch.logaddexp(log_w_M[:, None] + log_e_ML, torch.zeros_like(log_e_ML)) - math.log(2)
    weighted_M = log_w_M.exp() * (logprob_M - mean_M)
    evidence_L = torch.where(current_M[:, None], log_e_ML, older_ML).sum(0)
    compared_M = current_M & torch.isfinite(train_M)
    apart_M = torch.where(compared_M, (train_M - rollout_M).abs(), 0.0)
    sums = {
        "tokens": current_M.new_tensor(len(marks_M), dtype=torch.float64),
        "compared": compared_M.sum().double(),
        "surprise": weighted_M.sum(),
        # a few samples miss rare tokens of a large weight, so their squares alone would be too small
        "variance": torch.where(current_M, variance_M, weighted_M.square().maximum(variance_M)).sum(),
        "apart": apart_M.sum(),
        "apart_square": apart_M.square().sum(),
    }
    return sums | {f"evidence{number}": value for number, value in enumerate(evidence_L.unbind())}


@dataclass(frozen=True)
class EngineEvidence:
    """Evidence of one step against the hypothesis that the engine samples from the student."""

    tokens: float  # number of tested tokens
    bias: float  # mean of d_t over the tokens, nats
    z: float  # Σ d_t in standard deviations
    log_evidence: float  # log of the mean over λ of Π e_t
    compared: float = 0  # number of tokens whose log-probs were compared: those of the current weights
    # mean and root mean square of |log-prob of the student - log-prob of the engine| over these tokens, nats
    difference: float = 0
    root_mean_square: float = 0

    @staticmethod
    def of(sums: Mapping[str, float]) -> "EngineEvidence | None":
        """Return the evidence in sums of `sampling_sums`, added over ranks; None if no token was tested."""
        tokens, compared = sums.get("tokens", 0.0), sums.get("compared", 0.0)
        if not tokens:
            return None
        logs_L = torch.tensor([sums[f"evidence{number}"] for number in range(len(LAMBDAS))], dtype=torch.float64)
        deviation = math.sqrt(max(sums["variance"], 0.0))
        return EngineEvidence(
            tokens=tokens,
            bias=sums["surprise"] / tokens,
            z=sums["surprise"] / deviation if deviation else 0.0,
            log_evidence=float(logs_L.logsumexp(0)) - math.log(len(LAMBDAS)),
            compared=compared,
            difference=sums["apart"] / compared if compared else 0.0,
            root_mean_square=math.sqrt(sums["apart_square"] / compared) if compared else 0.0,
        )

    @staticmethod
    def of_differences(apart_M: np.ndarray) -> "EngineEvidence":
        """Return the evidence in differences between the log-probs of student and engine, f32 [M]."""
        count, apart_M = len(apart_M), np.abs(apart_M, dtype=np.float64)
        mean, square = (float(values.mean()) if count else 0.0 for values in (apart_M, apart_M**2))
        return EngineEvidence(0, 0, 0, 0, count, mean, math.sqrt(square))

    def is_foreign(self, test: int, dtype: str) -> bool:
        """Return whether the samples are from another distribution. `test` is the number of the test, from 1.

        Over all tests of a run, the probability of a wrong alarm is at most `FALSE_ALARMS`: the alarm of test k has
        the share 6 / (π k)².
        """
        limit = -math.log(FALSE_ALARMS) + math.log(math.pi**2 / 6) + 2 * math.log(test)
        return self.log_evidence > limit and abs(self.bias) > MATERIAL[dtype]

    def differs(self, dtype: str) -> bool:
        """Return whether engine and student compute different log-probs for the same weights."""
        is_near = self.difference <= DIFFERENCE[dtype] and self.root_mean_square <= ROOT_MEAN_SQUARE[dtype]
        return not is_near  # also if a value is NaN


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

    Two kinds of tokens cannot be tested: tokens with a repetition penalty, and greedy tokens of older weights, whose
    probability is 1.
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
