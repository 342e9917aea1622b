"""The ring on a CUDA device: `make test-gpu`. What test_ring.py has on a stand-in, and what only a GPU can show."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from fusewire.daemon import copying, demo
from fusewire.daemon.devices import CudaDevice
from fusewire.daemon.loader import Consumed, Loader, Source, Wanted
from fusewire.daemon.payload import BytesPayload, HeadPayload
from fusewire.daemon.ring import PAGE, Ring
from fusewire.daemon.settings import Loader as LoaderSettings
from fusewire.daemon.settings import Model, Settings
from fusewire.daemon.stimuli import Committed, Inspected, Placed, Verified
from fusewire.model import DeepseekV2Config, DeepseekV2ForCausalLM, Generation

pytestmark = pytest.mark.gpu

CHECKPOINTS = Path(demo.__file__).parent / "checkpoints"
FP8 = Path(__file__).parents[1] / "data" / "checkpoints" / "v3-fp8"
TIMEOUT = 60.0
BUSY_CYCLES = 500_000_000
"""For `torch.cuda._sleep`: a few tenths of a second."""


class Bench:
    """A loader with a ring to a GPU, driven one job at a time."""

    def __init__(
        self, folder: Path, *, slots: int = 3, slot_bytes: int = PAGE, generations: Literal[1, 2] = 2, **model: Any
    ) -> None:
        config = DeepseekV2Config.from_file(folder / "config.json")
        self.model = DeepseekV2ForCausalLM(config, device="cuda", generations=generations, **model)
        self.told: queue.Queue[Any] = queue.Queue()
        effective = msgspec.structs.replace(Settings(model=Model(config="")), loader=LoaderSettings(threads=3))
        self.ring = Ring(CudaDevice(self.model.device), slots, slot_bytes)
        self.loader = Loader(self.model, effective, self.told.put, self.ring)
        self.loader.start()

    def load(self, tensors: dict[str, Tensor], version: int | None = None) -> Any:
        whole = BytesPayload.parse(save(tensors), header_limit=1 << 20)
        self.loader.inspect("k", Source("shard", lambda: whole))
        outcome = self.told.get(timeout=TIMEOUT)
        if isinstance(outcome, Inspected):
            self.loader.place("k", "shard", version)
            outcome = self.told.get(timeout=TIMEOUT)
        self.loader.release("k")
        return outcome

    def go_live(self, version: int) -> None:
        self.loader.verify(version)
        verified = self.told.get(timeout=TIMEOUT)
        assert isinstance(verified, Verified)
        assert not verified.failure
        self.loader.commit(version)
        assert isinstance(self.told.get(timeout=TIMEOUT), Committed)


@pytest.fixture
def new_bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Bench]]:
    monkeypatch.setattr(copying, "INLINE_BYTES", 0)
    monkeypatch.setattr(copying, "SMALL_BYTES", 0)
    made: list[Bench] = []

    def make(*args: Any, **options: Any) -> Bench:
        made.append(Bench(*args, **options))
        return made[-1]

    yield make
    for bench in made:
        assert bench.loader.stop(TIMEOUT)


def assert_alike(found: Generation, expected: Generation) -> None:
    for name, parameter in found.parameters.items():
        other = expected.parameters[name]
        assert parameter.cpu().view(torch.uint8).equal(other.cpu().view(torch.uint8)), name


def random_checkpoint(model: DeepseekV2ForCausalLM, seed: int) -> dict[str, Tensor]:
    dice = torch.Generator().manual_seed(seed)
    kinds = {"F8_E4M3": torch.float8_e4m3fn, "F32": torch.float32}
    return {
        name: torch.rand(slot.shape, generator=dice).to(kinds.get(min(slot.dtypes), torch.bfloat16))
        for name, slot in model.table.slots.items()
    }


@pytest.mark.parametrize("pages", [1, 3, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("busy", [False, True])
def test_what_is_told_is_in_place(
    pages: int, dtype: torch.dtype, busy: bool, new_bench: Callable[..., Bench], checkpoint_tensors: Any
) -> None:
    """With casts and without, beside kernels on the default stream; looked at from a stream that waits for nobody."""
    bench = new_bench(CHECKPOINTS / "v2", slot_bytes=pages * PAGE, dtype=dtype)
    other = torch.cuda.Stream()
    tensors = checkpoint_tensors("v2")
    for seed in range(5):
        changed = {name: (tensor.float() + seed).to(tensor.dtype) for name, tensor in tensors.items()}
        if busy:
            torch.cuda._sleep(BUSY_CYCLES // 10)
        assert isinstance(bench.load(changed), Placed)
        with torch.cuda.stream(other):
            staged = bench.model.staging.staged
            found = {name: staged.rows(bench.model.table.slots[name]).cpu() for name in changed}
        for name, tensor in changed.items():
            assert found[name].equal(tensor.reshape(-1).to(dtype)), name
    torch.cuda.synchronize()


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
def test_fp8_in_any_split(keep: bool, in_place: bool, new_bench: Callable[..., Bench]) -> None:
    """Scales that wait, weights that wait, and values that are dequantised on the device."""
    bench = new_bench(FP8, keep_fp8=keep, generations=1 if in_place else 2)
    expected = DeepseekV2ForCausalLM(bench.model.config, keep_fp8=keep)
    for version in (1, 2):
        tensors = random_checkpoint(expected, version)
        expected.load_weights(tensors.items())
        names = sorted(tensors)
        np.random.default_rng(version).shuffle(names)
        for first in range(0, len(names), 5):
            placed = bench.load({name: tensors[name] for name in names[first : first + 5]}, version)
            assert isinstance(placed, Placed), placed
        again = bench.load(tensors, version)
        assert isinstance(again, Placed), again
        assert again.duplicates == len(tensors)
        bench.go_live(version)
        assert_alike(bench.model.generation, expected.generation)


def test_chunks(new_bench: Callable[..., Bench], checkpoint_tensors: Any) -> None:
    bench = new_bench(CHECKPOINTS / "v2", dtype=torch.float32)
    tensors = checkpoint_tensors("v2")
    shard = save(tensors)
    length = 8 + int.from_bytes(shard[:8], "little")
    head, data = shard[:length], np.frombuffer(shard, dtype=np.uint8)[length:]
    bench.loader.inspect("k", Source("shard", lambda: HeadPayload.parse(head, data.size, header_limit=1 << 20)))
    assert isinstance(bench.told.get(timeout=TIMEOUT), Inspected)
    bench.loader.place("k", "shard", 1)
    assert isinstance(bench.told.get(timeout=TIMEOUT), Wanted)
    for first in range(0, data.size, 10_001):
        chunk = data[first : first + 10_001].copy()
        bench.loader.feed("k", chunk, None, None)
        assert isinstance(bench.told.get(timeout=TIMEOUT), Consumed)
        chunk[:] = 0xEE
    assert isinstance(bench.told.get(timeout=TIMEOUT), Placed)
    bench.go_live(1)
    for name, tensor in tensors.items():
        rows = bench.model.generation.rows(bench.model.table.slots[name])
        assert rows.cpu().equal(tensor.reshape(-1).float()), name


def test_a_request_keeps_its_weights_until_its_kernels_have_read_them(
    new_bench: Callable[..., Bench], checkpoint_tensors: Any
) -> None:
    """Without tokens that end a sequence, the host is far ahead of the device when `generate` returns."""
    bench = new_bench(CHECKPOINTS / "v2")
    tensors = checkpoint_tensors("v2")
    for version in (1, 2):
        assert isinstance(bench.load(tensors, version), Placed)
        bench.go_live(version)
    held = bench.model.staging.generations.index(bench.model.generation)
    event = torch.cuda.Event()
    with bench.model.lease():
        torch.cuda._sleep(BUSY_CYCLES)
        event.record()
        assert not event.query()
        assert bench.model.staging.leases.held(held).leases == 1
    assert event.query()
    assert bench.model.staging.leases.held(held).leases == 0


def test_generating_while_versions_come(new_bench: Callable[..., Bench], checkpoint_tensors: Any) -> None:
    """Each answer is that of one version or of the other, and never of a mixture."""
    bench = new_bench(CHECKPOINTS / "v2", dtype=torch.float32)
    base = checkpoint_tensors("v2")
    kinds = [base, {name: tensor.flip(0) if tensor.dim() > 1 else tensor for name, tensor in base.items()}]
    prompt = torch.tensor([[1, 5, 25]], device="cuda")
    possible = set()
    for version, tensors in enumerate(kinds, 1):
        assert isinstance(bench.load(tensors, version), Placed)
        bench.go_live(version)
        possible.add(tuple(bench.model.generate(prompt, 12)[0].tolist()))
    found: set[tuple[int, ...]] = set()
    stop = threading.Event()

    def generate() -> None:
        while not stop.is_set():
            found.add(tuple(bench.model.generate(prompt, 12)[0].tolist()))

    thread = threading.Thread(target=generate)
    thread.start()
    for version in range(3, 13):
        deadline = time.monotonic() + TIMEOUT
        while bench.model.staging.staged_leases().leases and time.monotonic() < deadline:
            time.sleep(0.001)
        assert isinstance(bench.load(kinds[(version - 1) % 2], version), Placed)
        bench.go_live(version)
    stop.set()
    thread.join(TIMEOUT)

    assert found <= possible


def test_nothing_is_allocated_on_the_device_for_a_shard(
    new_bench: Callable[..., Bench], checkpoint_tensors: Any
) -> None:
    bench = new_bench(CHECKPOINTS / "v2", dtype=torch.float32)
    tensors = checkpoint_tensors("v2")
    assert isinstance(bench.load(tensors), Placed)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(10):
        assert isinstance(bench.load(tensors), Placed)

    assert torch.cuda.max_memory_allocated() == before


def test_the_rings_memory_is_pinned() -> None:
    memory, note = CudaDevice(torch.device("cuda")).host(1 << 20)

    assert (memory.is_pinned(), note) == (True, "")
