"""Resumed with changed optimizer settings: moments and counts continue, and all settings are those of the new plan.

The naive side changes every setting of torch's AdamW, of the schedule and of the clipping after the same updates.
"""

from typing import Any

import megatron_data as data
import megatron_layouts as layouts
import megatron_models as models
import megatron_reference as reference
import megatron_reference_experts as reference_experts
import pytest
import torch
from megatron_answers import Answers
from megatron_jobs import experts, lora, training
from safetensors.torch import load_file
from test_megatron_training import assert_close, records

from tests.cover import cover, tiered

Weights = dict[str, torch.Tensor]
Trained = tuple[list[dict[str, Any]], Weights]


def assert_goes_on(answers: Answers, name: str, weights: Weights, naive: Trained, before: Weights) -> None:
    wanted, final = naive
    for record, plain in zip(records(answers, name), wanted[data.SAVED_AFTER :], strict=True):
        assert record["weighted_loss"] == pytest.approx(plain["loss"], rel=1e-5, abs=1e-6)
        assert record["grad_norms"] == pytest.approx([plain["grad_norm"]] * len(record["grad_norms"]), rel=1e-5)
        assert record["learning_rate"] == pytest.approx(plain["learning_rate"], rel=1e-6)
        assert all(record["applied"])
    assert_close(weights, final, before)


@pytest.mark.parametrize(
    ("saved", "loads", "distributed"), tiered(training.CHANGED, cover(training.CHANGED, of=lambda case: (case[2],)))
)
def test_a_student_resumed_with_other_settings_equals_the_naive_one(
    answers: Answers, saved: str, loads: str, distributed: bool
) -> None:
    path = layouts.model_path(answers.root, "qwen3_tied")
    naive = reference.naive_training(path, "opd", data.OBJECTIVES["opd"], changed=True)
    name = f"changed-{training.resume_name(saved, loads, distributed)}"
    assert_goes_on(answers, name, answers.weights(name), naive, dict(models.load(path).named_parameters()))


def test_a_critic_resumed_with_other_settings_equals_the_naive_one(answers: Answers) -> None:
    path = layouts.model_path(answers.root, "valued")
    naive = reference.naive_critic_training(path, changed=True)
    before = dict(models.load_critic(path).named_parameters())
    assert_goes_on(answers, "changed-critic", answers.weights("changed-critic"), naive, before)


@pytest.mark.nightly
def test_an_adapter_resumed_with_other_settings_equals_pefts(answers: Answers) -> None:
    targets = lora.LORA_TARGETS["all"]
    begun = answers.root / "models" / f"adapter-{len(targets)}"
    base = layouts.model_path(answers.root, lora.LORA_MODELS["all"])
    wanted, final = reference.naive_lora_training(base, begun, changed=True)
    by_name = {name.replace(".default.", "."): tensor for name, tensor in final.items()}
    found, before = (
        load_file(path / "adapter_model.safetensors") for path in (answers.path("changed-lora.adapter"), begun)
    )
    assert_goes_on(answers, "changed-lora", found, (wanted, by_name), before)


def test_experts_resumed_with_other_settings_equal_the_naive_ones(answers: Answers) -> None:
    """Two optimizers in a chain."""
    path = layouts.model_path(answers.root, experts.CHANGED[0])
    naive = reference_experts.naive_experts_training(path, changed=True)
    before = load_file(f"{path}/model.safetensors")
    assert_goes_on(answers, "changed-experts", answers.weights("changed-experts"), naive, before)
