"""What tells of a version's shards besides the shards: an index, and the marker that everything has been written."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path, PurePath

import msgspec

from . import lease
from .errors import Reason, ShardNotReady, ShardRejected, printable
from .payload import open_descriptor
from .shard import MAX_COLONS

MARKER = "STABLE"
"""Name of an empty file that some trainers write into a version's folder last of all."""
INDEX_SUFFIX = ".safetensors.index.json"
INDEX_LIMIT = 64 * 1024 * 1024
"""Largest index that is read, in bytes: that of DeepSeek-V3, with its 91,991 tensors, has 9 MB."""


class _Index(msgspec.Struct):
    """All else that may be in an index is passed over, and takes no memory."""

    weight_map: dict[str, str]


_INDEX = msgspec.json.Decoder(_Index)


def is_marker(relative: PurePath) -> bool:
    """Whether a path has the marker's name."""
    return relative.name == MARKER


def is_index(relative: PurePath) -> bool:
    """Whether a path has an index's name."""
    return relative.name.endswith(INDEX_SUFFIX)


def read_index(path: Path, incomplete_after: float) -> tuple[str, ...]:
    """Return the names of the tensors that an index lists.

    Args:
        path: Of the index; links are not followed.
        incomplete_after: Seconds without a change after which a broken index is not taken for an unfinished one.

    Raises:
        ShardNotReady: It is still being written.
        ShardRejected: It can't be read, or is no index.
    """
    descriptor = open_descriptor(path)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ShardRejected(Reason.NOT_A_FILE, "not a regular file")
        if status.st_size > INDEX_LIMIT:
            raise ShardRejected(Reason.TOO_LARGE, f"{status.st_size} bytes: an index has at most {INDEX_LIMIT}")
        if lease.take(descriptor) is lease.Lease.WRITER:
            raise ShardNotReady("a writer has it open")
        try:
            return parse_index(_read(descriptor, status.st_size))
        except ValueError as error:
            if 0 <= time.time() - status.st_mtime < incomplete_after:
                raise ShardNotReady(f"not complete yet: {error}") from error
            raise ShardRejected(Reason.MALFORMED_INDEX, printable(error)) from error
        finally:
            lease.give_up(descriptor)
    except OSError as error:
        raise ShardRejected(Reason.UNREADABLE, f"while reading: {error.strerror}") from error
    finally:
        os.close(descriptor)


def parse_index(content: bytes) -> tuple[str, ...]:
    """Return the names of the tensors that an index lists. Raises ValueError, saying what is wrong."""
    if content.count(b":") > MAX_COLONS:  # what is read takes a hundred times the memory of the shortest names
        raise ValueError(f"more than {MAX_COLONS} entries")
    try:
        weights = _INDEX.decode(content).weight_map
    except msgspec.ValidationError as error:
        raise ValueError(f"it has no weight_map of tensor names to file names: {printable(error, 100)}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {printable(error, 100)}") from error
    if not weights:
        raise ValueError("its weight_map is empty")
    return tuple(weights)


def _read(descriptor: int, size: int) -> bytes:
    content = b""
    while len(content) < size and (more := os.pread(descriptor, size - len(content), len(content))):
        content += more
    return content
