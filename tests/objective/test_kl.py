"""KL estimators and the adaptive coefficient against their formulas, and the expected values of the estimators."""

import math

import pytest
import torch

from roll_opd.objective.reference_kl import KL_ESTIMATORS, adaptive_kl_coefficient, corrected_k3


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def k3(d: float) -> float:
    return (math.exp(-d) if d > -700 else math.inf) - 1 + d


REFERENCES = {
    "kl": lambda d: d,
    "k1": lambda d: d,
    "abs": abs,
    "mse": lambda d: d * d / 2,
    "k2": lambda d: d * d / 2,
    "k3": k3,
    "low_var_kl": lambda d: min(k3(d), 10.0),
    "corrected_k3": k3,  # on policy
}


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_equals_its_formula(name: str) -> None:
    logprobs = torch.tensor([-0.1, -2.0, -30.0, -0.5, -1e4, -0.1], dtype=torch.float64)
    other = torch.tensor([-1.0, -0.3, -0.5, -0.5, -0.1, -1e4], dtype=torch.float64)
    wanted = [REFERENCES[name](float(a) - float(b)) for a, b in zip(logprobs, other, strict=True)]
    assert KL_ESTIMATORS[name](logprobs, other).tolist() == pytest.approx(wanted, rel=1e-12)


def test_low_variance_has_no_gradient_beyond_its_bound() -> None:
    """ROLL's k3, whose value is clamped: 10 and no gradient on either side; `k3` itself has no bound."""
    logprobs = torch.tensor([-12.0, -1.0, -0.1, -1e4, -0.1], requires_grad=True)
    other = torch.tensor([0.0, -0.5, -13.0, -0.1, -1e4])
    found = KL_ESTIMATORS["low_var_kl"](logprobs, other)
    (gradient,) = torch.autograd.grad(found.sum(), logprobs)
    assert found.tolist() == pytest.approx([10.0, math.exp(0.5) - 1.5, 10.0, 10.0, 10.0], rel=1e-5)
    assert gradient.tolist() == pytest.approx([0.0, 1 - math.exp(0.5), 0.0, 0.0, 0.0], rel=1e-5)
    logprobs = torch.tensor([-12.0], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(KL_ESTIMATORS["k3"](logprobs, torch.zeros(1)), logprobs)
    assert gradient.item() == pytest.approx(1 - math.exp(12), rel=1e-12)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_gradcheck(name: str) -> None:
    logprobs = torch.tensor([-0.1, -2.0, -1.3, -0.5], dtype=torch.float64, requires_grad=True)
    other = torch.tensor([-1.0, -0.3, -0.5, -0.7], dtype=torch.float64)
    arguments = (other, logprobs.detach() + 0.1) if name == "corrected_k3" else (other,)
    assert torch.autograd.gradcheck(lambda x: KL_ESTIMATORS[name](x, *arguments), (logprobs,))


def test_corrected_k3() -> None:
    generator = torch.Generator().manual_seed(0)
    new, other, old = (-torch.rand(50, generator=generator, dtype=torch.float64) * 5 for _ in range(3))
    wanted = [
        clip(math.exp(n - o), 0, 2) * k3(n - q)
        for n, q, o in zip(new.tolist(), other.tolist(), old.tolist(), strict=True)
    ]
    assert corrected_k3(new, other, old).tolist() == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "direction"), [("k1", None), ("k2", "reverse"), ("k3", "forward"), ("corrected_k3", "reverse")]
)
def test_which_divergence_a_loss_descends(name: str, direction: str | None) -> None:
    """The expected gradient on the student's own samples, over a small vocabulary; that of k1 is 0."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, generator=generator, dtype=torch.float64).requires_grad_()
    other = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    probabilities = logprobs.detach().exp()
    (found,) = torch.autograd.grad((probabilities * KL_ESTIMATORS[name](logprobs, other)).sum(), logits)
    new = logits.log_softmax(0)
    divergence = {
        None: new.sum() * 0,
        "reverse": (new.exp() * (new - other)).sum(),
        "forward": (other.exp() * (other - new)).sum(),
    }[direction]
    (wanted,) = torch.autograd.grad(divergence, logits)
    torch.testing.assert_close(found, wanted)


def test_values_estimate_the_reverse_kl() -> None:
    new, other = (torch.randn(6, generator=torch.Generator().manual_seed(n)).double().log_softmax(0) for n in (2, 3))
    exact = float((new.exp() * (new - other)).sum())
    for name in ("k1", "k3"):
        assert float((new.exp() * KL_ESTIMATORS[name](new, other)).sum()) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize(
    ("kl", "wanted"), [(6.0, 0.1), (6.6, 0.1 * (1 + 0.1 * 0.25)), (60.0, 0.1 * 1.05), (0.0, 0.1 * 0.95)]
)
def test_adaptive_coefficient(kl: float, wanted: float) -> None:
    assert adaptive_kl_coefficient(0.1, kl, target=6.0, horizon=1024, samples=256) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_adaptive_coefficient_stays_where_the_kl_is_not_finite(kl: float) -> None:
    assert adaptive_kl_coefficient(0.1, kl, target=6.0, horizon=1024, samples=256) == 0.1
