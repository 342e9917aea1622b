"""What loaders and the daemon do with files that are not as they should be: tried out on small ones, not asserted.

Each probe writes a file and says what a loader made of it: ``refused``, or ``taken`` with whatever it holds. The daemon
gets the same files in its folder.
"""

from __future__ import annotations

import json
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from crowd import NORM, TINY, filled
from harness import Daemon
from loaders import LOADERS, PICKLED, Loader
from safetensors.torch import save as serialize
from torch import Tensor

from fusewire.daemon.client import Subscriber
from fusewire.daemon.events import ShardApplied, ShardRefused

WIDTH = TINY["hidden_size"]
OTHER = "model.layers.0.input_layernorm.weight"
NBYTES = 2 * WIDTH
TIMEOUT = 10.0
PATIENCE = 1.5
"""Seconds in which a file that is whole would have been applied many times over."""
OVERWRITTEN = "what was loaded stays, when the file is overwritten"
UNFINISHED = "a file that its writer has not filled yet"


def _file(header: str, data: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header.encode() + data


def _tensor(name: str, start: int, stop: int) -> str:
    entry = {"dtype": "BF16", "shape": [(stop - start) // 2], "data_offsets": [start, stop]}
    return f"{json.dumps(name)}: {json.dumps(entry)}"


def _of(*tensors: str) -> str:
    return "{" + ", ".join(tensors) + "}"


FIRST, SECOND = _tensor(NORM, 0, NBYTES), _tensor(OTHER, NBYTES, 2 * NBYTES)
MALFORMED: dict[str, bytes] = {
    "a name that comes twice": _file(_of(_tensor(NORM, 0, NBYTES // 2), FIRST, SECOND), bytes(2 * NBYTES)),
    "two tensors that overlap": _file(_of(FIRST, _tensor(OTHER, NBYTES - 64, 2 * NBYTES - 64)), bytes(2 * NBYTES - 64)),
    "a hole between two tensors": _file(
        _of(FIRST, _tensor(OTHER, NBYTES + 64, 2 * NBYTES + 64)), bytes(2 * NBYTES + 64)
    ),
    "bytes behind the last tensor": _file(_of(FIRST, SECOND), bytes(2 * NBYTES + 64)),
}
"""What is wrong with a file -> the file."""


def _whole(loader: str) -> tuple[dict[str, Tensor], Callable[[Path], None]]:
    """Return tensors and how they are written in a loader's format."""
    tensors = {name: torch.ones(WIDTH, dtype=torch.bfloat16) for name in (NORM, OTHER)}
    if loader == PICKLED:
        return tensors, lambda path: torch.save(tensors, path)
    return tensors, lambda path: _write(path, serialize(tensors))


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _loads(load: Loader, path: Path) -> str:
    """Load a file and throw it away."""
    try:
        for _, tensor in load(path):
            tensor.clone()
    except Exception:  # noqa: BLE001 - each has its own
        return "refused"
    return "taken"


def _zeros(load: Loader, path: Path, write: Callable[[Path], None]) -> str:
    """Set a file to its full size, header and all but data: what a trainer's disk shows half way."""
    write(path)
    size = path.stat().st_size
    head = path.read_bytes()[: size - 2 * NBYTES]
    with path.open("wb") as writer:  # it stays open meanwhile
        writer.write(head)
        writer.truncate(size)
        writer.flush()
        return _loads(load, path)


def _overwritten(name: str, load: Loader, path: Path, write: Callable[[Path], None]) -> str:
    """Load, overwrite the file in place, and look at what was loaded."""
    if name == "Run:ai model streamer":
        return "each tensor is copied out before the next comes"
    write(path)
    loaded = dict(load(path))
    with path.open("r+b") as writer:
        writer.write(b"\xff" * path.stat().st_size)
    return "yes" if all(bool((tensor == 1).all()) for tensor in loaded.values()) else "no"


def _probe_loader(name: str, load: Loader, where: Path) -> dict[str, str]:
    # torch.load goes by the suffix: it would hand a .safetensors on to safetensors
    path = where / ("probe.pt" if name == PICKLED else "probe.safetensors")
    outcome = {}
    for wrong, content in MALFORMED.items():
        path.write_bytes(content)
        outcome[wrong] = "another format" if name == PICKLED else _loads(load, path)
    _, write = _whole(name)
    outcome[UNFINISHED] = _zeros(load, path, write)
    outcome[OVERWRITTEN] = _overwritten(name, load, path, write)
    return outcome


def _outcome(subscriber: Subscriber, name: str, seconds: float) -> str:
    """Wait for what becomes of a file."""
    for event in subscriber.events(timeout=seconds):
        if isinstance(event, (ShardApplied, ShardRefused)) and event.shard == name:
            return "refused" if isinstance(event, ShardRefused) else "taken"
    return "waited for"


def _probe_daemon(running: Daemon, subscriber: Subscriber) -> dict[str, str]:
    outcome = {}
    for number, (wrong, content) in enumerate(MALFORMED.items()):
        path = running.shards / f"probe{number}.safetensors"
        aside = running.root / path.name
        aside.write_bytes(content)
        aside.rename(path)
        outcome[wrong] = _outcome(subscriber, path.name, TIMEOUT)
    _, write = _whole("")
    path, aside = running.shards / "late.safetensors", running.root / "whole"
    write(aside)
    content = aside.read_bytes()
    with path.open("wb") as writer:
        writer.write(content[: -2 * NBYTES])
        writer.truncate(len(content))
        writer.flush()
        outcome[UNFINISHED] = _outcome(subscriber, path.name, PATIENCE)
        writer.write(content[-2 * NBYTES :])
    if _outcome(subscriber, path.name, TIMEOUT) != "taken":
        raise SystemExit("a file that was filled late was not applied")
    time.sleep(0.1)
    mapped = ".safetensors" in Path(f"/proc/{running.pid}/maps").read_text()
    outcome[OVERWRITTEN] = "no" if mapped else "yes"
    return outcome


def run() -> list[dict[str, Any]]:
    """Try everything out; print a table, return records."""
    outcomes: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory(prefix="fusewire-probes-") as temporary:
        for name, load in LOADERS.items():
            outcomes[name] = _probe_loader(name, load, Path(temporary))
    with filled(TINY | {"n_routed_experts": 2}, log_level="error") as (running, subscriber):
        outcomes["fusewire"] = _probe_daemon(running, subscriber)
    print("\nwhat becomes of")
    for probe in (*MALFORMED, UNFINISHED, OVERWRITTEN):
        print(f"  {probe}: " + "; ".join(f"{name}: {outcome[probe]}" for name, outcome in outcomes.items()))
    return [
        {"part": "probe", "way": name, "probe": probe, "outcome": told}
        for name, outcome in outcomes.items()
        for probe, told in outcome.items()
    ]
