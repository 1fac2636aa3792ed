"""Slices of Gated DeltaNet and gated attention: positions of the heads, and exact joining."""

import pytest
import torch
from torch import Tensor

from roll_opd.megatron.weights.source import TensorSource
from roll_opd.megatron.weights.tensor_slices import SLICINGS, SliceSizes
from roll_opd.models.families.qwen_hybrid import DeltaSizes

DELTA = DeltaSizes(key_heads=4, value_heads=12, key_width=2, value_width=5, taps=3)
SIZES = SliceSizes(heads=8, kv_heads=4, vocab=1, padded_vocab=1, delta=DELTA)
HIDDEN, WIDTH = 3, 6
Q, V, H = 4 * 2, 12 * 5, 12  # rows of all heads: queries, values, numbers per value head
ROWS = {
    "gated_qkv": (8 * 2 * WIDTH, 4 * WIDTH, 4 * WIDTH),
    "delta_key_heads": (2 * Q + 2 * V, 2 * H),
    "delta_parts": (2 * Q + V, V, H, H),
    "delta_channels": (2 * Q + V,),
}


def tensors(name: str) -> dict[str, Tensor]:
    return {str(number): torch.randn(rows, HIDDEN) for number, rows in enumerate(ROWS[name])}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", ROWS)
def test_joined_parts_are_the_tensors(name: str, ranks: int) -> None:
    given = tensors(name)
    if name == "delta_channels":
        given = {key: tensor[:, None] for key, tensor in given.items()}
    parts = [SLICINGS[name].read(TensorSource(given), list(given), rank, ranks, SIZES) for rank in range(ranks)]
    assert len({part.shape for part in parts}) == 1
    found = SLICINGS[name].join(parts, SIZES)
    assert all(torch.equal(one, other) for one, other in zip(found, given.values(), strict=True))


def test_both_layouts_of_the_input_projection_give_the_same_parameter() -> None:
    """Row by row from their definitions: query, key, values, gates, betas and decays of each key head."""
    q, k = torch.randn(2, 4, 2, HIDDEN)
    v, z = torch.randn(2, 4, 15, HIDDEN)
    b, a = torch.randn(2, 4, 3, HIDDEN)
    wanted = torch.cat([q, k, v, z, b, a], 1).flatten(0, 1)
    parts = {"qkv": torch.cat([x.flatten(0, 1) for x in (q, k, v)]), "z": z.flatten(0, 1)}
    parts |= {"b": b.flatten(0, 1), "a": a.flatten(0, 1)}
    heads = {"qkvz": torch.cat([q, k, v, z], 1).flatten(0, 1), "ba": torch.cat([b, a], 1).flatten(0, 1)}
    for name, given in (("delta_parts", parts), ("delta_key_heads", heads)):
        found = SLICINGS[name].read(TensorSource(given), list(given), 0, 1, SIZES)
        assert torch.equal(found, wanted)


def test_a_config_of_another_release_is_refused() -> None:
    given = tensors("delta_parts")
    given["0"] = given["0"][:-5]
    with pytest.raises(ValueError, match=r"71 rows, but config.json implies 8 \+ 8 \+ 60,"):
        SLICINGS["delta_parts"].read(TensorSource(given), list(given), 0, 1, SIZES)
