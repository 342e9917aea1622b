"""Copying a shard's bytes to where they belong: in blocks, on several threads, without intermediate tensors.

A block goes straight from the payload (a leased mapping, a file descriptor or a message) into the destination's
own memory. Only where the dtypes differ, or the destination is not in host memory, it passes through a small buffer
that stays in the cache; each thread has one, made once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from fusewire.model import TORCH_DTYPES, Destination, all_finite

from .errors import Reason, ShardRejected
from .payload import Payload
from .shard import TensorEntry

Bytes: TypeAlias = npt.NDArray[np.uint8]

CAST_BYTES = 1 << 20
"""Bytes of a block that is cast on its way: it has to fit into a core's second-level cache."""
SMALL_BYTES = 64 << 10
"""A shard whose tensors are no larger than this, on average, is copied by the calling thread, too."""
LARGE_BYTES = 32 << 20
"""A shard of this size keeps its threads busy for so long that the calling one had better do something else."""
INLINE_BYTES = 1 << 20
"""A shard up to this size is copied by the calling thread: handing it out would cost more than it saves."""


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
    """

    def __init__(
        self,
        threads: int,
        block_bytes: int,
        progress: Callable[[int], None],
        wake: Callable[[], None] = lambda: None,
    ) -> None:
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
        """
        blocks = self._blocks(copies)
        nbytes = sum(copy.nbytes for copy in copies)
        # Threads that copy small tensors keep each other from the interpreter's lock.
        if self._threads == 1 or nbytes <= INLINE_BYTES or nbytes <= SMALL_BYTES * len(copies):
            self._work(payload, blocks)
            return
        shared = _Shared(blocks)
        workers = [self._pool.submit(self._work, payload, shared) for _ in range(self._threads)]
        if meanwhile is not None and nbytes >= LARGE_BYTES:
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

    def _work(self, payload: Payload, blocks: Iterator[_Block]) -> None:
        for block in blocks:
            if self._cancelled.is_set():
                raise ShardRejected(Reason.STOPPING, "the daemon is stopping; send it again later")
            if block.target is not None:
                payload.read_into(block.source, block.target)
            else:
                block.copy.destination.write(block.first, self._values(payload, block))
            self._progress(block.nbytes)

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


class _Shared(Iterator[_Block]):
    """An iterator that several threads may draw from."""

    def __init__(self, blocks: Iterator[_Block]) -> None:
        self._blocks = blocks
        self._lock = threading.Lock()

    def __next__(self) -> _Block:
        with self._lock:
            return next(self._blocks)
