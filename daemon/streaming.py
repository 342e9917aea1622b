"""One shard whose bytes come chunk by chunk: each is copied once, from where it lies into its place.

A stream is an update that stays open while its client sends: on the loader's thread, like all that changes weights, but
a piece at a time, so that others are served in between.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from fusewire.model import TORCH_DTYPES, LoadPlan, Update

from .copying import Copy
from .errors import Reason, ShardRejected

Bytes = npt.NDArray[np.uint8]


class Stream:
    """A shard that is coming.

    Args:
        plan: Where its tensors go.
        version: Theirs.
        nbytes: Size of its data section.
        compared: Tensors that have been there before, and have to be the same.
        xxh3: Digest that the data has to have; None: none was given.
        update: What the others belong to, begun; None: all are compared.
        new: These others.
    """

    def __init__(
        self,
        plan: LoadPlan,
        version: int | None,
        nbytes: int,
        compared: Sequence[Copy],
        xxh3: str | None,
        *,
        update: Update | None = None,
        new: Sequence[Copy] = (),
    ) -> None:
        self.plan = plan
        self.version = version
        self.update = update
        self.position = 0
        self.begun = self.heard = time.monotonic()
        """When it began, and when the last chunk came."""
        self._nbytes = nbytes
        parts = [(copy, True) for copy in compared] + [(copy, False) for copy in new]
        parts.sort(key=lambda part: part[0].start)
        self._copies = [copy for copy, _ in parts]
        self._compared = [compare for _, compare in parts]
        self._next = 0
        """The first tensor that is not whole yet."""
        self._rest = b""
        """Bytes of it that are no whole unit yet, where values are cast."""
        self._hash = xxhash.xxh3_128() if xxh3 is not None else None
        self._xxh3 = xxh3
        self.slots = frozenset(index for copy in new for index in copy.destination.slot.indices)
        """Slots that are being written: nobody else may write them."""
        self._writing = contextlib.ExitStack()
        if update is not None:
            self._writing.enter_context(update.writing(0.0))  # nobody reads what is staged: there is no wait

    @property
    def complete(self) -> bool:
        """Whether all bytes have come."""
        return self.position == self._nbytes

    def feed(self, chunk: Bytes) -> None:
        """Put the next bytes in place.

        Raises:
            ShardRejected: CONFLICT: they are not what the version has brought before.
        """
        if self._hash is not None:
            self._hash.update(chunk.data)
        done = 0
        while done < chunk.size:
            while self._next < len(self._copies) and self._end(self._next) <= self.position:
                self._next += 1
            if self._next == len(self._copies) or self._copies[self._next].start > self.position:
                done += self._skip(chunk.size - done)
                continue
            take = min(chunk.size - done, self._end(self._next) - self.position)
            self._put(self._copies[self._next], chunk[done : done + take], compare=self._compared[self._next])
            done += take
            self.position += take

    def finish(self) -> None:
        """All bytes have come: see whether they are what the sender says. Ends the writing.

        Raises:
            ShardRejected: DIGEST_MISMATCH.
        """
        if self._hash is not None and (found := self._hash.hexdigest()) != self._xxh3:
            raise ShardRejected(Reason.DIGEST_MISMATCH, f"its data has xxh3 {found}, the sender says {self._xxh3}")

    def close(self) -> None:
        """Let forward passes in, if any were kept out."""
        self._writing.close()

    def _end(self, index: int) -> int:
        copy = self._copies[index]
        return copy.start + copy.nbytes

    def _skip(self, most: int) -> int:
        """Pass over bytes that belong to no tensor of ours."""
        until = self._copies[self._next].start if self._next < len(self._copies) else self._nbytes
        count = min(most, until - self.position)
        self.position += count
        return count

    def _put(self, copy: Copy, piece: Bytes, *, compare: bool) -> None:
        destination, at = copy.destination, self.position - copy.start
        if destination.takes(copy.dtype):
            there = destination.bytes[at : at + piece.size]
            if not compare:
                np.copyto(there, piece)
            elif not np.array_equal(there, piece):
                self._conflict(copy)
            return
        itemsize = TORCH_DTYPES[copy.dtype].itemsize
        unit = destination.unit * itemsize
        first = (at - len(self._rest)) // itemsize
        if self._rest:
            piece = np.frombuffer(self._rest + piece.tobytes(), dtype=np.uint8)
        whole = piece.size // unit * unit
        self._rest = piece[whole:].tobytes()
        if not whole:
            return
        values = torch.from_numpy(piece[:whole].copy()).view(
            TORCH_DTYPES[copy.dtype]
        )  # torch wants to own what it reads
        if not compare:
            destination.write(first, values)
        elif not destination.holds(first, values):
            self._conflict(copy)

    def _conflict(self, copy: Copy) -> None:
        name = copy.destination.slot.name
        raise ShardRejected(
            Reason.CONFLICT,
            f"version {self.version} has already brought other bytes for {name}; "
            "send changed weights under a new version",
        )
