"""Families with other layers than Llama: log-probs, export and training against Hugging Face, in every layout."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import megatron_data as data
import megatron_layouts as layouts
import megatron_models as models
import megatron_reference as reference
import megatron_reference_experts as reference_experts
import numpy as np
import pytest
import torch
from megatron_answers import Answers
from megatron_jobs import families
from safetensors.torch import load_file

from tests.cover import cover, tiered

SMALL = [case for case in families.PLAIN if layouts.LAYOUTS[case[1]].world_size <= 2]
PUSHED = [*cover(SMALL), ("gpt_oss", "tp2cp2ep2"), ("minimax_m2", "ep2")]
Expected = Callable[[str, float], list[np.ndarray]]


@pytest.fixture(scope="module")
def expected(answers: Answers) -> Expected:
    """Hugging Face's log-probs of every sequence, by (model, temperature)."""

    @cache
    def compute(model: str, temperature: float) -> list[np.ndarray]:
        network = models.load(layouts.model_path(answers.root, model))
        with torch.no_grad():
            return [
                reference.token_logprobs(network, tokens, prompt, temperature).numpy()
                for tokens, prompt in data.sequences(layouts.VOCABULARY)
            ]

    return compute


@pytest.mark.parametrize(("model", "layout"), tiered(families.SCORED, PUSHED))
def test_logprobs_equal_hugging_face(answers: Answers, expected: Expected, model: str, layout: str) -> None:
    for name, (_, _, temperature, _) in data.PASSES.items():
        found = answers.arrays(f"family-{model}-{layout}-{name}")
        for number, wanted in enumerate(expected(model, temperature)):
            np.testing.assert_allclose(found[str(number)], wanted, rtol=0, atol=1e-5, err_msg=f"{name} {number}")


@pytest.mark.parametrize(("model", "layout"), tiered(families.SCORED, PUSHED))
def test_export_is_bit_exact_and_loads_in_transformers(answers: Answers, model: str, layout: str) -> None:
    source = load_file(Path(layouts.model_path(answers.root, model)) / "model.safetensors")
    exported = answers.weights(f"family-{model}-{layout}")
    assert exported.keys() == source.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in source.items())
    loaded = models.load(answers.path(f"family-{model}-{layout}.hf")).state_dict()
    original = models.load(layouts.model_path(answers.root, model)).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in original.items())


@pytest.mark.nightly
@pytest.mark.parametrize(("model", "layout"), families.TRAINED)
def test_training_equals_the_naive_one(answers: Answers, model: str, layout: str) -> None:
    path = layouts.model_path(answers.root, model)
    wanted, final = reference_experts.naive_experts_training(path, 0.0)
    for record, plain in zip(answers.values(f"family-trained-{model}-{layout}"), wanted, strict=True):
        assert record["weighted_loss"] == pytest.approx(plain["loss"], rel=1e-5, abs=1e-6)
        assert record["grad_norms"] == pytest.approx([plain["grad_norm"]] * len(record["grad_norms"]), rel=1e-4)
    before = load_file(f"{path}/model.safetensors")
    weights = answers.weights(f"family-trained-{model}-{layout}")
    for name, tensor in final.items():
        moved = (tensor - before[name]).norm()
        assert moved > 0 or name.endswith("e_score_correction_bias"), name  # these stay unless a rate is written
        assert (weights[name] - tensor).norm() <= 2e-3 * moved, name


@pytest.mark.nightly
@pytest.mark.parametrize(("model", "layout"), families.SAVED)
def test_a_state_of_several_ranks_resumes_on_one(answers: Answers, model: str, layout: str) -> None:
    straight, resumed = answers.weights(f"family-trained-{model}-{layout}"), answers.weights(f"family-resumed-{model}")
    assert straight.keys() == resumed.keys()
    assert all((resumed[name] - tensor).abs().max() <= 1e-6 for name, tensor in straight.items())
