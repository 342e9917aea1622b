"""Golden checkpoints, tiny configs, and an oracle for loading that shares no code with the loader."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fusewire.daemon import demo
from fusewire.model import DeepseekV2Config, DeepseekV2ForCausalLM

SHIPPED = Path(demo.__file__).parent / "checkpoints"
MADE = Path(__file__).parents[1] / "data" / "checkpoints"
"""Written by tests/make_checkpoints.py."""


def checkpoint(family: str) -> Path:
    return SHIPPED / family if (SHIPPED / family).is_dir() else MADE / family


Tensors = dict[str, Tensor]

torch.set_num_threads(1)  # on matrices as small as these, threads only wait for one another


@pytest.fixture(scope="session")
def golden_config() -> Callable[[str], DeepseekV2Config]:
    """``golden_config(family)``."""
    return lambda family: DeepseekV2Config.from_file(checkpoint(family) / "config.json")


@pytest.fixture(scope="session")
def golden_tensors() -> Callable[[str], Tensors]:
    """``golden_tensors(family)``: a golden checkpoint's tensors."""

    def load(family: str) -> Tensors:
        tensors: Tensors = {}
        for path in sorted(checkpoint(family).glob("model-*.safetensors")):
            tensors.update(load_file(path))
        return tensors

    return load


@pytest.fixture(scope="session")
def golden_values() -> Callable[[str], Tensors]:
    """``golden_values(family)``: token ids, logits, routing and generated tokens."""
    return lambda family: load_file(checkpoint(family) / "golden.safetensors")


@pytest.fixture(scope="session")
def shard_paths() -> Callable[[str], list[Path]]:
    """``shard_paths(family)``."""
    return lambda family: sorted(checkpoint(family).glob("model-*.safetensors"))


@pytest.fixture(scope="session")
def cold_load() -> Callable[[DeepseekV2Config, Mapping[str, Tensor], torch.dtype], Tensors]:
    """The oracle: what the parameters have to hold, put together with torch.cat and torch.stack from their names."""
    return _cold_load


def _cold_load(config: DeepseekV2Config, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensors:
    def join(*names: str) -> Tensor:
        return torch.cat([tensors[name] for name in names]).to(dtype)

    def mlp(prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{prefix}gate_up_proj.weight", join(f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight")
        yield f"{prefix}down_proj.weight", join(f"{prefix}down_proj.weight")

    made = {name: join(name) for name in ("model.embed_tokens.weight", "model.norm.weight")}
    if not config.tie_word_embeddings:
        made["lm_head.weight"] = join("lm_head.weight")
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        attention = f"{prefix}self_attn."
        plain = ["kv_a_layernorm.weight", "kv_b_proj.weight", "o_proj.weight"]
        plain += ["o_proj.bias"] if config.attention_bias else []
        leaves = ["weight", "bias"] if config.attention_bias else ["weight"]
        if config.q_lora_rank is None:
            plain += ["q_proj.weight", *(f"kv_a_proj_with_mqa.{leaf}" for leaf in leaves)]
        else:
            plain += ["q_a_layernorm.weight", "q_b_proj.weight"]
            for leaf in leaves:
                fused = f"{attention}fused_qkv_a_proj_with_mqa.{leaf}"
                made[fused] = join(f"{attention}q_a_proj.{leaf}", f"{attention}kv_a_proj_with_mqa.{leaf}")
        names = [f"{attention}{name}" for name in plain]
        names += [f"{prefix}input_layernorm.weight", f"{prefix}post_attention_layernorm.weight"]
        made.update({name: join(name) for name in names})
        if not config.is_moe(layer):
            made.update(mlp(f"{prefix}mlp."))
            continue
        made[f"{prefix}mlp.gate.weight"] = join(f"{prefix}mlp.gate.weight")
        bias = f"{prefix}mlp.gate.e_score_correction_bias"
        if bias in tensors:
            made[bias] = tensors[bias].float()
        experts = [f"{prefix}mlp.experts.{expert}." for expert in range(config.n_routed_experts or 0)]
        pairs = [join(f"{expert}gate_proj.weight", f"{expert}up_proj.weight") for expert in experts]
        made[f"{prefix}mlp.experts.w13_weight"] = torch.stack(pairs)
        made[f"{prefix}mlp.experts.w2_weight"] = torch.stack([join(f"{expert}down_proj.weight") for expert in experts])
        if config.n_shared_experts:
            made.update(mlp(f"{prefix}mlp.shared_experts."))
    return made


@pytest.fixture(scope="session")
def digest() -> Callable[[DeepseekV2ForCausalLM], str]:
    """``digest(model)``: a hash of all parameters' bytes and of all stamps."""

    def of(model: DeepseekV2ForCausalLM) -> str:
        made = hashlib.sha256()
        for name, parameter in model.generation.parameters.items():
            made.update(name.encode())
            made.update(parameter.reshape(-1).view(torch.uint8).numpy().tobytes())
        made.update(repr(model.generation.stamps).encode())
        return made.hexdigest()

    return of
