"""Values outside the mask of an update affect neither its loss, nor its gradient, nor its metrics."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from roll_opd.config.plan import ObjectivePlan
from roll_opd.megatron.critic_engine import _loss as critic_loss
from roll_opd.objective.opd_loss import opd_loss
from roll_opd.objective.registry import POLICY_LOSSES
from tests.each import each

LENGTHS = (4, 3, 5)
LOSSES = sorted(name for name in POLICY_LOSSES.builtin if POLICY_LOSSES.facts(name).needs is None)


def columns(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw() -> torch.Tensor:
        return torch.randn(sum(LENGTHS), generator=generator)

    actions = draw() > -0.8
    mask = actions & (draw() > -0.5)  # a correction left some out
    return {
        "mask": mask,
        "weight": mask / mask.sum(),
        "actions": actions,
        "advantages": draw() * actions,
        "old_logprobs": -draw().abs(),
        "ref_logprobs": -draw().abs(),
        "rewards": draw(),
        "opd_coefficients": 0.7 * actions,
        "opd_teacher": -0.7 * draw().abs() * actions,
        "importance_weights": draw().exp(),
    }


def update(arrays: dict[str, torch.Tensor], objective: ObjectivePlan, new: torch.Tensor) -> tuple[Any, ...]:
    leaf = new.clone().requires_grad_()
    arguments = {**POLICY_LOSSES.defaults(objective.policy_loss), **objective.policy_loss_args}
    loss, sums, _ = opd_loss(leaf, arrays, LENGTHS, objective=objective, arguments=arguments, step=1)
    loss.backward()
    assert leaf.grad is not None
    return loss.item(), leaf.grad.tolist(), {name: float(value) for name, value in sums.items()}


@each("loss", LOSSES)
@each("wild", [math.nan, math.inf, -math.inf])
def test_nothing_off_the_mask_is_read(loss: str, wild: float) -> None:
    objective = ObjectivePlan(policy_loss=loss, kl_loss="corrected_k3", kl_loss_coef=0.1)
    arrays, new = columns(3), -torch.rand(sum(LENGTHS), generator=torch.Generator().manual_seed(4))
    wanted = update(arrays, objective, new)
    off = ~arrays["mask"]
    for name in ("advantages", "old_logprobs", "ref_logprobs", "opd_teacher", "importance_weights"):
        assert update({**arrays, name: torch.where(off, wild, arrays[name])}, objective, new) == wanted, name
    spoilt = {name: torch.where(off, wild, arrays[name]) for name in ("old_logprobs", "ref_logprobs", "opd_teacher")}
    assert update({**arrays, **spoilt}, objective, torch.where(off, wild, new)) == wanted


def test_a_discount_reads_the_action_tokens_alone() -> None:
    """Including filtered tokens, which are left out of the loss but count as later tokens."""
    objective = ObjectivePlan(policy_loss="vanilla", opd_kl_discount=0.5)
    arrays, new = columns(5), -torch.rand(sum(LENGTHS), generator=torch.Generator().manual_seed(6))
    wanted = update(arrays, objective, new)
    off = ~arrays["actions"]
    for name in ("old_logprobs", "advantages"):
        assert update({**arrays, name: torch.where(off, math.nan, arrays[name])}, objective, new) == wanted
    gaps = arrays["opd_coefficients"] * arrays["old_logprobs"] - arrays["opd_teacher"]
    total, start = 0.0, 0
    for length in LENGTHS:
        places = [t for t in range(start, start + length) if arrays["actions"][t]]
        for number, t in enumerate(places):
            ahead = sum(0.5**k * float(gaps[later]) for k, later in enumerate(places[number:]))
            total += (
                float(arrays["weight"][t])
                * -(float(arrays["advantages"][t]) - ahead)
                * float(new[t] * arrays["importance_weights"][t])
            )
        start += length
    assert wanted[0] == pytest.approx(total, rel=1e-4)


def test_a_teacher_that_is_not_finite_on_the_mask_spoils_the_loss() -> None:
    arrays, new = columns(7), -torch.rand(sum(LENGTHS))
    place = int(arrays["mask"].nonzero()[0])
    for coefficient in (0.7, 0.0):  # also one that counts nothing: 0 times what is not finite
        broken = {name: value.clone() for name, value in arrays.items()}
        broken["opd_teacher"][place], broken["opd_coefficients"][place] = math.nan, coefficient
        assert math.isnan(update(broken, ObjectivePlan(), new)[0])


def test_approx_kl_is_that_of_old_against_new() -> None:
    """Samples of the old policy: half of each of two tokens, with probabilities 0.9 and 0.1 in the new policy."""
    new, old = torch.tensor([0.9, 0.1, 0.9, 0.1]).log(), torch.full((4,), 0.5).log()
    ones, zeros = torch.ones(4), torch.zeros(4)
    arrays = {"mask": ones.bool(), "weight": ones / 4, "advantages": ones, "old_logprobs": old}
    arrays |= {"opd_coefficients": zeros, "opd_teacher": zeros}
    arguments = POLICY_LOSSES.defaults("ppo")
    _, sums, _ = opd_loss(new, arrays, (4,), objective=ObjectivePlan(policy_loss="ppo"), arguments=arguments, step=1)
    assert float(sums["approx_kl"]) / 4 == pytest.approx(
        0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1), rel=1e-6
    )
    assert float(sums["clipped"]) == 4


@pytest.mark.parametrize("clip", [None, 0.2])
def test_a_critic_reads_nothing_off_the_mask(clip: float | None) -> None:
    mask = torch.tensor([True, False, True])
    arrays = {"mask": mask, "weight": mask / 2, "old_values": torch.ones(3), "returns": torch.full((3,), 2.0)}
    results = []
    for wild in (0.0, math.nan, math.inf):
        spoilt = {name: torch.where(mask, arrays[name], wild) for name in ("old_values", "returns")}
        leaf = torch.tensor([0.5, 0.6, 0.7], requires_grad=True)
        loss, report = critic_loss(leaf, SimpleNamespace(columns={**arrays, **spoilt}), clip=clip)
        loss.backward()
        results.append((loss.item(), leaf.grad.tolist(), {k: float(v) for k, v in report["sums"].items()}))
    assert results[0] == results[1] == results[2]
