"""What the ledger knows, put into the control socket's words. Pure: times and ids come as arguments."""

from __future__ import annotations

import msgspec

from . import wire
from .ledger import FINAL, Ledger
from .lifecycle import VersionState
from .progress import Version
from .roster import Versions

ENDED_VERSIONS = 20
"""Versions that are over and listed in a status, the latest."""
WAITING_SHARDS = 200
"""Shards listed in a status; the counters tell how many there are in all."""


def layers(ledger: Ledger) -> wire.Layers:
    """Return which layers are fused, loaded and waiting."""
    versions = ledger.versions
    return wire.Layers(
        total=versions.coverage.layers,
        fusable=len(versions.coverage.fusions),
        fused=tuple(sorted(versions.layers.fused)),
        loaded=tuple(sorted(versions.layers.loaded)),
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


def versions(ledger: Ledger, now: float) -> tuple[wire.VersionStatus, ...]:
    """Return what is known of every version: those that are open, the live and the retired one, and the last ends."""
    told = ledger.versions
    found = [_version(told, version, now) for version in told.known.values() if version.fresh or version.queued]
    found += [_version(told, version, now) for version in (told.serving, told.retired) if version is not None]
    shown = {version.version for version in found}
    ended = list(told.ended.items())[-ENDED_VERSIONS:]
    found += [
        wire.VersionStatus(version=number, state=state, detail=why)
        for number, (state, why) in ended
        if number not in shown
    ]
    return tuple(sorted(found, key=lambda one: -1 if one.version is None else one.version))


def _version(told: Versions, version: Version, now: float) -> wire.VersionStatus:
    if version.state in {VersionState.LIVE, VersionState.RETIRED}:
        return wire.VersionStatus(
            version=version.number, state=version.state, filled=len(version.filled), detail=version.why
        )
    names, count = told.describe_missing(version)
    staged = version is told.staged
    return wire.VersionStatus(
        version=version.number,
        state=version.state,
        staged=staged,
        filled=len(version.filled),
        waiting_shards=len(version.queued),
        missing=names,
        missing_count=count,
        stalled=staged and told.stalled(now),
        idle=now - version.grown,
        detail="" if staged else told.why_waiting(),
    )


def snapshot(ledger: Ledger, *, boot: str, seq: int, now: float, epoch: float) -> wire.Snapshot:
    """Return the full state as of the event ``seq``."""
    return wire.Snapshot(
        boot=boot,
        seq=seq,
        ready=ledger.versions.ready,
        version=ledger.versions.live,
        fused=tuple(sorted(ledger.versions.layers.fused.items())),
        loaded=tuple(sorted(ledger.versions.layers.loaded.items())),
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
