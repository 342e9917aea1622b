"""Which files of the drop folder are shards, and what is in it now. No threads, no watching."""

from __future__ import annotations

import os
from pathlib import Path, PurePath
from typing import NamedTuple

from fusewire.daemon.manifest import INDEX_SUFFIX, MARKER, is_index, is_marker
from fusewire.daemon.payload import Identity

SUFFIX = ".safetensors"
DEPTH = 4
"""Levels of subfolders that are looked into."""


class FileHint(NamedTuple):
    """Look at this file: it is there (``identity``), or no longer (None). Nothing more is claimed."""

    relative: PurePath
    """Under the drop folder."""
    identity: Identity | None


class Found(NamedTuple):
    """What a scan found. Paths are relative to the folder, and plain strings: most are the same as a scan ago."""

    shards: dict[str, Identity]
    """The oldest first, so that of two that hold the same tensor the later one wins; indices and markers after them."""
    passed_over: dict[str, str]
    """What could not be looked at, mostly subfolders, and why. What is in them is unknown, and not gone."""

    def is_unknown(self, relative: str) -> bool:
        """Whether a path was passed over, or lies in a subfolder that was."""
        return any(relative == path or relative.startswith(f"{path}/") for path in self.passed_over)


def is_wanted(relative: PurePath) -> bool:
    """Whether a path under the drop folder is a shard's, or tells of a version's shards.

    What tells of them is of interest in subfolders only: in the folder itself there are no versions.
    """
    if not 0 < len(relative.parts) <= DEPTH + 1 or any(part.startswith(".") for part in relative.parts):
        return False
    return relative.suffix == SUFFIX or (len(relative.parts) > 1 and (is_index(relative) or is_marker(relative)))


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


def scan(root: Path) -> Found:
    """Look at all shards in the folder and what tells of them, by the same rule of names as `is_wanted`.

    What vanishes meanwhile is left out. Links, pipes and devices under a shard's name are in it: refusing them is
    for whoever opens them.

    Raises:
        OSError: The folder itself can't be read.
    """
    found = Found({}, {})
    _walk(root, "", DEPTH, found)
    oldest_first = sorted(
        found.shards.items(), key=lambda item: (not item[0].endswith(SUFFIX), item[1].mtime_ns, item[0])
    )
    return found._replace(shards=dict(oldest_first))


def _walk(root: Path, below: str, depth: int, found: Found) -> None:
    """Look into one folder. Strings, not paths: ten thousand files must not hold up the other threads for long."""
    with os.scandir(root / below) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            relative = below + entry.name
            try:
                if entry.is_dir(follow_symlinks=False):
                    if depth:
                        _walk(root, relative + "/", depth - 1, found)
                    else:
                        found.passed_over[relative] = f"more than {DEPTH} levels deep"
                elif entry.name.endswith(SUFFIX) or (below and entry.name.endswith((INDEX_SUFFIX, MARKER))):
                    if not is_wanted(PurePath(relative)):
                        continue
                    found.shards[relative] = Identity.of(entry.stat(follow_symlinks=False))
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                found.passed_over[relative] = error.strerror or str(error)
