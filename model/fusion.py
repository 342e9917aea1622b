"""The fusion cache: where a part waits for its partners, across any number of arrivals.

An entry is what has come of one group (the halves of a pair, an fp8 weight and its scale) in one version; versions
never mix. Its parts are keyed by slot, so that weights pair with weights, biases with biases and scales with scales,
and the entry is whole when every part of every leaf is there. The cache owns a copy of what waits, never a view of a
sender's buffer, and is bounded in bytes and age: what it gives up, it reports.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch

from .errors import FusionCacheFull
from .names import Group, Slot

Key = tuple[int | None, int]
"""(version, index of the group); version None is the rolling one."""


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
    """Our own copy, flat: in the parameter's dtype, or fp8 as it came if its scale has to be applied yet."""
    since: float


class FusionCache:
    """The waiting room for halves. Not thread-safe: it belongs to the thread that loads weights.

    Args:
        groups: The parts that have to come together.
        device: Where the copies lie.
        max_bytes: Bound of all copies, in use and kept for reuse.
        max_age: Seconds after which an entry is given up.
        clock: Tells the time in seconds.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        device: torch.device,
        max_bytes: int,
        max_age: float,
        clock: Callable[[], float],
    ) -> None:
        self.max_bytes = max_bytes
        self.max_age = max_age
        self._groups = groups
        self._device = device
        self._clock = clock
        self._entries: dict[Key, dict[int, Waiting]] = {}
        self._free: list[torch.Tensor] = []
        self.held = 0
        """Bytes of the copies that wait or are reserved."""

    def waiting(self, version: int | None, group: int) -> Mapping[int, Waiting]:
        """Return what waits of a group in a version, by slot index."""
        return self._entries.get((version, group), {})

    def completes(self, version: int | None, group: int, arriving: Collection[int]) -> bool:
        """Whether the slots that arrive, with those that wait, are all parts of the group."""
        there = self.waiting(version, group)
        return all(slot.index in arriving or slot.index in there for slot in self._groups[group].slots)

    def reserve(
        self,
        version: int | None,
        slots: Sequence[Slot],
        dtype_of: Callable[[Slot], torch.dtype],
        keep: Collection[int],
    ) -> tuple[dict[int, torch.Tensor], tuple[ExpiredHalf, ...]]:
        """Make room for parts that will have to wait.

        Args:
            version: Theirs.
            slots: Theirs; a slot that waits already needs a second buffer until `put` replaces the first.
            dtype_of: Slot -> dtype of its copy.
            keep: Groups whose entries in this version may not make room: the update that asks counts on what waits
                there.

        Returns:
            A flat buffer for each slot index, and what was given up for them.

        Raises:
            FusionCacheFull: They are larger than the bound, or only entries to be kept could make room.
                Nothing was changed.
        """
        wanted = [(slot.index, slot.numel, dtype_of(slot)) for slot in slots]
        if not wanted:  # also when the bound has been lowered below what waits
            return {}, ()
        needed = sum(numel * dtype.itemsize for _, numel, dtype in wanted)
        kept = {(version, group) for group in keep}
        victims: list[Key] = []
        room = self.max_bytes - self.held
        by_age = sorted(self._entries, key=lambda key: min(w.since for w in self._entries[key].values()))
        for key in by_age:
            if room >= needed:
                break
            if key not in kept:
                victims.append(key)
                room += sum(waiting.tensor.nbytes for waiting in self._entries[key].values())
        if room < needed:
            raise FusionCacheFull(
                f"tensors of {needed} bytes have to wait for their partners; the fusion cache may hold "
                f"{self.max_bytes} bytes (fusion.max_bytes). Send partners in one shard, or raise the bound"
            )
        expired = tuple(half for key in victims for half in self._give_up(key, "bytes"))
        self.held += needed
        return {index: self._buffer(numel, dtype) for index, numel, dtype in wanted}, expired

    def put(self, version: int | None, slot: Slot, buffer: torch.Tensor) -> None:
        """Let a half wait in a reserved buffer; one that waited under the same slot is replaced."""
        assert slot.group is not None
        entry = self._entries.setdefault((version, slot.group), {})
        before = entry.get(slot.index)
        entry[slot.index] = Waiting(slot, buffer, self._clock())
        if before is not None:
            self.release(before.tensor)

    def release(self, buffer: torch.Tensor) -> None:
        """Give a reserved buffer back; it is kept for the next half of its size, within the bound."""
        self.held -= buffer.nbytes
        self._free.append(buffer)
        self._trim()

    def forget(self, version: int | None, group: int) -> None:
        """Drop an entry whose parts have been put in place."""
        for waiting in self._entries.pop((version, group), {}).values():
            self.release(waiting.tensor)

    def expire(self) -> tuple[ExpiredHalf, ...]:
        """Give up the entries whose oldest part has waited longer than ``max_age``."""
        limit = self._clock() - self.max_age
        old = [key for key, parts in self._entries.items() if min(p.since for p in parts.values()) <= limit]
        return tuple(half for key in old for half in self._give_up(key, "age"))

    def drop(self, version: int | None) -> tuple[ExpiredHalf, ...]:
        """Give up all entries of a version that another has superseded."""
        theirs = [key for key in self._entries if key[0] == version]
        return tuple(half for key in theirs for half in self._give_up(key, "superseded"))

    def pending(self) -> list[PendingHalf]:
        """Return all halves that wait here."""
        return [
            PendingHalf(
                version,
                self._groups[group].layer,
                waiting.slot.name,
                tuple(slot.name for slot in self._groups[group].slots if slot.index not in parts),
                waiting.since,
                waiting.tensor.nbytes,
                owned=True,
            )
            for (version, group), parts in self._entries.items()
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
        for (_, group), parts in self._entries.items():
            if not parts or len(parts) == len(self._groups[group].slots):
                raise AssertionError(f"{self._groups[group].parameter} waits though it is empty or whole")

    def _give_up(self, key: Key, cause: str) -> list[ExpiredHalf]:
        version, group = key
        layer = self._groups[group].layer
        expired = []
        for waiting in self._entries.pop(key).values():
            expired.append(ExpiredHalf(version, layer, waiting.slot.name, waiting.since, waiting.tensor.nbytes, cause))
            self.release(waiting.tensor)
        return expired

    def _buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        for position, free in enumerate(self._free):
            if (free.numel(), free.dtype) == (numel, dtype):
                return self._free.pop(position)
        self._trim()
        return torch.empty(numel, dtype=dtype, device=self._device)

    def _trim(self) -> None:
        """Let go of kept buffers, the oldest first, until all fit the bound."""
        while self._free and self.held + sum(buffer.nbytes for buffer in self._free) > self.max_bytes:
            self._free.pop(0)
