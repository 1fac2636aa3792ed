"""The test of an engine's samples: exact for any distribution, silent for samples of the student, loud for others."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from roll_opd.objective.engine_evidence import (
    CURRENT,
    DIFFERENCE,
    LAMBDAS,
    OLDER,
    EngineEvidence,
    kept_tokens,
    sampling_sums,
)

VOCABULARY = 40


def distributions(tokens: int, scale: float, seed: int) -> Tensor:
    """Return log-probs that are nearly uniform (small scale) to nearly deterministic (large scale), f64 [M, V]."""
    noise = torch.randn(tokens, VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (scale * noise).log_softmax(1)


def moments(logprobs_MV: Tensor, sampled_M: Tensor, kept_MV: Tensor | None = None) -> Tensor:
    kept_MV = torch.ones_like(logprobs_MV, dtype=torch.bool) if kept_MV is None else kept_MV
    p_MV = torch.where(kept_MV, logprobs_MV.exp(), 0)
    mass_M = p_MV.sum(1)
    p_MV = p_MV / mass_M[:, None]
    mean_M = (p_MV * logprobs_MV).sum(1)
    powers = [(p_MV * (power * logprobs_MV).exp()).sum(1).log() for power in LAMBDAS]
    columns = [
        picked(logprobs_MV, sampled_M),
        mass_M.log(),
        mean_M,
        (p_MV * (logprobs_MV - mean_M[:, None]) ** 2).sum(1),
    ]
    return torch.stack([*columns, *powers], 1)


def kept(logprobs_MV: Tensor, top_k: int, top_p: float) -> Tensor:
    return kept_tokens(logprobs_MV, *(torch.full((len(logprobs_MV),), value) for value in (top_k, top_p)))


def picked(logprobs_MV: Tensor, sampled_M: Tensor) -> Tensor:
    return logprobs_MV.gather(1, sampled_M[:, None])[:, 0]


def drawn(logprobs_MV: Tensor, seed: int) -> Tensor:
    return torch.multinomial(logprobs_MV.exp(), 1, generator=torch.Generator().manual_seed(seed))[:, 0]


def evidence(student_MV: Tensor, engine_MV: Tensor, seed: int, reported_MV: Tensor | None = None, mark: int = CURRENT):
    """Return the evidence of samples that an engine drew and whose log-probs it reported."""
    sampled_M = drawn(engine_MV, seed)
    reported_M = picked(engine_MV if reported_MV is None else reported_MV, sampled_M)
    sums = sampling_sums(moments(student_MV, sampled_M), reported_M, torch.full((len(sampled_M),), mark))
    return EngineEvidence.of({name: float(value) for name, value in sums.items()})


@pytest.mark.parametrize("mark", [CURRENT, OLDER])
def test_the_mean_of_the_evidence_is_one(mark: int) -> None:
    """For every λ, over all tokens that the student, or older weights, can draw, with their probabilities."""
    for scale in (0.3, 3.0, 12.0):
        student_MV = distributions(1, scale, 1).expand(VOCABULARY, VOCABULARY)
        engine_V = student_MV[0] if mark == CURRENT else distributions(1, scale, 2)[0]
        each = [
            sampling_sums(moments(student_MV[:1], torch.tensor([token])), engine_V[token, None], torch.tensor([mark]))
            for token in range(VOCABULARY)
        ]
        for number in range(len(LAMBDAS)):
            values = torch.tensor([float(sums[f"evidence{number}"]) for sums in each], dtype=torch.float64).exp()
            assert float((engine_V.exp() * values).sum()) == pytest.approx(1)


def test_sums_are_those_of_the_formulas() -> None:
    """A loop over tokens of current and older weights."""
    student_MV, engine_MV = distributions(30, 2.0, 3), distributions(30, 2.0, 4)
    sampled_M = drawn(engine_MV, 5)
    reported_M, marks = picked(engine_MV, sampled_M), [CURRENT if number % 3 else OLDER for number in range(30)]
    sums = sampling_sums(moments(student_MV, sampled_M), reported_M, torch.tensor(marks))
    surprise = variance = apart = square = 0.0
    for row, token, reported, mark in zip(
        student_MV.tolist(), sampled_M.tolist(), reported_M.tolist(), marks, strict=True
    ):
        mean = sum(math.exp(f) * f for f in row)
        weight = 1 if mark == CURRENT else math.exp(row[token] - reported)
        surprise += weight * (row[token] - mean)
        spread = sum(math.exp(f) * (f - mean) ** 2 for f in row)
        variance += spread if mark == CURRENT else max(spread, (weight * (row[token] - mean)) ** 2)
        apart += abs(row[token] - reported) if mark == CURRENT else 0
        square += (row[token] - reported) ** 2 if mark == CURRENT else 0
    assert float(sums["surprise"]) == pytest.approx(surprise)
    assert float(sums["variance"]) == pytest.approx(variance)
    assert float(sums["apart"]) == pytest.approx(apart)
    assert float(sums["apart_square"]) == pytest.approx(square)
    assert (float(sums["tokens"]), float(sums["compared"])) == (30, marks.count(CURRENT))


@pytest.mark.parametrize("runs", [100, pytest.param(1000, marks=pytest.mark.nightly)])
def test_healthy_runs_cause_no_alarm(runs: int) -> None:
    """Each run has ten tests of 64 tokens, of distributions from nearly uniform to nearly deterministic."""
    for run in range(runs):
        scale, mark = (0.5, 2.0, 5.0, 12.0, 30.0)[run % 5], (CURRENT, OLDER)[run % 2]
        student_MV = distributions(640, scale, run)
        engine_MV = student_MV if mark == CURRENT else (student_MV + distributions(640, 0.2, run + 1)).log_softmax(1)
        sampled_M = drawn(engine_MV, 10_000 + run)  # a stream of its own
        given = moments(student_MV, sampled_M), picked(engine_MV, sampled_M), torch.full((640,), mark)
        for test, parts in enumerate(zip(*(values.split(64) for values in given), strict=True), start=1):
            found = EngineEvidence.of({name: float(value) for name, value in sampling_sums(*parts).items()})
            assert found and not found.is_foreign(test, "fp32") and not found.differs("fp32")


Wrong = Callable[[Tensor], Tensor]
WRONG: dict[str, Wrong] = {  # the engine's distribution from the student's
    "a temperature that the engine ignores": lambda student_MV: (student_MV / 0.6).log_softmax(1),
    "top-p": lambda student_MV: masked(student_MV, kept(student_MV, -1, 0.8)),
    "top-k": lambda student_MV: masked(student_MV, kept(student_MV, 4, 1.0)),
    "other weights": lambda student_MV: (student_MV + 2 * distributions(len(student_MV), 1.0, 99)).log_softmax(1),
    "a bias of a logit": lambda student_MV: (student_MV + 3 * torch.eye(VOCABULARY)[7]).log_softmax(1),
    "speculation that accepts each draft": lambda student_MV: student_MV.roll(1, 0),
}


def masked(logprobs_MV: Tensor, kept_MV: Tensor) -> Tensor:
    return logprobs_MV.masked_fill(~kept_MV, -math.inf).log_softmax(1)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_engine_is_found(name: str) -> None:
    """By its samples alone, if it reports the student's log-probs; or by its log-probs, if it reports its own."""
    student_MV = distributions(2000, 2.0, 11)
    engine_MV = WRONG[name](student_MV)
    honest, silent = evidence(student_MV, engine_MV, 12), evidence(student_MV, engine_MV, 12, reported_MV=student_MV)
    assert honest and silent and honest.differs("bf16") and not silent.differs("fp32")
    assert name == "a bias of a logit" or silent.is_foreign(100, "bf16")


