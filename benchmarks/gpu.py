"""From a file to the rows of a model on a GPU, beside a plain copy of the same bytes from pinned memory.

Run: ``python benchmarks/gpu.py``. One CUDA device with 10 GB of free memory, 12 GB of host memory, 6 GB of disk; two to
three minutes. Without such a device it says so and ends with exit code 2. ``--dry-run`` goes through all of it on the
CPU, with the stand-in for a device and small sizes: it tells whether this script works, and nothing of any speed.

1. GB/s of the loader, from the page cache and from a tmpfs to the device, for several numbers of copy threads. The
   floor, in the same rounds: as many bytes from pinned host memory in blocks, by nothing but cudaMemcpyAsync. Beside it
   what the host alone can do: memcpy on as many threads. The goal is 0.9 of the floor (the last column).
2. Bytes that loading takes beyond the weights: on the device, pinned, and in host memory.
3. The commit pause while another thread generates, and what those tokens felt.
4. From close() of the file in a daemon's drop folder to its event in this process.
"""

from __future__ import annotations

import argparse
import itertools
import os
import queue
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import torch
from folder import V2, Fusewire
from harness import SETTINGS, Memcpy, daemon, interleave, machine, percentile, save, table, with_tunables
from safetensors.torch import save_file
from torch import Tensor
from versions import PROMPT, SIZES, config_of, random_weights

from fusewire.daemon.client import Subscriber
from fusewire.daemon.devices import CudaDevice, Device, HostDevice
from fusewire.daemon.lease import install_lease_signal_handling
from fusewire.daemon.loader import Loader, Source
from fusewire.daemon.payload import Payload, open_file
from fusewire.daemon.ring import Ring, layout
from fusewire.daemon.settings import Loader as LoaderSettings
from fusewire.daemon.settings import Model, Settings
from fusewire.daemon.stimuli import Inspected, Placed
from fusewire.model import DeepseekV2Config, DeepseekV2ForCausalLM, SlotTable

BLOCK = 16 << 20
"""Bytes of one plain copy: as a slot of the ring."""
TIMEOUT = 60.0
RING_BYTES = LoaderSettings().ring_bytes


class Bench(NamedTuple):
    """What is measured on."""

    device: torch.device
    new_device: Callable[[], Device]
    config: dict[str, Any]
    small: dict[str, Any]
    """For the commit pause."""
    rounds: int
    commits: int
    folder: str

    @property
    def real(self) -> bool:
        """Whether this is a GPU."""
        return self.device.type == "cuda"


