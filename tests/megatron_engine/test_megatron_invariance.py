"""Every policy loss and its gradient are the same however a batch is split, packed and spread over ranks."""

import megatron_cases as cases
import numpy as np
import pytest
from conftest import Answers

from roll_opd.config.algorithms import LOSSES


@pytest.mark.parametrize("layout", cases.INVARIANCE_LAYOUTS)
@pytest.mark.parametrize("policy_loss", LOSSES)
def test_loss_and_gradient_do_not_depend_on_split_order_and_layout(
    answers: Answers, policy_loss: str, layout: str
) -> None:
    alone, found = answers.arrays("invariance-tp1"), answers.arrays(f"invariance-{layout}")
    loss, gradient = (alone[f"{policy_loss}-whole-{what}"] for what in ("loss", "gradient"))
    assert np.linalg.norm(gradient) > 1e-3 and abs(loss) > 1e-3
    for split in cases.INVARIANCE_LAYOUTS[layout]:
        assert found[f"{policy_loss}-{split}-loss"] == pytest.approx(loss, rel=1e-5)
        difference = found[f"{policy_loss}-{split}-gradient"] - gradient
        assert np.linalg.norm(difference) <= 1e-5 * np.linalg.norm(gradient)
        assert np.abs(difference).max() <= 1e-5 * np.abs(gradient).max()
