"""A top-k and the probability of all other tokens, if it is too small for a subtraction in f32: against f64."""

import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from roll_opd.megatron.logprobs_and_topk import vocab_parallel_logprobs, vocab_parallel_topk
from roll_opd.megatron.vocabulary import VocabShard
from roll_opd.objective.divergences import divergence, topk_divergence

VOCABULARY, PADDED, K = 11, 16, 2
# how much of the mass is outside of the two likeliest tokens
TAILS = (0.3, 1e-3, 8e-8, 1e-10, 1e-15, 1e-30)
MEASURES = {
    "reverse_kl": {},
    "forward_kl": {},
    "jsd": {"beta": 0.3},
    "skewed_reverse_kl": {"alpha": 0.2},
    "skewed_forward_kl": {"alpha": 0.2},
}


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def hidden_of(tails: list[float], *, seed: int, turn: int) -> Tensor:
    """Hidden states f32 that are the logits themselves, for an output embedding of ones on the diagonal.

    The two likeliest tokens are `turn` and the next one; all others share the tail unequally.
    """
    shares = torch.rand(len(tails), VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    best = [turn, turn + 1]
    shares[:, best] = 0
    shares *= (torch.tensor(tails, dtype=torch.float64) / shares.sum(1))[:, None]
    left = 1 - torch.tensor(tails, dtype=torch.float64)
    shares[:, best] = torch.stack([0.7 * left, 0.3 * left], 1)
    return torch.nn.functional.pad(shares.log() + 3.0, (0, PADDED - VOCABULARY)).float()


def naive(name: str, s: Tensor, t: Tensor, *, beta: float = 0.5, alpha: float = 0.1) -> Tensor:
    """From log-probs f64, a bucket a column."""
    m = torch.logaddexp(t + math.log(beta), s + math.log1p(-beta))
    skewed = torch.logaddexp(s + math.log(alpha), t + math.log1p(-alpha))
    turned = torch.logaddexp(t + math.log(alpha), s + math.log1p(-alpha))

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a.exp() * (a - b)).sum(-1)

    return {
        "reverse_kl": lambda: kl(s, t),
        "forward_kl": lambda: kl(t, s),
        "jsd": lambda: beta * kl(t, m) + (1 - beta) * kl(s, m),
        "skewed_reverse_kl": lambda: kl(s, skewed),
        "skewed_forward_kl": lambda: kl(t, turned),
    }[name]()


def buckets(hidden: Tensor, ids: Tensor) -> Tensor:
    logprobs = hidden.double()[:, :VOCABULARY].log_softmax(1)
    others = torch.ones_like(logprobs, dtype=torch.bool).scatter(1, ids, False)
    rest = logprobs.masked_fill(~others, -math.inf).logsumexp(1, keepdim=True)
    return torch.cat([logprobs.gather(1, ids), rest], 1)


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize("source", ["teacher", "student"])
def test_value_and_gradient_at_every_tail(group: dist.ProcessGroup, name: str, source: str) -> None:
    pairs = [(s, t) for s in TAILS for t in TAILS]
    student = hidden_of([s for s, _ in pairs], seed=1, turn=3)
    teacher = hidden_of([t for _, t in pairs], seed=2, turn=3 if source == "teacher" else 6)
    vocab = VocabShard(torch.eye(PADDED), 1.0, VOCABULARY, group, chunk_bytes=4 * PADDED * 5)
    measure = divergence(name, **MEASURES[name])

    ids, picked = vocab_parallel_topk(teacher if source == "teacher" else student, vocab, K)
    torch.testing.assert_close(
        picked.double(), buckets(teacher if source == "teacher" else student, ids), rtol=1e-6, atol=1e-9
    )
    teacher_ML = vocab_parallel_logprobs(teacher, vocab, ids, with_rest=True)
    leaf = student.clone().requires_grad_()
    found = topk_divergence(vocab_parallel_logprobs(leaf, vocab, ids, with_rest=True), teacher_ML, measure)
    found.sum().backward()

    exact = student.double().requires_grad_()
    wanted = naive(name, buckets(exact, ids), buckets(teacher, ids), **MEASURES[name])
    wanted.sum().backward()
    assert exact.grad is not None and leaf.grad is not None
    torch.testing.assert_close(found.double(), wanted, rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=2e-5, atol=5e-7)  # of log-ratios up to 70
    assert not leaf.grad[:, VOCABULARY:].any()


def test_the_cases_that_once_had_no_gradient(group: dist.ProcessGroup) -> None:
    """A confident student that is wrong has a gradient, and a teacher's tail of 1e-10 has its exact weight."""
    vocab = VocabShard(torch.eye(PADDED), 1.0, VOCABULARY, group)
    student, teacher = (hidden_of([tail], seed=4, turn=3) for tail in (8e-8, 0.3))
    ids, _ = vocab_parallel_topk(student, vocab, K)
    leaf = student.clone().requires_grad_()
    sides = [vocab_parallel_logprobs(side, vocab, ids, with_rest=True) for side in (leaf, teacher)]
    topk_divergence(*sides, divergence("forward_kl")).sum().backward()
    assert leaf.grad is not None
    tail = leaf.grad[0, [n for n in range(VOCABULARY) if n not in ids[0]]].sum()
    assert tail.item() == pytest.approx(-(0.3 - 8e-8), rel=1e-5)


def test_no_tail_where_every_token_is_taken(group: dist.ProcessGroup) -> None:
    vocab = VocabShard(torch.eye(PADDED), 0.7, VOCABULARY, group)
    leaf = hidden_of([0.3, 1e-10], seed=5, turn=1).requires_grad_()
    ids, logprobs = vocab_parallel_topk(leaf, vocab, VOCABULARY)
    assert (logprobs[:, -1] == -math.inf).all()
    teacher = vocab_parallel_logprobs(hidden_of([0.3, 0.3], seed=6, turn=4), vocab, ids, with_rest=True)
    own = vocab_parallel_logprobs(leaf, vocab, ids, with_rest=True)
    topk_divergence(own, teacher, divergence("reverse_kl")).sum().backward()
    assert leaf.grad is not None and leaf.grad.isfinite().all() and leaf.grad.any()
    assert topk_divergence(own.detach(), own.detach(), divergence("jsd")).abs().max() < 1e-12
