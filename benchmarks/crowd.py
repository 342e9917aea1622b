"""What `growth.py` measures with crowds: many files dropped at once, and many subscribers.

Files are prepared beside the drop folder and renamed into it as fast as this process can. Every name has to have
exactly one ``shard.applied`` event, and the daemon's own counters have to say the same. Subscribers are plain SUB
sockets of this process, so what their 100 wake-ups cost is in the figure.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import zmq
from folder import V2
from harness import Daemon, cpu_seconds, daemon, percentile, private_bytes
from safetensors.torch import save as serialize
from safetensors.torch import save_file

from fusewire.daemon import events
from fusewire.daemon.client import Control, Subscriber
from fusewire.model import DeepseekV2Config, SlotTable

TINY: dict[str, Any] = V2 | {
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "num_experts_per_tok": 2,
}
"""With as many experts as there have to be tensors; each has three, of 4 KB."""
SMALL: dict[str, Any] = TINY | {"hidden_size": 8192, "n_routed_experts": 4}
"""Its final norm is one tensor of 16 KB."""
NORM = "model.norm.weight"
TIMEOUT = 120.0
START = 60.0


def zeros(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return a whole checkpoint of zeros."""
    slots = SlotTable.build(DeepseekV2Config.from_dict(config)).slots
    return {name: torch.zeros(slot.shape, dtype=torch.bfloat16) for name, slot in slots.items()}


@contextmanager
def filled(config: dict[str, Any], log_level: str = "warning") -> Iterator[tuple[Daemon, Subscriber]]:
    """Run a daemon with a live model of zeros, and a subscriber."""
    with (
        daemon(config, log_level=log_level) as running,
        Subscriber(running.endpoint("events"), running.endpoint("control"), timeout=START) as subscriber,
    ):
        base = running.root / "base.safetensors"
        save_file(zeros(config), base)
        base.rename(running.shards / base.name)
        subscriber.wait_ready(timeout=START)
        (running.shards / base.name).unlink()
        yield running, subscriber


# --------------------------------------------------------------------------------------------- files at once


