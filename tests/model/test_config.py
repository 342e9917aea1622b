"""Real config.json files are read or refused in words; so are broken ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fusewire.model import ConfigError, DeepseekV2Config, RopeScaling

CONFIGS = Path(__file__).parents[2] / "config" / "models"


def content(name: str) -> dict[str, Any]:
    return dict(json.loads((CONFIGS / f"{name}.json").read_text()))


SUPPORTED = {
    "DeepSeek-V2-236B_mscale0.707": (60, 1536, "group_limited_greedy", "softmax"),
    "DeepSeek-V2-236B_mscale1.0": (60, 1536, "group_limited_greedy", "softmax"),
    "DeepSeek-V2-Lite-Chat": (27, None, "greedy", "softmax"),
    "Moonlight-16B-A3B-Instruct": (27, None, "noaux_tc", "sigmoid"),
    "DeepSeek-V3": (61, 1536, "noaux_tc", "sigmoid"),
    "DeepSeek-R1": (61, 1536, "noaux_tc", "sigmoid"),
    "DeepSeek-V3.1-NVFP4": (61, 1536, "noaux_tc", "sigmoid"),
    "Kimi-K2-Instruct": (61, 1536, "noaux_tc", "sigmoid"),
}
REFUSED = {
    "DeepSeek-V3.2": "deepseek_v32.*indexer",
    "DeepSeek-V3.2-NVFP4": "deepseek_v32.*indexer",
    "GLM-4.7-Flash_merged": "glm4_moe_lite",
    "GLM-5": "glm_moe_dsa.*indexer",
    "GLM-5-FP8": "glm_moe_dsa.*indexer",
    "GLM-5.2": "glm_moe_dsa.*indexer",
    "Kimi-K2.5": "kimi_k25",
}


@pytest.mark.parametrize("name", SUPPORTED)
def test_supported(name: str) -> None:
    config = DeepseekV2Config.from_file(CONFIGS / f"{name}.json")
    found = (config.num_hidden_layers, config.q_lora_rank, config.topk_method, config.scoring_func)

    assert found == SUPPORTED[name]


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[name]) as refused:
        DeepseekV2Config.from_file(CONFIGS / f"{name}.json")
    assert name in str(refused.value)


def test_every_config_in_the_folder_is_tried() -> None:
    known = {*SUPPORTED, *REFUSED}

    assert {path.stem for path in CONFIGS.glob("*.json")} == known


def test_classic_and_transformers_5_keys_say_the_same() -> None:
    classic = content("DeepSeek-V2-Lite-Chat")
    modern = dict(classic)
    modern["rope_parameters"] = {**modern.pop("rope_scaling"), "rope_theta": modern.pop("rope_theta")}
    modern["rope_parameters"]["rope_type"] = modern["rope_parameters"].pop("type")
    modern["dtype"] = modern.pop("torch_dtype")

    assert DeepseekV2Config.from_dict(modern) == DeepseekV2Config.from_dict(classic)


def test_v3_without_routing_keys_is_v3() -> None:
    given = content("DeepSeek-V3")
    bare = {key: value for key, value in given.items() if key not in {"scoring_func", "topk_method"}}

    assert DeepseekV2Config.from_dict(bare) == DeepseekV2Config.from_dict(given)


def test_yarn_is_read() -> None:
    scaling = DeepseekV2Config.from_file(CONFIGS / "DeepSeek-V2-Lite-Chat.json").rope_scaling

    assert scaling == RopeScaling(
        factor=40,
        original_max_position_embeddings=4096,
        beta_fast=32,
        beta_slow=1,
        mscale=0.707,
        mscale_all_dim=0.707,
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": 1.5}, "hidden_size"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace"),
        ({"attention_bias": "no"}, "attention_bias"),
        ({"rope_scaling": "yarn"}, "rope_scaling"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "linear"),
        ({"rope_scaling": {"type": "yarn"}}, "factor"),
        ({"model_type": "llama"}, "llama"),
        ({"model_type": ["deepseek_v2"]}, "deepseek_v2"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"topk_method": "noaux_tc"}, "topk_method"),
        ({"scoring_func": "sigmoid"}, "scoring_func"),
        ({"torch_dtype": "int8"}, "torch_dtype"),
        ({"n_group": 7}, "n_group"),
        ({"topk_group": 2}, "topk_group"),
        ({"num_experts_per_tok": 65}, "num_experts_per_tok"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}, "weight_block_size"),
        ({"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, "e5m2"),
        ({"quantization_config": "fp8"}, "quantization_config"),
        ({"index_topk": 2048}, "index_topk"),
    ],
)
def test_a_bad_value_is_named(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content("DeepSeek-V2-Lite-Chat") | changes))
    with pytest.raises(ConfigError, match=named):
        DeepseekV2Config.from_file(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '"x"', "\x00", "[" * 100_000, "{}"])
def test_a_file_that_is_no_config(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        DeepseekV2Config.from_file(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        DeepseekV2Config.from_file(tmp_path / "config.json")


def test_which_layers_have_experts() -> None:
    config = DeepseekV2Config.from_file(CONFIGS / "DeepSeek-V2-Lite-Chat.json")
    every_second = config.replace(moe_layer_freq=2, first_k_dense_replace=3)

    assert [layer for layer in range(4) if config.is_moe(layer)] == [1, 2, 3]
    assert [layer for layer in range(9) if every_second.is_moe(layer)] == [4, 6, 8]
