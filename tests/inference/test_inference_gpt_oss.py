"""gpt-oss on CPUs, on one rank and on two: log-probs equal Hugging Face's, before and after a weight update."""

from pathlib import Path

import numpy as np
import pytest
from inference_models import Running, buckets_of, hf_logprobs, make_gpt_oss, save_model, update_weights

from roll_opd.config.plan import SamplingPlan


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2])
def test_sinks_windows_and_biased_experts_are_hugging_faces(tmp_path: Path, warm: None, ranks: int) -> None:
    prompts = [list(range(2, 20)), [7]]
    running = Running(save_model(make_gpt_oss(seed=0), tmp_path), tensor_parallel_size=ranks)
    for seed in (0, 1):
        model = make_gpt_oss(seed)
        if seed:
            running.run(update_weights(running.engine, buckets_of(model), version=seed))
        answers = running.batch(prompts, SamplingPlan(max_new_tokens=12), range(len(prompts)))
        for prompt, answer in zip(prompts, answers, strict=True):
            whole = [*prompt, *answer.tokens.tolist()]
            np.testing.assert_allclose(answer.logprobs, hf_logprobs(model, whole)[len(prompt) - 1 :], atol=2e-5, rtol=0)
    running.close()
