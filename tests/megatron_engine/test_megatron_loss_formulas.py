"""The loss of a pack and its gradient, in one process, against loops over sequences and tokens in double precision.

A random output head over random hidden states stands for a model; no layers, and no optimizer.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron_samples import TeacherTargets, TrainSample, columns_of
from torch import Tensor

from roll_opd.config.plan import ObjectivePlan
from roll_opd.megatron.output_head import OutputHead, TeacherHead
from roll_opd.megatron.packing import PackedBatch, pack
from roll_opd.megatron.student_engine import distillation_loss
from roll_opd.megatron.vocabulary import VocabShard
from roll_opd.objective.opd_loss import opd_loss

VOCABULARY, WIDTH, TEACHER_WIDTH, TOPK, TEMPERATURE = 13, 5, 7, 4, 0.7
LENGTHS = ((3, 6), (1, 4), (2, 7))  # tokens of prompt and response
COEFFICIENTS = (0.5, 1.5, 0.0)  # of the teacher on each sequence; 0: it reads the others alone


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def sequences(**arrays: Any) -> list[TrainSample]:
    """Return a sample for each of LENGTHS, with masked tokens in its response and old log-probs that differ."""
    samples = []
    for number, (prompt, response) in enumerate(LENGTHS):
        draw = np.random.default_rng(number)
        mask = np.arange(response) % 3 != 1
        given = {name: make(number, response) for name, make in arrays.items()}
        values = {
            "advantages": numbers(10 + number, response) * mask,
            "opd_coefficients": np.float32(COEFFICIENTS[number]) * mask,
            "opd_teacher": (COEFFICIENTS[number] * (numbers(20 + number, response) - 2) * mask).astype(np.float32),
            "old_logprobs": numbers(30 + number, response) / 4 - 2,
        }
        tokens = draw.integers(VOCABULARY, size=prompt + response)
        samples.append(TrainSample(tokens, prompt, mask, **(values | given)))
    return samples


def capped(logits: Tensor, cap: float | None) -> Tensor:
    return logits if cap is None else cap * torch.tanh(logits / cap)


def packed(
    samples: list[TrainSample], objective: ObjectivePlan, cap: float | None = None
) -> tuple[OutputHead, PackedBatch, Tensor, Tensor]:
    """Return head and pack, and in double precision the head's hidden states [M, E] and log-probs [M, V] of them."""
    batch = pack(columns_of(samples, objective), torch.device("cpu"), 1)
    hidden_NE = torch.from_numpy(numbers(1, len(batch.tokens_n), WIDTH)).requires_grad_()
    weight_VE = torch.from_numpy(numbers(2, VOCABULARY, WIDTH))
    hidden_ME = hidden_NE[batch.before_m]
    vocab = VocabShard(weight_VE, TEMPERATURE, VOCABULARY, dist.group.WORLD, logit_cap=cap)
    head = OutputHead(hidden_ME, batch.targets_m, vocab)
    naive_ME = hidden_ME.detach().double().requires_grad_()
    logits_MV = capped(naive_ME @ weight_VE.double().T, cap) / TEMPERATURE
    return head, batch, naive_ME, logits_MV.log_softmax(-1)


def assert_same(loss: Tensor, head: OutputHead, wanted: Tensor, naive_ME: Tensor) -> None:
    (gradient,) = torch.autograd.grad(loss, head.hidden_mE)
    (wanted_gradient,) = torch.autograd.grad(wanted, naive_ME)
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.double(), wanted_gradient, rtol=1e-4, atol=1e-6)


def own_logprobs(samples: list[TrainSample], dense_MV: Tensor) -> list[list[Tensor]]:
    """Return each sequence's log-probs of its response tokens."""
    rows, found = iter(dense_MV), []
    for sample in samples:
        found.append([next(rows)[token] for token in sample.tokens[sample.prompt_length :]])
    return found


