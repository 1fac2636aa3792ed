"""Updates, checkpoints and refused updates: against naive training with Hugging Face and torch, and across layouts."""

from functools import cache
from types import SimpleNamespace
from typing import Any

import megatron_data as data
import megatron_layouts as layouts
import megatron_models as models
import megatron_reference as reference
import numpy as np
import pytest
import torch
from megatron_answers import Answers
from megatron_jobs import poison, training
from transformers import get_scheduler

from roll_opd.config.plan import OptimizerPlan
from roll_opd.megatron.learner_engine import _learning_rate_schedule
from tests.cover import cover, tiered

VARIANTS = [(layout, *variant) for layout in training.TRAIN_LAYOUTS for variant in training.train_variants(layout)]
PUSHED = cover(VARIANTS, of=lambda variant: (*layouts.axes(variant[0]), *variant[1:]))
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def naive(answers: Answers) -> Any:
    """(records, final weights) of the naive training of a model."""

    @cache
    def train(model: str) -> tuple[list[dict], Weights]:
        objective = data.TRAIN_MODELS[model]
        return reference.naive_training(layouts.model_path(answers.root, model), objective, data.OBJECTIVES[objective])

    return train


def records(answers: Answers, name: str) -> list[dict]:
    return answers.values(f"{name}")


def start(answers: Answers, model: str) -> Weights:
    return dict(models.load(layouts.model_path(answers.root, model)).named_parameters())


def assert_close(actual: Weights, wanted: Weights, before: Weights, relative: float = 1e-5) -> None:
    """Compare within `relative` of each tensor's scale, and (stricter) compare the changes of the weights."""
    assert actual.keys() == wanted.keys()
    for name, tensor in wanted.items():
        distance = (actual[name] - tensor).abs().max()
        assert distance <= relative * tensor.abs().max(), (name, float(distance))
        moved = (tensor - before[name]).norm()
        assert moved > 0, name
        assert (actual[name] - tensor).norm() <= 2e-3 * moved, (name, float((actual[name] - tensor).norm() / moved))


@pytest.mark.parametrize(("layout", "model", "distributed", "tokens"), tiered(VARIANTS, PUSHED))
def test_training_equals_the_naive_one(
    answers: Answers, naive: Any, layout: str, model: str, distributed: bool, tokens: int | None
) -> None:
    name = training.train_name(model, layout, distributed, tokens)
    wanted, final = naive(model)
    found = records(answers, name)
    assert len(found) == len(wanted) == data.UPDATES
    for step, (record, plain) in enumerate(zip(found, wanted, strict=True)):
        samples = data.train_samples(step, data.TRAIN_MODELS[model])
        assert record["weighted_loss"] == pytest.approx(plain["loss"], rel=1e-5, abs=1e-6)
        assert record["grad_norms"] == pytest.approx([plain["grad_norm"]] * len(record["grad_norms"]), rel=1e-5)
        assert record["learning_rate"] == pytest.approx(plain["learning_rate"], rel=1e-6)
        assert record["tokens"] == sum(int(sample.action_mask.sum()) for sample in samples)
        assert all(record["applied"])
    assert_close(answers.weights(name), final, start(answers, model))


def test_clipping_bites(naive: Any) -> None:
    """Guards the test above: without clipping, a wrong norm would show nowhere in the weights."""
    for model in data.TRAIN_MODELS:
        norms = [record["grad_norm"] for record in naive(model)[0]]
        assert max(norms) > data.optimizer_plan(False).max_grad_norm


@pytest.mark.parametrize(("layout", "model", "distributed", "tokens"), tiered(VARIANTS, PUSHED))
def test_update_reports_every_samples_logprobs(
    answers: Answers, layout: str, model: str, distributed: bool, tokens: int | None
) -> None:
    found = answers.arrays(f"{training.train_name(model, layout, distributed, tokens)}-first")
    network = models.load(layouts.model_path(answers.root, model))
    samples = data.train_samples(0, data.TRAIN_MODELS[model])
    assert sorted(found, key=int) == [str(number) for number in range(len(samples))]
    for number, sample in enumerate(samples):
        with torch.no_grad():
            wanted = reference.token_logprobs(network, sample.tokens, sample.prompt_length, data.TEMPERATURE)
        np.testing.assert_allclose(found[str(number)], wanted.numpy(), rtol=0, atol=1e-5)


def test_ratio_clipped_and_approx_kl_follow_their_definitions(answers: Answers) -> None:
    """`ratio`, `clipped` and `approx_kl` of the first update, from their definitions."""
    model, objective = "qwen2_tied", data.OBJECTIVES["ppo"]
    network = models.load(layouts.model_path(answers.root, model))
    ratio = clipped = kl = 0.0
    for sample in data.train_samples(0, "ppo"):
        with torch.no_grad():
            new = reference.token_logprobs(network, sample.tokens, sample.prompt_length, data.TEMPERATURE)
        for t in np.flatnonzero(sample.action_mask):
            difference = float(new[t]) - float(sample.old_logprobs[t])
            value = np.exp(difference)
            ratio += value
            low, high = (objective.policy_loss_args.get(end, 0.2) for end in ("clip_low", "clip_high"))
            clipped += not 1 - low <= value <= 1 + high
            kl += value - 1 - difference  # of old against new, on samples of the old
    for layout in ("tp2", "pp2", "dp2"):
        record = records(answers, training.train_name(model, layout, True, 70))[0]
        assert record["ratio"] == pytest.approx(ratio, rel=1e-4)
        assert record["clipped"] == clipped > 0
        assert record["approx_kl"] == pytest.approx(kl, rel=1e-4)


