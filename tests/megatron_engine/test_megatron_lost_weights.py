"""Lost weights give every token -ln V and no error, so they are looked for where they are loaded."""

import torch

from roll_opd.megatron.model import all_zero


def test_all_zero() -> None:
    layer = torch.nn.Linear(3, 3)
    torch.nn.init.zeros_(layer.weight)
    assert all_zero([layer])  # whatever its bias
    assert not all_zero([layer, torch.nn.Linear(3, 3)])
