"""Replayed routes of an inference engine, in every layout: against Hugging Face with the same experts."""

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
from megatron_jobs import replay

from tests.cover import cover, tiered

CASES = tiered(replay.REPLAYS, cover(replay.REPLAYS, of=lambda case: (case[0], *layouts.axes(case[1]))))


@pytest.fixture(scope="module")
def naive(answers: Answers) -> Any:
    """(records, final weights) of the naive training."""
    return cache(lambda model: reference_experts.naive_replay_training(layouts.model_path(answers.root, model)))


@pytest.mark.parametrize(("model", "layout"), CASES)
@pytest.mark.parametrize("kind", ["pack", "shared"])
def test_logprobs_follow_the_routes(answers: Answers, model: str, layout: str, kind: str) -> None:
    """One sequence, which shares no prefix, has no routes, so its routers choose."""
    network = models.load(layouts.model_path(answers.root, model))
    found = answers.arrays(f"replay-{model}-{layout}-{kind}")
    apart = []
    for number, (tokens, prompt) in enumerate(data.sequences(layouts.VOCABULARY)):
        with torch.no_grad():
            own = reference.token_logprobs(network, tokens, prompt, 1.0).numpy()
            wanted = own if number == 2 else reference_experts.forced_logprobs(network, tokens, prompt, 1.0).numpy()
        np.testing.assert_allclose(found[str(number)], wanted, rtol=0, atol=1e-5)
        apart.append(np.abs(own - wanted).max(initial=0))
    assert max(apart) > 0.05  # so that to leave the routes alone would show


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_training_along_replayed_routes_equals_the_naive_one(
    answers: Answers, naive: Any, model: str, layout: str
) -> None:
    wanted, final = naive(model)
    found = answers.values(f"replay-{model}-{layout}")
    for step, (record, plain) in enumerate(zip(found, wanted, strict=True)):
        assert record["weighted_loss"] == pytest.approx(plain["loss"], rel=1e-5, abs=1e-6)
        assert record["grad_norms"] == pytest.approx([plain["grad_norm"]] * len(record["grad_norms"]), rel=1e-5)
        tokens = sum(len(sample.tokens) - 1 for sample in data.train_samples(step, "opd"))
        assert record["routed_tokens"] == tokens and record["routed_choices"] == 3 * tokens  # one layer is dense
        assert record["rerouted_tokens"] == plain["rerouted_tokens"]
        assert record["rerouted_choices"] == plain["rerouted_choices"]
    weights = answers.weights(f"replay-{model}-{layout}")
    for name, tensor in final.items():
        assert (weights[name] - tensor).abs().max() <= 1e-5 * tensor.abs().max(), name
