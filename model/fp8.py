"""Block-quantised weights: what a block's values are worth.

Each block of ``block`` x ``block`` elements of a weight, by position, has one float32 in ``weight_scale_inv``; a value
is the fp8 number times the scale of its block. Blocks at the lower and right edges are smaller.
"""

from __future__ import annotations

from torch import Tensor

BLOCK = 128


def dequantize(raw: Tensor, scale: Tensor, first_row: int = 0, block: int = BLOCK) -> Tensor:
    """Return float32 values.

    Args:
        raw: float8 [rows, columns], whole rows of a weight.
        scale: float32 [ceil(all rows / block), ceil(columns / block)], of the whole weight.
        first_row: Which row of the weight ``raw`` begins with.
        block: Rows and columns of a block.

    Returns:
        float32 [rows, columns]: ``raw[i, j] * scale[(first_row + i) // block, j // block]``.
    """
    rows, columns = raw.shape
    first_block, last_block = first_row // block, (first_row + rows - 1) // block
    factors = scale[first_block : last_block + 1].repeat_interleave(block, 0)
    skip = first_row - first_block * block
    factors = factors[skip : skip + rows].repeat_interleave(block, 1)[:, :columns]
    return raw.float() * factors
