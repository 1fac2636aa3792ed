"""How a tensor travels between processes: as a numpy array. Many weights are a bucket (`samples.weight_bucket`)."""

import numpy as np
import torch
from torch import Tensor


def as_array(tensor: Tensor) -> np.ndarray:
    """Return `tensor`, from any device and without its gradient, as an array of the same shape.

    numpy has no bf16: it travels as int16, which nothing else here uses.
    """
    tensor = tensor.detach().cpu()
    return (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


def as_tensor(array: np.ndarray) -> Tensor:
    """Return what `as_array` was given, on the CPU."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if tensor.dtype is torch.int16 else tensor
