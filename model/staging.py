"""Two generations: one live, one being filled. Which is which, what the one lacks of the other, and the flip.

A *stage* is the filling of the staged generation by one version, from its first tensor until it goes live or is given
up. Whatever the version does not bring is carried over from the live generation before it goes live; only slots in
which the two generations differ are copied, and which those are is known without looking at all of them: by induction,
the two differ in what the live version brought, and in what the stage has written.

With one generation there is no stage to speak of: everything happens in place, and every version keeps its own number
for the pairing of its halves.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from .generation import Generation, Stamp, settle
from .leases import Held, Leases
from .names import Slot


class StagingError(Exception):
    """The staged generation can't be used like that now; the message says why."""


class Carried(NamedTuple):
    """What was carried over from the live generation."""

    slots: int
    nbytes: int
    seconds: float
    fused: tuple[int, ...] = ()
    """Layers whose pair became whole: one part came, and the other was carried over."""


class _Seal(NamedTuple):
    """The staged generation was found complete: until something more is written."""

    writes: int
    brought: set[int]


class Staging:
    """The generations of a model, and their roles.

    Args:
        generations: One or two, over the same table.

    Attributes:
        leases: Who reads which generation.
        stage: Number of the present stage; grows with each.
        version: Whose stage it is.
        is_open: Whether a version is being staged.
        retired: Whether the generation that is not live holds, untouched, the version that was live before.
    """

    def __init__(self, generations: Sequence[Generation]) -> None:
        self.generations = tuple(generations)
        self.leases = Leases()
        self.stage = 0
        self.version: int | None = None
        self.is_open = False
        self._slots: tuple[Slot, ...] = tuple(self.generations[0].table.slots.values())
        self._behind = set(range(len(self._slots)))
        """Slots in which the staged generation may differ from the live one, apart from what the stage has written."""
        self._of_version: dict[int | None, int] = {}
        self._complete = False
        self._sealed: _Seal | None = None
        """What the stage had brought when everything else had been carried over."""

    @property
    def in_place(self) -> bool:
        """Whether there is only one generation."""
        return len(self.generations) == 1

    @property
    def live(self) -> Generation | None:
        """The generation that answers; None before there is one."""
        index = self.leases.live
        return None if index is None else self.generations[index]

    @property
    def staged(self) -> Generation:
        """The generation that is written."""
        return self.generations[self._staged_index()]

    @property
    def retired(self) -> bool:
        """Whether the version that was live before is still whole in the generation that is not live."""
        return not self.in_place and self.live is not None and self._complete and not self.staged.changed

    def staged_leases(self) -> Held:
        """Return the requests that still read the generation that is to be written. For any thread."""
        return self.leases.held(self._staged_index()) if not self.in_place else Held(0, 0.0)

    def begin(self, version: int | None) -> None:
        """Begin a stage for a version. What the staged generation held can be lost from now on.

        Raises:
            StagingError: Another version is being staged, or the staged generation is still read.
        """
        if self.in_place:
            return
        if self.is_open:
            raise StagingError(f"{_named(self.version)} is being staged; it has to go live or be given up first")
        held = self.leases.held(self._staged_index())
        if held.leases:
            raise StagingError(f"{held.leases} requests still read the generation, the oldest for {held.age:.1f} s")
        self.stage += 1
        self.version, self.is_open, self._sealed = version, True, None

    def of(self, version: int | None) -> int:
        """Return the stage of a version, in which its tensors find one another.

        Raises:
            StagingError: With two generations: it is not being staged.
        """
        if self.in_place:
            if version not in self._of_version:
                self.stage += 1
                self._of_version[version] = self.stage
            return self._of_version[version]
        if not self.is_open or version != self.version:
            raise StagingError(f"{_named(version)} is not being staged")
        return self.stage

    def brought(self) -> list[Slot]:
        """Return the slots that the present stage has filled."""
        staged, stage = self.staged, self.stage
        changed = sorted(staged.changed)
        return [self._slots[i] for i in changed if (s := staged.stamps[i]) is not None and s.stage == stage]

    def missing(self) -> list[Slot]:
        """Return the slots that the present stage has not filled."""
        brought = {slot.index for slot in self.brought()}
        return [slot for slot in self._slots if slot.index not in brought]

    def end(self, version: int | None) -> None:
        """With one generation: a version is live, and those that are older are over."""
        over = [v for v in self._of_version if v is not None and version is not None and v < version]
        for number in over:
            del self._of_version[number]

    def carry(self) -> Carried:
        """Copy from the live generation what this stage has not brought and what differs.

        Raises:
            StagingError: Nothing is live yet, so that there is nothing to carry over from, and slots are missing.
        """
        begin = time.monotonic()
        staged, live = self.staged, self.live
        there = {slot.index for slot in self.brought()}
        differing = self._lacking(there)
        if differing and live is None:
            raise StagingError(f"{len(differing)} slots are missing, and no weights are live to carry them over from")
        copied = nbytes = 0
        if live is not None:
            for slot in differing:
                staged.clear(slot)
            for first, numel, members in Generation.runs(differing):
                source = live.span(first, numel)
                staged.span(first, numel).copy_(source)
                nbytes += source.nbytes
                for slot in members:
                    stamp = live.stamps[slot.index]
                    assert stamp is not None
                    staged.stamp(slot, stamp)
            settle(staged.device)  # whoever reads it next may do so on another stream
            copied = len(differing)
        fused = []
        for layer, fusion in staged.table.fusions.items():
            came = sum(slot.index in there for slot in fusion.slots)
            if 0 < came < len(fusion.slots):
                fused.append(layer)
        self._sealed = _Seal(staged.writes, there)
        return Carried(copied, nbytes, time.monotonic() - begin, tuple(fused))

    def _lacking(self, brought: set[int]) -> list[Slot]:
        """Return the slots that the stage has not brought, and that are not as in the live generation."""
        staged, live = self.staged, self.live
        wanted = sorted((self._behind | staged.changed) - brought)
        return [self._slots[i] for i in wanted if live is None or staged.stamps[i] is not live.stamps[i]]

    def flip(self) -> int:
        """Make the staged generation live: the commit. Returns how many leases the one before still has.

        After `carry` no slot is looked at, so that it takes as long for any model.

        Raises:
            StagingError: Nothing is being staged, or slots have neither been brought nor carried over.
        """
        staged = self.staged
        if not self.is_open:
            raise StagingError("no version is being staged")
        sealed = self._sealed
        if sealed is None or sealed.writes != staged.writes:
            sealed = _Seal(staged.writes, {slot.index for slot in self.brought()})
            lacking = self._lacking(sealed.brought)
            if lacking:
                raise StagingError(f"{len(lacking)} slots have neither come nor been carried over: {lacking[0].name}")
        self._behind = sealed.brought if self.live is not None else set(range(len(self._slots)))
        self._complete = self.live is not None
        staged.version = self.version
        staged.torn = False
        staged.changed = set()
        self.is_open = False
        held = self.leases.flip(self._staged_index())
        self.staged.changed = set()
        return held

    def flip_back(self) -> int:
        """Make the retired generation live again: the rollback. Returns how many leases the other still has.

        Raises:
            StagingError: It is not intact any more, or there is none.
        """
        if not self.retired:
            why = "a newer version has begun to overwrite it" if self._complete else "there is none"
            raise StagingError(f"there is no retired version to go back to: {why}")
        self.is_open = False
        return self.leases.flip(self._staged_index())

    def drop(self) -> None:
        """Give the present stage up: what it has written means nothing any more."""
        for slot in self.brought():
            self.staged.clear(slot)
        self._behind |= self.staged.changed
        self.is_open = False

    def undo(self, slots: Sequence[Slot]) -> None:
        """Take back slots of the present stage: at its end they are carried over as if they had never come."""
        for slot in slots:
            self.staged.clear(slot)

    def forget_numbers(self) -> None:
        """A trainer has begun to count anew: no stamp's version says any more what is newer."""
        renamed: dict[int, tuple[Stamp, Stamp]] = {}  # a stamp that both generations hold has to stay one object
        for generation in self.generations:
            for index, stamp in enumerate(generation.stamps):
                if stamp is not None and stamp.version is not None:
                    pair = renamed.setdefault(id(stamp), (stamp, stamp._replace(version=None)))
                    generation.stamps[index] = pair[1]
        self._of_version = {version: stage for version, stage in self._of_version.items() if version is None}

    def _staged_index(self) -> int:
        return 0 if self.in_place or self.leases.live is None else 1 - self.leases.live


def _named(version: int | None) -> str:
    return "the rolling version" if version is None else f"version {version}"
