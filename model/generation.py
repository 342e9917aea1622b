"""One set of weights in memory: fixed storage, parameters as views of it, and a stamp for each slot.

Addresses never change: everything that reads weights may keep its views for the life of the process. A stamp is an
object that an update makes once for all slots that it fills: two generations that hold the same stamp for a slot hold
the same bytes there, and nothing else needs to be compared.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from .names import ParameterSpec, Slot, SlotTable

Bytes: TypeAlias = npt.NDArray[np.uint8]

PAGE = 4096
"""Every parameter begins on a page of its own, in bytes."""
DIGEST_BYTES = 16 << 20
"""What is read at a time for a digest."""
_MADV_POPULATE_WRITE = 23  # <linux/mman.h>, since Linux 5.14; the mmap module has no name for it yet

TORCH_DTYPES: dict[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
}
"""safetensors' name of a dtype -> torch's dtype: those that parameters and slots may have."""
SETTLE_TIMEOUT = 300.0
"""Seconds for which the host waits for what it has begun on a device: longer than any forward pass."""
SETTLE_POLL = 50e-6
SAFETENSORS_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class Stamp(NamedTuple):
    """What filled a slot."""

    version: int | None
    """None is the rolling version."""
    source: str
    """Name of the shard."""
    at: float
    """When, on the model's clock."""
    stage: int = 0
    """Which staging it belongs to: parts of one pair have to agree on it. See `staging`."""


class Span(NamedTuple):
    """Neighbouring slots of one parameter."""

    first: Slot
    numel: int
    slots: list[Slot]


class Generation:
    """Storage for all parameters of a slot table.

    Args:
        table: The slots and parameters.
        device: Where the storage lies.

    Attributes:
        parameters: Name -> tensor, a view of the storage with a fixed address.
        stamps: Slot index -> what filled the slot, None if its bytes mean nothing.
        filled: How many slots have a stamp.
        torn: Whether an update has begun to write rows and has not been settled: nobody may compute with them.
        writes: How often a slot has been cleared.
        changed: Indices of the slots that have been cleared since whoever looks after them emptied this set.
        version: What the weights are called once they are live; None is the rolling version.
    """

    def __init__(self, table: SlotTable, device: torch.device | str = "cpu") -> None:
        self.table = table
        self.device = torch.device(device)
        offsets, end = storage_layout(table)
        self.nbytes = end
        self._storage = _host_storage(end) if self.device.type == "cpu" else self._device_storage(end)
        self.parameters: dict[str, torch.Tensor] = {}
        self._flat: dict[str, torch.Tensor] = {}
        self._bytes: dict[str, tuple[Bytes, int]] = {}
        for name, spec in table.parameters.items():
            whole = self._storage[offsets[name] : offsets[name] + _nbytes(spec)]
            flat = self._flat[name] = whole.view(TORCH_DTYPES[spec.dtype])
            self.parameters[name] = flat.view(spec.shape)
            if self.device.type == "cpu":
                self._bytes[name] = whole.numpy(), flat.element_size()
        settle(self.device)
        self.stamps: list[Stamp | None] = [None] * len(table.slots)
        self.filled = 0
        self.torn = False
        self.changed: set[int] = set()
        self.writes = 0
        self.version: int | None = None

    def rows(self, slot: Slot) -> torch.Tensor:
        """Return a slot's elements as a flat view of its parameter."""
        return self._flat[slot.parameter][slot.offset : slot.offset + slot.numel]

    def bytes(self, slot: Slot) -> Bytes:
        """Return the memory of a slot's elements, writable; host memory only."""
        memory, itemsize = self._bytes[slot.parameter]
        return memory[slot.offset * itemsize : (slot.offset + slot.numel) * itemsize]

    def clear(self, slot: Slot) -> None:
        """Take a slot's stamp away: its bytes mean nothing from now on."""
        for index in slot.indices:
            self.filled -= self.stamps[index] is not None
            self.stamps[index] = None
        self.changed.update(slot.indices)
        self.writes += 1

    def stamp(self, slot: Slot, stamp: Stamp) -> None:
        """Say that a slot's bytes are whole and proven."""
        for index in slot.indices:
            self.filled += self.stamps[index] is None
            self.stamps[index] = stamp

    def carries(self, slot: Slot, stage: int) -> bool:
        """Whether everything that the slot fills was filled in this staging."""
        stamp = self.stamps[slot.index]
        if stamp is None or stamp.stage != stage:
            return False
        return slot.count == 1 or all(s is not None and s.stage == stage for s in self.of_stack(slot))

    def of_stack(self, slot: Slot) -> list[Stamp | None]:
        """Return the stamps of all slots that a stack fills."""
        return self.stamps[slot.index : slot.index + slot.count]

    def span(self, first: Slot, numel: int) -> torch.Tensor:
        """Return ``numel`` elements from the first one of a slot on, as a flat view of its parameter."""
        return self._flat[first.parameter][first.offset : first.offset + numel]

    @staticmethod
    def runs(slots: Iterable[Slot]) -> Iterator[Span]:
        """Put neighbours together, so that they can be looked at or copied in one go.

        Args:
            slots: In the order of their indices.
        """
        run: Span | None = None
        for slot in slots:
            if run and slot.parameter == run.first.parameter and slot.offset == run.first.offset + run.numel:
                run.slots.append(slot)
                run = run._replace(numel=run.numel + slot.numel)
                continue
            if run:
                yield run
            run = Span(slot, slot.numel, [slot])
        if run:
            yield run

    def missing(self) -> list[Slot]:
        """Return the slots that nothing has filled."""
        return [slot for slot in self.table.slots.values() if self.stamps[slot.index] is None]

    def _device_storage(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)


