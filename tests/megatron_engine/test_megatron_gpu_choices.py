"""What is chosen on GPUs, as far as that can be seen without one; docs/gpu.md says what cannot."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from roll_opd.config.plan import Layout
from roll_opd.megatron.layers import transformer_engine_attends, uses_transformer_engine
from roll_opd.megatron.model import fusions
from roll_opd.megatron.vocabulary import product

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_logits_are_f32_whatever_they_are_made_of(dtype: torch.dtype, device: str) -> None:
    """Of CUDA torch's own rules are asked, without computing: shapes, dtypes, which arguments there are."""
    with FakeTensorMode():
        hidden_CE, weight_VE = (torch.empty(rows, 8, dtype=dtype, device=device) for rows in (6, 10))
        logits_CV = product(hidden_CE, weight_VE)
    assert (logits_CV.dtype, logits_CV.shape, logits_CV.device.type) == (torch.float32, (6, 10), device)
