"""Real widths: two layers as wide as DeepSeek-V2's (bfloat16) and V3's (fp8) stream through a daemon that generates.

Run: ``python benchmarks/widths.py``. Needs about 8 GB of memory. All dimensions are those of the released models but
the number of layers, of experts and of words. The checkpoint is cut so that halves, weights and scales travel apart.
Checked: the daemon's tokens are those of a model in this process that was loaded in one call, and that model's fused
parameters are, bit for bit, torch.cat of the halves.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from harness import Daemon, daemon, machine, save
from safetensors.torch import save_file
from torch import Tensor

from fusewire.daemon.client import Control, Subscriber
from fusewire.model import DeepseekV2Config, DeepseekV2ForCausalLM, SlotTable

CONFIGS = Path(__file__).parents[1] / "config" / "models"
FEW: dict[str, Any] = {
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "n_routed_experts": 16,
    "num_nextn_predict_layers": 0,
    "vocab_size": 512,
    "eos_token_id": None,
}
MODELS = {"V2-236B-wide": "DeepSeek-V2-236B_mscale0.707", "V3-wide": "DeepSeek-V3"}
SHARDS = 12
PROMPT = [1, 5, 25, 125]
TOKENS = 4


def random_checkpoint(config: DeepseekV2Config) -> dict[str, Tensor]:
    """Return random weights of a size that keeps activations near 1."""
    seed = torch.Generator().manual_seed(0)
    made: dict[str, Tensor] = {}
    for name, slot in SlotTable.build(config).slots.items():
        if name.endswith("weight_scale_inv"):
            made[name] = torch.empty(slot.shape).uniform_(1e-4, 3e-4, generator=seed)
        elif slot.dtypes == {"F8_E4M3"}:
            made[name] = torch.randint(-120, 120, slot.shape, generator=seed).to(torch.float8_e4m3fn)
        elif len(slot.shape) == 1:
            made[name] = torch.ones(slot.shape, dtype=torch.bfloat16)
        else:
            made[name] = torch.empty(slot.shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=seed)
    return made


def cut(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Deal tensors out at random."""
    names = sorted(tensors)
    random.Random(0).shuffle(names)  # noqa: S311 - a shuffle, not a secret
    return [{name: tensors[name] for name in names[first::SHARDS]} for first in range(SHARDS)]


def stream(running: Daemon, tensors: dict[str, Tensor]) -> tuple[float, list[int]]:
    """Drop the shards one by one; return seconds from the first close to ready, and the tokens generated then."""
    with (
        Subscriber(running.endpoint("events"), running.endpoint("control"), timeout=60) as subscriber,
        Control(running.endpoint("control"), timeout=300) as control,
    ):
        shards = cut(tensors)
        for number, shard in enumerate(shards):
            save_file(shard, running.root / f"{number}.safetensors")
        step = running.shards / "step_1"
        step.mkdir()
        begin = time.perf_counter()
        for number in range(len(shards)):
            (running.root / f"{number}.safetensors").rename(step / f"{number}.safetensors")
        subscriber.wait_version(1, timeout=120)
        seconds = time.perf_counter() - begin
        status = control.status()
        if status.layers.fused != (0, 1) or status.pending:
            raise SystemExit(f"layers {status.layers.fused} fused, {len(status.pending)} halves waiting")
        return seconds, list(control.generate(PROMPT, TOKENS).token_ids)


def check_fused(model: DeepseekV2ForCausalLM, tensors: dict[str, Tensor]) -> int:
    """Compare each fused parameter with torch.cat of its halves; return how many there are."""
    count = 0
    for name, parameter in model.generation.parameters.items():
        if ".fused_qkv_a_proj_with_mqa." not in name:
            continue
        halves = [
            tensors[name.replace("fused_qkv_a_proj_with_mqa", half)] for half in ("q_a_proj", "kv_a_proj_with_mqa")
        ]
        whole = torch.cat([half.view(torch.uint8) for half in halves])
        if not parameter.view(torch.uint8).equal(whole):
            raise SystemExit(f"{name} is not torch.cat of its halves")
        count += 1
    return count


def main() -> int:
    """Run both models and print a line for each."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(machine())
    records = []
    for title, name in MODELS.items():
        raw = json.loads((CONFIGS / f"{name}.json").read_text()) | FEW
        config = DeepseekV2Config.from_dict(raw)
        tensors = random_checkpoint(config)
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        with daemon(raw) as running:
            seconds, tokens = stream(running, tensors)
        model = DeepseekV2ForCausalLM(config)
        model.load_weights(tensors.items())
        fused = check_fused(model, tensors)
        expected = model.generate(torch.tensor([PROMPT]), TOKENS)[0, len(PROMPT) :].tolist()
        if tokens != expected:
            raise SystemExit(f"{title}: the daemon generated {tokens}, a cold load {expected}")
        print(
            f"{title}: {nbytes / 1e9:.2f} GB in {SHARDS} shards, live after {seconds:.2f} s "
            f"({nbytes / seconds / 1e9:.1f} GB/s); {fused} fused parameters equal torch.cat; tokens {tokens} as cold"
        )
        records.append({"model": title, "bytes": nbytes, "seconds": seconds})
    print(f"written to {save('widths', records)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
