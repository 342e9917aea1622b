"""What a tensor costs beside its bytes: 90,427 tiny tensors with the names of DeepSeek-V3, in shards of 500.

Run: ``python benchmarks/names.py [--rounds N]``. A model with V3's layers and experts and dimensions of 128 is filled
by the daemon's own functions, one after the other, each phase timed: opening and parsing a header, looking its tensors
up, placing them, telling the ledger, publishing its events. In the same rounds, over the same files: ``safe_open`` and
``copy_`` into the same parameters. Then a real daemon takes all shards from its folder, from the first file to the
event that the version is live.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import zmq
from harness import daemon, machine, save
from safetensors import safe_open
from safetensors.torch import save_file

from fusewire.daemon import lease, settings
from fusewire.daemon.assembly import coverage_of
from fusewire.daemon.client import Subscriber
from fusewire.daemon.copying import Copier, Copy
from fusewire.daemon.ledger import Ledger
from fusewire.daemon.payload import open_file
from fusewire.daemon.publisher import Publisher
from fusewire.daemon.stimuli import (
    Commit,
    Committed,
    Inspected,
    Instruction,
    Placed,
    Publish,
    Seen,
    Verified,
    Verify,
)
from fusewire.model import DeepseekV2Config, DeepseekV2ForCausalLM, SlotTable, TensorMeta

SHARD = 500
V3 = json.loads((Path(__file__).parents[1] / "config" / "models" / "DeepSeek-V3.json").read_text())
TINY: dict[str, Any] = V3 | {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_attention_heads": 2,
    "q_lora_rank": 128,
    "kv_lora_rank": 120,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
PHASES = ("header", "validation", "placing", "ledger", "events")


def follow(ledger: Ledger, out: list[Instruction]) -> list[Instruction]:
    """Tell the ledger that what it asked for of a version has been done; return all instructions."""
    for instruction in list(out):
        if isinstance(instruction, Verify):
            out += follow(ledger, ledger.handle(Verified(now=0.0, version=instruction.version)))
        elif isinstance(instruction, Commit):
            out += follow(ledger, ledger.handle(Committed(now=0.0, version=instruction.version, leased=0)))
    return out


def write_shards(folder: Path) -> list[Path]:
    """Write all tensors of the tiny model; V3's multi-token prediction layer is left out."""
    table = SlotTable.build(DeepseekV2Config.from_dict(TINY))
    kinds = {"F8_E4M3": torch.float8_e4m3fn, "F32": torch.float32, "BF16": torch.bfloat16}
    names = list(table.slots)
    paths = []
    for number, first in enumerate(range(0, len(names), SHARD)):
        tensors = {}
        for name in names[first : first + SHARD]:
            slot = table.slots[name]
            dtype = kinds[next(iter(slot.dtypes))] if len(slot.dtypes) == 1 else torch.bfloat16
            tensors[name] = torch.full(slot.shape, 0.5).to(dtype)
        paths.append(folder / f"model-{number:05}.safetensors")
        save_file(tensors, paths[-1])
    return paths


class Watch:
    """Adds up the seconds of each phase."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time a phase."""
        begin = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - begin


