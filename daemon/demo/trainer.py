"""The demo's trainer: cuts a checkpoint so that pairs travel apart, and delivers it shuffled.

It knows nothing of the daemon but its folder and its ingest socket, as a real trainer would.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save, save_file

from fusewire.daemon.client import Trainer

FOLDER, SOCKET = "folder", "socket"


class Parcel(NamedTuple):
    """One shard to deliver, and by which way."""

    way: str
    name: str
    tensors: dict[str, torch.Tensor]


def load(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a checkpoint folder."""
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(checkpoint.glob("model*.safetensors")):
        tensors.update(load_file(shard))
    return tensors


def parcels(tensors: dict[str, torch.Tensor], seed: int) -> list[Parcel]:
    """Cut a checkpoint into small shards for both ways, in shuffled order.

    The halves of each pair go by different ways: a layer's q_a_proj by folder and its kv_a_proj_with_mqa by
    socket, or the other way round. All else is dealt out at random.
    """
    dice = random.Random(seed)  # noqa: S311 - a shuffle, not a secret
    ways: dict[str, list[str]] = {FOLDER: [], SOCKET: []}
    for name in tensors:
        part = next((part for part in ("q_a_proj", "kv_a_proj_with_mqa") if part in name.split(".")), None)
        if part is None:
            ways[dice.choice((FOLDER, SOCKET))].append(name)
        else:
            layer = int(name.split(".")[2])
            ways[FOLDER if (layer % 2 == 0) == (part == "q_a_proj") else SOCKET].append(name)
    cut = [
        Parcel(way, f"{way}-{number:03}", {name: tensors[name] for name in names})
        for way, all_names in ways.items()
        for number, names in enumerate(_cut(all_names, dice))
    ]
    dice.shuffle(cut)
    return cut


def _cut(names: list[str], dice: random.Random) -> Iterator[Sequence[str]]:
    names = dice.sample(names, len(names))
    while names:
        size = dice.randint(1, 12)
        yield names[:size]
        names = names[size:]


def main(argv: Sequence[str] | None = None) -> int:
    """Deliver a checkpoint. Returns the exit code: 1 if a shard was rejected."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="the daemon's drop folder")
    parser.add_argument("--endpoint", required=True, help="the daemon's ingest socket")
    parser.add_argument("--version", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)

    step = options.folder / f"step_{options.version}"
    step.mkdir(exist_ok=True)
    rejected = 0
    with Trainer(options.endpoint, timeout=30) as trainer:
        for parcel in parcels(load(options.checkpoint), options.seed):
            pair = [name for name in parcel.tensors if "_a_proj" in name]
            note = f"   <- {', '.join(name.removeprefix('model.') for name in pair)}" if pair else ""
            if parcel.way == FOLDER:
                save_file(parcel.tensors, step / f"{parcel.name}.safetensors")
                print(f"trainer     drops {parcel.name} ({len(parcel.tensors)} tensors){note}", flush=True)
            else:
                answer = trainer.push_bytes(save(parcel.tensors), version=options.version, name=parcel.name)
                rejected += answer.status == "rejected"
                sent = f"{parcel.name} ({len(parcel.tensors)} tensors)"
                print(f"trainer     pushes {sent}: {answer.status}{note}", flush=True)
    return 1 if rejected else 0


if __name__ == "__main__":
    raise SystemExit(main())