def files_at_once(count: int, settle: float) -> dict[str, Any]:
    """Drop so many files of one tensor each into the folder of a live model; return what became of them.

    Args:
        count: How many.
        settle: Seconds to listen on after the last: long enough for a scan, a file that is applied twice would show.
    """
    config = TINY | {"n_routed_experts": -(-count // 3) + 2}
    with filled(config) as (running, subscriber), Control(running.endpoint("control"), timeout=START) as control:
        aside = running.root / "aside"
        aside.mkdir()
        names = [name for name in SlotTable.build(DeepseekV2Config.from_dict(config)).slots if ".experts." in name]
        tensor = torch.ones((32, 64), dtype=torch.bfloat16)
        for number, name in enumerate(names[:count]):
            shape = (64, 32) if ".down_proj." in name else (32, 64)
            save_file({name: tensor.view(shape)}, aside / f"{number:05}.safetensors")
        paths = sorted(aside.iterdir())
        time.sleep(1)
        before, memory, cpu = control.status().counters, private_bytes(running), cpu_seconds(running.pid)
        begin = time.perf_counter()
        for path in paths:
            path.rename(running.shards / path.name)
        renamed = time.perf_counter() - begin
        applied, refused, last = _outcomes(subscriber, {path.name for path in paths}, settle)
        burned = cpu_seconds(running.pid) - cpu
        status = control.status()
        counted = {name: status.counters[name] - before[name] for name in before}
        return {
            "part": "files",
            "x": count,
            "seconds": last - begin,
            "renaming_seconds": renamed,
            "lost": count - len(applied),
            "twice": sum(times - 1 for times in applied.values()),
            "refused": refused,
            "counted": counted["shards_applied"],
            "waiting": len(status.waiting_shards),
            "events": counted["events"],
            "versions": counted["versions_live"],
            "healed": subscriber.healed,
            "cpu_seconds": burned,
            "extra_bytes": private_bytes(running) - memory,
        }


def _outcomes(subscriber: Subscriber, names: set[str], settle: float) -> tuple[Counter[str], int, float]:
    """Listen until all files have come, and a while longer; return how often each did, and when the last one did."""
    applied: Counter[str] = Counter()
    refused, last, until = 0, time.perf_counter(), time.monotonic() + TIMEOUT
    while time.monotonic() < until:
        for event in subscriber.events(timeout=0.5):
            if isinstance(event, events.ShardApplied) and event.shard in names:
                applied[event.shard] += 1
                last = time.perf_counter()
                if len(applied) == len(names):
                    until = min(until, time.monotonic() + settle)
            elif isinstance(event, events.ShardRefused):
                refused += 1
    return applied, refused, last


def print_files(record: dict[str, Any]) -> bool:
    """Print a line; return whether every file was applied exactly once, and the daemon counted as many."""
    count, cpu = record["x"], record["cpu_seconds"]
    print(
        f"  {count:6,} files: {record['seconds']:7.2f} s, {record['seconds'] / count * 1e6:7.0f} us a file, CPU "
        f"{cpu / count * 1e6:6.0f} us a file and {cpu / record['events'] * 1e6:6.0f} us an event; "
        f"{record['lost']} lost, {record['twice']} applied twice, {record['refused']} refused; "
        f"memory {record['extra_bytes'] / 1e6:+.1f} MB",
        flush=True,
    )
    none = ("lost", "twice", "refused", "waiting")
    return not any(record[name] for name in none) and record["counted"] == count


# ------------------------------------------------------------------------------------------------ subscribers


class Audience:
    """Subscribers that hear of shards; all of them greeted before anything is measured."""

    def __init__(self, running: Daemon, count: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, count + 10)
        self._sockets = [self._context.socket(zmq.SUB) for _ in range(count)]
        self._poller = zmq.Poller()
        for socket in self._sockets:
            socket.linger = 0
            socket.subscribe(b"daemon.heartbeat/")
            socket.subscribe(b"shard.applied/")
            socket.connect(running.endpoint("events"))
            self._poller.register(socket, zmq.POLLIN)
        self.wait(b"daemon.heartbeat/", b"")

    def wait(self, topic: bytes, part: bytes) -> float:
        """Wait until every subscriber has heard of something; return when the last one did."""
        missing, deadline = set(self._sockets), time.monotonic() + START
        while missing:
            ready = dict(self._poller.poll(1000))
            for socket in ready:
                heard, _, body = socket.recv_multipart()
                if heard == topic and part in body:
                    missing.discard(socket)
            if time.monotonic() > deadline:
                raise SystemExit(f"{len(missing)} of {len(self._sockets)} subscribers have not heard of {part!r}")
        return time.perf_counter()

    def close(self) -> None:
        """Disconnect."""
        self._context.destroy(linger=0)


def _drop(path: Path, content: bytes) -> float:
    """Write a file; return when it was closed."""
    with path.open("wb") as file:
        file.write(content)
    return time.perf_counter()


def subscribers(counts: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Drop one shard of 16 KB again and again before audiences of these sizes; print a line for each."""
    content = serialize({NORM: torch.ones(8192, dtype=torch.bfloat16)})
    records: list[dict[str, Any]] = []
    with filled(SMALL) as (running, _), Control(running.endpoint("control"), timeout=START) as control:
        for count in counts:
            audience, seconds = Audience(running, count), []
            before, cpu = control.status().counters["events"], cpu_seconds(running.pid)
            for number in range(rounds):
                path = running.shards / f"small-{count}-{number}.safetensors"
                closed = _drop(path, content)
                seconds.append(audience.wait(b"shard.applied/", f'"{path.name}"'.encode()) - closed)
                path.unlink()
                time.sleep(0.02)  # the daemon verifies it and lets it go live: the next one shall not wait for that
            burned = cpu_seconds(running.pid) - cpu
            published = control.status().counters["events"] - before
            audience.close()
            p50, p99 = percentile(seconds, 0.5), percentile(seconds, 0.99)
            print(
                f"  {count:4} subscribers, {rounds} shards: at the last one p50 {p50 * 1e3:6.2f} ms, "
                f"p99 {p99 * 1e3:6.2f} ms; daemon CPU {burned / published * 1e6:6.0f} us an event",
                flush=True,
            )
            records.append(
                {
                    "part": "subscribers",
                    "x": count,
                    "latencies": seconds,
                    "events": published,
                    "cpu_seconds": burned,
                }
            )
    return records