def digest(
    generation: Generation, deadline: float | None = None, cancelled: Callable[[], bool] = lambda: False
) -> tuple[str, int]:
    """Return the blake2b-128 of all parameters in the order of their names, and how many bytes they have.

    Alike for alike weights, however they came, on any device. See `DeepseekV2ForCausalLM.digest` for the rest.
    """
    made, nbytes = hashlib.blake2b(digest_size=16), 0
    for name in sorted(generation.parameters):
        whole = generation.parameters[name].reshape(-1).view(torch.uint8)
        made.update(name.encode())
        for part in whole.split(DIGEST_BYTES):
            if cancelled() or (deadline is not None and time.monotonic() > deadline):
                raise TimeoutError(f"the digest was given up after {nbytes} bytes")
            made.update(part.cpu().numpy().data)
            nbytes += part.numel()
    return made.hexdigest(), nbytes


def settle(device: torch.device, timeout: float = SETTLE_TIMEOUT) -> None:
    """Wait until a device has done what this thread has begun on its current stream; host memory needs no wait.

    Weights are read and written on several streams: a forward pass's, the one through which shards come in. What orders
    them is the host, which lets go of weights (ends a lease, opens the gate, stamps a slot) only after it has waited.

    Raises:
        TimeoutError: It was not done in ``timeout`` seconds.
    """
    if device.type != "cuda":
        return
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    deadline = time.monotonic() + timeout
    while not event.query():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{device} has not done what it was given for {timeout:g} s")
        time.sleep(SETTLE_POLL)


def storage_layout(table: SlotTable) -> tuple[dict[str, int], int]:
    """Return where each parameter begins in the storage, and the size of all, in bytes."""
    offsets, end = {}, 0
    for name, spec in table.parameters.items():
        offsets[name] = end
        end += -(-_nbytes(spec) // PAGE) * PAGE
    return offsets, end


def _nbytes(spec: ParameterSpec) -> int:
    return math.prod(spec.shape) * TORCH_DTYPES[spec.dtype].itemsize


def _host_storage(nbytes: int) -> torch.Tensor:
    """Allocate page-aligned memory and touch it now: the first touch of a page costs more than copying it."""
    try:
        memory = mmap.mmap(-1, max(nbytes, PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the weights need {nbytes} bytes of memory: {error.strerror}") from error
    for advice in (mmap.MADV_HUGEPAGE, _MADV_POPULATE_WRITE):
        try:
            memory.madvise(advice)
        except OSError:  # an older kernel: slower, not wrong
            continue
    return torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))[:nbytes]
