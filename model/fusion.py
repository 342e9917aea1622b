"""The fusion cache: where a half waits for its partner, across any number of arrivals.

An entry is what has come for one layer of one version; versions never mix. Its parts are keyed by slot, so that
weights pair with weights, biases with biases and scales with scales, and the entry is whole when every part of
every leaf is there. The cache owns a copy of what waits, never a view of a sender's buffer, and is bounded in
bytes and age: what it gives up, it reports.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

import torch

from .errors import FusionCacheFull
from .names import Fusion, Slot

Key = tuple[int | None, int]
"""(version, layer); version None is the rolling one."""


class PendingHalf(NamedTuple):
    """One tensor that waits for its partner."""

    version: int | None
    layer: int
    tensor: str
    missing: tuple[str, ...]
    """Tensors that its fusion still lacks."""
    since: float
    """When it came, on the model's clock."""
    nbytes: int
    owned: bool
    """True: the cache holds a copy. False: it lies in its rows of the parameter already."""


class ExpiredHalf(NamedTuple):
    """One tensor that was given up, with the reason."""

    version: int | None
    layer: int
    tensor: str
    since: float
    nbytes: int
    cause: str
    """``age``, ``bytes`` or ``superseded``."""


class Waiting(NamedTuple):
    """A part in the cache."""

    slot: Slot
    tensor: torch.Tensor
    """Our own copy, flat, in the parameter's dtype."""
    since: float


