"""The replacement of Apex for weight gradients, as far as it runs on a CPU."""

import torch

from roll_opd.megatron import fused_updates


def test_norm_of_all_gradients_is_that_of_one_vector() -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(7, 3), torch.randn(11), torch.zeros(2)]
    norm, each = fused_updates._norm(0, torch.zeros(1), [gradients])
    assert each is None and norm.shape == (1,)
    whole = torch.cat([gradient.flatten().double() for gradient in gradients]).norm()
    torch.testing.assert_close(norm[0].double(), whole, rtol=1e-6, atol=0)


def test_gradients_are_scaled_in_place_or_into_others() -> None:
    gradients = [torch.ones(3), torch.full((2,), 2.0)]
    others = [torch.zeros(3), torch.zeros(2)]
    fused_updates._scale(0, torch.zeros(1), [gradients, others], 0.5)
    assert [one.tolist() for one in others] == [[0.5] * 3, [1.0] * 2] and gradients[0].tolist() == [1.0] * 3
    fused_updates._scale(0, torch.zeros(1), [gradients, gradients], 0.5)
    assert [one.tolist() for one in gradients] == [[0.5] * 3, [1.0] * 2]


def test_adamw_on_a_cpu_keeps_its_bits() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    before = dict(optimizer.param_groups[0])
    fused_updates.fuse_adamw(optimizer)
    assert optimizer.param_groups[0] == before
