"""A model's parameters, grouped as the forward pass reads them: plain views, made once per generation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .config import DeepseekV2Config
from .fp8 import BLOCK, values
from .names import SCALE_LEAF

ROWS = 4096
"""Rows of a quantised weight that are dequantised at a time; a multiple of a block."""


class Linear(NamedTuple):
    """A projection: weight [out, in] and perhaps a bias [out]; fp8 weights have a scale for each block."""

    weight: Tensor
    bias: Tensor | None = None
    weight_scale_inv: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias."""
        if self.weight_scale_inv is None:
            return functional.linear(x, self.weight, self.bias)
        out = torch.cat([functional.linear(x, block) for block in self._blocks(x.dtype)], -1)
        return out if self.bias is None else out + self.bias

    def _blocks(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """Dequantise some rows at a time, so that never the whole weight exists twice."""
        assert self.weight_scale_inv is not None
        for first in range(0, self.weight.shape[0], ROWS):
            scale = self.weight_scale_inv[first // BLOCK : (first + ROWS) // BLOCK]
            yield values(self.weight[first : first + ROWS], scale, dtype)


class AttentionWeights(NamedTuple):
    """Multi-head latent attention of one layer."""

    fused_qkv_a_proj_with_mqa: Linear | None
    """q_a_proj's rows, then kv_a_proj_with_mqa's; None for a model without q_lora_rank."""
    q_a_layernorm: Tensor | None
    q_b_proj: Linear
    """Without q_lora_rank: q_proj, from the hidden state."""
    kv_a_proj_with_mqa: Linear | None
    kv_a_layernorm: Tensor
    w_kc: Tensor
    """[heads, qk_nope_head_dim, kv_lora_rank]: a view of kv_b_proj's rows, latent to keys."""
    w_vc: Tensor
    """[heads, v_head_dim, kv_lora_rank]: a view of kv_b_proj's rows, latent to values."""
    o_proj: Linear


class Mlp(NamedTuple):
    """A gated MLP; the gate's rows come before the up projection's."""

    gate_up_proj: Linear
    down_proj: Linear


class Moe(NamedTuple):
    """Routed experts and, perhaps, shared ones."""

    gate: Tensor
    """[experts, hidden]."""
    e_score_correction_bias: Tensor | None
    w13: tuple[Linear, ...]
    """For each expert [2 * width, hidden]: gate, then up; views of one parameter."""
    w2: tuple[Linear, ...]
    """For each expert [hidden, width]; views of one parameter."""
    shared_experts: Mlp | None


class LayerWeights(NamedTuple):
    """One decoder layer."""

    input_layernorm: Tensor
    attention: AttentionWeights
    post_attention_layernorm: Tensor
    mlp: Mlp | Moe


class ModelWeights(NamedTuple):
    """All of a model."""

    embed_tokens: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    lm_head: Tensor

    @classmethod
    def from_parameters(cls, config: DeepseekV2Config, parameters: Mapping[str, Tensor]) -> ModelWeights:
        """Group parameters by their names. Nothing is copied: all are views of what ``parameters`` holds."""
        embed = parameters["model.embed_tokens.weight"]
        return cls(
            embed,
            tuple(_layer(config, parameters, layer) for layer in range(config.num_hidden_layers)),
            parameters["model.norm.weight"],
            embed if config.tie_word_embeddings else parameters["lm_head.weight"],
        )


def _layer(config: DeepseekV2Config, parameters: Mapping[str, Tensor], layer: int) -> LayerWeights:
    prefix = f"model.layers.{layer}."
    mlp: Mlp | Moe
    if config.is_moe(layer):
        experts = f"{prefix}mlp.experts."
        mlp = Moe(
            parameters[f"{prefix}mlp.gate.weight"],
            parameters.get(f"{prefix}mlp.gate.e_score_correction_bias"),
            _experts(parameters, f"{experts}w13_weight"),
            _experts(parameters, f"{experts}w2_weight"),
            _mlp(parameters, f"{prefix}mlp.shared_experts.") if config.n_shared_experts else None,
        )
    else:
        mlp = _mlp(parameters, f"{prefix}mlp.")
    return LayerWeights(
        parameters[f"{prefix}input_layernorm.weight"],
        _attention(config, parameters, f"{prefix}self_attn."),
        parameters[f"{prefix}post_attention_layernorm.weight"],
        mlp,
    )


def _attention(config: DeepseekV2Config, parameters: Mapping[str, Tensor], prefix: str) -> AttentionWeights:
    kv_b = parameters[f"{prefix}kv_b_proj.weight"].unflatten(0, (config.num_attention_heads, -1))
    low_rank = config.q_lora_rank is not None
    return AttentionWeights(
        fused_qkv_a_proj_with_mqa=_linear(parameters, f"{prefix}fused_qkv_a_proj_with_mqa") if low_rank else None,
        q_a_layernorm=parameters[f"{prefix}q_a_layernorm.weight"] if low_rank else None,
        q_b_proj=_linear(parameters, f"{prefix}{'q_b_proj' if low_rank else 'q_proj'}"),
        kv_a_proj_with_mqa=None if low_rank else _linear(parameters, f"{prefix}kv_a_proj_with_mqa"),
        kv_a_layernorm=parameters[f"{prefix}kv_a_layernorm.weight"],
        w_kc=kv_b[:, : config.qk_nope_head_dim],
        w_vc=kv_b[:, config.qk_nope_head_dim :],
        o_proj=_linear(parameters, f"{prefix}o_proj"),
    )


def _mlp(parameters: Mapping[str, Tensor], prefix: str) -> Mlp:
    return Mlp(_linear(parameters, f"{prefix}gate_up_proj"), _linear(parameters, f"{prefix}down_proj"))


def _linear(parameters: Mapping[str, Tensor], name: str) -> Linear:
    weight = parameters[f"{name}.weight"]
    return Linear(weight, parameters.get(f"{name}.bias"), _scale(parameters, f"{name}.{SCALE_LEAF}", weight))


def _experts(parameters: Mapping[str, Tensor], name: str) -> tuple[Linear, ...]:
    weights = parameters[name]
    scales = _scale(parameters, f"{name.removesuffix('weight')}{SCALE_LEAF}", weights)
    each = [None] * len(weights) if scales is None else list(scales)
    return tuple(Linear(weight, None, scale) for weight, scale in zip(weights, each, strict=True))


def _scale(parameters: Mapping[str, Tensor], name: str, weight: Tensor) -> Tensor | None:
    """Return the scales of a weight that is kept quantised; a dequantised one has them, too, and needs them no more."""
    return parameters[name] if weight.dtype == torch.float8_e4m3fn else None