@pytest.mark.parametrize("name", ["top-p", "top-k", "speculation that accepts each draft"])
def test_a_wrong_engine_is_found_among_samples_of_older_weights(name: str) -> None:
    """Importance weights account for older weights, but not for tokens that the engine cannot draw or draws wrongly."""
    student_MV = distributions(20_000, 2.0, 13)
    older_MV = (student_MV + 0.1 * distributions(20_000, 1.0, 14)).log_softmax(1)
    found = evidence(student_MV, WRONG[name](older_MV), 15, reported_MV=older_MV, mark=OLDER)
    assert found and found.is_foreign(1, "bf16") and not found.compared


def test_declared_truncation_is_no_fault() -> None:
    """With the moments of the distribution after top-k and top-p, samples from it cause no alarm."""
    student_MV = distributions(4000, 2.0, 16)
    kept_MV = kept(student_MV, 10, 0.9)
    engine_MV = masked(student_MV, kept_MV)
    sampled_M = drawn(engine_MV, 17)
    given = moments(student_MV, sampled_M, kept_MV), picked(engine_MV, sampled_M), torch.full((4000,), CURRENT)
    found = EngineEvidence.of({name: float(value) for name, value in sampling_sums(*given).items()})
    assert found and not found.is_foreign(1, "fp32") and not found.differs("fp32") and abs(found.z) < 4


def test_an_error_of_few_tokens_is_a_difference() -> None:
    """Here the mean is below its bound, as with a top-p that hardly any token notices."""
    apart_M = np.zeros(4000, np.float32)
    apart_M[::200] = 0.1
    found = EngineEvidence.of_differences(apart_M)
    assert found.compared == 4000 and found.difference == pytest.approx(5e-4) and DIFFERENCE["fp32"] > 5e-4
    assert found.root_mean_square == pytest.approx(0.1 / 200**0.5) and found.differs("fp32")
    assert not EngineEvidence.of_differences(apart_M / 100).differs("fp32")
    assert EngineEvidence.of_differences(apart_M * np.nan).differs("bf16")


def test_without_tokens_there_is_no_evidence() -> None:
    none = torch.zeros(0, 4 + len(LAMBDAS))
    assert EngineEvidence.of({n: float(v) for n, v in sampling_sums(none, none[:, 0], torch.zeros(0)).items()}) is None
    assert EngineEvidence.of({}) is None
