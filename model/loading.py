"""Loading: putting the tensors of one shard where they belong, all of them or none.

An update begins with a plan that has passed the slot table, hands out destinations to be filled by whoever holds
the bytes, and ends with `finish` or `abort`. How it behaves depends on whether the model serves:

* Not serving: every tensor goes straight into its rows, halves too; a layer is fused once all parts carry the
  stamp of one version. Waiting costs nothing.
* Serving, in place: a half whose partner has not come goes into the fusion cache; the rows change only when all
  parts of the layer are there, between two forward passes. A reader sees the old pair or the new one.

A slot's stamp is taken away before a byte of it is written, and set once all of the shard is proven good.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .errors import ConflictError, StaleError
from .fusion import ExpiredHalf, FusionCache, PendingHalf
from .gate import Gate
from .generation import Generation, Stamp
from .names import Fusion, LoadPlan, Slot


class Destination(NamedTuple):
    """Where one tensor's values go, or what they are compared with."""

    slot: Slot
    tensor: torch.Tensor
    """Flat and contiguous, in the parameter's dtype."""
    in_place: bool
    """Whether these are rows that a forward pass may read."""

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        """The tensor's memory, writable; host memory only."""
        view: npt.NDArray[np.uint8] = self.tensor.view(torch.uint8).numpy()
        return view


class LoadReport(NamedTuple):
    """What became of the tensors of an update, and what waits now."""

    loaded: tuple[str, ...]
    """Tensors that are in their rows now."""
    fused: tuple[int, ...]
    """Layers whose pair became whole."""
    pending: tuple[PendingHalf, ...]
    """All halves that wait now, whichever update brought them."""
    skipped: tuple[tuple[str, str], ...]
    """(name, reason)."""
    expired: tuple[ExpiredHalf, ...]
    """Halves that were given up to make room."""
    duplicates: tuple[str, ...]
    """Tensors that this version had brought before, with the same bytes."""


class Weights(NamedTuple):
    """What an update works on."""

    generation: Generation
    fusion: FusionCache
    gate: Gate
    clock: Callable[[], float]


