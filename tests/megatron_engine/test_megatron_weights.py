"""Hugging Face's tensors in Megatron's parameters: against a loop over heads and rows, and converted back."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from transformers import Qwen3Config

from roll_opd.megatron.model_builder import enabled_attention_backend
from roll_opd.megatron.weights.model_weights import ENDS, CheckedSource, ModelWeights, is_zeroed
from roll_opd.megatron.weights.source import TensorSource
from roll_opd.megatron.weights.tensor_slices import SLICINGS, SliceSizes, TensorSlice
from roll_opd.models.families import FAMILIES

WIDTH, HEADS, KV_HEADS, HEAD, MLP, VOCABULARY = 6, 8, 4, 3, 20, 21
SIZES = SliceSizes(HEADS, KV_HEADS, VOCABULARY, padded_vocab=24)
ROWS = {"q": HEADS * HEAD, "k": KV_HEADS * HEAD, "v": KV_HEADS * HEAD, "gate": MLP, "up": MLP, "vocab": VOCABULARY}
TENSORS = {name: torch.randn(rows, WIDTH) for name, rows in ROWS.items()}
TENSORS |= {"down": torch.randn(WIDTH, MLP), "norm": torch.randn(WIDTH)}
TENSORS |= {f"{x}_bias": torch.randn(ROWS[x]) for x in "qkv"}
CUTS: list[tuple[TensorSlice, tuple[str, ...]]] = [
    (SLICINGS["replicated"], ("norm",)),
    (SLICINGS["rows"], ("gate",)),
    (SLICINGS["columns"], ("down",)),
    (SLICINGS["gate_up"], ("gate", "up")),
    (SLICINGS["qkv"], ("q", "k", "v")),
    (SLICINGS["qkv"], ("q_bias", "k_bias", "v_bias")),
    (SLICINGS["vocabulary"], ("vocab",)),
]


def shards(cut: TensorSlice, names: tuple[str, ...], ranks: int) -> list[Tensor]:
    return [cut.read(TensorSource(TENSORS), names, rank, ranks, SIZES) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("cut", "names"), CUTS)
def test_joined_shards_are_the_whole_tensors(cut: TensorSlice, names: tuple[str, ...], ranks: int) -> None:
    pieces = shards(cut, names, ranks)
    assert len({piece.shape for piece in pieces}) == 1
    joined = cut.join(pieces, SIZES)
    assert len(joined) == len(names)
    for name, tensor in zip(names, joined, strict=True):
        assert torch.equal(tensor, TENSORS[name])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_query_heads_are_cut_with_their_key_head(ranks: int) -> None:
    q, k, v = (TENSORS[name].unflatten(0, (-1, HEAD)) for name in "qkv")
    wanted = []
    for head in range(KV_HEADS):
        wanted += [q[2 * head], q[2 * head + 1], k[head], v[head]]
    assert torch.equal(torch.cat(shards(SLICINGS["qkv"], ("q", "k", "v"), ranks)), torch.cat(wanted))


def test_gates_and_rows_of_a_rank() -> None:
    first, second = shards(SLICINGS["gate_up"], ("gate", "up"), 2)
    gate, up = TENSORS["gate"], TENSORS["up"]
    assert torch.equal(first, torch.cat([gate[:10], up[:10]])) and torch.equal(second, torch.cat([gate[10:], up[10:]]))
    pieces = shards(SLICINGS["vocabulary"], ("vocab",), 4)
    assert torch.equal(torch.cat(pieces)[:VOCABULARY], TENSORS["vocab"]) and not pieces[-1][3:].any()


def test_a_size_that_does_not_divide_is_reported_by_name() -> None:
    with pytest.raises(ValueError, match="gate: dimension 0 of size 20 is not divisible by 3 tensor ranks"):
        shards(SLICINGS["gate_up"], ("gate", "up"), 3)


def test_layers_with_rows_of_zeros_count_as_lost() -> None:
    layer = "model.layers.0.mlp.up_proj.weight"
    healthy = torch.randn(200, 4)
    half = torch.cat([healthy, torch.zeros(200, 4)])
    embedding = "model.embed_tokens.weight"
    assert not is_zeroed(layer, healthy) and not is_zeroed(embedding, half)
    assert is_zeroed(layer, half) and is_zeroed(layer, -torch.zeros(9, 3)) and is_zeroed(embedding, torch.zeros(9, 3))
    assert not is_zeroed("model.layers.0.self_attn.q_proj.bias", torch.zeros(5)) and not is_zeroed(
        layer, torch.zeros(0, 4)
    )
    source = TensorSource({embedding: torch.zeros(9, 3), layer: half})
    with pytest.raises(ValueError, match=r"up_proj\.weight is zero in at least half"):
        CheckedSource(source).part(layer, 0, 200, 400)
    with pytest.raises(ValueError, match=r"embed_tokens\.weight is zero in at least half"):
        CheckedSource(source).part(embedding, 0, 0, 9)
    three_quarters = TensorSource({layer: torch.cat([healthy, healthy, healthy, torch.zeros(200, 4)])})
    CheckedSource(three_quarters).part(layer, 0, 600, 800)  # padded heads, the whole of which is on one rank


def test_a_vocabulary_of_another_size_is_reported() -> None:
    with pytest.raises(ValueError, match=r"vocab has 21 rows, but vocab_size in config\.json is 20"):
        SLICINGS["vocabulary"].read(TensorSource(TENSORS), ["vocab"], 0, 1, replace(SIZES, vocab=20))


def test_no_tensor_of_a_family_has_two_places() -> None:
    for family in FAMILIES.values():
        places = [name for entry in (*family.tensors.values(), *ENDS.values()) for name in entry.names]
        twice = {name for name in places if places.count(name) > 1}
        assert all(name.endswith("layernorm.weight") for name in twice)  # of either layer spec
        assert all(np.char.count(name, "{layer}") == 1 for entry in family.tensors.values() for name in entry.names)


def test_a_tensor_of_a_layer_without_a_place_is_an_error() -> None:
    hf_config = Qwen3Config(num_hidden_layers=2, vocab_size=VOCABULARY)
    config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4)
    weights = ModelWeights(hf_config, config, padded_vocab=32)
    nothing = torch.zeros(1)
    for name in ("model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias"):
        with pytest.raises(ValueError, match=f"no parameter for {name}"):
            weights.load([], TensorSource({name: nothing}))


@pytest.mark.parametrize(
    ("switches", "kind"),
    [
        ("---", "auto"),
        ("111", "auto"),
        ("100", "flash"),
        ("-00", "flash"),
        ("010", "fused"),
        ("001", "unfused"),
        ("000", "local"),
        ("0--", "fused"),
        ("101", "flash"),
    ],
)
def test_switches_of_the_environment_name_the_attention(
    monkeypatch: pytest.MonkeyPatch, switches: str, kind: str
) -> None:
    for name, value in zip(("FLASH", "FUSED", "UNFUSED"), switches, strict=True):
        monkeypatch.delenv(f"NVTE_{name}_ATTN", raising=False)
        if value != "-":
            monkeypatch.setenv(f"NVTE_{name}_ATTN", value)
    assert enabled_attention_backend().name == kind
