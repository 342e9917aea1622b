"""Loading: putting the tensors of one shard where they belong, all of them or none.

An update begins with a plan that has passed the slot table, hands out destinations to be filled by whoever holds
the bytes, and ends with `finish` or `abort`. How it behaves depends on whether forward passes may read the generation
that it writes:

* Nobody reads it (it is being staged, or the model does not serve yet): every tensor goes straight into its rows,
  halves too; a layer is fused once all parts carry the stamp of one stage. Waiting costs nothing.
* Serving, in place: a half whose partner has not come goes into the fusion cache; the rows change only when all
  parts of the layer are there, between two forward passes. A reader sees the old pair or the new one.

A slot's stamp is taken away before a byte of it is written, and set once all of the shard is proven good.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from .errors import ConflictError, StaleError
from .fp8 import dequantize
from .fusion import ExpiredHalf, FusionCache, PendingHalf
from .gate import Gate
from .generation import TORCH_DTYPES, Bytes, Generation, Stamp, settle
from .names import SCALE_LEAF, Group, LoadPlan, Slot
from .staging import StagingError


class Destination:
    """Where one tensor's values go, or what they are compared with.

    Args:
        slot: Of the tensor.
        generation: Whose rows are meant, unless ``copy`` is given.
        copy: A flat buffer in which the tensor waits.
        in_place: Whether these are rows that a forward pass may read.
        scale: float32 [blocks of rows, blocks of columns]: fp8 values are multiplied with it on their way.
    """

    __slots__ = ("_copy", "_generation", "in_place", "scale", "slot")

    def __init__(
        self,
        slot: Slot,
        generation: Generation,
        copy: torch.Tensor | None = None,
        *,
        in_place: bool = False,
        scale: torch.Tensor | None = None,
    ) -> None:
        self.slot = slot
        self.in_place = in_place
        self.scale = scale
        self._generation = generation
        self._copy = copy

    @classmethod
    def of_rows(cls, generation: Generation, slot: Slot, *, in_place: bool = False) -> Destination:
        """Return a slot's rows, by way of its scale if it has one."""
        scale = None
        if slot.scale is not None:
            scale = generation.parameters[f"{slot.name.rpartition('.')[0]}.{SCALE_LEAF}"]
        return cls(slot, generation, in_place=in_place, scale=scale)

    @property
    def tensor(self) -> torch.Tensor:
        """Flat and contiguous: rows of a parameter, or the copy."""
        return self._generation.rows(self.slot) if self._copy is None else self._copy

    @property
    def bytes(self) -> Bytes:
        """The tensor's memory, writable; host memory only."""
        if self._copy is None:
            return self._generation.bytes(self.slot)
        view: Bytes = self._copy.view(torch.uint8).numpy()
        return view

    @property
    def waits(self) -> bool:
        """Whether this is a buffer in which the tensor waits: memory that has been somebody else's before."""
        return self._copy is not None

    def takes(self, dtype: str) -> bool:
        """Whether values of this safetensors dtype may be copied as bytes, through `bytes`."""
        return self._generation.device.type == "cpu" and self.alike(dtype)

    def alike(self, dtype: str) -> bool:
        """Whether values of this safetensors dtype have the same bytes here as in the checkpoint."""
        if self.scale is not None:
            return False
        if self._copy is not None:
            return self._copy.dtype == TORCH_DTYPES[dtype]
        return self._generation.table.parameters[self.slot.parameter].dtype == dtype

    @property
    def unit(self) -> int:
        """Elements that have to be written together: a whole row where a scale is applied, else one."""
        return 1 if self.scale is None else self.slot.shape[-1]

    def worth(self, first: int, values: torch.Tensor) -> torch.Tensor:
        """Return what some of the checkpoint's values are worth here, before a cast to the destination's dtype.

        Args:
            first: Position of the first of them in the flat tensor; a multiple of ``unit``.
            values: Flat, in the checkpoint's dtype; whole units.
        """
        if self.scale is None:
            return values
        columns = self.slot.shape[-1]
        raw = values.to(self.scale.device).view(-1, columns)
        return dequantize(raw, self.scale, first // columns).view(-1)

    def write(self, first: int, values: torch.Tensor) -> None:
        """Put some of the checkpoint's values in place; see `worth`."""
        self.tensor[first : first + values.numel()].copy_(self.worth(first, values))

    def holds(self, first: int, values: torch.Tensor) -> bool:
        """Whether some of the checkpoint's values lie here already, bit for bit; see `worth`."""
        there = self.tensor[first : first + values.numel()]
        here = self.worth(first, values).to(there)
        return torch.equal(here.view(torch.uint8), there.view(torch.uint8))


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
    stage: int
    """In which the tensors find one another."""
    in_place: bool
    """Whether there is no other generation: then stamps tell which version is newer."""


class Update:
    """The loading of one shard: `compare`, then fill `destinations` and `finish` within `writing`; or `abort`.

    Args:
        weights: What to work on.
        plan: Where the tensors go.
        version: Theirs; None is the rolling version.
        source: Name of the shard, for the stamps.
        serving: Whether forward passes may read the rows.
        again: Whether it takes the place of what its version has brought before, instead of being compared with it.

    Raises:
        StaleError: A newer numbered version has filled some of the slots.
        FusionCacheFull: The halves that have to wait are too large. In both cases nothing was changed.
    """

    def __init__(
        self,
        weights: Weights,
        plan: LoadPlan,
        version: int | None,
        source: str,
        *,
        serving: bool,
        again: bool = False,
    ) -> None:
        self._weights = weights
        self._plan = plan
        self._version = version
        self._source = source
        self._serving = serving
        self._state = "begun"
        cache = weights.fusion

        self._cleared: dict[str, None] = {}
        self._refuse_stale()
        self.compared: tuple[Destination, ...] = () if again else repeats(weights, plan, version)
        """Tensors that this version has brought before: their values must equal these."""
        repeated = {destination.slot.index for destination in self.compared}
        new = [slot for slot in plan.slots if slot.index not in repeated]
        arriving = {index for slot in plan.slots for index in slot.indices}
        self._touched = {slot.group for slot in new if slot.group is not None}
        self._whole_before = {group for group in self._touched if self._is_whole(group)}
        self._completing = {group for group in self._touched if cache.completes(version, group, arriving)}
        waits = [slot for slot in new if self._has_to_wait(slot)]
        counted_on = {slot.group for slot in plan.slots if slot.group is not None}
        self._buffers, self.expired = cache.reserve(version, waits, self._dtype_waiting, counted_on)

        made = [self._destination(slot, self._buffers.get(slot.index)) for slot in new]
        self.rounds: tuple[tuple[Destination, ...], ...] = (
            tuple(destination for destination in made if destination.scale is None),
            tuple(destination for destination in made if destination.scale is not None),
        )
        """Memory to be filled, one round after the other: scales have to be there before they are applied."""

    @property
    def destinations(self) -> tuple[Destination, ...]:
        """The memory of all rounds."""
        return tuple(destination for one in self.rounds for destination in one)

    @contextlib.contextmanager
    def writing(self, timeout: float) -> Iterator[None]:
        """Hold off forward passes, if any could see the rows change; fill the destinations within.

        Raises:
            TimeoutError: A forward pass did not end in ``timeout`` seconds. The update may be aborted.
        """
        self._move("begun", "writing")
        touches = self._serving and any(d.slot.index not in self._buffers for d in self.destinations)
        with contextlib.ExitStack() as held:
            if touches:
                try:
                    held.enter_context(self._weights.gate.writing(timeout))
                except TimeoutError:
                    self._state = "begun"
                    raise
            for destination in self.destinations:
                if destination.slot.index not in self._buffers:
                    self._clear(destination.slot)
            for group in self._completing:
                if self._weights.generation.table.groups[group].computed:  # weights mean nothing without their scales
                    for waiting in self._weights.fusion.waiting(self._version, group).values():
                        self._clear(waiting.slot)
            self._place_waiting(scales=True)
            yield

    def differing(self, names: tuple[str, ...]) -> ConflictError:
        """Return the error to raise when tensors in ``compared`` turned out to differ."""
        assert self._version is not None
        return ConflictError(self._version, names)

    def finish(self) -> LoadReport:
        """Everything has been filled and proven: stamp it, and complete the pairs."""
        if self._state != "writing":
            raise RuntimeError(f"the update is {self._state}, not writing")
        from_cache = self._place_waiting(scales=False)  # what can fail comes first: it may still be aborted
        if from_cache:
            settle(self._weights.generation.device)  # a layer is told of only once its bytes are in place
        self._move("writing", "finished")
        generation, cache, version = self._weights.generation, self._weights.fusion, self._version
        stamp = Stamp(version, self._source, self._weights.clock(), self._weights.stage)
        placed = []
        for destination in self.destinations:
            slot = destination.slot
            if slot.index in self._buffers:
                cache.put(version, slot, destination.tensor)
            else:
                generation.stamp(slot, stamp)
                placed.append(slot.name)
        placed += from_cache
        for group in self._completing:
            for waiting in cache.waiting(version, group).values():
                generation.stamp(waiting.slot, stamp)
            cache.forget(version, group)
        return LoadReport(
            loaded=tuple(placed),
            fused=tuple(sorted(self._newly_fused())),
            pending=tuple(pending(self._weights)),
            skipped=self._plan.skipped,
            expired=self.expired,
            duplicates=tuple(destination.slot.name for destination in self.compared),
        )

    def _newly_fused(self) -> Iterator[int]:
        """The layers whose pair this update made whole."""
        table = self._weights.generation.table
        for layer, fusion in table.fusions.items():
            group = fusion.slots[0].group
            if group in self._touched and self._is_whole(group):
                through_cache = self._serving or fusion.computed
                if group in self._completing if through_cache else group not in self._whole_before:
                    yield layer

    def _place_waiting(self, *, scales: bool) -> list[str]:
        """Copy what waited, of the groups that are complete now, into its rows: first the scales, then the rest."""
        placed = []
        arriving = {index for destination in self.destinations for index in destination.slot.indices}
        for group in self._completing:
            for waiting in self._weights.fusion.waiting(self._version, group).values():
                slot = waiting.slot
                if slot.index in arriving:  # it came again and takes the place of what waited
                    continue
                if (slot.leaf == SCALE_LEAF) is scales:
                    self._clear(slot)
                    self._destination(slot, None).write(0, waiting.tensor)
                if not scales:
                    placed.append(slot.name)
        return placed

    def abort(self) -> tuple[str, ...]:
        """Give the update up. Returns the names of the slots that hold nothing now, since they were written."""
        if self._state not in {"begun", "writing"}:
            raise RuntimeError(f"the update has been {self._state} already")
        self._state = "aborted"
        for buffer in self._buffers.values():
            self._weights.fusion.release(buffer)
        return tuple(self._cleared)

    def _clear(self, slot: Slot) -> None:
        """Take the stamp of rows that are about to be written."""
        self._weights.generation.torn = True
        self._weights.generation.clear(slot)
        self._cleared[slot.name] = None

    def _move(self, expected: str, state: str) -> None:
        if self._state != expected:
            raise RuntimeError(f"the update is {self._state}, not {expected}")
        self._state = state

    def _refuse_stale(self) -> None:
        stamps, version = self._weights.generation.stamps, self._version
        if version is None or not self._weights.in_place:
            return
        newer = tuple(
            slot.name for slot in self._plan.slots if any(_newer(stamps[index], version) for index in slot.indices)
        )
        if newer:
            raise StaleError(version, newer)

    def _has_to_wait(self, slot: Slot) -> bool:
        """Whether a part has to wait in a copy: its rows may be read, it has to be computed with, or others wait there.

        The last is so when a model that served has lost rows to an update that failed: parts never meet if some
        wait in the cache and others lie in their rows.
        """
        if slot.group is None or slot.group in self._completing:
            return False
        if self._serving or self._weights.generation.table.groups[slot.group].computed:
            return True
        return bool(self._weights.fusion.waiting(self._version, slot.group))

    def _dtype_waiting(self, slot: Slot) -> torch.dtype:
        return torch.float8_e4m3fn if slot.scale is not None else self._weights.generation.rows(slot).dtype

    def _destination(self, slot: Slot, copy: torch.Tensor | None) -> Destination:
        if copy is not None:
            return Destination(slot, self._weights.generation, copy)
        return Destination.of_rows(self._weights.generation, slot, in_place=self._serving)

    def _is_whole(self, group: int) -> bool:
        generation = self._weights.generation
        return all(generation.carries(slot, self._weights.stage) for slot in generation.table.groups[group].slots)


def repeats(weights: Weights, plan: LoadPlan, version: int | None) -> tuple[Destination, ...]:
    """Return what the numbered version has brought of these tensors already: the values that must come again.

    Changes nothing. The rolling version may change its mind, so it has no repeats.
    """
    if version is None:
        return ()
    found = []
    for slot in plan.slots:
        waiting = None if slot.group is None else weights.fusion.waiting(version, slot.group).get(slot.index)
        if waiting is not None:
            found.append(Destination(slot, weights.generation, waiting.tensor))
        elif weights.generation.carries(slot, weights.stage):
            found.append(Destination.of_rows(weights.generation, slot))
    return tuple(found)


def _newer(stamp: Stamp | None, version: int) -> bool:
    return stamp is not None and stamp.version is not None and stamp.version > version


def pending(weights: Weights) -> list[PendingHalf]:
    """Return all halves that wait: those in the cache, and those that lie in their rows beside no partner."""
    return weights.fusion.pending() + alone(weights.generation, None if weights.in_place else weights.stage)


def alone(generation: Generation, stage: int | None = None) -> list[PendingHalf]:
    """Return the halves that lie in their rows beside no partner. Reads stamps only: any thread may ask.

    Args:
        generation: Which.
        stage: Only what this stage has brought counts as being there; None: whatever is there.
    """
    stamps = generation.stamps
    found = []
    for layer, fusion in generation.table.fusions.items():
        present = [
            (slot, stamp)
            for slot in fusion.slots
            if (stamp := stamps[slot.index]) is not None and stage in {None, stamp.stage}
        ]
        stages = {stamp.stage for _, stamp in present}
        if len(stages) == 1 and len(present) == len(fusion.slots):
            continue
        for slot, stamp in present:
            missing = tuple(other.name for other in fusion.slots if not generation.carries(other, stamp.stage))
            nbytes = generation.rows(slot).nbytes
            found.append(PendingHalf(stamp.version, layer, slot.name, missing, stamp.at, nbytes, owned=False))
    return found


def place_alone(weights: Weights, version: int | None, timeout: float) -> tuple[tuple[int, ...], int]:
    """Put the halves of a version that wait for partners that will not come beside the partners that are there.

    In place only. Halves that can't be placed without their partner (an fp8 weight to be dequantised) go on waiting.

    Returns:
        The layers whose pair is whole again by that, and how many bytes were written.

    Raises:
        TimeoutError: A forward pass did not end in ``timeout`` seconds; nothing was changed.
        StagingError: The partners that are there are not whole, or are newer; nothing was changed.
    """
    generation, cache = weights.generation, weights.fusion
    groups = [
        group
        for group, members in enumerate(generation.table.groups)
        if not members.computed and cache.waiting(version, group)
    ]
    if not groups:
        return (), 0
    for group in groups:
        _refuse_alone(generation, generation.table.groups[group], version)
    layers, nbytes = [], 0
    with weights.gate.writing(timeout):
        generation.torn = True
        for group in groups:
            members = generation.table.groups[group]
            waiting = cache.waiting(version, group)
            stamp = Stamp(version, "carried", weights.clock(), weights.stage)
            for half in waiting.values():
                generation.clear(half.slot)
                generation.rows(half.slot).copy_(half.tensor)
                nbytes += half.tensor.nbytes
            settle(generation.device)
            for slot in members.slots:
                generation.stamp(slot, stamp)
            cache.forget(version, group)
            if generation.table.fusions.get(members.layer) is members:
                layers.append(members.layer)
    return tuple(layers), nbytes


def _refuse_alone(generation: Generation, group: Group, version: int | None) -> None:
    stamps = [generation.stamps[slot.index] for slot in group.slots]
    if None in stamps or len({stamp.stage for stamp in stamps if stamp is not None}) > 1:
        raise StagingError(f"{group.parameter} is not whole: nothing can stand in for what did not come")
    if version is not None and any(_newer(stamp, version) for stamp in stamps):
        raise StagingError(f"{group.parameter} holds a newer version than {version}")


def groups_whole(generation: Generation) -> bool:
    """Whether the parts of each group have come, and have come together."""
    stamps = generation.stamps
    for group in generation.table.groups:
        first = stamps[group.slots[0].index]
        if first is None or not all(generation.carries(slot, first.stage) for slot in group.slots):
            return False
    return True
