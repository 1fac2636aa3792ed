"""The chunked, vocabulary-parallel log-probs against log_softmax in double precision."""

import json

import megatron_cases as cases
import numpy as np
import pytest
import torch
from conftest import Launches


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("layout", ["tp1", "tp2"])
def test_values_and_gradients(launches: Launches, layout: str, temperature: float) -> None:
    """For chunks of one row, of an odd number and of all rows; what pads the vocabulary takes no part."""
    found = launches.run(str(cases.LAYOUTS[layout].world_size)).arrays(f"vocab-{layout}")
    hidden, weight, targets, incoming = cases.vocab_inputs(cases.VOCAB_ROWS, cases.VOCAB_WIDTH, cases.VOCABULARY)
    hidden_ME = torch.from_numpy(hidden).double().requires_grad_()
    weight_VE = torch.from_numpy(weight).double().requires_grad_()
    logits_MV = hidden_ME @ weight_VE.T / temperature
    wanted = logits_MV.log_softmax(-1).gather(1, torch.from_numpy(targets)[:, None])[:, 0]
    wanted.backward(torch.from_numpy(incoming).double())
    for chunks in cases.VOCAB_CHUNK_ROWS:
        key = f"{chunks}-{temperature}"
        np.testing.assert_allclose(found[f"{key}-logprobs"], wanted.detach().numpy(), rtol=0, atol=1e-5)
        np.testing.assert_allclose(found[f"{key}-hidden"], hidden_ME.grad.numpy(), rtol=0, atol=2e-5)
        weight_grad = found[f"{key}-weight"]
        np.testing.assert_allclose(weight_grad[: cases.VOCABULARY], weight_VE.grad.numpy(), rtol=0, atol=2e-5)
        assert len(weight_grad) > cases.VOCABULARY and not weight_grad[cases.VOCABULARY :].any()


def test_memory_is_bounded_by_the_chunk(launches: Launches) -> None:
    """No tensor of the forward or backward pass is larger than a chunk; with one chunk, all logits are there."""
    launches.run("1")
    largest = {int(key): value for key, value in json.loads((launches.root / "memory.json").read_text()).items()}
    all_logits = 256 * 20_000 * 4
    assert 2**19 < largest[2**20] <= 2**20
    assert largest[2**30] == all_logits
