"""Copying a shard's bytes to where they belong: in blocks, on several threads, without intermediate tensors.

A block goes straight from the payload (a leased mapping, a file descriptor or a message) into the destination's
own memory. Only where the dtypes differ it passes through a small buffer that stays in the cache; each thread has one,
made once. To a device it goes through the ring, where the same threads fill slots.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from fusewire.model import TORCH_DTYPES, Destination, all_finite

from .errors import Reason, ShardRejected
from .payload import Payload
from .ring import Piece, Ring, Transfer
from .shard import TensorEntry

Bytes: TypeAlias = npt.NDArray[np.uint8]
T = TypeVar("T")

CAST_BYTES = 1 << 20
"""Bytes of a block that is cast on its way: it has to fit into a core's second-level cache."""
SMALL_BYTES = 64 << 10
"""A shard whose tensors are no larger than this, on average, is copied by the calling thread, too."""
LARGE_BYTES = 32 << 20
"""A shard of this size keeps its threads busy for so long that the calling one had better do something else."""
INLINE_BYTES = 1 << 20
"""A shard up to this size is copied by the calling thread: handing it out would cost more than it saves."""
BATCH_BYTES = 1 << 20
"""A slot of the ring is filled at least that far, however small the shard: smaller copies leave the bus idle."""
BATCH_PIECES = 64
"""Pieces of small tensors that go in one slot: a slot's copies are begun under a lock."""
SCALED_BYTES = 2 << 20
"""Bytes of fp8 values that are dequantised at a time on a device: they take twelve times that for a moment."""


class Copy(NamedTuple):
    """One tensor to copy: ``nbytes`` at ``start`` of the payload's data section, into a destination."""

    start: int
    nbytes: int
    dtype: str
    destination: Destination


class _Block(NamedTuple):
    source: int
    nbytes: int
    target: Bytes | None
    """Where the bytes go as they are; None if they have to be cast or to leave host memory."""
    first: int
    """Where the block begins in ``copy.destination.tensor``, in elements."""
    copy: Copy


