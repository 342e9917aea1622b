"""The latent KV cache: per token kv_lora_rank + qk_rope_head_dim numbers for each layer, for all heads together."""

from __future__ import annotations

import torch

from .config import DeepseekV2Config


class LatentCache:
    """Memory for the tokens of one batch of sequences, allocated once.

    Args:
        config: The model's numbers.
        batch: Sequences.
        capacity: Tokens that fit, prompt and new ones together.
        dtype: Of the activations.
        device: Where it lies.

    Attributes:
        length: Tokens that are in it.
    """

    def __init__(
        self, config: DeepseekV2Config, batch: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        layers = config.num_hidden_layers
        self.capacity = capacity
        self.length = 0
        self._latent = torch.empty(layers, batch, capacity, config.kv_lora_rank, dtype=dtype, device=device)
        self._rope = torch.empty(layers, batch, capacity, config.qk_rope_head_dim, dtype=dtype, device=device)

    def extend(self, layer: int, latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append a layer's new tokens; return all of that layer's tokens.

        Args:
            layer: Which layer.
            latent: [batch, tokens, kv_lora_rank], normalised.
            rope: [batch, tokens, qk_rope_head_dim], turned.

        Returns:
            Views [batch, length + tokens, ...] of both. ``length`` itself moves by `advance`, once per pass.
        """
        end = self.length + latent.shape[1]
        if end > self.capacity:
            raise ValueError(f"{end} tokens do not fit into a cache of {self.capacity}")
        self._latent[layer, :, self.length : end] = latent
        self._rope[layer, :, self.length : end] = rope
        return self._latent[layer, :, :end], self._rope[layer, :, :end]

    def advance(self, tokens: int) -> None:
        """Count the tokens that all layers have appended."""
        self.length += tokens
