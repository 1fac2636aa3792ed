"""MXFP4 (OCP Microscaling Formats 1.0): blocks of 32 four-bit floats (E2M1) with a common scale, a power of two.

Legend: N rows of a matrix, K blocks in a row, D = 32 · K columns.
"""

import torch
from torch import Tensor

# value of each four-bit code: sign, two bits of exponent, one bit of mantissa
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
EXPONENT_BIAS = 127  # exponent bias of the scales
BLOCKS, SCALES = "_blocks", "_scales"  # name endings of the two tensors of a matrix


def dequantised(blocks_NKB: Tensor, scales_NK: Tensor) -> Tensor:
    """Return the matrix in bf16, [N, D].

    Args:
        blocks_NKB: uint8 [N, K, 16], two values per byte; the lower four bits are the first value.
        scales_NK: uint8 [N, K], biased exponents of the scales.
    """
    values = torch.tensor(VALUES, dtype=torch.bfloat16, device=blocks_NKB.device)
    codes = torch.stack([blocks_NKB & 15, blocks_NKB >> 4], -1).flatten(-2)
    exponents = scales_NK.to(torch.int32)[..., None] - EXPONENT_BIAS
    return torch.ldexp(values[codes.int()], exponents).flatten(-2)