@pytest.mark.parametrize("discount", [0.0, 0.8])
@pytest.mark.parametrize(("clip", "cap"), [(None, None), (0.7, 2.5)])
def test_advantage_minus_discounted_reverse_kl_times_ratio(
    discount: float, clip: float | None, cap: float | None
) -> None:
    """Weighted by the corrections, as token means, plus the KL loss to the reference (k2); also of capped logits."""
    objective = ObjectivePlan(
        opd_kl_discount=discount, advantage_clip=clip, rl_loss_coef=0.5, kl_loss_coef=0.3, kl_loss="k2"
    )
    samples = sequences(
        importance_weights=lambda number, size: np.abs(numbers(40 + number, size)),
        ref_logprobs=lambda number, size: numbers(50 + number, size) / 4 - 2,
    )
    head, batch, naive_ME, dense_MV = packed(samples, objective, cap)
    settings: dict[str, Any] = {"objective": objective, "arguments": {}, "step": 1}
    loss, *_ = opd_loss(head.logprobs(), batch.columns, batch.lengths, **settings)

    tokens = sum(int(sample.action_mask.sum()) for sample in samples)
    wanted = torch.zeros((), dtype=torch.float64)
    for sample, logprobs in zip(samples, own_logprobs(samples, dense_MV), strict=True):
        penalty = 0.0
        for place in reversed(np.flatnonzero(sample.action_mask).tolist()):
            old, reference = float(sample.old_logprobs[place]), float(sample.ref_logprobs[place])
            reverse_kl = float(sample.opd_coefficients[place]) * old - float(sample.opd_teacher[place])
            penalty = reverse_kl + discount * penalty
            advantage = float(sample.advantages[place]) - penalty
            if clip is not None:
                advantage = max(-clip, min(clip, advantage))
            ratio = (logprobs[place] - old).exp()
            policy = -advantage * ratio * float(sample.importance_weights[place])
            wanted = wanted + 0.5 * (policy + 0.3 * (logprobs[place] - reference) ** 2 / 2) / tokens
    assert_same(loss, head, wanted, naive_ME)


@pytest.mark.parametrize("caps", [(None, None), (2.5, None), (None, 1.5)], ids=str)
@pytest.mark.parametrize("objective", ["topk", "full"])
def test_distillation_is_the_weighted_divergence_of_taught_tokens(
    objective: str, caps: tuple[float | None, float | None]
) -> None:
    """Reverse KL over a top-k and the bucket of the other tokens, or over the whole vocabulary.

    The logits of student and teacher have `caps`, as in Gemma 2.
    """
    teacher_VF = torch.from_numpy(numbers(3, VOCABULARY, TEACHER_WIDTH))
    hidden = [torch.from_numpy(numbers(60 + number, size, TEACHER_WIDTH)) for number, (_, size) in enumerate(LENGTHS)]
    raw = [states.double() @ teacher_VF.double().T for states in hidden]
    teacher = [(capped(logits, caps[1]) / TEMPERATURE).log_softmax(-1) for logits in raw]

    def targets(number: int, size: int) -> dict[str, TeacherTargets]:
        best, ids = teacher[number].topk(TOPK)
        rest = torch.log1p(-best.exp().sum(-1)).float()
        arrays = {"topk_ids": ids.int().numpy(), "topk_logprobs": best.float().numpy(), "topk_rest": rest.numpy()}
        arrays = arrays if objective == "topk" else {"hidden": hidden[number].numpy()}
        return {"teacher": TeacherTargets(COEFFICIENTS[number], arrays)} if COEFFICIENTS[number] else {}

    samples = sequences(teachers=targets)
    plan = ObjectivePlan(opd_objective=objective, opd_topk=TOPK, opd_vocab_size=VOCABULARY)
    head, batch, naive_ME, dense_MV = packed(samples, plan, caps[0])
    loss = distillation_loss(head, batch, plan, {"teacher": TeacherHead(teacher_VF, VOCABULARY, caps[1])})

    tokens = sum(int(sample.action_mask.sum()) for sample in samples)
    rows, wanted = iter(dense_MV), torch.zeros((), dtype=torch.float64)
    for number, sample in enumerate(samples):
        for place, student_V in enumerate(next(rows) for _ in range(len(sample.action_mask))):
            s, t = student_V.exp(), teacher[number][place].exp()
            if objective == "topk":
                kept = teacher[number][place].topk(TOPK).indices
                s, t = (torch.cat([p[kept], (p.sum() - p[kept].sum())[None]]) for p in (s, t))
            divergence = sum(a * (a.log() - math.log(b)) for a, b in zip(s, t.tolist(), strict=True))
            wanted = wanted + COEFFICIENTS[number] * bool(sample.action_mask[place]) * divergence / tokens
    assert_same(loss, head, wanted, naive_ME)
