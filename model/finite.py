"""Finding NaN and infinity in weights, at the speed of reading them.

In every dtype of a parameter, the numbers that are not finite are those whose exponent bits are all ones (IEEE 754),
so that their bits without the sign are at or above a limit; fp8 e4m3fn has no infinity, and one NaN for each sign (OCP
8-bit floating point specification, 5.2).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .generation import Generation
from .names import Slot

BLOCK = 1 << 19
"""Elements that are looked at at a time: their bits without the sign have to stay in a core's cache."""
DEVICE_BLOCK = 1 << 26
"""The same on a device, where each block is cast to float32: all experts of a layer would take twice their size."""
_LIMITS: dict[torch.dtype, tuple[type[np.unsignedinteger], int]] = {
    torch.bfloat16: (np.uint16, 0x7F80),
    torch.float16: (np.uint16, 0x7C00),
    torch.float32: (np.uint32, 0x7F800000),
    torch.float8_e4m3fn: (np.uint8, 0x7F),
}
"""dtype -> unsigned integer of its width, and the least bits without the sign that are no number."""


class NotFinite(NamedTuple):
    """One tensor that holds what is no number."""

    tensor: str
    nan: int
    inf: int
    numel: int

    def __str__(self) -> str:
        told = [f"{count} {what}" for count, what in ((self.nan, "NaN"), (self.inf, "Inf")) if count]
        return f"{self.tensor}: {' and '.join(told)} of {self.numel}"


def not_finite(generation: Generation, slots: Iterable[Slot]) -> list[NotFinite]:
    """Return the slots in which not every element is finite."""
    found = []
    for first, count, members in generation.runs(slots):
        values = generation.span(first, count)
        if all_finite(values):
            continue
        for slot in members:
            rows = generation.rows(slot)
            if not all_finite(rows):
                exact = rows.float()
                found.append(NotFinite(slot.name, int(exact.isnan().sum()), int(exact.isinf().sum()), slot.numel))
    return found


def all_finite(values: Tensor) -> bool:
    """Whether every element of a flat tensor is a finite number."""
    if values.device.type != "cpu":
        return all(bool(block.float().isfinite().all()) for block in values.split(DEVICE_BLOCK))
    kind, limit = _LIMITS[values.dtype]
    bits = values.view(torch.uint8).numpy().view(kind)
    magnitudes = np.empty(min(BLOCK, bits.size), dtype=kind)
    mask = np.iinfo(kind).max >> 1
    for begin in range(0, bits.size, BLOCK):
        block = bits[begin : begin + BLOCK]
        without_sign = np.bitwise_and(block, kind(mask), out=magnitudes[: block.size])
        if without_sign.max() >= limit:
            return False
    return True
