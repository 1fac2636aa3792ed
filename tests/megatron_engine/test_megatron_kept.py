"""Layers of multi-token prediction, as in DeepSeek-V3 and GLM-4.5: export writes the bytes of the original model."""

from pathlib import Path

import megatron_layouts as layouts
import megatron_models as models
import pytest
import torch
from megatron_answers import Answers
from megatron_jobs.kept import MERGED, TRAINED
from safetensors.torch import load_file

from roll_opd.models.model_info import read_model
from roll_opd.models.weight_files import weight_problems
from tests.cover import tiered

CASES = [(model, layout, state) for model, layout in TRAINED for state in ("-start", "")]
CASES.append((*MERGED, ""))


def tensors_in(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def content(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(("model", "layout", "state"), tiered(CASES, CASES[:2]))
def test_export_keeps_the_layers_of_multi_token_prediction(
    answers: Answers, model: str, layout: str, state: str
) -> None:
    """Before and after training and with merged adapters; transformers and `roll-opd` read the result."""
    source = Path(layouts.model_path(answers.root, model))
    exported = answers.path(f"kept-{model}-{layout}{state}.hf")
    before, after = tensors_in(source), tensors_in(exported)
    assert after.keys() == before.keys()
    layer = f"model.layers.{models.CONFIGS[model.removesuffix('_mtp')]().num_hidden_layers}."
    kept = {name for name in before if name.startswith(layer)}
    same = kept if state == "" else before.keys()
    assert len(kept) == 5 and all(content(after[name]) == content(before[name]) for name in same)
    assert state or any(content(after[name]) != content(before[name]) for name in before.keys() - kept)
    info = read_model(exported)
    assert info.parameters == sum(tensor.numel() for name, tensor in after.items() if name not in kept)
    assert set(info.kept) == kept and not [text for text in weight_problems(info) if "num_hidden_layers" in text]
    loaded = models.load(exported).state_dict()
    named = loaded.keys() & after.keys() - kept
    assert "model.norm.weight" in named and all(torch.equal(loaded[name], after[name]) for name in named)
