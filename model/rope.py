"""Rotary position embedding with YaRN, as DeepSeek uses it.

Weights are never permuted: V2 and V3 both turn neighbouring elements (2i, 2i+1) of a head together. De-interleaving
first and turning halves, as V3's code does, permutes queries and keys alike, so that their products are the same.
"""

from __future__ import annotations

import math

import torch

from .config import DeepseekV2Config, RopeScaling


def inverse_frequencies(config: DeepseekV2Config, device: torch.device) -> torch.Tensor:
    """Return the angle per position of each pair, float32 [qk_rope_head_dim / 2].

    Without scaling: theta^(-2i/d). With YaRN (Peng et al., 2023, "NTK-by-parts"): pairs that turn more than
    ``beta_fast`` times over the original context keep their frequency, pairs that turn less than ``beta_slow``
    times are slowed down by ``factor``, and those in between are blended linearly.
    """
    dim, base = config.qk_rope_head_dim, config.rope_theta
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    plain: torch.Tensor = 1.0 / base**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    low, high = _turning_pairs(scaling, dim, base)
    ramp = (torch.arange(dim // 2, dtype=torch.float32, device=device) - low) / (high - low)
    keep = 1.0 - ramp.clamp(0.0, 1.0)
    return plain / scaling.factor * (1.0 - keep) + plain * keep


def attention_factor(config: DeepseekV2Config) -> float:
    """Return what cos and sin are multiplied by: the ratio of the two magnitude scales."""
    scaling = config.rope_scaling
    if scaling is None:
        return 1.0
    if scaling.mscale and scaling.mscale_all_dim:
        return _magnitude(scaling.factor, scaling.mscale) / _magnitude(scaling.factor, scaling.mscale_all_dim)
    return _magnitude(scaling.factor, 1.0)


def softmax_scale(config: DeepseekV2Config) -> float:
    """Return what scores are multiplied by: 1/sqrt(head size), times YaRN's magnitude scale squared."""
    scale: float = config.qk_head_dim**-0.5
    scaling = config.rope_scaling
    if scaling is None or not scaling.mscale_all_dim:
        return scale
    return scale * _magnitude(scaling.factor, scaling.mscale_all_dim) ** 2


class Rope:
    """Angles for positions, computed once for a model.

    Args:
        config: The model's numbers.
        device: Where the tables lie.
    """

    def __init__(self, config: DeepseekV2Config, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(config, device)
        self._factor = attention_factor(config)

    def at(self, begin: int, tokens: int) -> torch.Tensor:
        """Return cos + i sin for ``tokens`` positions from ``begin``: complex64 [tokens, dim / 2]."""
        positions = torch.arange(begin, begin + tokens, dtype=torch.float32, device=self._frequencies.device)
        angles = torch.outer(positions, self._frequencies)
        return torch.polar(torch.full_like(angles, self._factor), angles)


def rotate(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Turn each pair of the last axis.

    Args:
        x: [batch, tokens, heads, dim], any float dtype.
        turns: complex64 [tokens, dim / 2], from `Rope.at`.

    Returns:
        The same shape and dtype as ``x``; computed in float32.
    """
    pairs = torch.view_as_complex(x.float().contiguous().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns[None, :, None, :]).flatten(-2).to(x.dtype)


def _magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _turning_pairs(scaling: RopeScaling, dim: int, base: float) -> tuple[float, float]:
    """Return between which pairs the frequencies are blended."""

    def pair_of(turns: float) -> float:
        length = scaling.original_max_position_embeddings
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair_of(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_of(scaling.beta_slow)), dim - 1)
    return low, high if high != low else low + 0.001
