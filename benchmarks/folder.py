"""From close() of a shard in the drop folder to its event in another process.

Beside it, in the same rounds: memcpy, and the usual way to reload.

Run: ``python benchmarks/folder.py [--rounds N] [--quick]``. Two shards: one fused pair of 65 MB, and about
2 GB of a DeepSeek-V2-wide layer. Both lie in the page cache. In each round, in turn:

* memcpy: the same bytes, RAM to RAM, warm, non-temporal, on two threads: the floor;
* the usual way: ``safetensors.torch.load_file``, ``torch.cat`` of the halves, ``copy_`` into the parameters,
  in this process, without any event: what a reload in place costs elsewhere;
* fusewire: the time from close() of the file to the arrival of its ``shard.applied`` event, in this process.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from harness import Daemon, Memcpy, daemon, interleave, machine, save, table, with_tunables
from safetensors.torch import load_file, save_file

from fusewire.daemon.client import Subscriber
from fusewire.daemon.events import ShardApplied, ShardRefused
from fusewire.model import DeepseekV2Config, SlotTable

V2 = {
    "model_type": "deepseek_v2",
    "vocab_size": 256,
    "hidden_size": 5120,
    "intermediate_size": 256,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 38,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 16.0,
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
PAIR = V2 | {
    "hidden_size": 15360,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "first_k_dense_replace": 1,
}
"""One layer whose q_a_proj and kv_a_proj_with_mqa have 65 MB together: 2,112 rows of 15,360 bfloat16."""
FLOOR = "memcpy, 2 threads (the floor)"
CLOSE_TO_EVENT = "fusewire: close() to event"
EVENT_TIMEOUT = 60.0
WRITE_BYTES = 16 * 1024 * 1024
"""What a trainer writes at a time: about one tensor."""


def random_shard(config: dict[str, Any], names: Callable[[str], bool], path: Path) -> dict[str, torch.Tensor]:
    """Write a shard with random values for the checkpoint names that are wanted; return its tensors."""
    table_ = SlotTable.build(DeepseekV2Config.from_dict(config), None)
    seed = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.empty(slot.shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=seed)
        for name, slot in table_.slots.items()
        if names(name)
    }
    save_file(tensors, path)
    return tensors


class UsualWay:
    """load_file + torch.cat + copy_, into parameters that exist already."""

    def __init__(self, path: Path, tensors: dict[str, torch.Tensor]) -> None:
        self._path = path
        stems = {name.rsplit(".", 2)[0] for name in tensors if ".q_a_proj." in name}
        self._pairs = [(f"{s}.q_a_proj.weight", f"{s}.kv_a_proj_with_mqa.weight") for s in stems]
        halves = set(itertools.chain.from_iterable(self._pairs))
        self._fused = [torch.cat([tensors[q], tensors[kv]]) for q, kv in self._pairs]
        self._parameters = {name: tensor.clone() for name, tensor in tensors.items() if name not in halves}

    def __call__(self) -> float:
        """Load once; return the seconds that it took."""
        begin = time.perf_counter()
        loaded = load_file(self._path)
        for (q, kv), fused in zip(self._pairs, self._fused, strict=True):
            fused.copy_(torch.cat([loaded[q], loaded[kv]]))
        for name, parameter in self._parameters.items():
            parameter.copy_(loaded[name])
        return time.perf_counter() - begin


class Fusewire:
    """Closes a file in the drop folder and waits for the event that tells of it."""

    def __init__(self, running: Daemon, subscriber: Subscriber, shard: Path) -> None:
        self._daemon = running
        self._subscriber = subscriber
        self._shard = shard
        self._number = 0
        self.copying: list[float] = []
        """What the daemon itself says of each delivery: seconds from the first byte copied to the last."""

    def __call__(self) -> float:
        """Deliver the shard once; return the seconds from close() to the event."""
        self._number += 1
        name = f"shard-{self._number}.safetensors"
        final = self._daemon.shards / name
        descriptor = os.open(final, os.O_WRONLY | os.O_CREAT)
        with self._shard.open("rb") as source:
            while block := source.read(WRITE_BYTES):
                os.write(descriptor, block)
        time.sleep(0.2)  # the daemon has seen it, and waits for its writer
        begin = time.perf_counter()
        os.close(descriptor)
        for event in self._subscriber.events(timeout=EVENT_TIMEOUT):
            if isinstance(event, ShardRefused) and event.shard == name:
                raise SystemExit(f"rejected: {event.message}")
            if isinstance(event, ShardApplied) and event.shard == name:
                seconds = time.perf_counter() - begin
                self.copying.append(event.seconds)
                final.unlink()
                return seconds
        raise SystemExit(f"no event within {EVENT_TIMEOUT} s")


def measure(
    config: dict[str, Any], shards: Mapping[str, Callable[[str], bool]], rounds: int
) -> list[dict[str, object]]:
    """Fill a daemon's model once, then deliver parts of it again and again.

    Args:
        config: The model's config.json.
        shards: Title -> which tensors are in that shard. One after the other, each beside its own floor.
        rounds: How often each is delivered, after one round to warm up.
    """
    records: list[dict[str, object]] = []
    with daemon(config) as running:
        base, shard = running.root / "base.safetensors", running.root / "shard"
        random_shard(config, lambda _: True, base)
        with Subscriber(running.endpoint("events"), running.endpoint("control"), timeout=30) as subscriber:
            base.rename(running.shards / base.name)
            subscriber.wait_ready(timeout=EVENT_TIMEOUT)
            (running.shards / base.name).unlink()
            torch.set_num_threads(1)
            fusewire = Fusewire(running, subscriber, shard)
            for title, wanted in shards.items():
                tensors = random_shard(config, wanted, shard)
                nbytes = sum(tensor.nbytes for tensor in tensors.values())
                usual = UsualWay(shard, tensors)
                fusewire.copying.clear()
                ways: dict[str, Callable[[], float]] = {
                    FLOOR: Memcpy(nbytes),
                    "usual: load_file + cat + copy_, 1 thread": usual,
                    "usual, torch with 2 threads": functools.partial(_with_threads, 2, usual),
                    CLOSE_TO_EVENT: fusewire,
                }
                times = interleave(ways, rounds)
                times["  of which copying"] = fusewire.copying[1:]
                records += [record | {"tensors": len(tensors)} for record in table(title, nbytes, times, floor=FLOOR)]
                del tensors, usual, ways
    return records


def _with_threads(threads: int, way: Callable[[], float]) -> float:
    torch.set_num_threads(threads)
    try:
        return way()
    finally:
        torch.set_num_threads(1)


def main() -> int:
    """Measure both shards and print a table."""
    parser = argparse.ArgumentParser(description="from close() of a shard to its event")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--quick", action="store_true", help="the pair only, few rounds")
    parser.add_argument("--only", choices=["pair", "shard"])
    options = parser.parse_args()
    with_tunables()
    print(machine())
    rounds = 5 if options.quick else options.rounds
    records = []
    if options.only != "shard":
        records += measure(PAIR, {"fused pair": lambda name: "_a_proj" in name}, rounds)
    if options.only != "pair" and not options.quick:
        records += measure(V2, {"V2-wide shard": lambda name: ".layers." in name}, rounds)
    print(f"\nwritten to {save('folder', records, quick=options.quick)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
