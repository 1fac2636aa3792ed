"""What is chosen on GPUs, as far as that can be seen without one; docs/gpu.md says what cannot."""

import pytest
import torch

from roll_opd.megatron.layers import transformer_engine_attends, uses_transformer_engine
from roll_opd.megatron.model import fusions
from roll_opd.plan import Layout

A100, H100, B200 = (8, 0), (9, 0), (10, 0)


@pytest.mark.parametrize(
    ("capability", "has_flash_attention", "deterministic", "attends"),
    [
        (A100, False, False, False),
        (A100, True, False, True),
        (A100, True, True, True),
        (H100, False, False, True),
        (H100, False, True, False),
        (H100, True, True, True),
        (B200, False, False, True),
    ],
)
def test_transformer_engine_attends_where_it_needs_no_square_of_a_packs_length(
    capability: tuple[int, int], has_flash_attention: bool, deterministic: bool, attends: bool
) -> None:
    settings = {"has_flash_attention": has_flash_attention, "deterministic": deterministic}
    assert transformer_engine_attends(capability, **settings) == attends


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_of_a_gpu_is_chosen_on_a_cpu(dtype: torch.dtype) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert not uses_transformer_engine(dtype)
    assert fusions(dtype, Layout()) == {}
