"""How cost grows: with the bytes of a shard, its tensors, the files that come at once, and the subscribers.

Run: ``python benchmarks/growth.py [--quick]``. A real daemon each time:

* bytes: 1, 10 and 100 times as many of a model as wide as DeepSeek-V2, from close() to the event;
* tensors: 64 to 64,000 of them in one shard of always the same size, the same way;
* files: 100 to 10,000 small ones renamed into the folder at once, until each has its event; none may be lost;
* subscribers: 1 to 100 of them, from close() of a shard of 16 KB to the event at the last of them.

Bytes and tensors are timed beside memcpy and the usual way to reload, in interleaved rounds, as in folder.py.
"""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import crowd
import folder
from harness import machine, save, with_tunables

from fusewire.model import DeepseekV2Config, SlotTable

UNIT = 22_000_000
"""Bytes: just over those of the smallest fused pair of DeepSeek-V2's width."""
TIMES = (1, 10, 100)
NARROW: dict[str, Any] = folder.V2 | {"hidden_size": 512}
"""A tenth of V2's width, for short runs."""
SHAPES = {64: (1024, 512), 640: (256, 200), 6_400: (128, 40), 64_000: (32, 16)}
"""Tensors in a shard -> hidden size and width of an expert, so that its bytes stay about 65 MB."""


def part_of(config: dict[str, Any], nbytes: int) -> Callable[[str], bool]:
    """Return a predicate that takes tensors of the layer, in the table's order, if they fit into so many bytes."""
    chosen: set[str] = set()
    for name, slot in SlotTable.build(DeepseekV2Config.from_dict(config)).slots.items():
        size = 2 * math.prod(slot.shape)
        if ".layers." in name and size <= nbytes:
            chosen.add(name)
            nbytes -= size
    return chosen.__contains__


def with_bytes(*, quick: bool) -> list[dict[str, Any]]:
    """Deliver ever larger shards."""
    config, unit, rounds = (NARROW, UNIT // 10, 3) if quick else (folder.V2, UNIT, 7)
    shards = {f"{times} x {unit / 1e6:g} MB": part_of(config, times * unit) for times in TIMES}
    records = folder.measure(config, shards, rounds)
    return [record | {"part": "bytes", "x": record["bytes"]} for record in records]


def with_tensors(*, quick: bool) -> list[dict[str, Any]]:
    """Deliver shards of ever more tensors."""
    records: list[dict[str, Any]] = []
    for count, (hidden, width) in SHAPES.items():
        if quick and count not in {64, 6_400}:
            continue
        config = crowd.TINY | {
            "hidden_size": hidden,
            "moe_intermediate_size": width,
            "n_routed_experts": count // 3,
        }
        wanted: Mapping[str, Callable[[str], bool]] = {f"{count:,} tensors": lambda name: ".experts." in name}
        measured = folder.measure(config, wanted, 3 if quick else 7)
        records += [record | {"part": "tensors", "x": record["tensors"]} for record in measured]
        gc.collect()
    return records


def with_files(*, quick: bool) -> tuple[list[dict[str, Any]], bool]:
    """Drop ever more files at once; the second value: whether all were applied, once each."""
    print("\nfiles of one tensor (4 KB), renamed into the folder of a live model at once")
    records, well = [], True
    for count in (100, 1_000) if quick else (100, 1_000, 10_000):
        records.append(crowd.files_at_once(count, settle=1.0 if quick else 6.0))
        well = crowd.print_files(records[-1]) and well
    return records, well


def with_subscribers(*, quick: bool) -> list[dict[str, Any]]:
    """Tell ever more subscribers."""
    print("\na shard of 16 KB: close() to the event at the last subscriber")
    return crowd.subscribers((1, 10, 100), 40 if quick else 300)


PARTS = ("bytes", "tensors", "files", "subscribers")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is wanted and print it; 1 if a file was lost, or applied twice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part; may be given several times")
    options = parser.parse_args(arguments)
    with_tunables()
    print(machine())
    wanted, quick = options.only or PARTS, options.quick
    records: list[dict[str, Any]] = []
    well = True
    if "bytes" in wanted:
        records += with_bytes(quick=quick)
    if "tensors" in wanted:
        records += with_tensors(quick=quick)
    if "files" in wanted:
        dropped, well = with_files(quick=quick)
        records += dropped
    if "subscribers" in wanted:
        records += with_subscribers(quick=quick)
    print(f"\nwritten to {save('growth', records, quick=quick)}")
    if not well:
        print("NOT every file was applied exactly once")
    return 0 if well else 1


if __name__ == "__main__":
    raise SystemExit(main())
