"""Divergences against their formulas, computed column by column in plain Python floats."""

import math

import pytest
import torch

from roll_opd.objective.divergences import DIVERGENCES, ENTROPY, divergence, topk_divergence
from roll_opd.objective.losses.batch import LossBatch
from roll_opd.objective.losses.policy_losses import importance_sampling
from roll_opd.objective.reverse_kl import weighted_reverse_kl

CASES = [
    ("reverse_kl", {}),
    ("forward_kl", {}),
    ("jsd", {"beta": 0.5}),
    ("jsd", {"beta": 0.1}),
    ("jsd", {"beta": 0.9}),
    ("skewed_reverse_kl", {"alpha": 0.1}),
    ("skewed_reverse_kl", {"alpha": 0.7}),
    ("skewed_forward_kl", {"alpha": 0.1}),
    ("skewed_forward_kl", {"alpha": 0.7}),
]
NAMES = [f"{name}-{'-'.join(map(str, arguments.values()))}" for name, arguments in CASES]
every = pytest.mark.parametrize(("name", "arguments"), CASES, ids=NAMES)


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True) if a > 0)


def naive(name: str, student: torch.Tensor, teacher: torch.Tensor, beta: float = 0.5, alpha: float = 0.1) -> float:
    s, t = [[math.exp(x) for x in row.tolist()] for row in (student, teacher)]

    def mix(a: list[float], b: list[float], weight: float) -> list[float]:
        return [weight * x + (1 - weight) * y for x, y in zip(a, b, strict=True)]

    if name == "jsd":
        m = mix(t, s, beta)
        return beta * kl(t, m) + (1 - beta) * kl(s, m)
    return {
        "reverse_kl": lambda: kl(s, t),
        "forward_kl": lambda: kl(t, s),
        "skewed_reverse_kl": lambda: kl(s, mix(s, t, alpha)),
        "skewed_forward_kl": lambda: kl(t, mix(t, s, alpha)),
    }[name]()


