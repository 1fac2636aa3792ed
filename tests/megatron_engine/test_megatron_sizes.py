"""Models of every family with random sizes: log-probs, gradients and export against Hugging Face.

`ROLL_OPD_TEST_SIZES=N pytest -m "" tests/megatron_engine/test_megatron_sizes.py` draws other sizes.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import megatron_data as data
import megatron_layouts as layouts
import megatron_models as models
import megatron_reference as reference
import megatron_sizes as sizes
import numpy as np
import pytest
import torch
from megatron_answers import Answers
from megatron_jobs.sizes import PASSES
from safetensors.torch import load_file
from transformers import PreTrainedModel

from roll_opd.config.plan import ObjectivePlan
from roll_opd.models.families import FAMILIES
from tests.cover import tiered

CASES = pytest.mark.parametrize(("family", "layout"), tiered(sizes.CASES, ()))
Model = Callable[[str], Path]


@pytest.fixture(scope="module")
def saved(answers: Answers) -> Model:
    """The directory of a family's model, by the family's name."""

    @cache
    def save(family: str) -> Path:
        path = Path(layouts.model_path(answers.root, f"sized-{family}"))
        models.save_random(path, sizes.draw_config(family), sizes.SEED)
        return path

    return save


@pytest.fixture(scope="module")
def expected(saved: Model) -> Callable[[str, float, bool], np.ndarray]:
    """Hugging Face's log-probs of every sequence, by (family, temperature, whether all operations are in f64)."""

    @cache
    def compute(family: str, temperature: float, exact: bool) -> np.ndarray:
        return reference.sequence_logprobs(load(saved(family)), temperature, exact=exact)

    return compute


@pytest.fixture(scope="module")
def slopes(saved: Model, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, torch.Tensor]]:
    """Hugging Face's gradients of an update by a family's name, under the names that the weights have on disk."""

    @cache
    def compute(family: str) -> dict[str, torch.Tensor]:
        network, samples = load(saved(family)), data.train_samples(0, "opd")
        logprobs = [reference.token_logprobs(network, s.tokens, s.prompt_length, data.TEMPERATURE) for s in samples]
        reference.naive_loss(logprobs, samples, ObjectivePlan()).backward()
        for parameter in network.parameters():
            parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        path = tmp_path_factory.mktemp(family)
        network.save_pretrained(path)
        return load_file(path / "model.safetensors")

    return compute


def load(path: Path) -> PreTrainedModel:
    """Return a model whose experts are loops: the default kernel refuses f64, and f32 of some widths."""
    network = models.load(path)
    network.set_experts_implementation("eager")
    return network


def test_every_family_of_the_registry_has_random_sizes() -> None:
    assert set(sizes.FAMILIES) == set(FAMILIES)


@CASES
def test_logprobs_equal_hugging_face(answers: Answers, saved: Model, expected: Any, family: str, layout: str) -> None:
    """Within 1e-5; f32 of Gated DeltaNet depends on the CPU, so hybrids have the bound of `assert_as_exact`."""
    saved(family)
    for name in PASSES:
        temperature = data.PASSES[name][2]
        found = answers.arrays(f"sized-{family}-{layout}-{name}")
        ours, theirs = np.concatenate([found[str(n)] for n in range(len(found))]), expected(family, temperature, False)
        if family in sizes.HYBRIDS:
            reference.assert_as_exact(ours, theirs, expected(family, temperature, True), temperature, name)
        else:
            assert np.abs(ours - theirs).max() <= 1e-5, name


@CASES
def test_gradients_equal_hugging_face(answers: Answers, saved: Model, slopes: Any, family: str, layout: str) -> None:
    """Of each tensor within 1e-4 of its largest value, or of a hundredth of the largest value of all."""
    saved(family)
    found = answers.weights(f"sized-{family}-{layout}-gradient")
    wanted = {name: each for name, each in slopes(family).items() if not name.endswith("e_score_correction_bias")}
    largest = max(float(tensor.abs().max()) for tensor in wanted.values())
    scales = {name: max(float(tensor.abs().max()), 0.01 * largest) for name, tensor in wanted.items()}
    apart = {name: float((found[name] - tensor).abs().max()) / scales[name] for name, tensor in wanted.items()}
    assert max(apart.values()) <= 1e-4, {name: value for name, value in apart.items() if value > 1e-4}


@CASES
def test_export_is_bit_exact_and_loads_in_transformers(
    answers: Answers, saved: Model, family: str, layout: str
) -> None:
    source = load_file(saved(family) / "model.safetensors")
    exported = answers.weights(f"sized-{family}-{layout}")
    assert exported.keys() == source.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in source.items())
    loaded = models.load(answers.path(f"sized-{family}-{layout}.hf")).state_dict()
    original = models.load(saved(family)).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in original.items())
