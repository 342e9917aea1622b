"""How far each version has come: which slots it filled, which layers are whole, which version is live.

A part of the ledger, and pure like it. Slots are counted as a set: a tensor that comes twice, or that another
tensor overlaps, must neither complete a layer early nor keep it from completing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from . import events
from .stimuli import Placed

OPEN_VERSIONS = 8
"""Incomplete numbered versions that are tracked; a newer one beyond these supersedes the oldest."""

ROLLING = None
"""The version of a shard that names none."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """What a model consists of, in numbers: the ledger's whole knowledge of it."""

    layer_of: Sequence[int | None]
    """Slot index -> layer number; None for what lies outside of the layers."""
    fusions: Mapping[int, tuple[int, ...]]
    """Layer -> the slots of its fused pair, over all leaves. Empty for a model that has no pairs."""
    layers: int


@dataclass(slots=True)
class Progress:
    """How far one version has come."""

    missing: dict[int | None, int]
    """Layer -> how many of its slots this version has not filled yet."""
    filled: set[int] = field(default_factory=set)
    fused: set[int] = field(default_factory=set)
    loaded: set[int] = field(default_factory=set)


class Versions:
    """The progress of every version that is open or live. Methods return the events to publish."""

    def __init__(self, coverage: Coverage) -> None:
        self.coverage = coverage
        self.ready = False
        self.live: int | None = None
        self.floor = -1
        """Numbered versions up to this one are over, the live one excepted."""
        self.progress: dict[int | None, Progress] = {}
        self.fused: dict[int, int | None] = {}
        """Layer -> the version that fused it last."""
        self.loaded: dict[int, int | None] = {}
        self._totals: dict[int | None, int] = {}
        for layer in coverage.layer_of:
            self._totals[layer] = self._totals.get(layer, 0) + 1

    def stale(self, version: int | None) -> str:
        """Say why a shard of this version comes too late; empty if it does not."""
        if version is None or version == self.live or version in self.progress:
            return ""
        if version <= self.floor:
            newer = f"version {self.live} is live" if self.live is not None else "newer ones have begun"
            return f"version {version} is over: {newer}"
        if len(self._open()) >= OPEN_VERSIONS and version < self._open()[0]:
            return f"version {version} comes too late: {OPEN_VERSIONS} newer versions have begun"
        return ""

    def begin(self, version: int | None) -> list[int]:
        """Track a version from now on. Returns the versions that are given up for it."""
        if version in self.progress:
            return []
        self.progress[version] = Progress(missing=dict(self._totals))
        return self._give_up(self._open()[:-OPEN_VERSIONS])

    def advance(self, version: int | None, placed: Placed) -> list[events.AnyEvent]:
        """Count what a shard of this version put in place; announce the layers that became whole by it."""
        progress = self.progress.get(version)
        if progress is None:  # given up while the shard was being placed
            return []
        out: list[events.AnyEvent] = []
        arrived = set(placed.arrived)
        for layer in placed.fused:
            arrived.update(self.coverage.fusions[layer])
            if version is ROLLING or layer not in progress.fused:
                progress.fused.add(layer)
                self.fused[layer] = version
                out.append(events.LayerFused(layer=layer, version=version, message=f"layer {layer} fused"))
        touched: set[int | None] = set()
        for slot in arrived - progress.filled:
            progress.missing[self.coverage.layer_of[slot]] -= 1
            touched.add(self.coverage.layer_of[slot])
        progress.filled |= arrived
        for layer in sorted(layer for layer in touched if layer is not None):
            if progress.missing[layer] == 0 and layer not in progress.loaded:
                progress.loaded.add(layer)
                self.loaded[layer] = version
                out.append(events.LayerLoaded(layer=layer, version=version, message=f"layer {layer} loaded"))
                if version is ROLLING and self.ready:
                    self._restart(progress, layer)
        return out

    def complete(self, version: int | None, placed: Placed) -> tuple[list[events.AnyEvent], list[int]]:
        """Announce the version if it became whole, and readiness. Also returns the versions that are over."""
        out: list[events.AnyEvent] = []
        over: list[int] = []
        progress = self.progress.get(version)
        if progress is not None and placed.serving and not any(progress.missing.values()):
            if version is ROLLING:
                out += self._announce(version, "rolling version")
                del self.progress[ROLLING]
            elif version != self.live:
                out += self._announce(version, f"version {version}")
                self.live = version
                over = self._give_up([v for v in self.progress if v is not None and v < version])
                self.floor = max(self.floor, version - 1)
        if placed.serving and not self.ready:
            self.ready = True
            message = f"model ready: all {placed.filled} slots filled"
            out.append(events.ModelReady(version=self.live, message=message))
        return out, over

    def unfill(self, slots: Iterable[tuple[int | None, int]]) -> None:
        """Take back (version, slot) pairs: their bytes were given up or could not be proven."""
        for version, slot in slots:
            progress = self.progress.get(version)
            if progress is not None and slot in progress.filled:
                progress.filled.discard(slot)
                progress.missing[self.coverage.layer_of[slot]] += 1

    def validate(self) -> None:
        """Check the invariants; for tests."""
        for version, progress in self.progress.items():
            assert version is None or version > self.floor or version == self.live
            for layer, total in self._totals.items():
                filled = sum(1 for slot in progress.filled if self.coverage.layer_of[slot] == layer)
                assert progress.missing[layer] == total - filled
        assert len(self._open()) <= OPEN_VERSIONS

    def _open(self) -> list[int]:
        return sorted(v for v in self.progress if v is not None and v != self.live)

    def _give_up(self, versions: list[int]) -> list[int]:
        for version in versions:
            del self.progress[version]
            self.floor = max(self.floor, version)
        return versions

    def _announce(self, version: int | None, label: str) -> list[events.AnyEvent]:
        total = len(self.coverage.layer_of)
        return [
            events.VersionComplete(version=version, message=f"{label} complete: all {total} slots filled"),
            events.VersionLive(version=version, message=f"{label} live"),
        ]

    def _restart(self, progress: Progress, layer: int) -> None:
        """The rolling version has no end: once a layer of it is whole, the layer's next round begins."""
        progress.filled = {slot for slot in progress.filled if self.coverage.layer_of[slot] != layer}
        progress.missing[layer] = self._totals[layer]
        progress.loaded.discard(layer)