class FusionCache:
    """The waiting room for halves. Not thread-safe: it belongs to the thread that loads weights.

    Args:
        fusions: Layer -> the parts that have to come together.
        max_bytes: Bound of all copies, in use and kept for reuse.
        max_age: Seconds after which an entry is given up.
        clock: Tells the time in seconds.
    """

    def __init__(
        self,
        fusions: Mapping[int, Fusion],
        max_bytes: int,
        max_age: float,
        clock: Callable[[], float],
    ) -> None:
        self.max_bytes = max_bytes
        self.max_age = max_age
        self._fusions = fusions
        self._clock = clock
        self._entries: dict[Key, dict[int, Waiting]] = {}
        self._free: list[torch.Tensor] = []
        self.held = 0
        """Bytes of the copies that wait or are reserved."""

    def waiting(self, version: int | None, layer: int) -> Mapping[int, Waiting]:
        """Return what waits of a layer of a version, by slot index."""
        return self._entries.get((version, layer), {})

    def completes(self, version: int | None, layer: int, arriving: Collection[int]) -> bool:
        """Whether the slots that arrive, with those that wait, are all parts of the layer's fusion."""
        there = self.waiting(version, layer)
        return all(slot.index in arriving or slot.index in there for slot in self._fusions[layer].slots)

    def reserve(
        self, version: int | None, slots: Iterable[Slot], like: Callable[[Slot], torch.Tensor]
    ) -> tuple[dict[int, torch.Tensor], tuple[ExpiredHalf, ...]]:
        """Make room for halves that will have to wait.

        Args:
            version: Theirs.
            slots: Theirs; a slot that waits already needs a second buffer until `put` replaces the first.
            like: Slot -> its rows, for size, dtype and device.

        Returns:
            A buffer for each slot index, and what was given up for them.

        Raises:
            FusionCacheFull: They are larger than the bound, or only entries that they belong to could make
                room. Nothing was changed.
        """
        rows = {slot.index: like(slot) for slot in slots}
        needed = sum(tensor.nbytes for tensor in rows.values())
        own = {(version, slot.layer) for slot in slots}
        victims: list[Key] = []
        room = self.max_bytes - self.held
        by_age = sorted(self._entries, key=lambda key: min(w.since for w in self._entries[key].values()))
        for key in by_age:
            if room >= needed:
                break
            if key not in own:
                victims.append(key)
                room += sum(waiting.tensor.nbytes for waiting in self._entries[key].values())
        if room < needed:
            raise FusionCacheFull(
                f"halves of {needed} bytes have to wait for their partners; the fusion cache may hold "
                f"{self.max_bytes} bytes (fusion.max_bytes). Send both halves in one shard, or raise the bound"
            )
        expired = tuple(half for key in victims for half in self._give_up(key, "bytes"))
        self.held += needed
        return {index: self._buffer(tensor) for index, tensor in rows.items()}, expired

    def put(self, version: int | None, slot: Slot, buffer: torch.Tensor) -> None:
        """Let a half wait in a reserved buffer; one that waited under the same slot is replaced."""
        assert slot.layer is not None
        entry = self._entries.setdefault((version, slot.layer), {})
        before = entry.get(slot.index)
        entry[slot.index] = Waiting(slot, buffer, self._clock())
        if before is not None:
            self.release(before.tensor)

    def release(self, buffer: torch.Tensor) -> None:
        """Give a reserved buffer back; it is kept for the next half of its size, within the bound."""
        self.held -= buffer.nbytes
        self._free.append(buffer)
        self._trim()

    def forget(self, version: int | None, layer: int) -> None:
        """Drop an entry whose parts have been put in place."""
        for waiting in self._entries.pop((version, layer), {}).values():
            self.release(waiting.tensor)

    def expire(self) -> tuple[ExpiredHalf, ...]:
        """Give up the entries whose oldest part has waited longer than ``max_age``."""
        limit = self._clock() - self.max_age
        old = [key for key, parts in self._entries.items() if min(p.since for p in parts.values()) <= limit]
        return tuple(half for key in old for half in self._give_up(key, "age"))

    def drop(self, version: int) -> tuple[ExpiredHalf, ...]:
        """Give up all entries of a version that another has superseded."""
        theirs = [key for key in self._entries if key[0] == version]
        return tuple(half for key in theirs for half in self._give_up(key, "superseded"))

    def pending(self) -> list[PendingHalf]:
        """Return all halves that wait here."""
        return [
            PendingHalf(
                version,
                layer,
                waiting.slot.name,
                tuple(slot.name for slot in self._fusions[layer].slots if slot.index not in parts),
                waiting.since,
                waiting.tensor.nbytes,
                owned=True,
            )
            for (version, layer), parts in self._entries.items()
            for waiting in parts.values()
        ]

    def check(self, reserved: int = 0) -> None:
        """Check the invariants; for tests.

        Raises:
            AssertionError: Naming the one that is broken.
        """
        waiting = sum(w.tensor.nbytes for parts in self._entries.values() for w in parts.values())
        if self.held != waiting + reserved:
            raise AssertionError(f"{self.held} bytes held, {waiting} waiting and {reserved} reserved")
        if self.held + sum(buffer.nbytes for buffer in self._free) > max(self.max_bytes, self.held):
            raise AssertionError("more bytes than the bound allows")
        for (_, layer), parts in self._entries.items():
            if not parts or len(parts) == len(self._fusions[layer].slots):
                raise AssertionError(f"layer {layer} waits though it is empty or whole")

    def _give_up(self, key: Key, cause: str) -> list[ExpiredHalf]:
        version, layer = key
        expired = []
        for waiting in self._entries.pop(key).values():
            expired.append(ExpiredHalf(version, layer, waiting.slot.name, waiting.since, waiting.tensor.nbytes, cause))
            self.release(waiting.tensor)
        return expired

    def _buffer(self, like: torch.Tensor) -> torch.Tensor:
        for position, free in enumerate(self._free):
            if (free.shape, free.dtype, free.device) == (like.shape, like.dtype, like.device):
                return self._free.pop(position)
        self._trim()
        return torch.empty_like(like)

    def _trim(self) -> None:
        """Let go of kept buffers, the oldest first, until all fit the bound."""
        while self._free and self.held + sum(buffer.nbytes for buffer in self._free) > self.max_bytes:
            self._free.pop(0)
