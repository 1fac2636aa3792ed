"""Tensors are preserved as numpy arrays, also in bf16."""

import pickle

import pytest
import torch

from roll_opd.samples.transport import as_array, as_tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32])
def test_tensors_are_the_same_after_pickling(dtype: torch.dtype) -> None:
    tensor = (100 * torch.randn(3, 4, generator=torch.Generator().manual_seed(0))).to(dtype)
    back = as_tensor(pickle.loads(pickle.dumps(as_array(tensor))))
    assert back.dtype is dtype and torch.equal(back, tensor)
