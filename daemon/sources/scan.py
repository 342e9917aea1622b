"""Which files of the drop folder are shards, and what is in it now. No threads, no watching."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import NamedTuple

from fusewire.daemon.payload import Identity

SUFFIX = ".safetensors"
DEPTH = 4
"""Levels of subfolders that are looked into."""


class FileHint(NamedTuple):
    """Look at this file: it is there (``identity``), or no longer (None). Nothing more is claimed."""

    relative: PurePath
    """Under the drop folder."""
    identity: Identity | None


def is_shard_name(relative: PurePath) -> bool:
    """Whether a path under the drop folder is a shard's final name.

    An allow-list: names under which programs write before they rename (``.NAME.XXXXXX`` and ``.~tmp~/`` of
    rsync, ``*.incomplete``, ``*.part``, ``.nfsXXXX``, ``.tmpXXXXXX``) either begin with a dot or end otherwise.
    """
    return (
        relative.suffix == SUFFIX
        and 0 < len(relative.parts) <= DEPTH + 1
        and not any(part.startswith(".") for part in relative.parts)
    )


def look(root: Path, relative: PurePath) -> FileHint:
    """Look at one file now."""
    try:
        return FileHint(relative, Identity.of((root / relative).lstat()))
    except OSError:
        return FileHint(relative, None)


def scan(root: Path) -> dict[PurePath, Identity]:
    """Return all shards in the folder, the oldest first, so that of two that hold the same tensor the later wins.

    What vanishes meanwhile is left out. Links, pipes and devices under a shard's name are in it: refusing them is
    for whoever opens them.

    Raises:
        OSError: The folder itself can't be read.
    """
    found = dict(_walk(root, PurePath(), DEPTH))
    return dict(sorted(found.items(), key=lambda item: (item[1].mtime_ns, item[0])))


def _walk(root: Path, below: PurePath, depth: int) -> Iterator[tuple[PurePath, Identity]]:
    with os.scandir(root / below) as entries:
        for entry in entries:
            relative = below / entry.name
            try:
                if entry.is_dir(follow_symlinks=False):
                    if depth and not entry.name.startswith("."):
                        yield from _walk(root, relative, depth - 1)
                elif is_shard_name(relative):
                    yield relative, Identity.of(entry.stat(follow_symlinks=False))
            except OSError:  # it vanished, or is a subfolder that may not be read
                continue
