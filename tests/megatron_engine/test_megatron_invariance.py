"""Every loss and its gradient are the same however a batch is split, packed and spread over ranks."""

import megatron_cases as cases
import numpy as np
import pytest
from megatron_answers import Answers


@pytest.mark.parametrize("layout", [name for name, splits in cases.INVARIANCE_LAYOUTS.items() if "observed" in splits])
@pytest.mark.parametrize("loss", (*cases.INVARIANT, cases.CRITIC_LOSS))
def test_observed_tokens_change_no_bit_of_loss_and_gradient(answers: Answers, loss: str, layout: str) -> None:
    kind = "critic_invariance" if loss == cases.CRITIC_LOSS else "invariance"
    found = answers.arrays(f"{kind}-{layout}")
    for what in ("loss", "gradient"):
        np.testing.assert_array_equal(found[f"{loss}-observed-{what}"], found[f"{loss}-tokens-{what}"])


@pytest.mark.parametrize("layout", cases.INVARIANCE_LAYOUTS)
@pytest.mark.parametrize("loss", (*cases.INVARIANT, cases.CRITIC_LOSS))
def test_loss_and_gradient_do_not_depend_on_split_order_and_layout(answers: Answers, loss: str, layout: str) -> None:
    kind = "critic_invariance" if loss == cases.CRITIC_LOSS else "invariance"
    alone, found = answers.arrays(f"{kind}-tp1"), answers.arrays(f"{kind}-{layout}")
    value, gradient = (alone[f"{loss}-whole-{what}"] for what in ("loss", "gradient"))
    assert np.linalg.norm(gradient) > 1e-3 and abs(value) > 1e-3
    for split in cases.INVARIANCE_LAYOUTS[layout]:
        assert found[f"{loss}-{split}-loss"] == pytest.approx(value, rel=1e-5)
        difference = found[f"{loss}-{split}-gradient"] - gradient
        assert np.linalg.norm(difference) <= 1e-5 * np.linalg.norm(gradient)
        assert np.abs(difference).max() <= 1e-5 * np.abs(gradient).max()
