"""The function that a configuration names in place of `reverse_kl_advantages`."""

from dataclasses import replace

import pytest
import torch

from roll_opd.base.frozen import FrozenDict
from roll_opd.config.plan import ObjectivePlan
from roll_opd.objective.registry import AlgorithmError, register_opd_advantage
from roll_opd.objective.reverse_kl import TaughtTokens, advantages, reverse_kl_advantages

COLUMNS = {
    "opd_coefficients": torch.tensor([0.5, 0.5, 0.0]),
    "opd_teacher": torch.tensor([-1.0, -2.0, 0.0]),
    "advantages": torch.tensor([0.25, 0.0, 1.0]),
    "mask": torch.tensor([True, True, False]),
}
STUDENT_M = torch.tensor([-1.0, -3.0, float("-inf")])  # the log-prob of an observed token may be anything


@register_opd_advantage("multiplied")
def multiplied(tokens: TaughtTokens, *, factor: float = 2.0) -> torch.Tensor:
    return reverse_kl_advantages(replace(tokens, reverse_kl_M=factor * tokens.reverse_kl_M))


@register_opd_advantage("short")
def short(tokens: TaughtTokens) -> torch.Tensor:
    return tokens.external_M[:1]


def test_a_function_of_the_user_has_the_place_of_the_default() -> None:
    plain, kl_M = advantages(STUDENT_M, COLUMNS, [2, 1], ObjectivePlan())
    assert kl_M.tolist() == [0.5 * -1.0 + 1.0, 0.5 * -3.0 + 2.0, 0.0]
    assert plain.tolist() == [0.25 - 0.5, -0.5, 1.0]
    objective = ObjectivePlan(opd_advantage_fn="multiplied", opd_advantage_fn_args=FrozenDict({"factor": 3.0}))
    found, same = advantages(STUDENT_M, COLUMNS, [2, 1], objective)
    assert found.tolist() == [0.25 - 3 * 0.5, -3 * 0.5, 1.0] and torch.equal(same, kl_M)
    for wrong in ("short", "nothing"):
        with pytest.raises(AlgorithmError, match=wrong):
            advantages(STUDENT_M, COLUMNS, [2, 1], ObjectivePlan(opd_advantage_fn=wrong))
