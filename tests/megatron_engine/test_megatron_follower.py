"""Weights that follow a student, in every layout: against the formula, per tensor, and Hugging Face's scores.

The workers themselves check on all ranks that a model which follows its own weights does not change, and that a resumed
model continues with the same bits.
"""

import megatron_data as data
import megatron_layouts as layouts
import megatron_models as models
import megatron_reference as reference
import numpy as np
import pytest
import torch
from megatron_answers import Answers
from megatron_jobs import followers
from safetensors.torch import load_file


def averaged(start: dict[str, torch.Tensor], decay: float) -> dict[str, torch.Tensor]:
    """decay * teacher + (1 - decay) * student, in f64."""
    average = {name: tensor.double() for name, tensor in start.items()}
    for times in range(followers.FOLLOWED_TIMES):
        student = followers.learned(start, times)
        average = {name: decay * average[name] + (1 - decay) * student[name].double() for name in average}
    return average


@pytest.mark.parametrize("decay", followers.DECAYS)
@pytest.mark.parametrize("model", followers.FOLLOWED)
@pytest.mark.parametrize("layout", followers.FOLLOW_LAYOUTS)
def test_a_follower_is_the_moving_average(answers: Answers, layout: str, model: str, decay: float) -> None:
    start = load_file(f"{layouts.model_path(answers.root, model)}/model.safetensors")
    wanted, found = averaged(start, decay), answers.weights(f"follow-{layout}-{model}-{decay}")
    is_apart = decay and followers.FOLLOWED[model] == "bf16"
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        expected = wanted[name].float()
        if not decay:  # the student's own weights, in the precision of the teacher
            expected = expected.bfloat16() if followers.FOLLOWED[model] == "bf16" else expected
            assert torch.equal(tensor, expected), name
        else:  # in f32, also of a teacher that computes in bf16
            assert tensor.dtype is torch.float32 and (
                not is_apart or not torch.equal(tensor, tensor.bfloat16().float())
            )
            torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("layout", followers.FOLLOW_LAYOUTS[1:])
def test_every_layout_has_the_same_bits(answers: Answers, layout: str) -> None:
    for model in followers.FOLLOWED:
        for decay in followers.DECAYS:
            one, other = (answers.weights(f"follow-{name}-{model}-{decay}") for name in ("tp1", layout))
            assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("decay", followers.DECAYS)
@pytest.mark.parametrize("layout", followers.FOLLOW_LAYOUTS)
def test_it_scores_with_the_weights_that_it_has(answers: Answers, layout: str, decay: float) -> None:
    name = f"follow-{layout}-qwen3_tied-{decay}"
    model = models.load(answers.path(f"{name}.hf"))
    for number, values in answers.arrays(name).items():
        tokens, prompt = data.sequences(layouts.VOCABULARY)[int(number)]
        wanted = reference.token_logprobs(model, tokens, prompt, 1.0).detach().numpy()
        np.testing.assert_allclose(values, wanted, rtol=0, atol=1e-5)
