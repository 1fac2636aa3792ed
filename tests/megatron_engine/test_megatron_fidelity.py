"""Token log-probs and exported weights against Hugging Face, under every layout."""

import json
from collections.abc import Callable
from functools import cache
from itertools import combinations
from pathlib import Path

import megatron_data as data
import megatron_layouts as layouts
import megatron_models as models
import megatron_reference as reference
import numpy as np
import pytest
import torch
from megatron_answers import Answers
from megatron_jobs import fidelity
from safetensors.torch import load_file

from tests.cover import cover, tiered

GRID = [(layout, model) for layout in fidelity.FROZEN_LAYOUTS for model in layouts.models(layout)]
DEMO_GRID = [(layout, model) for layout in fidelity.FROZEN_LAYOUTS for model in layouts.demo_models(layout)]
PAIRS = [
    (model, one, other)
    for one, other in combinations(fidelity.FROZEN_LAYOUTS, 2)
    for model in layouts.DEMO_MODELS
    if model in layouts.demo_models(one) and model in layouts.demo_models(other)
]
# a pack that is cut over context ranks is attended to with a mask, in other blocks
SAME_BITS = [pair for pair in PAIRS if not any(layouts.LAYOUTS[layout].cp > 1 for layout in pair[1:])]
PUSHED_PAIRS = cover((pair for pair in PAIRS if pair[1] == "tp1"), of=lambda pair: (pair[0], *layouts.axes(pair[2])))
PUSHED = cover(GRID) + [(layout, model) for model, *pair in PUSHED_PAIRS for layout in pair]
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
                for tokens, prompt in data.sequences_for(model)
            ]

    return compute


@pytest.mark.parametrize(("layout", "model"), tiered(GRID + DEMO_GRID, PUSHED))
def test_logprobs_equal_hugging_face(answers: Answers, expected: Expected, layout: str, model: str) -> None:
    for name, (_, _, temperature, _) in data.PASSES.items():
        scored = answers.arrays(f"frozen-{model}-{layout}-{name}")
        wanted = expected(model, temperature)
        assert sorted(scored, key=int) == [str(number) for number in range(len(wanted))]
        for number, values in enumerate(wanted):
            assert scored[str(number)].dtype == np.float32
            np.testing.assert_allclose(scored[str(number)], values, rtol=0, atol=1e-5, err_msg=f"{name} {number}")


@pytest.mark.parametrize(("layout", "model"), tiered(GRID, PUSHED))
def test_one_sequence_is_scored_where_ranks_have_nothing_to_do(
    answers: Answers, expected: Expected, layout: str, model: str
) -> None:
    """Fewer sequences than data-parallel ranks: one rank has nothing to do."""
    scored = answers.arrays(f"frozen-{model}-{layout}-lonely")
    assert list(scored) == ["0"]
    np.testing.assert_allclose(scored["0"], expected(model, 1.0)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("model", layouts.MODELS)
def test_the_references_differ_between_places_models_and_temperatures(expected: Expected, model: str) -> None:
    """Guards the tests above: a flat distribution would agree with anything."""
    values = expected(model, 1.0)
    assert np.concatenate(values).std() > 0.3
    assert np.abs(np.concatenate(values) - np.concatenate(expected(model, 0.7))).max() > 0.1
    other = expected("llama" if model != "llama" else "llama3", 1.0)
    assert np.abs(values[0] - other[0]).max() > 0.1


@pytest.mark.parametrize("model", layouts.MODELS)
def test_the_gather_shifts_by_one(answers: Answers, model: str) -> None:
    """Entry i is log p(token P+i | tokens before P+i): not the place before, not the place after."""
    network = models.load(layouts.model_path(answers.root, model))
    tokens, prompt = data.sequences(layouts.VOCABULARY)[0]
    scored = answers.arrays(f"frozen-{model}-tp1-pack")["0"]
    with torch.no_grad():
        table = reference.all_logprobs(network, tokens, 1.0).numpy()
    assert len(scored) == len(tokens) - prompt
    places = np.arange(prompt, len(tokens))
    np.testing.assert_allclose(scored, table[places - 1, tokens[places]], rtol=0, atol=1e-5)
    assert np.abs(scored - table[places, tokens[places]]).mean() > 0.1
    assert np.abs(scored - table[places - 1, tokens[places - 1]]).mean() > 0.1


def differences(answers: Answers, kind: str, model: str, one: str, other: str) -> np.ndarray:
    found = []
    for name in data.PASSES:
        left = answers.arrays(f"{kind}-{model}-{one}-{name}")
        right = answers.arrays(f"{kind}-{model}-{other}-{name}")
        found += [left[key] - right[key] for key in left]
    return np.concatenate(found)


@pytest.mark.parametrize(("model", "one", "other"), tiered(SAME_BITS, PUSHED_PAIRS))
def test_reverse_kl_of_equal_weights_is_zero(answers: Answers, model: str, one: str, other: str) -> None:
    """A teacher with the student's weights but another layout adds nothing."""
    assert np.abs(differences(answers, "frozen", model, one, other)).max() < 1e-6


@pytest.mark.parametrize(("model", "one", "other"), tiered(PAIRS, PUSHED_PAIRS))
def test_an_ordinary_run_is_as_near_as_rounding_allows(answers: Answers, model: str, one: str, other: str) -> None:
    found = differences(answers, "ordinary", model, one, other)
    assert abs(found.mean()) < 1e-6 and np.abs(found).max() < 1e-5


@pytest.mark.parametrize(("layout", "model"), tiered(GRID, PUSHED))
def test_export_is_bit_exact(answers: Answers, layout: str, model: str) -> None:
    source = load_file(Path(layouts.model_path(answers.root, model)) / "model.safetensors")
    exported = answers.weights(f"frozen-{model}-{layout}")
    assert exported.keys() == source.keys()
    for name, tensor in source.items():
        assert exported[name].dtype == tensor.dtype and torch.equal(exported[name], tensor), name


@pytest.mark.parametrize(("layout", "model"), tiered(DEMO_GRID, PUSHED))
def test_export_keeps_configuration_and_tokenizer(answers: Answers, layout: str, model: str) -> None:
    source = Path(layouts.model_path(answers.root, model))
    exported = answers.path(f"frozen-{model}-{layout}.hf")
    assert sorted(file.name for file in exported.iterdir()) == sorted(file.name for file in source.iterdir())
    for file in source.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            assert (exported / file.name).read_bytes() == file.read_bytes()
    before = json.loads((source / "config.json").read_text())
    after = json.loads((exported / "config.json").read_text())
    assert after == {**before, "dtype": "float32"}  # the weights were read from bf16 and ran in fp32


@pytest.mark.parametrize("model", layouts.DEMO_MODELS)
def test_exported_model_loads_in_transformers(answers: Answers, model: str) -> None:
    source = models.load(layouts.model_path(answers.root, model))
    exported = models.load(answers.path(f"frozen-{model}-tp2.hf"))
    for name, tensor in source.state_dict().items():
        assert torch.equal(exported.state_dict()[name], tensor), name
