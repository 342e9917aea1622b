"""The ring: host memory through which a shard's bytes get to a device. Allocated once, and used over and over.

Reader threads fill its slots, and begin the copies to the device themselves. A slot's life:

    free -> filling     a reader has taken it, and reads bytes into it
    filling -> flying   they are being copied to their rows, on the device's own stream; the slot's event is behind them
    filling -> free     they could not be read
    flying -> free      the stream has passed the event

Whoever holds a slot that is filling takes no second one, so that readers never wait for one another in a circle. Bytes
of another dtype than their rows' go through one buffer on the device, and are cast there: the stream's order keeps the
next ones out of it until they have been.

That bytes have left is no news worth telling: `Transfer.drain` returns once all of a shard's events have been passed.
As the host has waited for that, every forward pass that begins afterwards, on whatever stream, finds them in place.
"""

from __future__ import annotations

import contextlib
import enum
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import structlog
import torch

from fusewire.model import TORCH_DTYPES, Destination

from .devices import CudaDevice, Device, DeviceError, Event

Bytes: TypeAlias = npt.NDArray[np.uint8]

SLOT_BYTES = 16 << 20
"""Largest slot: a copy of this size spends nearly all of its time on the bus."""
PAGE = 4096
"""A slot begins on a page, in bytes."""
POLL = 50e-6
"""Seconds between two looks at the event that comes next: a slot of 16 MiB takes six times as long on PCIe 5."""
TIMEOUT = 30.0
"""Seconds for which a device may take nothing, before a shard is given up and tried again."""
CLOSE_TIMEOUT = 2.0

log = structlog.get_logger()

Read: TypeAlias = Callable[[int, Bytes], None]
"""Fills memory with bytes from a position of the source."""


class Piece(NamedTuple):
    """Bytes of one tensor: whole units of its destination, and no more than a slot holds."""

    source: int
    """Where they begin in the source, in bytes."""
    nbytes: int
    offset: int
    """Where they begin in the tensor, in bytes of ``dtype``."""
    dtype: str
    destination: Destination


class State(enum.Enum):
    """What happens to a slot."""

    FREE = enum.auto()
    FILLING = enum.auto()
    FLYING = enum.auto()


_MOVES = {
    (State.FREE, State.FILLING),
    (State.FILLING, State.FLYING),
    (State.FILLING, State.FREE),
    (State.FLYING, State.FREE),
}


class _Slot:
    """A part of the ring's memory."""

    __slots__ = ("bytes", "event", "memory", "pieces", "state", "transfer")

    def __init__(self, memory: torch.Tensor, event: Event) -> None:
        self.memory = memory
        self.bytes: Bytes = memory.numpy()
        self.event = event
        self.state = State.FREE
        self.pieces: Sequence[Piece] = ()
        """What flies: keeps the destinations' memory from being given away, should their shard be given up."""
        self.transfer: Transfer | None = None

    def move(self, state: State) -> None:
        """Go on to another state."""
        if (self.state, state) not in _MOVES:
            raise RuntimeError(f"a slot of the ring can't become {state.name} while it is {self.state.name}")
        self.state = state


