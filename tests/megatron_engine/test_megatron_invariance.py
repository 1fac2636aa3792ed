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
    agree(answers, kind, loss, layout, cases.INVARIANCE_LAYOUTS[layout])


@pytest.mark.parametrize(
    ("layout", "loss"),
    [(layout, loss) for layout in cases.EXPERT_INVARIANCE for loss in cases.EXPERT_INVARIANCE[layout][1]],
)
def test_nor_of_a_mixture_of_experts(answers: Answers, loss: str, layout: str) -> None:
    agree(answers, "experts_invariance", loss, layout, cases.EXPERT_INVARIANCE[layout][:1])


@pytest.mark.parametrize("name", [name for name in cases.OPTIONS if not name.startswith("none")])
def test_options_of_memory_stages_and_kernels_change_neither(answers: Answers, name: str) -> None:
    """Layers computed again, stages of unequal sizes, what needs a GPU: against one rank without any of it."""
    plain = answers.arrays("options-none" if cases.OPTIONS[name][0] == "deep" else "options-none_experts")
    found = answers.arrays(f"options-{name}")
    assert found["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert np.linalg.norm(found["gradient"] - plain["gradient"]) <= 1e-5 * np.linalg.norm(plain["gradient"])


def agree(answers: Answers, kind: str, loss: str, layout: str, splits: tuple[str, ...]) -> None:
    """Fail where loss or gradient are others than of the whole batch on one rank."""
    alone, found = answers.arrays(f"{kind}-tp1"), answers.arrays(f"{kind}-{layout}")
    value, gradient = (alone[f"{loss}-whole-{what}"] for what in ("loss", "gradient"))
    assert np.linalg.norm(gradient) > 1e-3 and abs(value) > 1e-3
    for split in splits:
        assert found[f"{loss}-{split}-loss"] == pytest.approx(value, rel=1e-5)
        difference = found[f"{loss}-{split}-gradient"] - gradient
        assert np.linalg.norm(difference) <= 1e-5 * np.linalg.norm(gradient)
        assert np.abs(difference).max() <= 1e-5 * np.abs(gradient).max()
