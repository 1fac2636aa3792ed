"""LoRA in every layout: against peft on Hugging Face's model, and layouts compared with each other."""

import math
from typing import Any

import megatron_data as data
import megatron_layouts as layouts
import megatron_models as models
import megatron_reference as reference
import numpy as np
import pytest
import torch
from megatron_answers import Answers
from megatron_jobs import lora
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.cover import cover, tiered

LAYOUTS = tiered(
    lora.LORA_LAYOUTS, cover(lora.LORA_LAYOUTS, of=lambda layout: (*layouts.axes(layout), lora.LORA_LAYOUTS[layout]))
)
Trained = dict[str, tuple[list[dict], dict[str, torch.Tensor]]]


def base(answers: Answers, kind: str) -> str:
    return layouts.model_path(answers.root, lora.LORA_MODELS[kind])


def beginning(answers: Answers, layout: str) -> Any:
    return answers.root / "models" / f"adapter-{len(lora.LORA_TARGETS[lora.LORA_LAYOUTS[layout]])}"


@pytest.fixture(scope="module")
def naive(answers: Answers) -> Trained:
    """For each kind of adapter, the result of the same updates with peft and torch."""
    return {
        kind: reference.naive_lora_training(base(answers, kind), answers.root / "models" / f"adapter-{len(targets)}")
        for kind, targets in lora.LORA_TARGETS.items()
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_equals_pefts(answers: Answers, naive: Trained, layout: str) -> None:
    wanted, final = naive[lora.LORA_LAYOUTS[layout]]
    found = answers.values(f"lora-{layout}")
    for record, plain in zip(found, wanted, strict=True):
        assert record["weighted_loss"] == pytest.approx(plain["loss"], rel=1e-5, abs=1e-6)
        assert record["grad_norms"] == pytest.approx([plain["grad_norm"]] * len(record["grad_norms"]), rel=1e-5)
        assert all(record["applied"])
    exported = load_file(answers.path(f"lora-{layout}.adapter") / "adapter_model.safetensors")
    begun = load_file(beginning(answers, layout) / "adapter_model.safetensors")
    by_name = {name.replace(".default.", "."): tensor for name, tensor in final.items()}
    assert exported.keys() == by_name.keys() == begun.keys()
    for name, tensor in by_name.items():
        assert (exported[name] - tensor).abs().max() <= 1e-5 * tensor.abs().max(), name
        moved = (tensor - begun[name]).norm()
        assert (exported[name] - tensor).norm() <= 2e-3 * moved, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_peft_loads_the_adapter_and_the_merged_model_is_both(answers: Answers, layout: str) -> None:
    name = f"lora-{layout}"
    adapted = models.load_adapted(base(answers, lora.LORA_LAYOUTS[layout]), answers.path(f"{name}.adapter"))
    merged, found = models.load(answers.path(f"{name}.hf")), answers.arrays(f"{name}-on")
    for number, (tokens, prompt) in enumerate(data.sequences(layouts.VOCABULARY)):
        with torch.no_grad():
            wanted = reference.token_logprobs(adapted, tokens, prompt, 1.0).numpy()
            also = reference.token_logprobs(merged, tokens, prompt, 1.0).numpy()
        np.testing.assert_allclose(found[str(number)], wanted, rtol=0, atol=1e-5)
        np.testing.assert_allclose(also, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_switched_off_or_zero_an_adapter_changes_no_bit(answers: Answers, layout: str) -> None:
    """Compared with a model without an adapter in the same layout."""
    plain = answers.arrays(f"lora-{layout}-base")
    for state in ("off", "zero"):
        found = answers.arrays(f"lora-{layout}-{state}")
        assert found.keys() == plain.keys()
        assert all(np.array_equal(found[number], plain[number]) for number in plain), state
    assert any(not np.array_equal(answers.arrays(f"lora-{layout}-on")[number], plain[number]) for number in plain)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters_begin_with_the_same_numbers_in_every_layout(answers: Answers, layout: str) -> None:
    """B is zero; A is uniform within 1 / sqrt(inputs), as peft draws it."""
    alone = {"attention": "ep2", "experts": "tp2ep2"}.get(lora.LORA_LAYOUTS[layout], "tp1")
    first = load_file(answers.path(f"lora-{alone}-zero.adapter") / "adapter_model.safetensors")
    found = load_file(answers.path(f"lora-{layout}-zero.adapter") / "adapter_model.safetensors")
    for name, tensor in found.items():
        assert torch.equal(tensor, first[name]), name
        if ".lora_B." in name:
            assert not tensor.any(), name
        else:
            bound = tensor.size(1) ** -0.5
            assert 0.8 * bound < tensor.abs().max() <= bound and abs(tensor.mean()) < 0.3 * bound, name


@pytest.mark.parametrize(
    ("saved", "loads"), tiered(lora.LORA_RESUMES, cover(lora.LORA_RESUMES, of=lambda case: (case[0] == case[1],)))
)
def test_resumed_equals_uninterrupted(answers: Answers, saved: str, loads: str) -> None:
    straight, resumed = (
        load_file(answers.path(f"{name}.adapter") / "adapter_model.safetensors")
        for name in (f"lora-{saved}", f"lora-{saved}-resumed-{loads}")
    )
    whole, rest = (answers.values(f"{name}") for name in (f"lora-{saved}", f"lora-{saved}-resumed-{loads}"))
    for left, right in zip(whole[data.SAVED_AFTER :], rest, strict=True):
        assert right["weighted_loss"] == pytest.approx(left["weighted_loss"], rel=1e-5)
        assert right["grad_norms"][0] == pytest.approx(left["grad_norms"][0], rel=1e-5)
    for name, tensor in straight.items():
        if saved == loads:
            assert torch.equal(resumed[name], tensor), name
        else:
            assert (resumed[name] - tensor).abs().max() <= 1e-6, name


def test_a_checkpoint_holds_the_adapter_alone(answers: Answers) -> None:
    """The matrices, two moments and a master copy of each; nothing of the base."""
    adapter = load_file(beginning(answers, "tp2") / "adapter_model.safetensors")
    entries = FileSystemReader(answers.path("lora-tp2.ckpt")).read_metadata().state_dict_metadata
    tensors = {name: math.prod(of.size) for name, of in entries.items() if isinstance(of, TensorStorageMetadata)}
    assert all(".lora_" in name for name in tensors if tensors[name] > 1), tensors
    assert sum(tensors.values()) == 4 * sum(tensor.numel() for tensor in adapter.values())
