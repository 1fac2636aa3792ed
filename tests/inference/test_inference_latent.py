"""Latent attention on CPUs: log-probs and routes of DeepSeek-V3 equal Hugging Face's, also after a weight update."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from inference_models import Running, buckets_of, hf_logprobs, make_latent, save_model, update_weights

from roll_opd.config.plan import ModelPlan, SamplingPlan
from roll_opd.inference.engine_arguments import resolve_engine_args


def test_cpus_with_amx_compute_it_as_others_do(tmp_path: Path) -> None:
    """vLLM's kernel for these CPUs supports only bf16, and ends the process for f32 weights."""
    model = ModelPlan(str(save_model(make_latent(seed=0), tmp_path)), "fp32")
    same: dict[str, Any] = {"max_model_len": 32, "seed": 3, "tensor_parallel_size": 1}
    assert resolve_engine_args(model, on_cpu=True, engine_args={}, **same)["attention_backend"] == "CPU_MLA"
    users: dict[str, Any] = {"attention_config": {"backend": "AMX_MLA"}}
    for on_cpu, own in ((True, users), (False, {})):
        assert "attention_backend" not in resolve_engine_args(model, on_cpu=on_cpu, engine_args=own, **same)


@pytest.mark.nightly
def test_latent_attention_is_hugging_faces(tmp_path: Path, warm: None) -> None:
    prompts = [list(range(2, 20)), [7]]
    running = Running(save_model(make_latent(seed=0), tmp_path), routes=True)
    for seed in (0, 1):
        model, chosen = make_latent(seed), []
        model.model.layers[1].mlp.gate.register_forward_hook(lambda gate, inputs, found, to=chosen: to.append(found[2]))
        if seed:
            running.run(update_weights(running.engine, buckets_of(model), version=seed))
        answers = running.batch(prompts, SamplingPlan(max_new_tokens=12), range(len(prompts)))
        for prompt, answer in zip(prompts, answers, strict=True):
            whole = [*prompt, *answer.tokens.tolist()]
            np.testing.assert_allclose(answer.logprobs, hf_logprobs(model, whole)[len(prompt) - 1 :], atol=2e-5, rtol=0)
            wanted = torch.sort(chosen[-1][:-1], -1).values.numpy()
            np.testing.assert_array_equal(np.sort(answer.routes, -1)[:, 1], wanted)
    running.close()
