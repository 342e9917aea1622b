"""Pushing shards over the ingest socket: in chunks as messages, and by shared memory.

Run: ``python benchmarks/ingest.py [--rounds N] [--quick]``. In each round, in turn, for shards of 97 MB and 918 MB:

* memcpy: the same bytes, RAM to RAM, on one thread, and on two;
* chunks: from the call to the answer, which comes when all bytes are in place; as messages, and by shared memory;
* whole: the same in one message, as plain pyzmq sends it, where the daemon takes it.

Then several clients at once, the same while one of them stops half way, and the daemon's memory meanwhile.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from folder import V2
from harness import SETTINGS, Daemon, Memcpy, daemon, interleave, machine, private_bytes, save, table, with_tunables
from safetensors.torch import save as serialize

from fusewire.daemon import wire
from fusewire.daemon.client import Control, Trainer
from fusewire.daemon.sending import Sender
from fusewire.model import DeepseekV2Config, SlotTable

PAIR = ("q_a_proj", "kv_a_proj_with_mqa")
WHOLE_LIMIT = 256 << 20


def shards() -> dict[str, bytes]:
    """Return the fused pair, and a third of a layer as wide as DeepSeek-V2's."""
    slots = SlotTable.build(DeepseekV2Config.from_dict(V2)).slots
    seed = torch.Generator().manual_seed(0)

    def some(names: list[str]) -> bytes:
        return serialize(
            {n: torch.empty(slots[n].shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=seed) for n in names}
        )

    pair = [n for n, slot in slots.items() if slot.part in PAIR] + ["model.layers.0.self_attn.q_b_proj.weight"]
    return {
        "pair and q_b_proj": some(pair),
        "a third of a layer": some([n for n in slots if ".experts." not in n or ".experts.1" in n]),
    }


def pusher(running: Daemon, shard: bytes, *, shared: bool) -> Callable[[], float]:
    """Return a function that pushes a shard in chunks and returns the seconds until its answer."""
    trainer = Trainer(running.endpoint("ingest"), timeout=120, shared_memory=shared)

    def push() -> float:
        begin = time.perf_counter()
        answer = trainer.push_bytes(shard)
        seconds = time.perf_counter() - begin
        if answer.status != "applied":
            raise SystemExit(f"the daemon answered {answer}")
        settle(running)
        return seconds

    return push


def whole(running: Daemon, shard: bytes) -> Callable[[], float]:
    """Return a function that pushes a shard in one message."""
    trainer = Trainer(running.endpoint("ingest"), timeout=120)

    def push() -> float:
        begin = time.perf_counter()
        answer = trainer._ask([wire.encode(wire.Put()), shard])  # noqa: SLF001 - as plain pyzmq would send it
        seconds = time.perf_counter() - begin
        if answer.status != "applied":
            raise SystemExit(f"the daemon answered {answer}")
        settle(running)
        return seconds

    return push


def settle(running: Daemon) -> None:
    """Wait until the daemon has verified what came, so that the next push meets an idle one."""
    deadline = time.monotonic() + 30
    with Control(running.endpoint("control"), timeout=60) as control:
        while why := control.status().staging_waits:
            if time.monotonic() > deadline:
                raise SystemExit(f"the daemon is not done: {why}")
            time.sleep(0.005)


