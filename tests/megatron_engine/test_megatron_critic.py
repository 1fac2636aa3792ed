"""The critic against Hugging Face's model with one label and naive training, under every layout."""

import json
from typing import Any

import megatron_data as data
import megatron_layouts as layouts
import megatron_models as models
import megatron_reference as reference
import numpy as np
import pytest
import torch
from megatron_answers import Answers
from megatron_jobs import critic
from test_megatron_training import assert_close, records

from tests.cover import cover, tiered

LAYOUTS = tiered(critic.CRITIC_LAYOUTS, cover(critic.CRITIC_LAYOUTS, of=layouts.axes))
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def naive(answers: Answers) -> tuple[list[dict], Weights]:
    return reference.naive_critic_training(layouts.model_path(answers.root, "valued"))


def values_of(path: Any) -> list[np.ndarray]:
    network = models.load_critic(path)
    with torch.no_grad():
        return [reference.token_values(network, *sequence).numpy() for sequence in data.sequences(layouts.VOCABULARY)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_are_of_the_state_before_each_token(answers: Answers, layout: str) -> None:
    found = answers.arrays(f"{critic.critic_name(layout)}-values")
    wanted = values_of(layouts.model_path(answers.root, "valued"))
    assert sorted(found, key=int) == [str(number) for number in range(len(wanted))]
    for number, values in enumerate(wanted):
        assert found[str(number)].dtype == np.float32
        np.testing.assert_allclose(found[str(number)], values, rtol=0, atol=1e-5)
    assert np.abs(np.concatenate(wanted)).max() > 0.1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_equals_the_naive_one(answers: Answers, naive: tuple[list[dict], Weights], layout: str) -> None:
    wanted, final = naive
    found = records(answers, critic.critic_name(layout))
    assert len(found) == len(wanted) == data.UPDATES
    for record, plain in zip(found, wanted, strict=True):
        assert record["weighted_loss"] == pytest.approx(plain["loss"], rel=1e-5)
        assert record["grad_norms"] == pytest.approx([plain["grad_norm"]] * len(record["grad_norms"]), rel=1e-5)
        assert record["learning_rate"] == pytest.approx(plain["learning_rate"], rel=1e-6)
        assert all(record["applied"])
    before = dict(models.load_critic(layouts.model_path(answers.root, "valued")).named_parameters())
    assert_close(answers.weights(critic.critic_name(layout)), final, before)


def test_sums_of_the_first_update(answers: Answers) -> None:
    network = models.load_critic(layouts.model_path(answers.root, "valued"))
    tokens = clipped = 0
    total = error = 0.0
    for sample in data.value_samples(0):
        with torch.no_grad():
            values = reference.token_values(network, sample.tokens, sample.prompt_length).numpy()
        for t in np.flatnonzero(sample.action_mask):
            held = np.clip(values[t], sample.old_values[t] - data.VALUE_CLIP, sample.old_values[t] + data.VALUE_CLIP)
            tokens, total = tokens + 1, total + float(values[t])
            error += float(values[t] - sample.returns[t]) ** 2
            clipped += bool((held - sample.returns[t]) ** 2 > (values[t] - sample.returns[t]) ** 2)
    for layout in ("tp2sp", "pp2", "dp2"):
        record = records(answers, critic.critic_name(layout))[0]
        assert (record["tokens"], record["clipped"]) == (tokens, clipped) and clipped > 0
        assert record["values"] == pytest.approx(total, rel=1e-4)
        assert record["squared_error"] == pytest.approx(error, rel=1e-4)


def test_without_a_head_to_take_over_all_values_are_0_at_first(answers: Answers) -> None:
    name = critic.critic_name("tp1", "qwen3")
    found = answers.arrays(f"{name}-values")
    assert len(found) > 2 and not np.concatenate(list(found.values())).any()
    assert answers.weights(name)["score.weight"].any()


@pytest.mark.parametrize(
    ("saved", "loads"),
    tiered(critic.CRITIC_RESUMES, cover(critic.CRITIC_RESUMES, of=lambda case: (case[0] == case[1],))),
)
def test_resumed_equals_uninterrupted(answers: Answers, saved: str, loads: str) -> None:
    name = critic.critic_resume_name(saved, loads)
    straight, resumed = answers.weights(critic.critic_name(saved)), answers.weights(name)
    assert straight.keys() == resumed.keys() and "score.weight" in resumed
    for key, tensor in straight.items():
        if saved == loads:
            assert torch.equal(resumed[key], tensor), key
        else:
            assert (resumed[key] - tensor).abs().max() <= 1e-6, key
    before = records(answers, critic.critic_name(saved))[data.SAVED_AFTER :]
    assert [r["learning_rate"] for r in records(answers, name)] == [r["learning_rate"] for r in before]


def test_what_it_saves_is_a_model_with_one_label(answers: Answers) -> None:
    """Although the initial model is a language model."""
    name = critic.critic_name("tp1", "qwen3")
    path = answers.path(f"{name}.hf")
    config = json.loads((path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]
    model = models.load_critic(path)
    assert model.config.num_labels == 1
    assert answers.weights(name).keys() == dict(model.named_parameters()).keys()
