"""The forward pass, as a function of weights, tokens and cache. It keeps nothing: a flip is another argument."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.nn import functional

from .attention import attention, rms_norm
from .cache import LatentCache
from .config import DeepseekV2Config
from .moe import gated_mlp, moe
from .rope import Rope
from .weights import ModelWeights, Moe


def forward(
    config: DeepseekV2Config, weights: ModelWeights, rope: Rope, token_ids: Tensor, cache: LatentCache
) -> Tensor:
    """Run new tokens through the model.

    Args:
        config: The model's numbers.
        weights: All of them, from one generation.
        rope: The model's angles.
        token_ids: int64 [batch, tokens].
        cache: The tokens before; the new ones are appended.

    Returns:
        Logits, float32 [batch, tokens, vocab_size].
    """
    tokens = token_ids.shape[1]
    turns = rope.at(cache.length, tokens)
    eps = config.rms_norm_eps
    x = functional.embedding(token_ids, weights.embed_tokens)
    for index, layer in enumerate(weights.layers):
        x = x + attention(config, layer.attention, rms_norm(x, layer.input_layernorm, eps), turns, cache, index)
        normed = rms_norm(x, layer.post_attention_layernorm, eps)
        x = x + (moe(config, layer.mlp, normed) if isinstance(layer.mlp, Moe) else gated_mlp(layer.mlp, normed))
    cache.advance(tokens)
    return functional.linear(rms_norm(x, weights.norm, eps), weights.lm_head).float()


Step = Callable[[Tensor], Tensor]
"""New token ids [batch, tokens] -> logits of the last one [batch, vocab_size]."""


def generate(
    step: Step,
    token_ids: Tensor,
    *,
    max_new_tokens: int,
    eos_token_id: tuple[int, ...],
    hold: Callable[[], AbstractContextManager[None]],
    deadline: float | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Tensor:
    """Continue sequences greedily, until each has ended or ``max_new_tokens`` have been added.

    Args:
        step: Runs the model on new tokens.
        token_ids: int64 [batch, tokens], the prompts.
        max_new_tokens: How many to add at most.
        eos_token_id: Tokens that end a sequence; what follows in its row is the first of them again.
        hold: Entered around each step, to keep the weights as they are.
        deadline: On `time.monotonic`; None: no limit but ``max_new_tokens``.
        cancelled: Asked before each step.

    Returns:
        int64 [batch, tokens + new].

    Raises:
        TimeoutError: The deadline passed, or it was cancelled; the message says after how many tokens.
    """
    ids, new = token_ids, token_ids
    ends = torch.tensor(eos_token_id, device=token_ids.device)
    ended = torch.zeros(token_ids.shape[0], dtype=torch.bool, device=token_ids.device)
    for count in range(max_new_tokens):
        if cancelled():
            raise TimeoutError(f"generation was cancelled after {count} of {max_new_tokens} tokens")
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError(f"the deadline passed after {count} of {max_new_tokens} tokens")
        with hold():
            new = step(new).argmax(-1, keepdim=True)
        if eos_token_id:
            new = torch.where(ended[:, None], ends[0], new)
            ended |= torch.isin(new[:, 0], ends)
        ids = torch.cat([ids, new], 1)
        if eos_token_id and bool(ended.all()):
            break
    return ids