def several(running: Daemon, *, shared: bool, stalled: bool) -> tuple[float, int]:
    """Push a shard from four clients at once, each another version's part; return seconds and bytes of memory."""
    before, most, stop = private_bytes(running), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not stop.is_set():
            most = max(most, private_bytes(running))
            time.sleep(0.005)

    names = [f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight" for expert in range(32) for part in PARTS]
    slots = SlotTable.build(DeepseekV2Config.from_dict(V2)).slots
    parts = [
        serialize({n: torch.zeros(slots[n].shape, dtype=torch.bfloat16) for n in names[first::4]}) for first in range(4)
    ]
    stopped = threading.Event()
    if stalled:
        threading.Thread(target=stall, args=(running, stopped, shared), daemon=True).start()
        time.sleep(0.3)
    watching = threading.Thread(target=watch)
    watching.start()
    begin = time.perf_counter()

    def push(part: bytes) -> None:
        with Trainer(running.endpoint("ingest"), timeout=120, shared_memory=shared) as trainer:
            answer = trainer.push_bytes(part)
            if answer.status != "applied":
                raise SystemExit(f"the daemon answered {answer}")

    pushers = [threading.Thread(target=push, args=(part,)) for part in parts]
    for one in pushers:
        one.start()
    for one in pushers:
        one.join()
    seconds = time.perf_counter() - begin
    stop.set()
    watching.join()
    stopped.set()
    settle(running)
    return sum(map(len, parts)) / seconds, most - before


PARTS = ("gate", "up", "down")


def stall(running: Daemon, stopped: threading.Event, shared: bool) -> None:
    """Begin a shard, send one chunk of it, and fall silent."""
    with Trainer(running.endpoint("ingest"), timeout=60) as trainer:
        sender = Sender(running.endpoint("ingest"), trainer.welcome, shared=shared)
        slots = SlotTable.build(DeepseekV2Config.from_dict(V2)).slots
        name = "model.layers.0.self_attn.o_proj.weight"
        shard = serialize({name: torch.zeros(slots[name].shape, dtype=torch.bfloat16)})
        size = 8 + int.from_bytes(shard[:8], "little")

        def pause(position: int) -> None:
            if position:
                stopped.wait(60)
                raise TimeoutError

        def fill(position: int, target: memoryview) -> None:
            pause(position)
            target[:] = shard[size + position : size + position + len(target)]

        def cut(position: int, nbytes: int) -> bytes:
            pause(position)
            return shard[size + position : size + position + nbytes]

        try:
            sender.send(wire.Begin(stream="", nbytes=len(shard) - size), shard[:size], fill, cut, 60)
        except TimeoutError:
            sender.close()


def main() -> int:
    """Run everything and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--quick", action="store_true", help="3 rounds")
    parser.add_argument("--durability", choices=["memory", "spool"], default="memory")
    arguments = parser.parse_args()
    with_tunables()
    rounds = 3 if arguments.quick else arguments.rounds
    print(machine())
    records: list[dict[str, Any]] = []
    # What is to be measured is the way to the parameters; with "spool" each byte is also written to a file.
    settings = SETTINGS.replace("[socket]\n", f'[socket]\ndurability = "{arguments.durability}"\n')
    with daemon(V2, settings=settings) as running:
        slots = SlotTable.build(DeepseekV2Config.from_dict(V2)).slots
        everything = {name: torch.zeros(slot.shape, dtype=torch.bfloat16) for name, slot in slots.items()}
        with Trainer(running.endpoint("ingest"), timeout=120) as trainer:
            trainer.push_bytes(
                serialize(everything)
            )  # from now on whatever comes goes live, and makes room for the next
        del everything
        settle(running)
        for title, shard in shards().items():
            on_one = Memcpy(len(shard), 1)
            ways: dict[str, Callable[[], float]] = {
                "memcpy, 1 thread (the floor)": on_one,
                "memcpy, 2 threads": Memcpy(len(shard), 2, beside=on_one),
                "chunks by shared memory": pusher(running, shard, shared=True),
                "chunks as messages (ipc)": pusher(running, shard, shared=False),
            }
            if len(shard) < WHOLE_LIMIT:
                ways["one message (ipc)"] = whole(running, shard)
            records += table(title, len(shard), interleave(ways, rounds), "memcpy, 1 thread (the floor)")
        print("\nfour clients at once, 755 MB in all, medians of 3")
        for shared in (True, False):
            for stalled in (False, True):
                runs = [several(running, shared=shared, stalled=stalled) for _ in range(1 if arguments.quick else 3)]
                rate = statistics.median(rate for rate, _ in runs)
                extra = max(extra for _, extra in runs)
                how = "shared memory" if shared else "messages"
                other = "beside one that has stopped half way" if stalled else ""
                print(f"  {how:14} {rate / 1e9:5.2f} GB/s, memory {extra / 1e6:+7.1f} MB {other}")
                records.append({"way": how, "stalled": stalled, "bytes_per_second": rate, "extra_bytes": extra})
    print(f"\nwritten to {save('ingest', records, quick=arguments.quick)}")
    os._exit(0)  # the clients' threads have nothing left to say


if __name__ == "__main__":
    raise SystemExit(main())
