"""Versions: what a commit costs those who generate, what carrying over costs, and what streaming takes from them.

Run: ``python benchmarks/versions.py``. Needs about 8 GB of memory. Four parts:

1. The commit pause, for models whose sizes differ by ten times and more. A thread begins and ends one lease after the
   other, as forward passes do; how long each took is compared with how long it takes while nothing happens.
2. What is carried over, and how long that takes, against the share of the bytes that a version brought.
3. Tokens per second of a daemon that generates, idle and while versions stream in.
4. Bytes of memory that the daemon takes beyond its two generations, while shards of different sizes stream in.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import shutil
import statistics
import threading
import time
from typing import Any

import torch
from harness import Daemon, Peak, daemon, machine, percentile, private_bytes, save, with_tunables
from safetensors.torch import save_file
from torch import Tensor

from fusewire.daemon.client import Control, Subscriber
from fusewire.model import Carried, DeepseekV2Config, DeepseekV2ForCausalLM, SlotTable

BASE: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "vocab_size": 512,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_attention_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "eos_token_id": None,
}
SIZES: dict[str, dict[str, Any]] = {
    "small": {},
    "10x": {"hidden_size": 1024, "intermediate_size": 2048, "moe_intermediate_size": 384},
    "100x": {"hidden_size": 2560, "intermediate_size": 8192, "moe_intermediate_size": 2048, "n_routed_experts": 10},
    "1000 experts": {"n_routed_experts": 4000, "moe_intermediate_size": 16},
}
"""By bytes; and one with as many slots as a small DeepSeek-V3 has experts."""
COMMITS = 200
SHARES = (0.01, 0.1, 0.5, 1.0)
PROMPT = [1, 5, 25, 125]


def config_of(changes: dict[str, Any]) -> dict[str, Any]:
    """Return a whole config.json."""
    return BASE | changes


def random_weights(config: DeepseekV2Config, seed: int = 0) -> dict[str, Tensor]:
    """Return weights of a size that keeps activations near 1."""
    dice = torch.Generator().manual_seed(seed)
    return {
        name: torch.ones(slot.shape, dtype=torch.bfloat16)
        if len(slot.shape) == 1
        else torch.empty(slot.shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=dice)
        for name, slot in SlotTable.build(config).slots.items()
    }


# -------------------------------------------------------------------------------------- 1. the commit pause


class Readers:
    """A thread that begins and ends leases without a pause, and notes how long each took to begin."""

    def __init__(self, model: DeepseekV2ForCausalLM) -> None:
        self._model = model
        self._stop = threading.Event()
        self.waits: list[float] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            begin = time.perf_counter()
            with self._model.lease():
                self.waits.append(time.perf_counter() - begin)
            time.sleep(0.0001)

    def stop(self) -> list[float]:
        """End the thread; return the waits in seconds."""
        self._stop.set()
        self._thread.join()
        return self.waits


def commit_pause(title: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Commit again and again under readers; print what they felt."""
    config = DeepseekV2Config.from_dict(config_of(changes))
    model = DeepseekV2ForCausalLM(config, generations=2)
    weights = random_weights(config)
    addresses = [p.data_ptr() for g in model.staging.generations for p in g.parameters.values()]
    model.load_weights(weights.items(), 0)
    model.commit(0)
    model.load_weights(weights.items(), 1)
    model.commit(1)
    idle_readers = Readers(model)
    time.sleep(1.0)
    idle = idle_readers.stop()
    norm = {"model.norm.weight": weights["model.norm.weight"]}
    commits: list[float] = []
    during: list[float] = []
    for version in range(2, 2 + COMMITS):
        deadline = time.monotonic() + 10
        while model.staging.staged_leases().leases and time.monotonic() < deadline:
            time.sleep(0.0005)
        model.load_weights(norm.items(), version)
        model.carry(version)
        readers = Readers(model)
        time.sleep(0.002)
        seen = len(readers.waits)
        begin = time.perf_counter()
        model.commit(version)
        commits.append(time.perf_counter() - begin)
        time.sleep(0.002)
        during += readers.stop()[seen:]
    if addresses != [p.data_ptr() for g in model.staging.generations for p in g.parameters.values()]:
        raise SystemExit("an address changed")
    nbytes = model.generation.nbytes
    print(
        f"  {title:14} {nbytes / 1e6:10,.1f} MB {len(model.table.slots):7,} slots   commit p50 "
        f"{statistics.median(commits) * 1e6:6.0f} us  p99 {percentile(commits, 0.99) * 1e6:6.0f} us   to begin a pass: "
        f"p99 {percentile(during, 0.99) * 1e6:6.0f} us around commits, {percentile(idle, 0.99) * 1e6:6.0f} us idle"
    )
    return {"part": "pause", "bytes": nbytes, "commits": commits, "around": during, "idle": idle}


# ------------------------------------------------------------------------------------------- 2. carrying over


