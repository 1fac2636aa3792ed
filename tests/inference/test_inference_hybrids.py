"""Gated DeltaNet on CPUs: log-probs of Qwen3.5 are exact except for the rounding of bf16."""

import json
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from inference_models import Running, buckets_of, hf_logprobs, make_hybrid, save_model, update_weights
from plan_sources import hybrid_config

from roll_opd.base.torch_imports import IMPORTER, import_without_torchvision
from roll_opd.config.plan import ModelPlan, SamplingPlan
from roll_opd.inference.engine_arguments import resolve_engine_args


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed here")
def test_vision_code_of_transformers_is_importable_without_torchvision() -> None:
    import_without_torchvision()
    module = import_module(IMPORTER)
    assert module.smart_resize(64, 64)
    assert sys.modules.get("torchvision") is None  # it stays missing for others
    with pytest.raises(ImportError, match="torchvision is not installed"):
        module.tvF.resize()


def test_engines_leave_out_the_vision_part_and_cache_no_prefixes_of_hybrids_on_cpus(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hybrid_config("Qwen3.5-2B")))
    model, same = ModelPlan(str(tmp_path), "bf16"), {"max_model_len": 32, "seed": 3, "tensor_parallel_size": 1}
    found = resolve_engine_args(model, on_cpu=True, engine_args={}, **same)
    assert found["language_model_only"] is True and found["enable_prefix_caching"] is False
    assert "enable_prefix_caching" not in resolve_engine_args(model, on_cpu=False, engine_args={}, **same)


@pytest.mark.nightly
def test_logprobs_are_as_near_to_exact_ones_as_those_of_transformers(tmp_path: Path, warm: None) -> None:
    """Before and after new weights; the mean distance is at most three times that of transformers in bf16."""
    prompts = [list(range(2, 20)), [7], list(range(90, 60, -1))]
    running = Running(save_model(make_hybrid(seed=0), tmp_path), "bf16")
    for seed in (0, 1):
        model = make_hybrid(seed)
        if seed:
            running.run(update_weights(running.engine, buckets_of(model), version=seed))
        answers = running.batch(prompts, SamplingPlan(max_new_tokens=24), range(len(prompts)))
        ours, theirs, spread = [], [], []
        for prompt, answer in zip(prompts, answers, strict=True):
            whole = [*prompt, *answer.tokens.tolist()]
            exact = hf_logprobs(make_hybrid(seed).float(), whole)[len(prompt) - 1 :]
            ours.append(np.abs(answer.logprobs - exact))
            theirs.append(np.abs(hf_logprobs(model, whole)[len(prompt) - 1 :] - exact))
            spread.append(exact)
        distance, rounding = (np.concatenate(values).mean() for values in (ours, theirs))
        assert distance <= 3 * rounding < 0.3 * np.concatenate(spread).std()
    running.close()
