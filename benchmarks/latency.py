"""How long a small shard takes to its event, idle and beside a large one; and what a daemon costs that does nothing.

Run: ``python benchmarks/latency.py [--quick]``. One tensor of 16 KB, by the folder (close() to ``shard.applied`` in
this process) and by the socket (from the call to the event), each some hundred times: while the daemon is idle, and
while large shards stream in one after the other. Then its CPU time while nothing happens, its memory beyond that of its
weights, and the time from its start until it answers.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from folder import V2
from harness import Daemon, cpu_seconds, daemon, machine, percentile, private_bytes, save, with_tunables
from safetensors.torch import save as serialize
from safetensors.torch import save_file

from fusewire.daemon.client import Subscriber, Trainer
from fusewire.daemon.events import ShardApplied
from fusewire.model import DeepseekV2Config, DeepseekV2ForCausalLM, SlotTable

SMALL = "model.norm.weight"
CONFIG = V2 | {"hidden_size": 8192}
"""So that the final norm is one tensor of 16 KB."""


class Applied:
    """Hears of shards, by name."""

    def __init__(self, running: Daemon) -> None:
        self._subscriber = Subscriber(running.endpoint("events"), running.endpoint("control"), timeout=60)

    def wait(self, name: str) -> float:
        """Wait for a shard; return when its event came."""
        for event in self._subscriber.events(timeout=60):
            if isinstance(event, ShardApplied) and event.shard == name:
                return time.perf_counter()
        raise SystemExit(f"no event for {name}")


def by_folder(running: Daemon, small: bytes, applied: Applied) -> Callable[[int], float]:
    """Return a function that drops the small shard as file number n, and returns the seconds to its event."""

    def once(number: int) -> float:
        name = f"small{number}.safetensors"
        with (running.shards / name).open("wb") as file:
            file.write(small)
        begin = time.perf_counter()
        seconds = applied.wait(name) - begin
        (running.shards / name).unlink()
        return seconds

    return once


def by_socket(running: Daemon, small: bytes, applied: Applied) -> Callable[[int], float]:
    """Return a function that pushes the small shard as number n, and returns the seconds to its event."""
    trainer = Trainer(running.endpoint("ingest"), timeout=60)

    def once(number: int) -> float:
        begin = time.perf_counter()
        trainer.push_bytes(small, name=f"pushed{number}")
        return applied.wait(f"pushed{number}") - begin

    return once


def measure(title: str, once: Callable[[int], float], numbers: range) -> dict[str, Any]:
    """Do it again and again, with short pauses; print the percentiles."""
    seconds = []
    for number in numbers:
        seconds.append(once(number))
        time.sleep(0.005)
    p50, p99 = percentile(seconds, 0.5) * 1e3, percentile(seconds, 0.99) * 1e3
    print(f"  {title:44} p50 {p50:7.2f} ms   p99 {p99:7.2f} ms   worst {max(seconds) * 1e3:7.2f} ms", flush=True)
    return {"way": title, "seconds": seconds}


def stream(running: Daemon, large: Path, stop: threading.Event, landed: list[int]) -> None:
    """Drop the large shard again and again; each time a new file that is the old one's bytes."""
    with Subscriber(running.endpoint("events"), running.endpoint("control"), timeout=60) as subscriber:
        for number in range(10_000):
            if stop.is_set():
                return
            path = running.shards / f"large{number}.safetensors"
            path.hardlink_to(large)
            for event in subscriber.events(timeout=60):
                if isinstance(event, ShardApplied) and event.shard == path.name:
                    break
            landed.append(number)
            path.unlink()


def main() -> int:
    """Run everything and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, a smaller model")
    quick = parser.parse_args().quick
    with_tunables()
    rounds, idle_seconds = (60, 5) if quick else (400, 30)
    print(machine())
    raw = CONFIG | {"n_routed_experts": 6} if quick else CONFIG
    config = DeepseekV2Config.from_dict(raw)
    slots = SlotTable.build(config).slots
    small = serialize({SMALL: torch.ones(slots[SMALL].shape, dtype=torch.bfloat16)})
    records: list[dict[str, Any]] = []
    begin = time.perf_counter()
    with daemon(raw) as running:
        started = time.perf_counter() - begin
        weights = {name: torch.zeros(slot.shape, dtype=torch.bfloat16) for name, slot in slots.items()}
        applied = Applied(running)
        save_file(weights, running.shards / "base.safetensors")
        applied.wait("base.safetensors")
        aside = running.root / "aside.safetensors"
        del weights[SMALL]  # two shards with the same tensor are applied one after the other
        save_file(weights, aside)
        nbytes = aside.stat().st_size
        del weights
        time.sleep(2)
        print(f"\na shard of one tensor of {len(small):,} bytes, {rounds} times")
        ways = {"folder: close() to event": by_folder, "socket: call to event": by_socket}
        for title, way in ways.items():
            records.append(measure(f"{title}, idle", way(running, small, applied), range(rounds)))
        stop, landed = threading.Event(), list[int]()
        streaming = threading.Thread(target=stream, args=(running, aside, stop, landed))
        streaming.start()
        begin = time.perf_counter()
        for number, (title, way) in enumerate(ways.items()):
            numbers = range(10_000 * (1 + number), 10_000 * (1 + number) + rounds)
            beside = f"{title}, beside shards of {nbytes / 1e9:.1f} GB"
            records.append(measure(beside, way(running, small, applied), numbers))
        stop.set()
        streaming.join()
        rate = len(landed) * nbytes / (time.perf_counter() - begin)
        print(f"  meanwhile {len(landed)} large shards came, {rate / 1e9:.1f} GB/s")
        records.append({"meanwhile_bytes_per_second": rate, "meanwhile_shards": len(landed)})
        time.sleep(2)
        before = cpu_seconds(running.pid)
        time.sleep(idle_seconds)
        share = (cpu_seconds(running.pid) - before) / idle_seconds
        beyond = private_bytes(running) - 2 * DeepseekV2ForCausalLM.nbytes(config)
        print(f"\nidle: {share:.2%} of a core; {beyond / 1e6:.0f} MB beyond two generations; up after {started:.2f} s")
        records.append({"idle_cpu": share, "beyond_bytes": beyond, "start_seconds": started})
    print(f"written to {save('latency', records, quick=quick)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
