"""Filling memory that is allocated already from one safetensors file: fusewire's daemon beside other loaders.

Run: ``python benchmarks/peers.py [--rounds N] [--quick]``. One file of 2 GB (quick: 0.2 GB) in the page cache, as wide
as DeepSeek-V2. In each round, in turn: memcpy of as many bytes on one thread and on two; reading the file's bytes with
preadv on one and on two; then each loader, followed by ``copy_`` of every tensor into its parameter, torch with as many
threads as there are cores; and fusewire, from close() of the file in its folder to its event here. After the first
round each way's bytes are compared with the file's.

They do not do the same. The daemon is another process, checks the file and the model's names, pairs halves and tells of
it; the loaders are functions in one's own process. What each does with files that are not as they should be is tried
out here too, on small ones, and printed as a second table. Packages that are not installed are named and left out.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import folder
import numpy as np
import probes
import torch
from harness import Daemon, Memcpy, Peak, daemon, interleave, machine, private_bytes, save, table, with_tunables
from loaders import LOADERS, MISSING, PICKLED, VERSIONS, Loader
from safetensors.torch import load_file
from torch import Tensor

from fusewire.daemon.client import Subscriber

ONE, TWO = "memcpy, 1 thread", "memcpy, 2 threads (the floor)"
BLOCK = 4 * 1024 * 1024
FUSEWIRE = "fusewire: close() to event"


class State:
    """Parameters that are there already: views of one block of memory, which they fill.

    Args:
        shapes: Name -> shape; all are bfloat16.
    """

    def __init__(self, shapes: dict[str, torch.Size]) -> None:
        total = sum(shape.numel() for shape in shapes.values())
        self.memory = torch.zeros(total, dtype=torch.bfloat16)
        self.parameters: dict[str, Tensor] = {}
        at = 0
        for name, shape in shapes.items():
            self.parameters[name] = self.memory[at : at + shape.numel()].view(shape)
            at += shape.numel()

    def check(self, path: Path, who: str) -> None:
        """Compare with what the file holds; SystemExit if it differs."""
        for name, tensor in load_file(path).items():
            if not torch.equal(tensor, self.parameters[name]):
                raise SystemExit(f"{who}: {name} is not what the file holds")


class Fill:
    """One loader, and `copy_` into the state; checks the bytes once, and notes the memory that it takes."""

    def __init__(self, name: str, loader: Loader, path: Path, state: State, truth: Path) -> None:
        self._name, self._loader, self._path, self._state, self._truth = name, loader, path, state, truth
        self.extra_bytes = 0
        self._checked = False

    def __call__(self) -> float:
        """Fill once; return seconds."""
        if self._checked:
            return self._fill()
        self._state.memory.zero_()
        before = private_bytes(os.getpid())
        peak = Peak(lambda: private_bytes(os.getpid()))
        seconds = self._fill()
        self.extra_bytes = peak.stop() - before
        self._state.check(self._truth, self._name)
        self._checked = True
        return seconds

    def _fill(self) -> float:
        begin = time.perf_counter()
        for name, tensor in self._loader(self._path):
            self._state.parameters[name].copy_(tensor)
        return time.perf_counter() - begin


class Read:
    """The page cache's rate: a file's bytes by preadv into memory, in blocks, on several threads."""

    def __init__(self, path: Path, state: State, threads: int) -> None:
        self._memory = state.memory.view(torch.uint8).numpy().data
        size = path.stat().st_size
        self._skip = size - self._memory.nbytes
        self._path, self._pool = path, ThreadPoolExecutor(threads)
        edges = np.linspace(0, self._memory.nbytes, threads + 1).astype(np.int64).tolist()
        self._parts = list(pairwise(edges))

    def __call__(self) -> float:
        """Read once; return seconds."""
        begin = time.perf_counter()
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            list(self._pool.map(lambda part: self._read(descriptor, *part), self._parts))
        finally:
            os.close(descriptor)
        return time.perf_counter() - begin

    def _read(self, descriptor: int, start: int, stop: int) -> None:
        while start < stop:
            got = os.preadv(descriptor, [self._memory[start : min(stop, start + BLOCK)]], self._skip + start)
            if not got:
                raise SystemExit(f"{self._path} has become shorter")
            start += got


class Delivered:
    """fusewire.folder's way, watched for memory in its first round."""

    def __init__(self, running: Daemon, subscriber: Subscriber, shard: Path) -> None:
        self._deliver = folder.Fusewire(running, subscriber, shard)
        self._running = running
        self.extra_bytes: int | None = None

    def __call__(self) -> float:
        """Deliver the shard once; return the seconds from close() to the event."""
        if self.extra_bytes is not None:
            return self._deliver()
        before, peak = private_bytes(self._running), Peak(lambda: private_bytes(self._running))
        seconds = self._deliver()
        self.extra_bytes = peak.stop() - before
        return seconds


def measure(*, quick: bool, rounds: int) -> list[dict[str, Any]]:
    """Run all ways in turn; print a table, return records."""
    config = folder.V2 | {"hidden_size": 512} if quick else folder.V2
    with daemon(config) as running:
        base, shard, pickled = running.root / "base.safetensors", running.root / "shard", running.root / "state.pt"
        folder.random_shard(config, lambda _: True, base)
        tensors = folder.random_shard(config, lambda name: ".layers." in name, shard)
        torch.save(tensors, pickled)
        state = State({name: tensor.shape for name, tensor in tensors.items()})
        del tensors
        nbytes = state.memory.nbytes
        with Subscriber(running.endpoint("events"), running.endpoint("control"), timeout=60) as subscriber:
            base.rename(running.shards / base.name)
            subscriber.wait_ready(timeout=folder.EVENT_TIMEOUT)
            (running.shards / base.name).unlink()
            fills = {
                name: Fill(name, loader, pickled if name == PICKLED else shard, state, shard)
                for name, loader in LOADERS.items()
            }
            on_one = Memcpy(nbytes, 1)
            delivered = Delivered(running, subscriber, shard)
            ways: dict[str, Callable[[], float]] = {
                ONE: on_one,
                TWO: Memcpy(nbytes, 2, beside=on_one),
                "page cache: preadv, 1 thread": Read(shard, state, 1),
                "page cache: preadv, 2 threads": Read(shard, state, 2),
                **{f"{name} + copy_": fill for name, fill in fills.items()},
                FUSEWIRE: delivered,
            }
            times = interleave(ways, rounds)
    records = table("an allocated state from one file", nbytes, times, floor=TWO)
    extra = {f"{name} + copy_": fill.extra_bytes for name, fill in fills.items()} | {FUSEWIRE: delivered.extra_bytes}
    records = [record | {"part": "time"} for record in records]
    print("\n  memory beyond what is filled, at most:")
    for name, more in extra.items():
        print(f"  {name:44} {(more or 0) / 1e6:+10.1f} MB")
        records.append({"part": "memory", "way": name, "extra_bytes": more})
    for name, distribution in MISSING.items():
        print(f"  {name:44} not installed (pip install {distribution})")
        records.append({"part": "missing", "way": name, "distribution": distribution})
    return records


def main() -> int:
    """Measure, try out, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="0.2 GB, 3 rounds")
    options = parser.parse_args()
    with_tunables()
    print(machine())
    records = measure(quick=options.quick, rounds=3 if options.quick else options.rounds)
    records += [{"part": "version", "way": name, "version": version} for name, version in VERSIONS.items()]
    records += probes.run()
    print(f"\nwritten to {save('peers', records, quick=options.quick)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