def pair(rows: int, columns: int, spread: float = 1.0, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(2, rows, columns, generator=generator, dtype=torch.float64)
    return logits[0].log_softmax(-1), logits[1].log_softmax(-1)


def test_every_divergence_is_tested() -> None:
    assert {name for name, _ in CASES} == set(DIVERGENCES)


@every
@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_divergences_equal_their_formulas(name: str, arguments: dict, spread: float) -> None:
    student, teacher = pair(6, 11, spread)
    found = divergence(name, **arguments)(student, teacher)
    wanted = [naive(name, s, t, **arguments) for s, t in zip(student, teacher, strict=True)]
    assert found.tolist() == pytest.approx(wanted, rel=1e-10, abs=1e-12)


@every
def test_gradient_is_that_of_the_value(name: str, arguments: dict) -> None:
    """With respect to the log-probs of each column, and through a softmax."""
    student, teacher = pair(4, 7, 2.0)
    measure = divergence(name, **arguments)
    assert torch.autograd.gradcheck(lambda x: measure(x, teacher), student.clone().requires_grad_())
    assert torch.autograd.gradcheck(lambda x: measure(x.log_softmax(-1), teacher), student.clone().requires_grad_())


@every
def test_equal_distributions_give_nothing(name: str, arguments: dict) -> None:
    student, _ = pair(5, 1000, 3.0)
    student = student.float().requires_grad_()
    found = divergence(name, **arguments)(student, student.detach())
    found.sum().backward()
    assert found.abs().max() < 1e-7 and student.grad.abs().max() < 1e-7


@every
def test_what_one_side_rules_out(name: str, arguments: dict) -> None:
    """Column 0 is impossible for both, 1 for the student, 2 for the teacher; 3 nearly so for both."""
    inf = math.inf
    student = torch.tensor([[-inf, -inf, math.log(0.3), -700.0, math.log(0.7)]], dtype=torch.float64)
    teacher = torch.tensor([[-inf, math.log(0.5), -inf, -745.0, math.log(0.5)]], dtype=torch.float64)
    student.requires_grad_()
    found = divergence(name, **arguments)(student, teacher)
    found.sum().backward()
    if name in ("reverse_kl", "forward_kl"):
        assert found.item() == inf
    else:
        assert found.item() == pytest.approx(naive(name, student[0], teacher[0], **arguments), rel=1e-12)
    assert not student.grad.isnan().any()
    assert student.grad[0, 0] == 0


def test_extreme_parameters() -> None:
    """At 0 and 1 jsd is the limit of jsd/β and jsd/(1-β); the skewed ones at 0 are plain."""
    student, teacher = pair(3, 9)
    small, large = (divergence("jsd", beta=beta)(student, teacher) for beta in (1e-7, 1 - 1e-7))
    forward, reverse = (divergence(name)(student, teacher) for name in ("forward_kl", "reverse_kl"))
    torch.testing.assert_close(small / 1e-7, forward, rtol=1e-5, atol=0)
    torch.testing.assert_close(large / 1e-7, reverse, rtol=1e-5, atol=0)
    assert torch.equal(divergence("jsd", beta=0)(student, teacher), forward)
    assert torch.equal(divergence("jsd", beta=1)(student, teacher), reverse)
    assert torch.equal(divergence("skewed_reverse_kl", alpha=0)(student, teacher), reverse)
    assert torch.equal(divergence("skewed_forward_kl", alpha=0)(student, teacher), forward)


@pytest.mark.parametrize("arguments", [{"beta": 1.1}, {"beta": -0.1}, {"alpha": 1.0}, {"alpha": -0.1}])
def test_parameters_out_of_range_are_refused(arguments: dict) -> None:
    with pytest.raises(ValueError, match="use a number from 0"):
        divergence("jsd", **arguments)
    with pytest.raises(ValueError, match="'kl' is unknown; use one of reverse_kl"):
        divergence("kl")


def with_rest(logprobs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the probabilities of the tokens, followed by the probability of all other tokens together."""
    others = torch.ones_like(logprobs, dtype=torch.bool).scatter(1, ids, False)
    rest = logprobs.masked_fill(~others, -math.inf).logsumexp(1)
    return torch.cat([logprobs.gather(1, ids), rest[:, None]], 1)


@every
def test_topk_with_its_tail(name: str, arguments: dict) -> None:
    """Against the formula on K + 1 buckets; never negative, at most the full divergence, and equal to it for K = V."""
    columns, measure = 13, divergence(name, **arguments)
    student, teacher = pair(8, columns, 2.0)
    whole = measure(student, teacher)
    before = torch.zeros_like(whole)
    order = teacher.argsort(-1, descending=True)
    for k in range(1, columns + 1):
        ids = order[:, :k]
        found = topk_divergence(with_rest(student, ids), with_rest(teacher, ids), measure).double()
        if k < columns:
            sides = [
                torch.cat([x.gather(1, ids), x.gather(1, order[:, k:]).logsumexp(1)[:, None]], 1)
                for x in (student, teacher)
            ]
            wanted = [naive(name, s, t, **arguments) for s, t in zip(*sides, strict=True)]
            assert found.tolist() == pytest.approx(wanted, rel=1e-6, abs=1e-9)
        assert (found >= before - 1e-6).all() and (found <= whole + 1e-6).all() and (found >= 0).all()
        before = found
    torch.testing.assert_close(before, whole, rtol=1e-6, atol=1e-7)


@every
def test_gradients_of_topk_divergences_pass_gradcheck(name: str, arguments: dict) -> None:
    student, teacher = pair(4, 9, 2.0)
    ids = teacher.topk(3, -1).indices
    measure = divergence(name, **arguments)

    def value(logits: torch.Tensor) -> torch.Tensor:
        sides = (with_rest(logits.log_softmax(-1), ids), with_rest(teacher, ids))
        return measure(*(side.log_softmax(-1) for side in sides))

    assert torch.autograd.gradcheck(value, student.clone().requires_grad_())
    logits = [student.clone().requires_grad_() for _ in range(2)]
    value(logits[0]).sum().backward()
    topk_divergence(with_rest(logits[1].log_softmax(-1), ids), with_rest(teacher, ids), measure).sum().backward()
    torch.testing.assert_close(logits[1].grad, logits[0].grad, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradient_of_topk_with_every_token_is_that_of_the_whole(dtype: torch.dtype) -> None:
    student, teacher = (x.to(dtype) for x in pair(6, 50, 3.0))
    grads = []
    everything = torch.arange(50).expand(len(student), -1)
    for topk in (False, True):
        logits = student.clone().requires_grad_()
        sides = (logits.log_softmax(-1), teacher)
        if topk:
            topk_divergence(*(with_rest(side, everything) for side in sides), divergence("reverse_kl")).sum().backward()
        else:
            divergence("reverse_kl")(*sides).sum().backward()
        grads.append(logits.grad)
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)


def test_entropy_equals_its_formula_and_passes_gradcheck() -> None:
    logprobs, _ = pair(5, 8)
    wanted = [-sum(math.exp(x) * x for x in row.tolist()) for row in logprobs]
    assert ENTROPY(logprobs).tolist() == pytest.approx(wanted, rel=1e-12)
    assert torch.autograd.gradcheck(lambda x: ENTROPY(x.log_softmax(-1)), logprobs.clone().requires_grad_())
    certain = torch.tensor([0.0, -math.inf], dtype=torch.float64)
    assert ENTROPY(certain).item() == 0.0


def test_expected_gradient_of_sampled_tokens_is_that_of_the_whole() -> None:
    """`sampled` is an unbiased estimate of the reverse KL's gradient: within five standard errors of 1,000,000 samples.

    The standard errors are those of the samples themselves; the test would see a bias of 2 % of the gradient.
    """
    student, teacher = (x[0] for x in pair(1, 6, 1.0, seed=3))
    logits = student.clone().requires_grad_()
    divergence("reverse_kl")(logits.log_softmax(-1), teacher).backward()
    exact = logits.grad
    samples = 1_000_000
    tokens = torch.multinomial(student.exp(), samples, replacement=True, generator=torch.Generator().manual_seed(5))
    logits_SK = student.expand(samples, -1).clone().requires_grad_()
    logprobs_S = logits_SK.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    old_S = logprobs_S.detach()
    penalty_S = weighted_reverse_kl(old_S, torch.ones(samples), teacher[tokens])
    everywhere_S = torch.ones(samples, dtype=torch.bool)
    batch = LossBatch(logprobs_S, old_S, -penalty_S, everywhere_S, lengths=(samples,))
    importance_sampling(batch).sum().backward()
    error = logits_SK.grad.std(0) / math.sqrt(samples)
    assert ((logits_SK.grad.mean(0) - exact).abs() < 5 * error).all()
    assert error.max() < 0.004 * exact.abs().max()