def place(paths: list[Path], model: DeepseekV2ForCausalLM, publisher: Publisher, version: int) -> Watch:
    """Do for each shard what the daemon does for it."""
    watch = Watch()
    ledger = Ledger(coverage_of(model.table, model.config.num_hidden_layers), held_limit=1, known_limit=10**6)
    copier = Copier(2, 4 << 20, lambda _: None)
    for path in paths:
        key = path.name
        with watch("ledger"):
            ledger.handle(Seen(key=key, name=key, source="folder", identity=1, content=1, now=0.0))
        with watch("header"):
            payload = open_file(path, leases=True, settle=0.0, incomplete_after=0.0, header_limit=16 << 20)
        with watch("validation"):
            entries = {entry.name: entry for entry in payload.header.tensors}
            plan = model.table.plan({name: TensorMeta(e.dtype, e.shape) for name, e in entries.items()})
        with watch("ledger"):
            slots = tuple(slot.index for slot in plan.slots)
            ledger.handle(Inspected(key=key, now=0.0, version=version, slots=slots, skipped=0, nbytes=1))
        with watch("placing"):
            update = model.begin(plan, version, key)
            with update.writing(10.0):
                for one_round in update.rounds:
                    copies = [(entries[destination.slot.name], destination) for destination in one_round]
                    copier.run(payload, [Copy(e.start, e.stop - e.start, e.dtype, d) for e, d in copies])
                payload.verify()
                report = model.finish(update)
            payload.close()
        with watch("ledger"):
            placed = Placed(
                key=key,
                now=0.0,
                arrived=tuple(model.table.slots[name].index for name in report.loaded),
                fused=report.fused,
                waiting={},
                pending=(),
                duplicates=0,
                serving=model.serving,
                filled=model.generation.filled,
                seconds=0.0,
            )
            out = follow(ledger, ledger.handle(placed))
        with watch("events"):
            for instruction in out:
                if isinstance(instruction, Publish):
                    publisher.publish(instruction.event)
    copier.close()
    if ledger.versions.live != version:
        raise SystemExit("the version did not go live")
    return watch


def with_safe_open(paths: list[Path], model: DeepseekV2ForCausalLM) -> float:
    """Fill the same rows by safe_open and copy_; return seconds."""
    begin = time.perf_counter()
    for path in paths:
        with safe_open(path, "pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - no mapping
                slot = model.table.slots[name]
                model.generation.rows(slot).copy_(shard.get_tensor(name).view(-1))
    return time.perf_counter() - begin


def main() -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description="the cost of a tensor beside its bytes")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    lease.install_lease_signal_handling()
    print(machine())
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    table = SlotTable.build(DeepseekV2Config.from_dict(V3))
    seconds, memory = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"slot table of DeepSeek-V3: {len(table.slots)} slots in {seconds:.2f} s, {memory / 1024:.0f} MiB")

    with tempfile.TemporaryDirectory(prefix="fusewire-names-") as temporary:
        folder = Path(temporary)
        paths = write_shards(folder)
        model = DeepseekV2ForCausalLM(DeepseekV2Config.from_dict(TINY))
        count = len(model.table.slots)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        endpoint = settings.Events(endpoint=f"ipc://{folder}/events")
        publisher = Publisher(context, endpoint, boot="bench", mode=0o600)
        watches, theirs = [], []
        for number in range(options.rounds + 1):
            gc.collect()
            watch = place(paths, model, publisher, version=number)
            other = with_safe_open(paths, model)
            if number:  # the first round only warms up
                watches.append(watch)
                theirs.append(other)
        publisher.close()
        context.term()
        mine = {phase: statistics.median(w.seconds[phase] for w in watches) / count * 1e6 for phase in PHASES}
        safe = statistics.median(theirs) / count * 1e6
        print(f"\n{count} tensors in {len(paths)} shards, medians of {options.rounds} rounds, microseconds per tensor")
        for phase, micros in mine.items():
            print(f"  {phase:32} {micros:7.2f}")
        print(f"  {'together':32} {sum(mine.values()):7.2f}")
        print(f"  {'safe_open + get_tensor + copy_':32} {safe:7.2f}")

        with (
            daemon(TINY) as running,
            Subscriber(running.endpoint("events"), running.endpoint("control"), timeout=30) as subscriber,
        ):
            begin = time.perf_counter()
            step = running.shards / "step_1"
            step.mkdir()
            for path in paths:
                path.rename(step / path.name)
            subscriber.wait_version(1, timeout=120)
            live = (time.perf_counter() - begin) / count * 1e6
        print(f"  {'daemon: first file to version live':32} {live:7.2f}")
    records = [{"phase": phase, "microseconds": micros} for phase, micros in mine.items()]
    records += [{"phase": "safe_open", "microseconds": safe}, {"phase": "daemon", "microseconds": live}]
    print(f"\nwritten to {save('names', records)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