@pytest.mark.parametrize("layout", ["tp2", "tp2sp", "pp2", "dp2", "cp2"])
def test_fewer_samples_than_ranks(answers: Answers, layout: str) -> None:
    """A rank without a sample still takes part in the update."""
    one, other = records(answers, "few-tp1"), records(answers, f"few-{layout}")
    for left, right in zip(one, other, strict=True):
        assert right["weighted_loss"] == pytest.approx(left["weighted_loss"], rel=1e-5, abs=1e-6)
        assert right["grad_norms"] == pytest.approx(left["grad_norms"] * 2, rel=1e-5)
    before = start(answers, "qwen3_tied")
    assert_close(answers.weights(f"few-{layout}"), answers.weights("few-tp1"), before)


@pytest.mark.parametrize(("saved", "loads", "distributed", "tokens"), tiered(training.RESUMES, cover(training.RESUMES)))
def test_resumed_equals_uninterrupted(
    answers: Answers, saved: str, loads: str, distributed: bool, tokens: int | None
) -> None:
    """Bit for bit under the layout that saved; under another, as near as the layouts are to each other."""
    straight_name = training.train_name(training.resumed_model(saved, loads), saved, distributed, tokens)
    name = training.resume_name(saved, loads, distributed)
    straight, resumed = answers.weights(straight_name), answers.weights(name)
    before, after = records(answers, straight_name)[data.SAVED_AFTER :], records(answers, name)
    assert [r["learning_rate"] for r in after] == [r["learning_rate"] for r in before]
    assert straight.keys() == resumed.keys()
    for key, tensor in straight.items():
        if saved == loads:
            assert torch.equal(resumed[key], tensor), key
        else:
            assert (resumed[key] - tensor).abs().max() <= 1e-6, key
    if saved == loads:
        assert after == before
    for left, right in zip(before, after, strict=True):
        assert right["weighted_loss"] == pytest.approx(left["weighted_loss"], rel=1e-5)
        assert right["grad_norms"][0] == pytest.approx(left["grad_norms"][0], rel=1e-5)


@pytest.mark.parametrize("layout", poison.POISON)
def test_update_that_is_not_finite_is_skipped(answers: Answers, layout: str) -> None:
    """Weights and optimizer are unchanged on every rank, and the next update is not affected."""
    ranks = records(answers, f"poison-{layout}")
    assert len(ranks) == 2
    for facts in ranks:
        assert facts == {
            "applied": [False, False, False, True],
            "untouched": True,
            "moved": True,
            "no_trace": True,
        }


@pytest.mark.parametrize("layout", tiered(training.HALF_LAYOUTS, training.HALF_PUSHED))
def test_bf16_with_master_weights_follows_f32(answers: Answers, naive: Any, layout: str) -> None:
    """The bounds follow from the 8 bits of precision of bf16 and their effect on sums."""
    wanted, final = naive("deep")
    for record, plain in zip(records(answers, f"half-{layout}"), wanted, strict=True):
        assert record["weighted_loss"] == pytest.approx(plain["loss"], abs=2e-3)
        assert record["grad_norms"] == pytest.approx([plain["grad_norm"]] * len(record["grad_norms"]), rel=2e-2)
        assert all(record["applied"])
    weights = answers.weights(f"half-{layout}")
    assert weights.keys() == final.keys()
    for name, tensor in final.items():
        assert weights[name].dtype == torch.bfloat16
        assert (weights[name].float() - tensor).abs().max() <= 1e-2 * tensor.abs().max(), name


def test_the_last_update_has_a_learning_rate_above_zero() -> None:
    """Against transformers' schedules, whose learning rate reaches 0 after the last update."""
    total = 5
    for kind in ("linear", "cosine"):
        plan = OptimizerPlan(learning_rate=1.0, lr_scheduler_type=kind, total_steps=total)
        group: dict[str, Any] = {"lr": 0.0}
        schedule = _learning_rate_schedule(SimpleNamespace(param_groups=[group]), plan)
        rates = []
        for _ in range(total):
            schedule.step(1)
            rates.append(group["lr"])
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        theirs = get_scheduler(kind, optimizer, 0, total + 1)  # its first learning rate is that of no update of ours
        expected = []
        for _ in range(total):
            optimizer.step()
            theirs.step()
            expected.append(theirs.get_last_lr()[0])
        np.testing.assert_allclose(rates, expected)
        assert rates[-1] > 0
