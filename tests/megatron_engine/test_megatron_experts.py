"""Mixtures of experts in every layout: against Hugging Face, and routers' losses against their formulas."""

from functools import cache
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
from megatron_jobs import experts, routers
from safetensors.torch import load_file

from roll_opd.config.plan import MicroBatchLimits
from roll_opd.samples.micro_batches import assign, singles
from tests.cover import cover, tiered

GRID = experts.EXPERT_GRID
SMALL = [case for case in GRID if layouts.LAYOUTS[case[1]].world_size <= 2]
PUSHED = cover(SMALL, of=lambda case: (case[0], *layouts.axes(case[1])))
# no other test needs the layout that saves DeepSeek's; its weights and biases of routers are exported on every push
ONE_MODELS_RESUMES = [case for case in experts.EXPERT_RESUMES if case[0] == layouts.EXPERT_MODELS[0]]


@pytest.fixture(scope="module")
def naive(answers: Answers) -> Any:
    """(records, final weights) of the naive training of a model."""

    def trained(model: str) -> Any:
        path = layouts.model_path(answers.root, model)
        return reference_experts.naive_experts_training(path, experts.BIAS_RATES.get(model, 0.0))

    return cache(trained)


@pytest.mark.parametrize(("model", "layout"), tiered(GRID, PUSHED))
def test_logprobs_are_hugging_faces(answers: Answers, model: str, layout: str) -> None:
    network = models.load(layouts.model_path(answers.root, model))
    for name, (_, _, temperature, _) in data.PASSES.items():
        found = answers.arrays(f"experts-{model}-{layout}-{name}")
        for number, (tokens, prompt) in enumerate(data.sequences(layouts.VOCABULARY)):
            with torch.no_grad():
                wanted = reference.token_logprobs(network, tokens, prompt, temperature).numpy()
            np.testing.assert_allclose(found[str(number)], wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("model", "layout"), tiered(GRID, PUSHED))
def test_what_was_loaded_is_exported_to_the_bit(answers: Answers, model: str, layout: str) -> None:
    wanted = load_file(f"{layouts.model_path(answers.root, model)}/model.safetensors")
    found = answers.weights(f"experts-{model}-{layout}-start")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize(("model", "layout"), tiered(GRID, PUSHED))
def test_training_equals_the_naive_one(answers: Answers, naive: Any, model: str, layout: str) -> None:
    wanted, final = naive(model)
    found = answers.values(f"experts-{model}-{layout}")
    for record, plain in zip(found, wanted, strict=True):
        assert record["weighted_loss"] == pytest.approx(plain["loss"], rel=1e-5, abs=1e-6)
        assert record["grad_norms"] == pytest.approx([plain["grad_norm"]] * len(record["grad_norms"]), rel=1e-5)
        assert all(record["applied"])
    before = load_file(f"{layouts.model_path(answers.root, model)}/model.safetensors")
    weights = answers.weights(f"experts-{model}-{layout}")
    assert weights.keys() == final.keys()
    for name, tensor in final.items():
        assert (weights[name] - tensor).abs().max() <= 1e-5 * tensor.abs().max(), name
        moved = (tensor - before[name]).norm()
        assert moved > 0, name  # biases of routers, too
        assert (weights[name] - tensor).norm() <= 2e-3 * moved, name


@pytest.mark.parametrize(
    ("model", "saved", "loads"),
    tiered(experts.EXPERT_RESUMES, cover(ONE_MODELS_RESUMES, of=lambda case: (case[1] == case[2],))),
)
def test_resumed_equals_uninterrupted(answers: Answers, model: str, saved: str, loads: str) -> None:
    straight = answers.weights(f"experts-{model}-{saved}")
    resumed = answers.weights(f"experts-resume-{model}-{saved}-{loads}")
    whole, rest = (
        answers.values(f"experts-{name}") for name in (f"{model}-{saved}", f"resume-{model}-{saved}-{loads}")
    )
    for left, right in zip(whole[data.SAVED_AFTER :], rest, strict=True):
        assert right["weighted_loss"] == pytest.approx(left["weighted_loss"], rel=1e-5)
        assert right["grad_norms"][0] == pytest.approx(left["grad_norms"][0], rel=1e-5)
    for name, tensor in straight.items():
        if saved == loads:
            assert torch.equal(resumed[name], tensor), name
        else:
            assert (resumed[name] - tensor).abs().max() <= 1e-6, name


@pytest.mark.parametrize(
    ("layout", "name"), [(layout, name) for layout, (names, _) in routers.ROUTER_LAYOUTS.items() for name in names]
)
def test_losses_of_routers_are_means_over_all_tokens(answers: Answers, layout: str, name: str) -> None:
    """For any split into ranks and micro-batches; padding does not count.

    The balancing loss is defined per micro-batch, so its mean over micro-batches is compared.
    """
    path, samples = layouts.model_path(answers.root, layouts.EXPERT_MODELS[0]), data.train_samples(3, "opd")
    units, limits = (
        singles([len(sample.tokens) for sample in samples]),
        MicroBatchLimits(tokens=routers.ROUTER_LAYOUTS[layout][1]),
    )
    of_ranks = assign(units, layouts.LAYOUTS[layout].dp, limits, equal=True)
    packs = [pack for rank in of_ranks for pack in rank if pack]
    assert len(packs) > 2 or routers.ROUTER_LAYOUTS[layout][1] is None
    value, gradients = reference_experts.naive_router_loss(path, name, samples, packs)
    found = answers.arrays(f"routers-{layout}")
    assert float(found[name]) == pytest.approx(value, rel=1e-5)
    coefficient = next(v for v in routers.ROUTER_COEFFICIENTS[name].values() if isinstance(v, float))
    norm = sum(float(gradient.square().sum()) for gradient in gradients.values()) ** 0.5
    assert float(np.linalg.norm(found[f"{name}-gradient"])) == pytest.approx(coefficient * norm, rel=1e-4)
    first = next(key for key in gradients if key.endswith("mlp.gate.weight"))
    of_router = found[f"{name}-gradient"]
    one = (coefficient * gradients[first]).flatten().numpy()
    windows = np.lib.stride_tricks.sliding_window_view(of_router, len(one))
    assert np.abs(windows - one).max(1).min() <= 1e-4 * np.abs(one).max()  # it stands somewhere among the others