def carry_over() -> list[dict[str, Any]]:
    """Let versions bring a share of the bytes, twice in a row; print what the second had to carry over."""
    config = DeepseekV2Config.from_dict(config_of(SIZES["100x"]))
    model = DeepseekV2ForCausalLM(config, generations=2)
    weights = random_weights(config)
    total = sum(tensor.nbytes for tensor in weights.values())
    numbers = itertools.count()

    def bring(share: float) -> Carried:
        version, brought, chosen = next(numbers), 0, {}
        for name, tensor in weights.items():
            if brought < share * total:
                chosen[name] = tensor
                brought += tensor.nbytes
        model.load_weights(chosen.items(), version)
        carried = model.carry(version)
        model.commit(version)
        return carried

    bring(1.0)
    bring(1.0)
    records = []
    for share in SHARES:
        bring(share)
        carried = bring(0.0001)
        rate = f"{carried.nbytes / carried.seconds / 1e9:5.1f} GB/s" if carried.nbytes else ""
        print(
            f"  after a version of {share:5.0%} of {total / 1e6:,.0f} MB: {carried.slots:4} slots, "
            f"{carried.nbytes / 1e6:7,.1f} MB carried over in {carried.seconds * 1e3:7.2f} ms {rate}"
        )
        records.append({"part": "carry", "share": share, "bytes": carried.nbytes, "seconds": carried.seconds})
        bring(1.0)
    return records


# ------------------------------------------------------------------- 3. generating, and 4. memory, in a daemon


def drop(running: Daemon, weights: dict[str, Tensor], version: int, shards: int) -> None:
    """Put a version's shards into the folder: written once, then linked, so that the trainer's work is not measured."""
    written = running.root / f"in_{shards}"
    if not written.exists():
        written.mkdir()
        names = list(weights)
        for number in range(shards):
            save_file({name: weights[name] for name in names[number::shards]}, written / f"{number}.safetensors")
    aside = running.root / f"aside{version}"
    aside.mkdir()
    for path in written.iterdir():
        (aside / path.name).hardlink_to(path)
    aside.rename(running.shards / f"step_{version}")


def tokens_per_second(control: Control, seconds: float) -> float:
    """Generate for a while; return tokens per second."""
    begin, tokens = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        tokens += len(control.generate(PROMPT, 16, timeout=60).token_ids)
    return tokens / (time.perf_counter() - begin)


def in_a_daemon() -> list[dict[str, Any]]:
    """Stream versions into a daemon that generates; print tokens per second, and the memory that it took."""
    raw = config_of(SIZES["100x"])
    config = DeepseekV2Config.from_dict(raw)
    weights = random_weights(config)
    total = sum(tensor.nbytes for tensor in weights.values())
    nbytes = DeepseekV2ForCausalLM.nbytes(config)
    records: list[dict[str, Any]] = []
    with (
        daemon(raw) as running,
        Subscriber(running.endpoint("events"), running.endpoint("control"), timeout=60) as subscriber,
        Control(running.endpoint("control"), timeout=120) as control,
    ):
        empty = private_bytes(running)
        version = 1
        drop(running, weights, version, 8)
        subscriber.wait_version(version, timeout=120)
        tokens_per_second(control, 2)
        before = private_bytes(running)
        print(
            f"  two generations: {2 * nbytes / 1e6:,.0f} MB; the daemon with empty weights has "
            f"{(empty - 2 * nbytes) / 1e6:,.0f} MB more, after a first version and some requests "
            f"{(before - 2 * nbytes) / 1e6:,.0f} MB more"
        )
        for shards in (32, 8, 1):
            idle = tokens_per_second(control, 4)
            peak, stop = Peak(lambda: private_bytes(running)), threading.Event()
            landed: list[int] = []

            def stream(shards: int = shards, stop: threading.Event = stop, landed: list[int] = landed) -> None:
                nonlocal version
                while not stop.is_set():
                    version += 1
                    drop(running, weights, version, shards)
                    subscriber.wait_version(version, timeout=120)
                    landed.append(version)
                    shutil.rmtree(running.shards / f"step_{version}")

            streaming = threading.Thread(target=stream)
            streaming.start()
            begin = time.perf_counter()
            busy = tokens_per_second(control, 8)
            stop.set()
            streaming.join()
            rate = len(landed) * total / (time.perf_counter() - begin)
            extra = peak.stop() - before
            print(
                f"  versions of {total / 1e6:,.0f} MB in {shards:2} shards ({total / shards / 1e6:6,.0f} MB each): "
                f"{idle:6.1f} tokens/s idle, {busy:6.1f} ({busy / idle:.2f}) while {rate / 1e9:.2f} GB/s of new "
                f"weights came in {len(landed)} versions; memory {extra / 1e6:+.1f} MB"
            )
            records.append({"part": "daemon", "shards": shards, "idle": idle, "busy": busy, "extra_bytes": extra})
    return records


def main() -> int:
    """Run all parts."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with_tunables()
    print(machine())
    records: list[dict[str, Any]] = []
    print(f"\n1. commit pause, {COMMITS} commits each")
    for title, changes in SIZES.items():
        records.append(commit_pause(title, changes))
        gc.collect()
    print("\n2. carrying over")
    records += carry_over()
    gc.collect()
    print("\n3., 4. a daemon that generates while versions stream in")
    records += in_a_daemon()
    print(f"\nwritten to {save('versions', records)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
