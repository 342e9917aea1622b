"""Mixture of experts: which experts a token goes to, and what they make of it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .config import DeepseekV2Config
from .weights import Mlp, Moe

_NORM_EPS = 1e-20
"""Added to the sum of the chosen weights before dividing by it, as DeepSeek-V3 does."""


def gated_mlp(weights: Mlp, x: Tensor) -> Tensor:
    """Return down(silu(gate(x)) * up(x)); shapes as ``x``."""
    gate, up = weights.gate_up_proj(x).chunk(2, -1)
    return weights.down_proj(functional.silu(gate) * up)


def route(config: DeepseekV2Config, weights: Moe, x: Tensor) -> tuple[Tensor, Tensor]:
    """Choose experts for each token.

    Args:
        config: The model's numbers.
        weights: The layer's.
        x: [tokens, hidden].

    Returns:
        Indices int64 and weights float32, both [tokens, num_experts_per_tok], the best first.
    """
    logits = functional.linear(x.float(), weights.gate.float())
    scores = logits.sigmoid() if config.scoring_func == "sigmoid" else logits.softmax(-1)
    # The correction bias takes part in the choice alone: the weights come from the scores without it.
    choice = scores if weights.e_score_correction_bias is None else scores + weights.e_score_correction_bias
    if config.topk_method != "greedy":
        choice = _within_best_groups(config, choice)
    indices = choice.topk(config.num_experts_per_tok, -1).indices
    chosen = scores.gather(-1, indices)
    if config.is_v3 and config.norm_topk_prob:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + _NORM_EPS)
    return indices, chosen * config.routed_scaling_factor


def moe(config: DeepseekV2Config, weights: Moe, x: Tensor) -> Tensor:
    """Send each token through its experts and the shared ones.

    Args:
        config: The model's numbers.
        weights: The layer's.
        x: [batch, tokens, hidden].

    Returns:
        [batch, tokens, hidden].
    """
    flat = x.reshape(-1, x.shape[-1])
    indices, scale = route(config, weights, flat)
    out = torch.zeros_like(flat)
    for expert in indices.unique().tolist():
        token, rank = torch.where(indices == expert)
        gate, up = weights.w13[expert](flat[token]).chunk(2, -1)
        made = weights.w2[expert](functional.silu(gate) * up)
        out.index_add_(0, token, (made * scale[token, rank, None]).to(out.dtype))
    routed = out.view_as(x)
    return routed if weights.shared_experts is None else routed + gated_mlp(weights.shared_experts, x)


def _within_best_groups(config: DeepseekV2Config, choice: Tensor) -> Tensor:
    """Leave only the experts of each token's best groups to choose from.

    A group's score is its best expert's (V2: group_limited_greedy), or the sum of its two best (V3: noaux_tc).
    """
    grouped = choice.unflatten(-1, (config.n_group, -1))
    best = min(2, grouped.shape[-1]) if config.topk_method == "noaux_tc" else 1
    group_scores = grouped.topk(best, -1).values.sum(-1)
    groups = group_scores.topk(config.topk_group, -1).indices
    allowed = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(-1, groups, value=True)
    barred = float("-inf") if config.is_v3 else 0.0
    limited: Tensor = grouped.masked_fill(~allowed.unsqueeze(-1), barred).flatten(-2)
    return limited
