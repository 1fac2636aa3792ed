"""An engine with a LoRA adapter beside the base: log-probs against peft, versions, and refused updates."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from inference_models import Running, hf_logprobs, make_mixture, make_model, running, save_model, update_weights
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict

from roll_opd.config.plan import LoraPlan, ModelPlan, SamplingPlan
from roll_opd.inference.engine_arguments import vllm_arguments
from roll_opd.inference.plugin import SHARED_MEMORY
from roll_opd.inference.weight_updates import WeightUpdateError
from roll_opd.models.adapter_files import adapted_modules, adapter_config, tensor_name
from roll_opd.models.model_info import read_model

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, ALPHA = 5, 15.0  # a rank for which vLLM's buffers are too large
PROMPTS = [[5, 6, 7], [50, 40, 30, 20, 10], [3], list(range(2, 42))]
VERSIONS = itertools.count(1)


def adapted(base: Any, seed: int) -> PeftModel:
    """Return `base` with an adapter in which every matrix depends on `seed`."""
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(LAYERS))
    model: Any = get_peft_model(base, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def matrices(model: PeftModel) -> dict[str, torch.Tensor]:
    return dict(get_peft_model_state_dict(model))


def send(engine: Running, tensors: dict[str, torch.Tensor], buckets: int = 3) -> None:
    names = list(tensors)
    parts = [{name: tensors[name] for name in names[first::buckets]} for first in range(buckets)]
    engine.run(update_weights(engine.engine, parts, next(VERSIONS)))


@pytest.fixture(scope="module")
def engine(tiny_model_path: str, warm: None) -> Iterator[Running]:
    yield from running(tiny_model_path, adapter=LoraPlan(LAYERS, RANK, ALPHA))


def test_log_probs_are_pefts_after_every_update(engine: Running) -> None:
    """Before the first update, the engine has the base model. Afterwards, each update replaces the adapter."""
    tokens = np.random.default_rng(0).integers(2, 99, 60).tolist()
    before = engine.run(engine.engine.prompt_logprobs(tokens))
    np.testing.assert_allclose(before, hf_logprobs(make_model(seed=0), tokens), atol=1e-5, rtol=0)
    for seed in (1, 2):
        model = adapted(make_model(seed=0), seed)
        send(engine, matrices(model))
        found = engine.run(engine.engine.prompt_logprobs(tokens))
        np.testing.assert_allclose(found, hf_logprobs(model, tokens), atol=2e-5, rtol=0)
        assert np.abs(found - before).max() > 0.1
        before = found
        completions = engine.batch(PROMPTS, SamplingPlan(max_new_tokens=16, temperature=0.7), range(4))
        for prompt, completion in zip(PROMPTS, completions, strict=True):
            sampled = hf_logprobs(model, [*prompt, *completion.tokens.tolist()], 0.7)[len(prompt) - 1 :]
            np.testing.assert_allclose(completion.logprobs, sampled, atol=2e-5, rtol=0)
            assert {version for version, _ in completion.versions} == {engine.engine.updates.version}


@pytest.mark.nightly
def test_updates_leave_nothing_behind(engine: Running) -> None:
    """200 updates: memory of the engine core, and files in /dev/shm."""
    tensors = matrices(adapted(make_model(seed=0), 3))
    [core] = [each for each in psutil.Process().children(recursive=True) if "EngineCore" in " ".join(each.cmdline())]
    send(engine, tensors)
    files, bytes_before = set(Path("/dev/shm").iterdir()), 0
    for number in range(200):
        send(engine, tensors)
        bytes_before = core.memory_info().rss if number == 20 else bytes_before
    assert core.memory_info().rss - bytes_before < 2**20 * 2
    assert set(Path("/dev/shm").iterdir()) <= files


@pytest.mark.nightly
@pytest.mark.parametrize(
    "fault",
    ["half", "layer", "twice"],
)
def test_an_incomplete_adapter_fails_the_update(tiny_model_path: str, fault: str, warm: None) -> None:
    tensors = matrices(adapted(make_model(seed=0), 1))
    lacking = {"half": r"layers\.1\.mlp\.up_proj\.lora_B", "layer": r"layers\.1\.mlp\.up_proj", "twice": "$^"}[fault]
    found = {name: tensor for name, tensor in tensors.items() if not re.search(lacking, name)}
    broken = Running(tiny_model_path, adapter=LoraPlan(LAYERS, RANK, ALPHA))
    buckets = [found, dict([next(iter(found.items()))])] if fault == "twice" else [found]
    with pytest.raises(WeightUpdateError, match="twice" if fault == "twice" else r"layers\.1\.mlp\.up_proj"):
        broken.run(update_weights(broken.engine, buckets, 1))
    broken.close()


@pytest.mark.nightly
def test_two_ranks_hold_their_parts(tiny_model_path: str) -> None:
    tokens = np.random.default_rng(0).integers(2, 99, 60).tolist()
    for one in running(tiny_model_path, adapter=LoraPlan(LAYERS, RANK, ALPHA), tensor_parallel_size=2):
        model = adapted(make_model(seed=0), 1)
        send(one, matrices(model))
        found = one.run(one.engine.prompt_logprobs(tokens))
        np.testing.assert_allclose(found, hf_logprobs(model, tokens), atol=2e-5, rtol=0)


def test_vllm_packs_the_matrices_of_all_experts(tmp_path: Path) -> None:
    """As far as it goes on a CPU: names, target modules and packing, with vLLM's code for adapters of experts."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import PackedLoRALayerWeights
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.lora.utils import is_in_target_modules
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    base, plan = save_model(make_mixture(seed=0), tmp_path), LoraPlan(LAYERS, RANK, ALPHA)
    model = read_model(tmp_path)
    tensors = {
        tensor_name(module, matrix): torch.randn(*((RANK, columns) if matrix == "A" else (rows, RANK)))
        for module in sorted(adapted_modules(model, LAYERS))
        for rows, columns in [model.tensors[f"{module}.weight"].shape]
        for matrix in "AB"
    }
    helper = PEFTHelper.from_dict(adapter_config(base, RANK, ALPHA, LAYERS))
    found = LoRAModel.from_lora_tensors(1, tensors, helper, device="cpu", dtype=torch.float32)
    mapping = RoutedExperts.make_expert_params_mapping(torch.nn.Module(), "gate_proj", "down_proj", "up_proj", 4)
    names = [name.rstrip(".") for _, name, _, _ in mapping]
    given = {"max_model_len": 64, "seed": 0, "tensor_parallel_size": 1, "engine_args": {}, "sleeps": False}
    arguments = vllm_arguments(ModelPlan(base), **given, routes=False, weight_transfer=SHARED_MEMORY, adapter=plan)
    targets = arguments.lora_target_modules
    assert is_in_target_modules("model.layers.1.mlp.experts", targets, {"experts": names})
    assert not is_in_target_modules("model.layers.1.mlp.gate", targets, {"experts": names})
    packed = PackedLoRALayerWeights.pack_moe(
        [found.get_lora(f"model.layers.1.mlp.{name}") for name in names], "experts"
    )
    for number, part in enumerate(("gate_proj", "down_proj", "up_proj")):
        for expert in range(4):
            module = f"model.layers.1.mlp.experts.{expert}.{part}"
            assert torch.equal(packed.lora_a[number][expert], tensors[tensor_name(module, "A")])
            assert torch.equal(packed.lora_b[number][expert], tensors[tensor_name(module, "B")])
        assert packed.scaling[number] == ALPHA / RANK
