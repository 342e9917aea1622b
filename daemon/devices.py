"""What the ring needs of a device: memory, a stream of its own, and events on it.

`CudaDevice` is the real one. `HostDevice` is a stand-in for tests and dry runs without a GPU: host memory plays the
device's, and a thread that may lag, fail or hang plays its stream. Whoever announces bytes too early, or reuses a
buffer too early, gets wrong bytes there as on a GPU.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

import torch


class DeviceError(Exception):
    """What was begun on a device has failed; the message says what the device says."""


class Event(Protocol):
    """A mark in a device's stream that can be set again and again."""

    def record(self) -> None:
        """Set the mark behind everything that has been begun on the stream until now."""

    def done(self) -> bool:
        """Whether the stream has passed the mark. Raises whatever failed before it."""


class Device(Protocol):
    """A device with one stream of its own, beside the one on which forward passes run."""

    def host(self, nbytes: int) -> tuple[torch.Tensor, str]:
        """Allocate host memory that the device reads at full speed: uint8, and a note if it had to be slower memory."""

    def memory(self, nbytes: int) -> torch.Tensor:
        """Allocate memory of the device, uint8, that only the own stream uses."""

    def event(self) -> Event:
        """Make a mark for the own stream."""

    def side(self) -> contextlib.AbstractContextManager[object]:
        """Within, what this thread begins goes to the own stream."""

    def begin(self, work: Callable[[], object]) -> None:
        """Begin a copy or a computation, within `side`; it may be done later. For one thread at a time."""

    def follow(self) -> None:
        """Let what comes next on the own stream wait for all that has been begun on this thread's other stream."""

    def close(self) -> None:
        """Give everything back, within a bounded time."""


def pinned(nbytes: int) -> tuple[torch.Tensor, str]:
    """Allocate pinned host memory; where that is refused, pageable memory, which the driver copies once more.

    Returns:
        The memory, and a note if it is the latter.
    """
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True), ""
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
        note = (
            f"{nbytes} bytes of host memory can't be pinned ({why}), so that copies to the device take about twice as "
            "long. Allow it (LimitMEMLOCK=infinity), or lower loader.ring_bytes"
        )
        return torch.empty(nbytes, dtype=torch.uint8), note


class CudaEvent:
    """An event of CUDA on one stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._event = torch.cuda.Event()

    def record(self) -> None:
        """See `Event`."""
        self._event.record(self._stream)

    def done(self) -> bool:
        """See `Event`."""
        return bool(self._event.query())


class CudaDevice:
    """A GPU.

    Args:
        device: Which.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def host(self, nbytes: int) -> tuple[torch.Tensor, str]:
        """See `Device`."""
        return pinned(nbytes)

    def memory(self, nbytes: int) -> torch.Tensor:
        """See `Device`. Taken on the own stream, whose part of torch's memory no other stream's kernels still use."""
        with self.side():
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def event(self) -> CudaEvent:
        """See `Device`."""
        return CudaEvent(self._stream)

    def side(self) -> contextlib.AbstractContextManager[object]:
        """See `Device`."""
        return torch.cuda.stream(self._stream)

    def begin(self, work: Callable[[], object]) -> None:
        """See `Device`: kernels and copies are queued by the driver."""
        work()

    def follow(self) -> None:
        """See `Device`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def close(self) -> None:
        """See `Device`: torch keeps both."""


class _Mark(NamedTuple):
    event: HostEvent
    number: int


class HostEvent:
    """A mark in the stand-in's queue."""

    def __init__(self, work: queue.SimpleQueue[_Work | None]) -> None:
        self._work = work
        self._set = 0
        self._passed = 0
        self._error: Exception | None = None

    def record(self) -> None:
        """See `Event`."""
        self._set += 1
        self._error = None
        self._work.put(_Mark(self, self._set))

    def done(self) -> bool:
        """See `Event`."""
        if self._passed < self._set:
            return False
        if self._error is not None:
            raise self._error
        return True

    def reach(self, number: int, error: Exception | None) -> None:
        """The stream is here."""
        self._error = error
        self._passed = number


_Work: TypeAlias = Callable[[], object] | _Mark


class HostDevice:
    """A stand-in: what is begun happens later, in order, on a thread.

    Args:
        before: Called on that thread before each thing that it does. It may sleep (a device that lags), raise (the
            next mark fails, what comes after goes on) or wait (a device that hangs).

    Attributes:
        allocated: Bytes that were asked for.
        followed: How often `follow` was called; there is no other stream.
    """

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        self.allocated = 0
        self.followed = 0
        self._before = before
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="fusewire-device", daemon=True)
        self._thread.start()

    def host(self, nbytes: int) -> tuple[torch.Tensor, str]:
        """See `Device`."""
        return self.memory(nbytes), ""

    def memory(self, nbytes: int) -> torch.Tensor:
        """See `Device`."""
        self.allocated += nbytes
        return torch.empty(nbytes, dtype=torch.uint8)

    def event(self) -> HostEvent:
        """See `Device`."""
        return HostEvent(self._work)

    def side(self) -> contextlib.AbstractContextManager[object]:
        """See `Device`."""
        return contextlib.nullcontext()

    def begin(self, work: Callable[[], object]) -> None:
        """See `Device`."""
        self._work.put(work)

    def follow(self) -> None:
        """See `Device`."""
        self.followed += 1

    def close(self) -> None:
        """See `Device`."""
        self._work.put(None)
        self._thread.join(1.0)

    def _run(self) -> None:
        failed: Exception | None = None
        while (work := self._work.get()) is not None:
            try:
                self._before()
                if not isinstance(work, _Mark):
                    work()
            except Exception as error:  # noqa: BLE001 - as on a device: the next mark tells of it
                failed = error
            if isinstance(work, _Mark):
                work.event.reach(work.number, failed)
                failed = None
