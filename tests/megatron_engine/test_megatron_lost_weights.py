"""Lost weights give every token -ln V, or another wrong number, and no error; they are looked for where they load."""

import torch

from roll_opd.megatron.bridge import zero_tensors


def test_zero_tensors() -> None:
    whole = {"model.layers.0.mlp.up_proj.weight": torch.randn(200, 3), "model.norm.weight": torch.ones(3)}
    padded = torch.cat([torch.randn(3, 3), torch.zeros(97, 3)])  # a vocabulary of which few rows are in use
    healthy = whole | {"model.embed_tokens.weight": padded, "model.layers.0.self_attn.q_proj.bias": torch.zeros(3)}
    assert zero_tensors(healthy) == []
    for name in whole:
        assert zero_tensors(healthy | {name: -torch.zeros_like(healthy[name])}) == [name]
    assert zero_tensors({"model.embed_tokens.weight": torch.zeros(9, 3)}) == ["model.embed_tokens.weight"]
    half = whole["model.layers.0.mlp.up_proj.weight"].clone()
    half[:100] = 0
    assert zero_tensors({"model.layers.0.mlp.up_proj.weight": half}) == ["model.layers.0.mlp.up_proj.weight"]