class Ring:
    """Slots, and the thread that sees them come back.

    Args:
        device: Where the bytes go.
        slots: How many can be filled or fly at the same time.
        slot_bytes: Bytes of each; a multiple of `PAGE`.
        timeout: Seconds for which the device may take nothing.

    Attributes:
        note: Why copies will be slower than they could be; empty: they won't.
    """

    def __init__(self, device: Device, slots: int, slot_bytes: int, timeout: float = TIMEOUT) -> None:
        self.device = device
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.timeout = timeout
        memory, self.note = device.host(slots * slot_bytes)
        self._staging = device.memory(slot_bytes)
        """Where bytes wait, on the device, for their cast."""
        self._free: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        for part in memory.split(slot_bytes):
            self._free.put(_Slot(part, device.event()))
        self._flying: queue.SimpleQueue[_Slot | None] = queue.SimpleQueue()
        """In the order of the stream."""
        self._launching = threading.Lock()
        """Held while a slot's copies are begun: the staging buffer is used by one slot after the other."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="fusewire-ring", daemon=True)
        self._thread.start()

    def transfer(self, destinations: Iterable[Destination]) -> Transfer:
        """Begin to bring a shard's bytes to its destinations.

        Rows of a staged generation belong to nobody else. Where memory may have been somebody else's a moment ago (a
        buffer for a half that waits), where forward passes have just read the rows, or where a scale has just been
        put in place, copies come after what has been begun on this thread's own stream.
        """
        if any(d.in_place or d.waits or d.scale is not None for d in destinations):
            self.device.follow()
        return Transfer(self)

    def take(self) -> _Slot:
        """Wait for a free slot, and begin to fill it.

        Raises:
            TimeoutError: None came back for ``timeout`` seconds.
        """
        try:
            slot = self._free.get(timeout=self.timeout)
        except queue.Empty:
            raise TimeoutError(f"the device has taken no bytes for {self.timeout:g} s") from None
        slot.move(State.FILLING)
        return slot

    def give_back(self, slot: _Slot) -> None:
        """A slot is free again."""
        slot.move(State.FREE)
        slot.pieces, slot.transfer = (), None
        self._free.put(slot)

    def launch(self, slot: _Slot, pieces: Sequence[Piece], transfer: Transfer) -> None:
        """Begin to copy what a slot has been filled with; the transfer hears of what fails."""
        slot.move(State.FLYING)
        slot.pieces, slot.transfer = pieces, transfer
        with self._launching:
            for step in (partial(self._begin, slot), slot.event.record):  # an event also behind what failed half-way
                try:
                    step()
                except Exception as error:  # noqa: BLE001 - it is the end of this shard, whatever it was
                    transfer.fail(error)
            self._flying.put(slot)

    def close(self) -> None:
        """End the thread, within a bounded time; nothing may be sent any more."""
        self._flying.put(None)
        self._thread.join(CLOSE_TIMEOUT)
        self._closing.set()
        self._thread.join(CLOSE_TIMEOUT)
        self.device.close()

    def _begin(self, slot: _Slot) -> None:
        begin, position = self.device.begin, 0
        with self.device.side():
            for _, nbytes, offset, dtype, destination in slot.pieces:
                source = slot.memory[position : position + nbytes]
                position += nbytes
                if destination.alike(dtype):
                    rows = destination.tensor.view(torch.uint8)[offset : offset + nbytes]
                    begin(partial(rows.copy_, source, non_blocking=True))
                    continue
                staged = self._staging[:nbytes]
                begin(partial(staged.copy_, source, non_blocking=True))
                values = staged.view(TORCH_DTYPES[dtype])
                begin(partial(destination.write, offset // values.element_size(), values))

    def _watch(self) -> None:
        """Free the slots whose event has been passed, in the order of the stream."""
        while (slot := self._flying.get()) is not None:
            transfer, failed = slot.transfer, None
            try:
                while not slot.event.done():
                    if self._closing.is_set():
                        return
                    time.sleep(POLL)
            except Exception as error:  # noqa: BLE001 - told to whom it concerns
                failed = error
            assert transfer is not None
            self.give_back(slot)
            transfer.land(failed)


class Transfer:
    """One shard's bytes on their way to a device. `send` and `put` may be called by several threads."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._changed = threading.Condition()
        self._flying = 0
        self._error: Exception | None = None

    def send(self, pieces: Sequence[Piece], read: Read) -> None:
        """Read pieces that fit into a slot together, and begin to copy them; they are in place after `drain`.

        Raises:
            TimeoutError: The device takes nothing.
            DeviceError: What was sent before has failed.
            ShardRejected: From ``read``.
        """
        self._refuse_failed()
        try:
            slot = self._ring.take()
        except TimeoutError as error:
            self.fail(error)  # the other threads need not wait as long
            raise
        try:
            position = 0
            for piece in pieces:
                read(piece.source, slot.bytes[position : position + piece.nbytes])
                position += piece.nbytes
        except BaseException:
            self._ring.give_back(slot)
            raise
        with self._changed:
            self._flying += 1
        self._ring.launch(slot, pieces, self)

    def put(self, data: Bytes, offset: int, dtype: str, destination: Destination) -> None:
        """Send bytes of one tensor that lie in memory, whole units; the memory is free again when this returns.

        Raises: See `send`.
        """
        unit = destination.unit * TORCH_DTYPES[dtype].itemsize
        step = self._ring.slot_bytes // unit * unit

        def read(start: int, target: Bytes) -> None:
            np.copyto(target, data[start : start + target.size])

        for start in range(0, data.size, step):
            nbytes = min(step, data.size - start)
            self.send([Piece(start, nbytes, offset + start, dtype, destination)], read)

    def holds(self, destination: Destination, first: int, values: torch.Tensor) -> bool:
        """Ask `Destination.holds` on the ring's own stream, where it does not wait for forward passes."""
        with self._ring.device.side():
            return destination.holds(first, values)

    def drain(self) -> None:
        """Wait until all that was sent is in place.

        Raises:
            TimeoutError: It is not, ``timeout`` seconds after the last slot was sent.
            DeviceError: Some of it failed.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._flying, self._ring.timeout):
                self.fail(TimeoutError(f"copies to the device have not ended for {self._ring.timeout:g} s"))
        self._refuse_failed()

    def abandon(self) -> None:
        """The shard is given up: wait, within the timeout, until nothing of it is under way any more."""
        if not isinstance(self._error, TimeoutError):  # else we have waited already
            with contextlib.suppress(TimeoutError, DeviceError):
                self.drain()

    def fail(self, error: Exception) -> None:
        """Something went wrong; the first thing counts."""
        with self._changed:
            if self._error is None:
                self._error = error

    def land(self, error: Exception | None) -> None:
        """A slot's event has been passed, or its copies have failed."""
        with self._changed:
            self._flying -= 1
            if error is not None:
                self.fail(error)
            if not self._flying:
                self._changed.notify_all()

    def _refuse_failed(self) -> None:
        error = self._error
        if isinstance(error, TimeoutError):
            raise error
        if error is not None:
            raise DeviceError(f"the device failed: {error}") from error


def layout(ring_bytes: int, threads: int) -> tuple[int, int]:
    """Cut a ring into slots: at least two for each thread, one to be filled while the other flies.

    Returns:
        Number of slots, and bytes of each.
    """
    slot_bytes = min(SLOT_BYTES, ring_bytes // (2 * threads) // PAGE * PAGE)
    return ring_bytes // slot_bytes, slot_bytes


def ring_for(device: torch.device, ring_bytes: int, threads: int) -> Ring | None:
    """Make the ring for a model's device; None: there bytes are copied without one."""
    if device.type != "cuda":
        return None
    ring = Ring(CudaDevice(device), *layout(ring_bytes, threads))
    if ring.note:
        log.warning("ring.pageable", reason=ring.note)
    return ring
