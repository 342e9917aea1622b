"""Which settings can change while the daemon runs. Pure."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from .settings import Settings

RELOADABLE = frozenset(
    {
        "folder.settle",
        "folder.incomplete_after",
        "fusion.max_age",
        "fusion.max_bytes",
        "limits.header_bytes",
        "limits.known_shards",
        "limits.unleased_bytes",
        "log.level",
        "socket.in_flight_bytes",
        "versions.commit",
        "versions.finite",
        "versions.stale_after",
    }
)
"""Keys that SIGHUP applies; all others need a restart, and a reload says so."""


class Reload(NamedTuple):
    """The outcome of comparing two settings."""

    effective: Settings
    """The old settings with what could be taken over from the new ones."""
    applied: tuple[str, ...]
    refused: tuple[str, ...]
    """Changed keys that need a restart."""


def compare(old: Settings, new: Settings) -> Reload:
    """Take over from ``new`` what can change without a restart."""
    effective, applied, refused = old, [], []
    for section in Settings.__struct_fields__:
        before, after = getattr(old, section), getattr(new, section)
        taken = {}
        for key in before.__struct_fields__:
            if getattr(before, key) == getattr(after, key):
                continue
            name = f"{section}.{key}"
            if name in RELOADABLE:
                taken[key] = getattr(after, key)
                applied.append(name)
            else:
                refused.append(name)
        if taken:
            effective = msgspec.structs.replace(effective, **{section: msgspec.structs.replace(before, **taken)})
    return Reload(effective, tuple(applied), tuple(refused))
