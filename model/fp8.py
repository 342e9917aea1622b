"""Block-quantised weights: what a block's values are worth.

Each block of ``block`` x ``block`` elements of a weight, by position, has one float32 in ``weight_scale_inv``; a value
is the fp8 number times the scale of its block. Blocks at the lower and right edges are smaller.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
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


def values(raw: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return whole blocks of rows in the dtype of a forward pass, by the fastest way that the device has.

    On a GPU one kernel, made by torch.compile, reads each fp8 number once and writes each value once; elsewhere float32
    is passed through.

    Args:
        raw: float8 [rows, columns], beginning at a block.
        scale: float32 [ceil(rows / BLOCK), ceil(columns / BLOCK)] of these rows.
        dtype: Of the values.

    Returns:
        [rows, columns].
    """
    if raw.is_cuda:
        return fused()(raw, scale, dtype)
    return dequantize(raw, scale).to(dtype)


@functools.cache
def fused(backend: str = "inductor") -> Callable[[Tensor, Tensor, torch.dtype], Tensor]:
    """Compile `by_index` once, for weights of any shape."""
    compiled: Callable[[Tensor, Tensor, torch.dtype], Tensor] = torch.compile(by_index, dynamic=True, backend=backend)
    return compiled


def by_index(raw: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The same as `values`, in terms that a compiler can fuse: each element looks its scale up."""
    row = torch.arange(raw.shape[0], device=raw.device) // BLOCK
    column = torch.arange(raw.shape[1], device=raw.device) // BLOCK
    return (raw.float() * scale[row[:, None], column[None, :]]).to(dtype)
