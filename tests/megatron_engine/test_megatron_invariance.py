"""Every loss and its gradient are independent of how a batch is split, packed and distributed over ranks."""

import numpy as np
import pytest
from megatron_answers import Answers
from megatron_jobs import invariance, options

from tests.cover import tiered


@pytest.mark.parametrize(
    ("loss", "layout"),
    tiered(
        (case for case in invariance.INVARIANCE_GRID if "observed" in invariance.INVARIANCE_LAYOUTS[case[1]]),
        invariance.PUSHED_INVARIANCE,
    ),
)
def test_observed_tokens_change_no_bit_of_loss_and_gradient(answers: Answers, loss: str, layout: str) -> None:
    found = answers.arrays(invariance.invariance_name(loss, layout))
    for what in ("loss", "gradient"):
        np.testing.assert_array_equal(found[f"{loss}-observed-{what}"], found[f"{loss}-tokens-{what}"])


@pytest.mark.parametrize(("loss", "layout"), tiered(invariance.INVARIANCE_GRID, invariance.PUSHED_INVARIANCE))
def test_loss_and_gradient_do_not_depend_on_split_order_and_layout(answers: Answers, loss: str, layout: str) -> None:
    names = invariance.alone_name(loss), invariance.invariance_name(loss, layout)
    agree(*(answers.arrays(name) for name in names), loss, invariance.INVARIANCE_LAYOUTS[layout])


@pytest.mark.parametrize(
    ("layout", "loss"), tiered(invariance.EXPERT_INVARIANCE_GRID, invariance.PUSHED_EXPERT_INVARIANCE)
)
def test_loss_and_gradient_of_experts_do_not_depend_on_split_and_layout(
    answers: Answers, loss: str, layout: str
) -> None:
    alone, found = (answers.arrays(invariance.expert_invariance_name(name, loss)) for name in ("tp1", layout))
    agree(alone, found, loss, invariance.EXPERT_INVARIANCE[layout][:1])


@pytest.mark.parametrize("name", [name for name in options.OPTIONS if not name.startswith("none")])
def test_options_of_memory_stages_and_kernels_change_neither(answers: Answers, name: str) -> None:
    """Recomputed layers, stages of unequal sizes, options for GPUs: against one rank without these options."""
    plain = answers.arrays("options-none" if options.OPTIONS[name][0] == "deep" else "options-none_experts")
    found = answers.arrays(f"options-{name}")
    assert found["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert np.linalg.norm(found["gradient"] - plain["gradient"]) <= 1e-5 * np.linalg.norm(plain["gradient"])


def agree(alone: dict[str, np.ndarray], found: dict[str, np.ndarray], loss: str, splits: tuple[str, ...]) -> None:
    """Fail where loss or gradient differ from those of the whole batch on one rank."""
    value, gradient = (alone[f"{loss}-whole-{what}"] for what in ("loss", "gradient"))
    assert np.linalg.norm(gradient) > 1e-3 and abs(value) > 1e-3
    for split in splits:
        assert found[f"{loss}-{split}-loss"] == pytest.approx(value, rel=1e-5)
        difference = found[f"{loss}-{split}-gradient"] - gradient
        assert np.linalg.norm(difference) <= 1e-5 * np.linalg.norm(gradient)
        assert np.abs(difference).max() <= 1e-5 * np.abs(gradient).max()
