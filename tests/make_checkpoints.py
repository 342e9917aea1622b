"""Write the tiny checkpoints under tests/data/checkpoints/, with the logits that transformers computes from them.

Run: ``python tests/make_checkpoints.py [FOLDER]`` with transformers installed (see constraints.txt for the version).
Weights are random. Each folder is as transformers' ``save_pretrained`` writes it, in bfloat16, plus golden.safetensors:
token ids, float32 logits, and greedy tokens. The fp8 one is quantised here, block by block, and its golden values are
those of the dequantised weights in transformers, whose own fp8 path is not used.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

FOLDER = Path(__file__).parent / "data" / "checkpoints"
TOKENS = 24

COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "bos_token_id": 0,
    "pad_token_id": None,
    "initializer_range": 0.15,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 32.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 1.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
PLAIN = {"rope_type": "default", "rope_theta": 50000.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "v2-greedy": {
        "model_type": "deepseek_v2",
        "q_lora_rank": 24,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.0,
        "norm_topk_prob": False,
        "rope_parameters": PLAIN,
    },
    "moonlight": {
        "model_type": "deepseek_v3",
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.446,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-5,
        "rope_parameters": PLAIN,
    },
    "kimi": {
        "model_type": "kimi_k2",
        "q_lora_rank": 24,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.827,
        "norm_topk_prob": True,
        "rope_parameters": YARN,
    },
    "v3-fp8": {
        "model_type": "deepseek_v3",
        "hidden_size": 192,
        "intermediate_size": 160,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 2,
        "q_lora_rank": 128,
        "kv_lora_rank": 136,
        "qk_nope_head_dim": 24,
        "v_head_dim": 40,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "rope_parameters": YARN,
        "attention_bias": False,
        "initializer_range": 0.08,
    },
}


def main() -> None:
    """Write all families."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    for seed, (family, changes) in enumerate(FAMILIES.items()):
        make(target / family, COMMON | changes, seed)


def make(folder: Path, settings: dict[str, Any], seed: int) -> None:
    """Write one family."""
    torch.manual_seed(seed)
    model_type = settings.pop("model_type")
    v2 = model_type == "deepseek_v2"
    kind: Any = DeepseekV2ForCausalLM if v2 else DeepseekV3ForCausalLM
    model = kind((DeepseekV2Config if v2 else DeepseekV3Config)(**settings))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape) * 0.1)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.copy_(1 + 0.2 * torch.randn(parameter.shape))
    model.to(torch.bfloat16)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = buffer.data.float()
    model.save_pretrained(folder, max_shard_size="120KB")
    # Read anew: a cast of the module has rounded its buffers, RoPE's frequencies among them.
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    rewrite_config(folder, model_type)
    if folder.name.endswith("fp8"):
        quantise(folder, model)
    golden(folder, model)


def rewrite_config(folder: Path, model_type: str) -> None:
    """Name the family, and leave out what tells of this machine's transformers."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["model_type"] = model_type
    config.pop("transformers_version", None)
    path.write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    (folder / "generation_config.json").unlink(missing_ok=True)


def quantise(folder: Path, model: torch.nn.Module) -> None:
    """Replace the weights of all Linears but lm_head and the routers by fp8; in the model, by what that is worth."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    state = {name: parameter.data for name, parameter in model.named_parameters()}
    for path in sorted(folder.glob("model-*.safetensors")):
        tensors = load_file(path)
        for name in sorted(tensors):
            if not name.endswith(("_proj.weight", "_proj_with_mqa.weight")):
                continue
            raw, scale = block_quantise(tensors[name].float())
            tensors[name], tensors[f"{name}_scale_inv"] = raw, scale
            index["weight_map"][f"{name}_scale_inv"] = path.name
            put(state, config, name, dequantise(raw, scale))
        save_file(tensors, path, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1, sort_keys=True) + "\n")
    for name in list(DEQUANTISED):
        parameter, part = DEQUANTISED.pop(name)
        model.get_parameter(parameter).data[part] = VALUES.pop(name)


DEQUANTISED: dict[str, tuple[str, Any]] = {}
VALUES: dict[str, Tensor] = {}


def put(state: dict[str, Tensor], config: dict[str, Any], name: str, values: Tensor) -> None:
    """Note where the dequantised values go in transformers' module, which stacks the experts."""
    width = config["moe_intermediate_size"]
    VALUES[name] = values
    if name in state:
        DEQUANTISED[name] = (name, ...)
        return
    head, _, rest = name.partition(".experts.")
    expert, part, _ = rest.split(".")
    if part == "down_proj":
        DEQUANTISED[name] = (f"{head}.experts.down_proj", int(expert))
    else:
        rows = slice(0, width) if part == "gate_proj" else slice(width, 2 * width)
        DEQUANTISED[name] = (f"{head}.experts.gate_up_proj", (int(expert), rows))


def block_quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Divide each 128x128 block by its largest value over 448."""
    scale = torch.empty(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
    raw = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    for i, j in itertools.product(range(scale.shape[0]), range(scale.shape[1])):
        block = (slice(i * 128, i * 128 + 128), slice(j * 128, j * 128 + 128))
        scale[i, j] = weight[block].abs().max() / 448
        raw[block] = (weight[block] / scale[i, j]).to(torch.float8_e4m3fn)
    return raw, scale


def dequantise(raw: Tensor, scale: Tensor) -> Tensor:
    """Multiply each block with its scale."""
    out = raw.float()
    for i, j in itertools.product(range(scale.shape[0]), range(scale.shape[1])):
        out[i * 128 : i * 128 + 128, j * 128 : j * 128 + 128] *= scale[i, j]
    return out


@torch.inference_mode()
def golden(folder: Path, model: Any) -> None:
    """Write what the model makes of two prompts."""
    vocabulary = model.config.vocab_size
    ids = {"a": torch.randint(vocabulary, (1, 12)), "b": torch.randint(vocabulary, (1, 28))}
    values = {f"ids.{name}": prompt for name, prompt in ids.items()}
    values |= {f"logits.{name}": model(prompt).logits[0].float().clone() for name, prompt in ids.items()}
    made = model.generate(ids["a"], max_new_tokens=TOKENS, do_sample=False, use_cache=True)
    values["gen.a"] = made[0, -TOKENS:].clone()
    save_file(values, folder / "golden.safetensors")


if __name__ == "__main__":
    main()
