"""Tensor parallelism and tied embeddings: every worker maps the same memory; no stale copy of a head stays."""

from pathlib import Path

import numpy as np
from inference_models import Running, buckets_of, hf_logprobs, make_model, save_model


def test_tied_weights_reach_both_workers(tmp_path: Path, warm: None) -> None:
    path = save_model(make_model(seed=0, tied=True), tmp_path)
    running = Running(path, tensor_parallel_size=2)
    tokens = np.random.default_rng(0).integers(2, 99, 60).tolist()
    for seed in (1, 2):
        model = make_model(seed, tied=True)
        running.run(running.engine.update_weights(buckets_of(model), version=seed))
        found = running.run(running.engine.prompt_logprobs(tokens))
        np.testing.assert_allclose(found, hf_logprobs(model, tokens), atol=1e-5, rtol=0)
    assert running.engine.weights_version == 2
    running.close()
