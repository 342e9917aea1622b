"""Finding the shards of a Hugging Face checkpoint folder: by its index, or the one file. Reads no weights."""

from __future__ import annotations

import json
from pathlib import Path

from .errors import StartError, printable

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
INDEX_LIMIT = 64 * 1024 * 1024
"""Largest index that is read, in bytes: that of DeepSeek-V3, with its 91,991 tensors, has 9 MB."""


def shards_of(folder: Path) -> list[Path]:
    """Return the paths of a checkpoint's shards, in the order of their names.

    Raises:
        StartError: There is no checkpoint, its index is malformed, or shards that it names are
            missing (all of them are listed).
    """
    if not folder.is_dir():
        raise StartError(f"model.checkpoint = {folder}: no such folder")
    index, single = folder / INDEX, folder / SINGLE
    if index.is_file():
        names = _names(index)
    elif single.is_file():
        names = [SINGLE]
    else:
        raise StartError(f"model.checkpoint = {folder}: neither {INDEX} nor {SINGLE} is in it")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise StartError(
            f"model.checkpoint = {folder}: {len(missing)} of the {len(names)} shards in {INDEX} are "
            "missing: " + ", ".join(printable(name, 80) for name in missing[:20])
        )
    return [folder / name for name in names]


def _names(index: Path) -> list[str]:
    try:
        if index.stat().st_size > INDEX_LIMIT:
            raise StartError(f"{index}: larger than {INDEX_LIMIT} bytes, that is no checkpoint's index")
        content = json.loads(index.read_bytes())
        names = sorted(set(content["weight_map"].values()))
    except OSError as error:
        raise StartError(f"{index}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise StartError(f"{index}: not valid JSON: {printable(error)}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise StartError(f"{index}: has no weight_map of tensor names to file names") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or name in {"", ".", ".."}:
            raise StartError(f"{index}: {printable(name, 80)!r} is not the name of a file in the same folder")
    if not names:
        raise StartError(f"{index}: its weight_map is empty")
    return names
