"""Latent attention on CPUs: DeepSeek-V3's log-probs and routes are Hugging Face's, before and after new weights."""

from pathlib import Path

import numpy as np
import torch
from inference_models import Running, buckets_of, hf_logprobs, make_latent, save_model

from roll_opd.plan import SamplingPlan


def test_latent_attention_is_hugging_faces(tmp_path: Path, warm: None) -> None:
    prompts = [list(range(2, 20)), [7]]
    running = Running(save_model(make_latent(seed=0), tmp_path), routes=True)
    for seed in (0, 1):
        model, chosen = make_latent(seed), []
        model.model.layers[1].mlp.gate.register_forward_hook(lambda gate, inputs, found, to=chosen: to.append(found[2]))
        if seed:
            running.run(running.engine.update_weights(buckets_of(model), version=seed))
        answers = running.batch(prompts, SamplingPlan(max_new_tokens=12), range(len(prompts)))
        for prompt, answer in zip(prompts, answers, strict=True):
            whole = [*prompt, *answer.tokens.tolist()]
            np.testing.assert_allclose(answer.logprobs, hf_logprobs(model, whole)[len(prompt) - 1 :], atol=2e-5, rtol=0)
            wanted = torch.sort(chosen[-1][:-1], -1).values.numpy()
            np.testing.assert_array_equal(np.sort(answer.routes, -1)[:, 1], wanted)
    running.close()