class Copier:
    """A pool of named threads that copy blocks.

    Args:
        threads: How many blocks are copied at the same time.
        block_bytes: Size of a block that needs no cast.
        progress: Called with the number of bytes after each block, from any of the threads.
        wake: Called when a large shard has been copied, from any of the threads; see `run`.
        ring: The way to the device that all destinations are on; None: they are in host memory, or on a device without
            a ring, to which blocks are written one by one. Closed with the copier.
    """

    def __init__(
        self,
        threads: int,
        block_bytes: int,
        progress: Callable[[int], None],
        wake: Callable[[], None] = lambda: None,
        ring: Ring | None = None,
    ) -> None:
        self._ring = ring
        self._wake = wake
        self._threads = threads
        self._block_bytes = block_bytes
        self._progress = progress
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="fusewire-copy")
        self._local = threading.local()
        self._cancelled = threading.Event()

    def run(
        self,
        payload: Payload,
        copies: Sequence[Copy],
        meanwhile: Callable[[threading.Event], None] | None = None,
    ) -> None:
        """Copy everything; return when all of it is in place.

        Args:
            payload: Where from.
            copies: What, and where to.
            meanwhile: Called in this thread while others copy something large; has to return soon after the event is
                set. Whatever waits for it is woken by `wake`.

        Raises:
            ShardRejected: The payload could not be read. What was copied until then is unproven.
            TimeoutError: The device takes nothing.
            DeviceError: The device failed.
        """
        nbytes = sum(copy.nbytes for copy in copies)
        # Threads that copy small tensors keep each other from the interpreter's lock.
        apart = self._threads > 1 and nbytes > INLINE_BYTES and nbytes > SMALL_BYTES * len(copies)
        beside = meanwhile if nbytes >= LARGE_BYTES else None
        transfer = self.transfer(copies)
        if transfer is None:
            self._share(partial(self._work, payload), self._blocks(copies), beside, apart=apart)
            return
        try:
            self._share(partial(self._ship, payload, transfer), self._batches(copies, nbytes), beside, apart=apart)
            transfer.drain()
        except BaseException:
            transfer.abandon()
            raise

    def transfer(self, copies: Iterable[Copy]) -> Transfer | None:
        """Begin to bring a shard's bytes to the device, if there is a ring; see `Ring.transfer`."""
        return None if self._ring is None else self._ring.transfer(copy.destination for copy in copies)

    def _share(
        self,
        work: Callable[[Iterator[T]], None],
        items: Iterator[T],
        meanwhile: Callable[[threading.Event], None] | None,
        *,
        apart: bool,
    ) -> None:
        """Let the threads draw from the items, or this one alone; return when all is done."""
        if not apart:
            work(items)
            return
        shared = _Shared(items)
        workers = [self._pool.submit(work, shared) for _ in range(self._threads)]
        if meanwhile is not None:
            done, left = threading.Event(), iter(range(self._threads - 1, -1, -1))

            def ended(_: object) -> None:
                if not next(left):
                    done.set()
                    self._wake()

            for worker in workers:
                worker.add_done_callback(ended)
            meanwhile(done)
        wait(workers)
        for worker in workers:
            worker.result()

    def compare(self, payload: Payload, copies: Sequence[Copy]) -> tuple[str, ...]:
        """Return the names of the tensors whose values are not those that lie at their destination.

        Raises:
            ShardRejected: The payload could not be read.
        """
        # Beside forward passes, not behind them: all that was put there is in place already, whatever the stream.
        with contextlib.nullcontext() if self._ring is None else self._ring.device.side():
            differing = [
                block.copy.destination.slot.name
                for block in self._blocks(copies, direct=False)
                if not block.copy.destination.holds(block.first, self._values(payload, block))
            ]
        return tuple(dict.fromkeys(differing))

    def search(self, payload: Payload, entries: Sequence[TensorEntry]) -> tuple[str, ...]:
        """Return the names of the tensors that hold NaN or infinity.

        Raises:
            ShardRejected: The payload could not be read.
        """
        found = []
        for entry in entries:
            for start in range(entry.start, entry.stop, CAST_BYTES):
                block = self._read(payload, start, min(CAST_BYTES, entry.stop - start))
                if not all_finite(torch.from_numpy(block).view(TORCH_DTYPES[entry.dtype])):
                    found.append(entry.name)
                    break
        return tuple(found)

    def digest(self, payload: Payload) -> str:
        """Return the xxh3-128 of the data section, as 32 hexadecimal digits."""
        made = xxhash.xxh3_128()
        for start in range(0, payload.header.nbytes, CAST_BYTES):
            made.update(self._read(payload, start, min(CAST_BYTES, payload.header.nbytes - start)).data)
        return made.hexdigest()

    def cancel(self) -> None:
        """Give up what is being copied at the next block: the daemon is stopping. For any thread."""
        self._cancelled.set()

    def close(self) -> None:
        """End the threads; blocks that are being copied are finished."""
        self._pool.shutdown()
        if self._ring is not None:
            self._ring.close()

    def _blocks(self, copies: Sequence[Copy], *, direct: bool = True) -> Iterator[_Block]:
        """Cut tensors into blocks; those that go straight to their destination, if that is asked for, are larger."""
        for copy in copies:
            destination, itemsize = copy.destination, TORCH_DTYPES[copy.dtype].itemsize
            target = destination.bytes if direct and destination.takes(copy.dtype) else None
            if target is not None and copy.nbytes <= self._block_bytes:
                yield _Block(copy.start, copy.nbytes, target, 0, copy)
                continue
            unit = destination.unit * itemsize
            step = self._block_bytes if target is not None else max(1, CAST_BYTES // unit) * unit
            for offset in range(0, copy.nbytes, step):
                nbytes = min(step, copy.nbytes - offset)
                part = target[offset : offset + nbytes] if target is not None else None
                yield _Block(copy.start + offset, nbytes, part, offset // itemsize, copy)

    def _batches(self, copies: Sequence[Copy], nbytes: int) -> Iterator[list[Piece]]:
        """Cut tensors and put small ones together, so that each batch fills a slot of the ring.

        A small shard fills less of them, so that all threads have something to do.
        """
        assert self._ring is not None
        size = min(self._ring.slot_bytes, max(BATCH_BYTES, -(-nbytes // (2 * self._threads))))
        batch, room = list[Piece](), size
        for copy in copies:
            unit = copy.destination.unit * TORCH_DTYPES[copy.dtype].itemsize
            if unit > self._ring.slot_bytes:
                detail = f"a row of {copy.destination.slot.name} has {unit} bytes, a slot of the ring"
                raise ShardRejected(Reason.TOO_LARGE, f"{detail} {self._ring.slot_bytes} (loader.ring_bytes)")
            most = size if copy.destination.scale is None else SCALED_BYTES
            most, offset = max(unit, most // unit * unit), 0
            while offset < copy.nbytes:
                take = min(copy.nbytes - offset, most, max(0, room) // unit * unit)
                if batch and (not take or len(batch) == BATCH_PIECES):
                    yield batch
                    batch, room = [], size
                    continue
                take = take or unit  # a row that is longer than such a batch
                batch.append(Piece(copy.start + offset, take, offset, copy.dtype, copy.destination))
                offset, room = offset + take, room - take
        if batch:
            yield batch

    def _work(self, payload: Payload, blocks: Iterator[_Block]) -> None:
        for block in blocks:
            self._refuse_cancelled()
            if block.target is not None:
                payload.read_into(block.source, block.target)
            else:
                block.copy.destination.write(block.first, self._values(payload, block))
            self._progress(block.nbytes)

    def _ship(self, payload: Payload, transfer: Transfer, batches: Iterator[list[Piece]]) -> None:
        for batch in batches:
            self._refuse_cancelled()
            transfer.send(batch, payload.read_into)
            self._progress(sum(piece.nbytes for piece in batch))

    def _refuse_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise ShardRejected(Reason.STOPPING, "the daemon is stopping; send it again later")

    def _values(self, payload: Payload, block: _Block) -> torch.Tensor:
        """Read a block into this thread's buffer; valid until the next block."""
        return torch.from_numpy(self._read(payload, block.source, block.nbytes)).view(TORCH_DTYPES[block.copy.dtype])

    def _read(self, payload: Payload, start: int, nbytes: int) -> Bytes:
        buffer = self._buffer(nbytes)
        payload.read_into(start, buffer)
        self._progress(0)
        return buffer

    def _buffer(self, nbytes: int) -> Bytes:
        buffer: Bytes | None = getattr(self._local, "buffer", None)
        if buffer is None or buffer.size < nbytes:  # a row of a weight may be longer
            buffer = self._local.buffer = np.empty(max(CAST_BYTES, nbytes), dtype=np.uint8)
        return buffer[:nbytes]


class _Shared(Iterator[T]):
    """An iterator that several threads may draw from."""

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items
        self._lock = threading.Lock()

    def __next__(self) -> T:
        with self._lock:
            return next(self._items)
