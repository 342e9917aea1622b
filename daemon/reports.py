"""What the ledger knows, put into the control socket's words. Pure: times and ids come as arguments."""

from __future__ import annotations

import msgspec

from . import wire
from .ledger import FINAL, Ledger

WAITING_SHARDS = 200
"""Shards listed in a status; the counters tell how many there are in all."""


def layers(ledger: Ledger) -> wire.Layers:
    """Return which layers are fused, loaded and waiting."""
    versions = ledger.versions
    return wire.Layers(
        total=versions.coverage.layers,
        fusable=len(versions.coverage.fusions),
        fused=tuple(sorted(versions.fused)),
        loaded=tuple(sorted(versions.loaded)),
        waiting=tuple(sorted({half.layer for half in ledger.pending})),
    )


def pending(ledger: Ledger, now: float) -> tuple[wire.PendingHalf, ...]:
    """Return the halves that wait, with their ages as of ``now``."""
    later = now - ledger.pending_at
    return tuple(msgspec.structs.replace(half, age=half.age + later) for half in ledger.pending)


def rejected(ledger: Ledger, epoch: float) -> tuple[wire.RejectedShard, ...]:
    """Return the newest rejections, latest last. ``epoch``: Unix time at which the ledger's clock read 0."""
    return tuple(
        wire.RejectedShard(
            shard=event.shard,
            source=event.source,
            reason=event.reason,
            detail=event.detail,
            time=epoch + at,
        )
        for at, event in ledger.rejected
    )


def waiting_shards(ledger: Ledger) -> tuple[wire.WaitingShard, ...]:
    """Return the shards that are known and not done, and what each of them waits for."""
    found = []
    for shard in ledger.shards.values():
        if shard.state not in FINAL:
            found.append(
                wire.WaitingShard(shard=shard.name, source=shard.source, state=shard.state.value, why=shard.why)
            )
            if len(found) == WAITING_SHARDS:
                break
    return tuple(found)


def versions(ledger: Ledger) -> tuple[wire.VersionStatus, ...]:
    """Return how far each version has come that is open or live; the rolling one first."""
    live = ledger.versions.live
    return tuple(
        wire.VersionStatus(
            version=version,
            state="live" if version is not None and version == live else "open",
            filled=len(progress.filled),
        )
        for version, progress in sorted(
            ledger.versions.progress.items(), key=lambda item: -1 if item[0] is None else item[0]
        )
    )


def snapshot(ledger: Ledger, *, boot: str, seq: int, now: float, epoch: float) -> wire.Snapshot:
    """Return the full state as of the event ``seq``."""
    return wire.Snapshot(
        boot=boot,
        seq=seq,
        ready=ledger.versions.ready,
        version=ledger.versions.live,
        fused=tuple(sorted(ledger.versions.fused.items())),
        loaded=tuple(sorted(ledger.versions.loaded.items())),
        pending=pending(ledger, now),
        rejected=rejected(ledger, epoch),
    )


def headline(ledger: Ledger) -> str:
    """Return one line for `systemctl status`."""
    told = layers(ledger)
    state = "ready" if ledger.versions.ready else f"not ready, {ledger.filled} slots filled"
    version = "" if ledger.versions.live is None else f", version {ledger.versions.live}"
    fused = f"{len(told.fused)}/{told.fusable} layers fused, " if told.fusable else ""
    return (
        f"{state}{version}: {fused}{len(told.loaded)}/{told.total} loaded, "
        f"{len(ledger.pending)} halves waiting, {ledger.counters['shards_rejected']:.0f} shards rejected"
    )
