"""Multi-head latent attention (DeepSeek-V2, section 2.1), computed on the latents themselves.

kv_b_proj is absorbed: instead of expanding each cached latent into keys and values for every head, the queries are
taken into the latent space (w_kc) and the attended latents out of it (w_vc).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .cache import LatentCache
from .config import DeepseekV2Config
from .rope import rotate, softmax_scale
from .weights import AttentionWeights

LATENT_NORM_EPS = 1e-6
"""Epsilon of q_a_layernorm and kv_a_layernorm, whatever rms_norm_eps says: as transformers has it."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, in float32, times the weight; dtype as ``x``."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def attention(
    config: DeepseekV2Config,
    weights: AttentionWeights,
    x: Tensor,
    turns: Tensor,
    cache: LatentCache,
    layer: int,
) -> Tensor:
    """Attend causally from new tokens to all tokens.

    Args:
        config: The model's numbers.
        weights: The layer's.
        x: [batch, tokens, hidden], normalised.
        turns: Rotations of the new positions, from `Rope.at`.
        cache: Earlier tokens; the new ones are appended.
        layer: Index of the layer in the cache.

    Returns:
        [batch, tokens, hidden].
    """
    batch, tokens, _ = x.shape
    heads, nope, rope = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
    kv_split = [config.kv_lora_rank, rope]

    # Query and compressed key-value projections.
    if weights.fused_qkv_a_proj_with_mqa is not None and weights.q_a_layernorm is not None:
        assert config.q_lora_rank is not None
        down, latent, k_rope = weights.fused_qkv_a_proj_with_mqa(x).split([config.q_lora_rank, *kv_split], -1)
        query = weights.q_b_proj(rms_norm(down, weights.q_a_layernorm, LATENT_NORM_EPS))
    else:
        assert weights.kv_a_proj_with_mqa is not None
        latent, k_rope = weights.kv_a_proj_with_mqa(x).split(kv_split, -1)
        query = weights.q_b_proj(x)
    q_nope, q_rope = query.view(batch, tokens, heads, nope + rope).split([nope, rope], -1)

    # Positions; the latents and the one shared position key go into the cache.
    q_rope = rotate(q_rope, turns)
    k_rope = rotate(k_rope.unsqueeze(2), turns).squeeze(2)
    latents, k_ropes = cache.extend(layer, rms_norm(latent, weights.kv_a_layernorm, LATENT_NORM_EPS), k_rope)

    # Scores: content in the latent space, plus position.
    q_latent = torch.einsum("bthn,hnc->bhtc", q_nope, weights.w_kc)
    scores = q_latent @ latents.unsqueeze(1).mT + q_rope.transpose(1, 2) @ k_ropes.unsqueeze(1).mT
    scores = scores.float() * softmax_scale(config)
    if tokens > 1:
        before = latents.shape[1] - tokens
        hidden = torch.ones(tokens, before + tokens, dtype=torch.bool, device=x.device).triu(before + 1)
        scores = scores.masked_fill(hidden, float("-inf"))
    attended = scores.softmax(-1).to(x.dtype) @ latents.unsqueeze(1)

    # Out of the latent space, and back to the hidden size.
    values = torch.einsum("bhtc,hvc->bthv", attended, weights.w_vc)
    return weights.o_proj(values.reshape(batch, tokens, heads * config.v_head_dim))
