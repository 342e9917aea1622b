"""What is written down so that a restart comes back to where the daemon was. Plain data, and pure.

A `ShardRecord` for each shard whose outcome is known, a `Held` each time that the slots which rest on a shard change,
and one `Standing` for everything about versions. Each replaces the one before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Literal

import msgspec

from .lifecycle import VersionState

Runs = tuple[tuple[int, int], ...]
"""A set of slots as (first, end) runs, sorted: a shard of thousands of tensors has a few."""

StandingOf = Literal["staged", "live", "over"]
"""``staged``: its version is not live yet; ``live``: slots rest on it; ``over``: nothing depends on it any more."""


class ShardRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one shard."""

    id: int
    order: int
    """Outcomes in the order in which they came: what is applied again is applied in this order."""
    key: str
    name: str
    source: str
    """``folder``, ``checkpoint`` or ``socket``."""
    place: str = ""
    """Where its bytes are, within what ``source`` says; empty: nowhere but in the model."""
    identity: tuple[int, ...] | None = None
    """Of a file, as it was then: device, inode, size, mtime and ctime in nanoseconds."""
    digest: str = ""
    """xxh3-128 of its data section, if anybody has computed it."""
    version: int | None = None
    run: str | None = None
    nbytes: int = 0
    reason: str = ""
    """Why it was rejected; empty: it was applied."""
    detail: str = ""
    standing: StandingOf = "over"
    slots: Runs = ()
    """Those that it brought and that have not been taken from it."""


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What rests on a shard has changed."""

    id: int
    standing: StandingOf
    slots: Runs = ()


class OpenVersion(msgspec.Struct, frozen=True, kw_only=True):
    """What has been told of a version that is not live, apart from its shards."""

    number: int
    promised: Runs | None
    closed: bool
    promise: str
    approved: bool


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about versions that does not lie in shards."""

    ready: bool = False
    """Whether anything is live."""
    live: int | None = None
    """Its number; None: the rolling version."""
    run: str | None = None
    past_runs: tuple[str, ...] = ()
    floor: int = -1
    ended: tuple[tuple[int, VersionState, str], ...] = ()
    open: tuple[OpenVersion, ...] = ()


Entry = ShardRecord | Held | Standing


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """All that was written down, as it is read back."""

    standing: Standing = Standing()
    shards: tuple[ShardRecord, ...] = ()
    """In the order of their outcomes."""


def runs_of(slots: Iterable[int]) -> Runs:
    """Write a set of slots as runs."""
    ordered = sorted(slots)
    if not ordered:
        return ()
    breaks = [0, *(i + 1 for i, (one, other) in enumerate(pairwise(ordered)) if other != one + 1), len(ordered)]
    return tuple((ordered[begin], ordered[end - 1] + 1) for begin, end in pairwise(breaks))


def slots_of(runs: Runs) -> set[int]:
    """Read runs back."""
    return {slot for first, end in runs for slot in range(first, end)}
