"""Reading a real config.json of the DeepSeek-V2/V3 architecture, in the classic and the transformers-5 spelling.

Parsing is one thing, support another: `DeepseekV2Config.from_dict` reads whatever has this architecture's keys,
`require_supported` says what this release can't run.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from .errors import ConfigError

ARCHITECTURES = {"deepseek_v2": "v2", "deepseek_v3": "v3", "kimi_k2": "v3"}
"""model_type -> which of the two routings and attentions it has."""
NEIGHBOURS = {
    "deepseek_v32": "its sparse attention needs an indexer (index_topk)",
    "glm_moe_dsa": "its sparse attention needs an indexer (index_topk)",
    "glm4_moe_lite": "its parity with this architecture has not been shown",
    "kimi_k25": "its text model lies inside of a multimodal one (text_config)",
}
"""Architectures that are close and yet not supported, and why."""
CONFIG_LIMIT = 16 * 1024 * 1024
"""Largest config.json that is read, in bytes."""
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""torch's name of a dtype -> safetensors' name."""

_Value = TypeVar("_Value", int, float, str, bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """YaRN's parameters (Peng et al., 2023, section 3.4), as config.json names them."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8:
    """Block-quantised weights: each block of a weight has one float32 scale in ``weight_scale_inv``."""

    block: int = 128
    """Rows and columns of a block; those at the edges are smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV2Config:
    """The numbers of one model, named as in config.json."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int | None
    n_shared_experts: int | None
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    topk_method: str
    scoring_func: str
    norm_topk_prob: bool
    routed_scaling_factor: float
    first_k_dense_replace: int
    moe_layer_freq: int
    rms_norm_eps: float
    hidden_act: str
    attention_bias: bool
    tie_word_embeddings: bool
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    rope_interleave: bool
    num_nextn_predict_layers: int
    torch_dtype: str
    eos_token_id: tuple[int, ...]
    fp8: Fp8 | None = None
    """How the Linear weights of the checkpoint are quantised; None: not at all."""
    unsupported: tuple[str, ...] = ()
    """What this release can't run, one sentence each."""

    @property
    def is_v3(self) -> bool:
        """Whether routing is V3's (sigmoid, correction bias)."""
        return ARCHITECTURES[self.model_type] == "v3"

    @property
    def qk_head_dim(self) -> int:
        """Size of a query or key head, with and without position."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def is_moe(self, layer: int) -> bool:
        """Whether a layer has experts instead of one dense MLP."""
        return (
            self.n_routed_experts is not None
            and layer >= self.first_k_dense_replace
            and layer % self.moe_layer_freq == 0
        )

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> DeepseekV2Config:
        """Read a config.json that this release can run.

        Raises:
            ConfigError: The file can't be read, is no JSON object, is of another architecture, lacks a key, or
                asks for something that is not supported.
        """
        path = Path(path)
        try:
            if path.stat().st_size > CONFIG_LIMIT:
                raise ConfigError(f"{path}: larger than {CONFIG_LIMIT} bytes, that is no config.json")
            content = json.loads(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; give the path of the model's config.json") from error
        except (ValueError, RecursionError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{path}: not valid JSON: {error}") from error
        try:
            config = cls.from_dict(content)
            config.require_supported()
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        return config

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> DeepseekV2Config:
        """Build a config from the keys of a config.json.

        Raises:
            ConfigError: Another architecture, a missing key, or a value of the wrong type.
        """
        if not isinstance(content, Mapping):
            raise ConfigError(f"a config.json is an object, not {type(content).__name__}")
        model_type = content.get("model_type")
        if isinstance(model_type, str) and model_type in NEIGHBOURS:
            raise ConfigError(
                f"model_type {model_type!r} is not supported: {NEIGHBOURS[model_type]}; "
                f"supported: {', '.join(ARCHITECTURES)}"
            )
        if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
            raise ConfigError(
                f"model_type {model_type!r} is another architecture; supported: {', '.join(ARCHITECTURES)}"
            )
        v3 = ARCHITECTURES[model_type] == "v3"
        keys = _Keys(content)
        theta, scaling = _rope(keys)
        eos = content.get("eos_token_id")
        return cls(
            model_type=model_type,
            vocab_size=keys.size("vocab_size"),
            hidden_size=keys.size("hidden_size"),
            intermediate_size=keys.size("intermediate_size"),
            moe_intermediate_size=keys.size("moe_intermediate_size", default=1),
            num_hidden_layers=keys.size("num_hidden_layers"),
            num_attention_heads=keys.size("num_attention_heads"),
            q_lora_rank=keys.size("q_lora_rank") if content.get("q_lora_rank") is not None else None,
            kv_lora_rank=keys.size("kv_lora_rank"),
            qk_nope_head_dim=keys.size("qk_nope_head_dim"),
            qk_rope_head_dim=keys.size("qk_rope_head_dim"),
            v_head_dim=keys.size("v_head_dim"),
            n_routed_experts=keys.size("n_routed_experts") if content.get("n_routed_experts") else None,
            n_shared_experts=keys.size("n_shared_experts") if content.get("n_shared_experts") else None,
            num_experts_per_tok=keys.size("num_experts_per_tok", default=1),
            n_group=keys.size("n_group", default=1),
            topk_group=keys.size("topk_group", default=1),
            topk_method=keys.value("topk_method", str, "noaux_tc" if v3 else "greedy"),
            scoring_func=keys.value("scoring_func", str, "sigmoid" if v3 else "softmax"),
            norm_topk_prob=keys.value("norm_topk_prob", bool, v3),
            routed_scaling_factor=keys.number("routed_scaling_factor", 1.0),
            first_k_dense_replace=keys.count("first_k_dense_replace", 0),
            moe_layer_freq=keys.size("moe_layer_freq", default=1),
            rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
            hidden_act=keys.value("hidden_act", str, "silu"),
            attention_bias=keys.value("attention_bias", bool, default=False),
            tie_word_embeddings=keys.value("tie_word_embeddings", bool, default=False),
            max_position_embeddings=keys.size("max_position_embeddings"),
            rope_theta=theta,
            rope_scaling=scaling,
            rope_interleave=keys.value("rope_interleave", bool, default=True),
            num_nextn_predict_layers=keys.count("num_nextn_predict_layers", 0),
            torch_dtype=str(content.get("torch_dtype") or content.get("dtype") or "bfloat16"),
            eos_token_id=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
            fp8=Fp8() if _is_block_fp8(content.get("quantization_config")) else None,
            unsupported=tuple(_unsupported(content)),
        )

    def require_supported(self) -> None:
        """Refuse what this release can't run.

        Raises:
            ConfigError: Naming everything at once.
        """
        problems = [*self.unsupported, *_unsupported_values(self)]
        if problems:
            raise ConfigError("; ".join(problems))

    def replace(self, **changes: Any) -> DeepseekV2Config:  # noqa: ANN401 - any field
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)


class _Keys:
    """Typed look-ups in a config.json whose errors name the key."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.content = content

    def value(self, key: str, kind: type[_Value], default: _Value | None = None) -> _Value:
        value = self.content.get(key)
        if value is None:
            if default is None:
                raise ConfigError(f"{key} is missing")
            return default
        # bool is an int in Python, but not in a config.json
        if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
            raise ConfigError(f"{key} is {value!r}; it has to be of type {kind.__name__}")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number of 1 or more."""
        value = self.value(key, int, default)
        if value < 1:
            raise ConfigError(f"{key} is {value}; it has to be 1 or more")
        return value

    def count(self, key: str, default: int) -> int:
        """A whole number of 0 or more."""
        value = self.value(key, int, default)
        if value < 0:
            raise ConfigError(f"{key} is {value}; it has to be 0 or more")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Any number, whole or not."""
        value = self.content.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        return self.value(key, float, default)


def _rope(keys: _Keys) -> tuple[float, RopeScaling | None]:
    """Read RoPE's base and scaling: rope_theta + rope_scaling, or transformers 5's rope_parameters."""
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(keys.content.get(name) or {}, Mapping):
            raise ConfigError(f"{name} is {keys.content[name]!r}; it has to be an object or null")
    scaling = keys.content.get("rope_parameters") or keys.content.get("rope_scaling") or {}
    inner = _Keys(scaling)
    theta = keys.number("rope_theta", inner.number("rope_theta", 10000.0))
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "yarn":
        raise ConfigError(f"rope type {kind!r} is not supported; supported: yarn, default")
    return theta, RopeScaling(
        factor=inner.number("factor"),
        original_max_position_embeddings=inner.size(
            "original_max_position_embeddings", keys.size("max_position_embeddings")
        ),
        beta_fast=inner.number("beta_fast", 32.0),
        beta_slow=inner.number("beta_slow", 1.0),
        mscale=inner.number("mscale", 1.0),
        mscale_all_dim=inner.number("mscale_all_dim", 0.0),
    )


def _unsupported(content: Mapping[str, Any]) -> list[str]:
    problems = []
    if content.get("index_topk") is not None:
        problems.append("index_topk: sparse attention with an indexer is not supported")
    quantization = content.get("quantization_config")
    if quantization is not None and not _is_block_fp8(quantization):
        problems.append(
            f"quantization_config {quantization!r} is not supported; supported: quant_method fp8, fmt e4m3, "
            f"weight_block_size {[Fp8().block] * 2}, or none"
        )
    return problems


def _is_block_fp8(quantization: object) -> bool:
    return (
        isinstance(quantization, Mapping)
        and quantization.get("quant_method") == "fp8"
        and quantization.get("fmt", "e4m3") == "e4m3"
        and quantization.get("weight_block_size", [Fp8().block] * 2) == [Fp8().block] * 2
    )


def _unsupported_values(config: DeepseekV2Config) -> list[str]:
    methods = {"v2": {"greedy", "group_limited_greedy"}, "v3": {"noaux_tc"}}[ARCHITECTURES[config.model_type]]
    scoring = "sigmoid" if config.is_v3 else "softmax"
    allowed = {
        "topk_method": (config.topk_method, methods),
        "scoring_func": (config.scoring_func, {scoring}),
        "hidden_act": (config.hidden_act, {"silu"}),
        "torch_dtype": (config.torch_dtype, set(DTYPES)),
    }
    problems = [
        f"{key} {value!r} is not supported; supported: {', '.join(sorted(good))}"
        for key, (value, good) in allowed.items()
        if value not in good
    ]
    experts = config.n_routed_experts
    if experts is not None:
        if experts % config.n_group:
            problems.append(f"n_routed_experts {experts} is not a multiple of n_group {config.n_group}")
        if config.topk_group > config.n_group:
            problems.append(f"topk_group {config.topk_group} is more than n_group {config.n_group}")
        if config.num_experts_per_tok > experts // config.n_group * config.topk_group:
            problems.append(f"num_experts_per_tok {config.num_experts_per_tok} is more than can be chosen from")
    if config.qk_rope_head_dim % 2:
        problems.append(f"qk_rope_head_dim {config.qk_rope_head_dim} is odd; RoPE turns pairs")
    return problems
