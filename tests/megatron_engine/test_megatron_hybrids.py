"""Models with Gated DeltaNet layers in every layout: log-probs, training and export against Hugging Face."""

from functools import cache
from pathlib import Path
from typing import Any

import megatron_data as data
import megatron_layouts as layouts
import megatron_models as models
import megatron_reference as reference
import megatron_reference_experts as reference_experts
import numpy as np
import pytest
import torch
from megatron_answers import Answers
from megatron_jobs.hybrids import GRID, MULTIMODAL, SAVED
from safetensors.torch import load_file

from tests.cover import tiered

CASES = pytest.mark.parametrize(("model", "layout"), tiered(GRID, [("qwen3_5", "cp2")]))


@pytest.fixture(scope="module")
def naive(answers: Answers) -> Any:
    """(records, final weights) of the naive training of a model."""
    return cache(lambda model: reference_experts.naive_experts_training(layouts.model_path(answers.root, model)))


@pytest.fixture(scope="module")
def expected(answers: Answers) -> Any:
    """Hugging Face's log-probs of every sequence, by (model, temperature, whether all operations are in f64)."""

    @cache
    def compute(model: str, temperature: float, exact: bool) -> np.ndarray:
        network = models.load(layouts.model_path(answers.root, model))
        return reference.sequence_logprobs(network, temperature, exact=exact)

    return compute


@CASES
def test_logprobs_equal_hugging_face(answers: Answers, expected: Any, model: str, layout: str) -> None:
    """Packed, alone, with shared prefixes, and split into micro-batches; f32 of Gated DeltaNet depends on the CPU."""
    for name, (_, _, temperature, _) in data.PASSES.items():
        found = answers.arrays(f"hybrid-{model}-{layout}-{name}")
        theirs, exact = (expected(model, temperature, is_exact) for is_exact in (False, True))
        ours = np.concatenate([found[str(number)] for number in range(len(found))])
        reference.assert_as_exact(ours, theirs, exact, temperature, name)


@CASES
def test_export_is_bit_exact_and_loads_in_transformers(answers: Answers, model: str, layout: str) -> None:
    source = load_file(Path(layouts.model_path(answers.root, model)) / "model.safetensors")
    exported = answers.weights(f"hybrid-{model}-{layout}-start")
    assert exported.keys() == source.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in source.items())
    loaded = models.load(answers.path(f"hybrid-{model}-{layout}-start.hf")).state_dict()
    original = models.load(layouts.model_path(answers.root, model)).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in original.items())


@pytest.mark.nightly
@pytest.mark.parametrize(("model", "layout"), MULTIMODAL)
def test_a_multimodal_checkpoint_is_its_text_model_and_keeps_the_rest(
    answers: Answers, model: str, layout: str
) -> None:
    """Log-probs of the text model; vision part and multi-token prediction are exported bit for bit."""
    source = Path(layouts.model_path(answers.root, f"{model}_multimodal"))
    network = models.load(layouts.model_path(answers.root, model))
    found = answers.arrays(f"hybrid-multimodal-{model}-{layout}-pack")
    temperature = data.PASSES["pack"][2]
    for number, (tokens, prompt) in enumerate(data.sequences(layouts.VOCABULARY)):
        with torch.no_grad():
            wanted = reference.token_logprobs(network, tokens, prompt, temperature).numpy()
        np.testing.assert_allclose(found[str(number)], wanted, rtol=0, atol=1e-5)
    exported: dict[str, torch.Tensor] = {}
    for file in answers.path(f"hybrid-multimodal-{model}-{layout}.hf").glob("*.safetensors"):
        exported |= load_file(file)
    original = load_file(source / "model.safetensors")
    assert exported.keys() == original.keys()
    assert all(exported[name].dtype is tensor.dtype for name, tensor in original.items())
    assert all(torch.equal(exported[name], tensor) for name, tensor in original.items())
    loaded = models.load(answers.path(f"hybrid-multimodal-{model}-{layout}.hf")).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in network.state_dict().items())


@CASES
def test_training_equals_the_naive_one(answers: Answers, naive: Any, model: str, layout: str) -> None:
    """Losses, norms of gradients, and how far each tensor moved."""
    wanted, final = naive(model)
    for record, plain in zip(answers.values(f"hybrid-{model}-{layout}"), wanted, strict=True):
        assert record["weighted_loss"] == pytest.approx(plain["loss"], rel=1e-5, abs=1e-6)
        assert record["grad_norms"] == pytest.approx([plain["grad_norm"]] * len(record["grad_norms"]), rel=1e-4)
    before = load_file(f"{layouts.model_path(answers.root, model)}/model.safetensors")
    weights = answers.weights(f"hybrid-{model}-{layout}")
    assert weights.keys() == final.keys()
    for name, tensor in final.items():
        moved = (tensor - before[name]).norm()
        assert moved > 0, name
        assert (weights[name] - tensor).norm() <= 2e-3 * moved, name


@pytest.mark.nightly
@pytest.mark.parametrize(("model", "layout"), SAVED)
def test_a_state_of_several_ranks_resumes_on_one(answers: Answers, model: str, layout: str) -> None:
    straight, resumed = answers.weights(f"hybrid-{model}-{layout}"), answers.weights(f"hybrid-resume-{model}")
    assert all((resumed[name] - tensor).abs().max() <= 1e-6 for name, tensor in straight.items())