class Update:
    """The loading of one shard: `compare`, then fill `destinations` and `finish` within `writing`; or `abort`.

    Args:
        weights: What to work on.
        plan: Where the tensors go.
        version: Theirs; None is the rolling version.
        source: Name of the shard, for the stamps.
        serving: Whether forward passes may read the rows.

    Raises:
        StaleError: A newer numbered version has filled some of the slots.
        FusionCacheFull: The halves that have to wait are too large. In both cases nothing was changed.
    """

    def __init__(self, weights: Weights, plan: LoadPlan, version: int | None, source: str, *, serving: bool) -> None:
        self._weights = weights
        self._plan = plan
        self._version = version
        self._source = source
        self._serving = serving
        self._state = "begun"
        generation, cache = weights.generation, weights.fusion

        self._refuse_stale()
        again = {slot.index for slot in plan.slots if self._came_before(slot)}
        new = [slot for slot in plan.slots if slot.index not in again]
        arriving = {slot.index for slot in plan.slots}
        layers = {slot.layer for slot in new if slot.fused and slot.layer is not None}
        self._whole_before = {layer for layer in layers if self._is_whole(generation.table.fusions[layer])}
        self._completing = {layer for layer in layers if cache.completes(version, layer, arriving)}
        waits = [slot for slot in new if serving and slot.fused and slot.layer not in self._completing]
        self._buffers, self.expired = cache.reserve(version, waits, generation.rows)

        self.compared: tuple[Destination, ...] = tuple(
            Destination(slot, self._present(slot), in_place=False) for slot in plan.slots if slot.index in again
        )
        """Tensors that this version has brought before: their bytes must equal these."""
        self.destinations: tuple[Destination, ...] = tuple(
            Destination(slot, self._buffers[slot.index], in_place=False)
            if slot.index in self._buffers
            else Destination(slot, generation.rows(slot), in_place=serving)
            for slot in new
        )
        """Memory to be filled, in the order of the plan."""

    @contextlib.contextmanager
    def writing(self, timeout: float) -> Iterator[None]:
        """Hold off forward passes, if any could see the rows change; fill the destinations within.

        Raises:
            TimeoutError: A forward pass did not end in ``timeout`` seconds. The update may be aborted.
        """
        self._move("begun", "writing")
        touches = any(destination.in_place for destination in self.destinations)
        try:
            with self._weights.gate.writing(timeout) if touches else contextlib.nullcontext():
                for destination in self.destinations:
                    if destination.slot.index not in self._buffers:
                        self._weights.generation.clear(destination.slot)
                yield
        except TimeoutError:
            self._state = "begun"
            raise

    def differing(self, names: tuple[str, ...]) -> ConflictError:
        """Return the error to raise when tensors in ``compared`` turned out to differ."""
        assert self._version is not None
        return ConflictError(self._version, names)

    def finish(self) -> LoadReport:
        """Everything has been filled and proven: stamp it, and complete the pairs."""
        self._move("writing", "finished")
        generation, cache, version = self._weights.generation, self._weights.fusion, self._version
        stamp = Stamp(version, self._source, self._weights.clock())
        placed = []
        for destination in self.destinations:
            slot = destination.slot
            if slot.index in self._buffers:
                cache.put(version, slot, destination.tensor)
            else:
                generation.stamp(slot, stamp)
                placed.append(slot.name)
        for layer in self._completing:
            for waiting in cache.waiting(version, layer).values():
                if not any(waiting.slot.index == d.slot.index for d in self.destinations):
                    generation.rows(waiting.slot).copy_(waiting.tensor)
                    generation.stamp(waiting.slot, stamp)
            cache.forget(version, layer)
        fusions = generation.table.fusions
        touched = {s.layer for s in self._plan.slots if s.fused and s.layer is not None}
        fused = sorted(
            layer
            for layer in touched
            if self._is_whole(fusions[layer])
            and (layer in self._completing if self._serving else layer not in self._whole_before)
            and any(d.slot.layer == layer and d.slot.fused for d in self.destinations)
        )
        return LoadReport(
            loaded=tuple(placed),
            fused=tuple(fused),
            pending=tuple(pending(self._weights)),
            skipped=self._plan.skipped,
            expired=self.expired,
            duplicates=tuple(destination.slot.name for destination in self.compared),
        )

    def abort(self) -> tuple[str, ...]:
        """Give the update up. Returns the names of the slots that hold nothing now, since they were written."""
        if self._state not in {"begun", "writing"}:
            raise RuntimeError(f"the update has been {self._state} already")
        written = self._state == "writing"
        self._state = "aborted"
        for buffer in self._buffers.values():
            self._weights.fusion.release(buffer)
        if not written:
            return ()
        return tuple(d.slot.name for d in self.destinations if d.slot.index not in self._buffers)

    def _move(self, expected: str, state: str) -> None:
        if self._state != expected:
            raise RuntimeError(f"the update is {self._state}, not {expected}")
        self._state = state

    def _refuse_stale(self) -> None:
        stamps, version = self._weights.generation.stamps, self._version
        if version is None:
            return
        newer = tuple(
            slot.name
            for slot in self._plan.slots
            if (stamp := stamps[slot.index]) is not None and stamp.version is not None and stamp.version > version
        )
        if newer:
            raise StaleError(version, newer)

    def _came_before(self, slot: Slot) -> bool:
        """Whether this numbered version has brought this slot already. The rolling version may change its mind."""
        if self._version is None:
            return False
        stamp = self._weights.generation.stamps[slot.index]
        return (stamp is not None and stamp.version == self._version) or self._waits(slot)

    def _waits(self, slot: Slot) -> bool:
        return (
            slot.fused
            and slot.layer is not None
            and slot.index in self._weights.fusion.waiting(self._version, slot.layer)
        )

    def _present(self, slot: Slot) -> torch.Tensor:
        if self._waits(slot) and slot.layer is not None:
            return self._weights.fusion.waiting(self._version, slot.layer)[slot.index].tensor
        return self._weights.generation.rows(slot)

    def _is_whole(self, fusion: Fusion) -> bool:
        return all(
            (stamp := self._weights.generation.stamps[slot.index]) is not None and stamp.version == self._version
            for slot in fusion.slots
        )


def pending(weights: Weights) -> list[PendingHalf]:
    """Return all halves that wait: those in the cache, and those that lie in their rows beside no partner."""
    stamps = weights.generation.stamps
    found = weights.fusion.pending()
    for layer, fusion in weights.generation.table.fusions.items():
        present = [(slot, stamp) for slot in fusion.slots if (stamp := stamps[slot.index]) is not None]
        versions = {stamp.version for _, stamp in present}
        if len(versions) == 1 and len(present) == len(fusion.slots):
            continue
        for slot, stamp in present:
            missing = tuple(
                other.name
                for other in fusion.slots
                if (theirs := stamps[other.index]) is None or theirs.version != stamp.version
            )
            nbytes = weights.generation.rows(slot).nbytes
            found.append(PendingHalf(stamp.version, layer, slot.name, missing, stamp.at, nbytes, owned=False))
    return found


def fusions_whole(generation: Generation) -> bool:
    """Whether the parts of each fusion have come, and have come from one version."""
    stamps = generation.stamps
    for fusion in generation.table.fusions.values():
        found = [stamps[slot.index] for slot in fusion.slots]
        if any(stamp is None for stamp in found) or len({s.version for s in found if s is not None}) != 1:
            return False
    return True
