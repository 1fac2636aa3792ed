"""MXFP4 (OCP Microscaling Formats 1.0): blocks of 32 four-bit floats E2M1 with a shared power of two.

Legend: N rows of a matrix, K blocks in a row, D = 32 · K columns.
"""

import torch
from torch import Tensor

# by sign, two bits of exponent and one of mantissa
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
EXPONENT_BIAS = 127  # of scales
BLOCKS, SCALES = "_blocks", "_scales"  # ends of the names of a matrix's two tensors


def dequantised(blocks_NKB: Tensor, scales_NK: Tensor) -> Tensor:
    """Return the matrix in bf16, [N, D].

    Args:
        blocks_NKB: uint8 [N, K, 16]; the lower four bits of a byte come first.
        scales_NK: uint8, biased exponents of the blocks.
    """
    values = torch.tensor(VALUES, dtype=torch.bfloat16, device=blocks_NKB.device)
    codes = torch.stack([blocks_NKB & 15, blocks_NKB >> 4], -1).flatten(-2)
    exponents = scales_NK.to(torch.int32)[..., None] - EXPONENT_BIAS
    return torch.ldexp(values[codes.int()], exponents).flatten(-2)
