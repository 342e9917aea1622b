"""Other ways to get tensors out of a file: each a function from a path to pairs of name and tensor.

Those whose package is not installed are left out; `MISSING` names them. They come with ``pip install -e '.[bench]'``.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

os.environ.setdefault("RUNAI_STREAMER_LOG_LEVEL", "WARNING")

Loader = Callable[[Path], Iterable[tuple[str, Tensor]]]


def safetensors(path: Path) -> Iterable[tuple[str, Tensor]]:
    """``load_file``: tensors that are views of the mapped file."""
    return load_file(path).items()


def torch_load(path: Path) -> Iterable[tuple[str, Tensor]]:
    """``torch.load(mmap=True)`` of what ``torch.save`` wrote; its pickle is read by torch's restricted unpickler."""
    loaded: dict[str, Tensor] = torch.load(path, mmap=True, weights_only=True)
    return loaded.items()


def fastsafetensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """The file is read into one buffer by several threads; tensors are views of it."""
    module: Any = importlib.import_module("fastsafetensors")
    with module.fastsafe_open(str(path), device="cpu", nogds=True) as opened:
        for name in opened.keys():  # noqa: SIM118 - no mapping
            yield name, opened.get_tensor(name)


def runai(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Several threads read into buffers that are used again: each tensor is to be copied before the next."""
    module: Any = importlib.import_module("runai_model_streamer")
    with module.SafetensorsStreamer() as streamer:
        streamer.stream_file(str(path), owned=False)
        yield from streamer.get_tensors()


KNOWN: dict[str, tuple[str, Loader]] = {
    "safetensors load_file": ("safetensors", safetensors),
    "torch.load(mmap=True)": ("torch", torch_load),
    "fastsafetensors": ("fastsafetensors", fastsafetensors),
    "Run:ai model streamer": ("runai-model-streamer", runai),
}
"""What people call it -> its distribution and how it is used."""
PICKLED = "torch.load(mmap=True)"
"""The one that reads another format."""


def _installed(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


VERSIONS = {name: _installed(distribution) for name, (distribution, _) in KNOWN.items()}
LOADERS = {name: loader for name, (_, loader) in KNOWN.items() if VERSIONS[name]}
MISSING = {name: distribution for name, (distribution, _) in KNOWN.items() if not VERSIONS[name]}
