"""Tensor parallelism, tied embeddings, experts: workers map the same memory, and no copy of weights is stale."""

from pathlib import Path

import numpy as np
import pytest
from inference_models import (
    Running,
    buckets_of,
    hf_logits,
    hf_logprobs,
    make_mixture,
    make_model,
    save_model,
    update_weights,
)

from roll_opd.config.plan import SamplingPlan


@pytest.mark.nightly
def test_tied_weights_reach_both_workers(tmp_path: Path, warm: None) -> None:
    path = save_model(make_model(seed=0, tied=True), tmp_path)
    running = Running(path, tensor_parallel_size=2)
    tokens = np.random.default_rng(0).integers(2, 99, 60).tolist()
    for seed in (1, 2):
        model = make_model(seed, tied=True)
        running.run(update_weights(running.engine, buckets_of(model), version=seed))
        found = running.run(running.engine.prompt_logprobs(tokens))
        np.testing.assert_allclose(found, hf_logprobs(model, tokens), atol=1e-5, rtol=0)
    assert running.engine.updates.version == 2
    prompts = [[first, first + 1] for first in range(2, 18)]
    completions = running.batch(prompts, SamplingPlan(max_new_tokens=12, temperature=0), range(16))
    for prompt, completion in zip(prompts, completions, strict=True):  # as one rank answers: test_inference_engine.py
        answered = completion.tokens.tolist()
        greedy = hf_logits(model, [*prompt, *answered]).argmax(dim=-1)[len(prompt) - 1 :]
        assert answered == greedy.tolist()
    running.close()


@pytest.mark.nightly
def test_experts_are_packed_again(tmp_path: Path, warm: None) -> None:
    """vLLM's kernels for CPUs need a special weight layout, which vLLM creates when it loads a model."""
    running = Running(save_model(make_mixture(seed=0), tmp_path), tensor_parallel_size=2)
    tokens = np.random.default_rng(0).integers(2, 99, 60).tolist()
    for seed in (0, 1, 2):
        model = make_mixture(seed)
        if seed:
            running.run(update_weights(running.engine, buckets_of(model), version=seed))
        found = running.run(running.engine.prompt_logprobs(tokens))
        np.testing.assert_allclose(found, hf_logprobs(model, tokens), atol=1e-5, rtol=0)
    running.close()