def write_shard(config: dict[str, Any], path: Path) -> int:
    """Write all tensors of a model, with values that repeat themselves; return the bytes of their data."""
    base = torch.empty(8 << 20, dtype=torch.bfloat16).normal_(0, 0.02, generator=torch.Generator().manual_seed(0))
    tensors = {
        name: base.repeat(-(-slot.numel // base.numel()))[: slot.numel].view(slot.shape).clone()
        for name, slot in SlotTable.build(DeepseekV2Config.from_dict(config)).slots.items()
    }
    save_file(tensors, path)
    return sum(tensor.nbytes for tensor in tensors.values())


class Floor:
    """The floor: bytes from pinned memory to the device, block after block on one stream, and nothing else."""

    def __init__(self, bench: Bench, nbytes: int) -> None:
        self._real = bench.real
        self._from = torch.ones(nbytes, dtype=torch.uint8, pin_memory=bench.real)
        self._to = torch.zeros(nbytes, dtype=torch.uint8, device=bench.device)
        self._wait()

    def _wait(self) -> None:
        if self._real:
            torch.cuda.synchronize()

    def __call__(self) -> float:
        """Copy once; return the seconds that it took."""
        begin = time.perf_counter()
        for source, target in zip(self._from.split(BLOCK), self._to.split(BLOCK), strict=True):
            target.copy_(source, non_blocking=True)
        self._wait()
        return time.perf_counter() - begin


class Loading:
    """The daemon's loader with its ring, in this process."""

    def __init__(self, bench: Bench, model: DeepseekV2ForCausalLM, threads: int) -> None:
        self.told: queue.Queue[Any] = queue.Queue()
        self.ring = Ring(bench.new_device(), *layout(RING_BYTES, threads))
        if self.ring.note:
            print(f"  note: {self.ring.note}")
        loader = LoaderSettings(threads=threads)
        settings = msgspec.structs.replace(Settings(model=Model(config="")), loader=loader)
        self._loader = Loader(model, settings, self.told.put, self.ring)
        self._loader.start()

    def place(self, path: Path) -> float:
        """Place a shard; return the seconds from the order to the outcome, when all bytes are on the device."""
        key = str(path)

        def opened() -> Payload:
            return open_file(path, leases=True, settle=0.0, incomplete_after=0.0, header_limit=16 << 20)

        self._loader.inspect(key, Source(path.name, opened))
        self._expect(Inspected)
        begin = time.perf_counter()
        self._loader.place(key, path.name, None)
        self._expect(Placed)
        seconds = time.perf_counter() - begin
        self._loader.release(key)
        return seconds

    def stop(self) -> None:
        """End its threads."""
        if not self._loader.stop(TIMEOUT):
            raise SystemExit("the loader did not end")

    def _expect(self, kind: type) -> None:
        outcome = self.told.get(timeout=TIMEOUT)
        if not isinstance(outcome, kind):
            raise SystemExit(f"expected {kind.__name__}, got {outcome}")


def model_of(bench: Bench, config: dict[str, Any], generations: Literal[1, 2] = 2) -> DeepseekV2ForCausalLM:
    """Return a model without weights."""
    return DeepseekV2ForCausalLM(DeepseekV2Config.from_dict(config), device=bench.device, generations=generations)


@contextmanager
def shards(bench: Bench) -> Iterator[tuple[dict[str, Path], int]]:
    """Write the shard where it will be in the page cache, and to a tmpfs if there is room."""
    with tempfile.TemporaryDirectory(dir=bench.folder) as disk, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        path = Path(disk) / "shard.safetensors"
        nbytes = write_shard(bench.config, path)
        found = {"page cache": path}
        if shutil.disk_usage(memory).free > 1.1 * nbytes:
            found["tmpfs"] = Path(shutil.copy(path, memory))
        else:
            print(f"  note: /dev/shm has no room for {nbytes / 1e6:,.0f} MB: no tmpfs row")
        yield found, nbytes


# ------------------------------------------------------------------------------- 1. throughput, 2. what it takes


def throughput(bench: Bench) -> tuple[list[dict[str, object]], int]:
    """Measure with several numbers of threads; return records and the number that was the fastest."""
    records: list[dict[str, object]] = []
    cores = os.cpu_count() or 1
    best, fastest = 1, float("inf")
    with shards(bench) as (paths, nbytes):
        model = model_of(bench, bench.config)
        floor = Floor(bench, nbytes)
        for threads in sorted({min(count, cores) for count in (2, 4, 8, 16)}):
            loading = Loading(bench, model, threads)
            ways: dict[str, Callable[[], float]] = {
                "pinned memory, plain copies (the floor)": floor,
                f"host memcpy alone, {threads} threads": Memcpy(nbytes, threads),
            }
            for name, path in paths.items():
                ways[f"fusewire: {name} -> device"] = partial(loading.place, path)
            times = interleave(ways, bench.rounds)
            title = f"{threads} copy threads, {loading.ring.slots} slots of {loading.ring.slot_bytes >> 20} MiB"
            records += table(title, nbytes, times, floor="pinned memory, plain copies (the floor)")
            median = statistics.median(times["fusewire: page cache -> device"])
            if median < fastest:
                best, fastest = threads, median
            if threads == min(16, cores):
                records.append(transient(bench, loading, paths["page cache"]))
            loading.stop()
            check(model, paths["page cache"])
    return records, best


def check(model: DeepseekV2ForCausalLM, path: Path) -> None:
    """The bytes on the device have to be those of the file: a rate of anything else means nothing."""
    from safetensors import safe_open  # noqa: PLC0415 - for this alone

    with safe_open(path, framework="pt") as shard:
        for name in list(shard.keys())[:: max(1, len(shard.keys()) // 20)]:
            rows = model.staging.staged.rows(model.table.slots[name])
            if not torch.equal(rows.cpu(), shard.get_tensor(name).reshape(-1)):
                raise SystemExit(f"{name} has other bytes on the device than in the file")


def transient(bench: Bench, loading: Loading, path: Path) -> dict[str, object]:
    """Load some more; print what that takes beyond the weights and the ring."""
    before_host = anonymous_bytes()
    before = 0
    if bench.real:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    for _ in range(3):
        loading.place(path)
    on_device = torch.cuda.max_memory_allocated() - before if bench.real else 0
    ring = loading.ring
    record: dict[str, object] = {
        "part": "transient",
        "device_bytes": on_device,
        "host_bytes": anonymous_bytes() - before_host,
        "ring_pinned_bytes": ring.slots * ring.slot_bytes,
        "ring_device_bytes": ring.slot_bytes,
    }
    print(
        f"  per shard: {on_device / 1e6:+,.1f} MB on the device, {(anonymous_bytes() - before_host) / 1e6:+,.1f} MB in "
        f"host memory; for good: {ring.slots * ring.slot_bytes / 1e6:,.0f} MB pinned, "
        f"{ring.slot_bytes / 1e6:,.0f} MB on the device for casts"
    )
    return record


def anonymous_bytes() -> int:
    """Return what this process has allocated, without mapped files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("no RssAnon in /proc")


# ------------------------------------------------------------------------------------------ 3. the commit pause


class Generating:
    """A thread that generates without a pause, and notes when each token was begun."""

    def __init__(self, model: DeepseekV2ForCausalLM) -> None:
        self._model = model
        self._stop = threading.Event()
        self.begun: list[float] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        prompt = torch.tensor([PROMPT], device=self._model.device)
        while not self._stop.is_set():
            self._model.generate(prompt, 8, cancelled=self._note)

    def _note(self) -> bool:
        self.begun.append(time.perf_counter())
        return False

    def gaps(self, since: float, until: float) -> list[float]:
        """Return the seconds from one token to the next."""
        inside = [at for at in self.begun if since <= at <= until]
        return [after - at for at, after in itertools.pairwise(inside)]

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()


def commit_pause(bench: Bench) -> dict[str, object]:
    """Commit again and again beside a thread that generates; print how long each took and what the tokens felt."""
    model = model_of(bench, bench.small)
    weights: dict[str, Tensor] = random_weights(model.config)
    for version in (0, 1):
        model.load_weights(weights.items(), version)
        model.commit(version)
    norm = {"model.norm.weight": weights["model.norm.weight"]}
    generating = Generating(model)
    time.sleep(1.0)
    quiet_since = time.perf_counter()
    time.sleep(2.0)
    quiet = generating.gaps(quiet_since, time.perf_counter())
    commits: list[float] = []
    busy_since = time.perf_counter()
    for version in range(2, 2 + bench.commits):
        deadline = time.monotonic() + TIMEOUT
        while model.staging.staged_leases().leases and time.monotonic() < deadline:
            time.sleep(0.0005)
        model.load_weights(norm.items(), version)
        model.carry(version)
        begin = time.perf_counter()
        model.commit(version)
        commits.append(time.perf_counter() - begin)
    busy = generating.gaps(busy_since, time.perf_counter())
    generating.stop()
    print(
        f"  {len(commits)} commits of {model.generation.nbytes / 1e6:,.0f} MB: p50 "
        f"{statistics.median(commits) * 1e6:,.0f} us, p99 {percentile(commits, 0.99) * 1e6:,.0f} us; a token: p50 "
        f"{statistics.median(quiet) * 1e3:.2f} ms and p99 {percentile(quiet, 0.99) * 1e3:.2f} ms before, "
        f"{statistics.median(busy) * 1e3:.2f} and {percentile(busy, 0.99) * 1e3:.2f} ms while versions came"
    )
    return {"part": "pause", "bytes": model.generation.nbytes, "commits": commits, "quiet": quiet, "busy": busy}


# ------------------------------------------------------------------------------------- 4. close() to the event


def close_to_event(bench: Bench, threads: int) -> list[dict[str, object]]:
    """Deliver the shard to a daemon by its folder, again and again."""
    settings = SETTINGS.replace("[model]\n", f'[model]\ndevice = "{bench.device}"\n')
    settings += f"[loader]\nthreads = {threads}\n"
    with daemon(bench.config, where=bench.folder, settings=settings) as running:
        shard = running.root / "shard"
        nbytes = write_shard(bench.config, shard)
        with Subscriber(running.endpoint("events"), running.endpoint("control"), timeout=TIMEOUT) as subscriber:
            shutil.copy(shard, running.root / "base")
            (running.root / "base").rename(running.shards / "base.safetensors")
            subscriber.wait_ready(timeout=TIMEOUT)
            floor, fusewire = Floor(bench, nbytes), Fusewire(running, subscriber, shard)
            floor_name = "pinned memory, plain copies (the floor)"
            times = interleave({floor_name: floor, "fusewire: close() to event": fusewire}, min(5, bench.rounds))
            times["  of which copying"] = fusewire.copying[1:]
    return table(f"close() to event, {threads} copy threads", nbytes, times, floor=floor_name)


def main() -> int:
    """Run all parts."""
    parser = argparse.ArgumentParser(description="from a file to the rows of a model on a GPU")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with a stand-in: does the script work?")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dir", default="/var/tmp", help="a folder on a disk")  # noqa: S108 - made by tempfile
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        print(
            f"gpu.py: torch {torch.__version__} finds no CUDA device, so there is nothing to measure", file=sys.stderr
        )
        return 2
    with_tunables()
    install_lease_signal_handling()
    if options.dry_run:
        small = config_of(SIZES["small"])
        bench = Bench(torch.device("cpu"), HostDevice, small, small, 2, 10, options.dir)
    else:
        device = torch.device("cuda", torch.cuda.current_device())
        medium = config_of(SIZES["10x"])
        bench = Bench(device, lambda: CudaDevice(device), V2, medium, options.rounds, 200, options.dir)
    begin = time.perf_counter()
    name = torch.cuda.get_device_name(bench.device) if bench.real else "DRY RUN: no figure below means anything"
    print(f"{name}; torch {torch.__version__}; {machine()}\n\n1., 2. throughput, and what it takes")
    records, threads = throughput(bench)
    print("\n3. the commit pause")
    records.append(commit_pause(bench))
    print("\n4. a daemon: close() to event")
    records += close_to_event(bench, threads)
    records.append({"part": "device", "name": name, "torch": torch.__version__})
    path = save("gpu" if bench.real else "gpu-dry-run", records)
    print(f"\nwritten to {path} after {time.perf_counter() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
