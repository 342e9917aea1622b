"""The ring, on the stand-in for a device: a stream that lags, fails or hangs. The oracle is the payload's bytes.

The stand-in does later what a GPU does later. Whoever announces too early, or fills a slot again too early, leaves
other bytes behind here as well.
"""

from __future__ import annotations

import json
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor

from fusewire.daemon import copying, demo
from fusewire.daemon.copying import Copier, Copy
from fusewire.daemon.devices import CudaDevice, DeviceError, HostDevice, pinned
from fusewire.daemon.errors import Reason, ShardRejected
from fusewire.daemon.loader import Consumed, Loader, Source, Wanted
from fusewire.daemon.payload import Bytes, BytesPayload, HeadPayload
from fusewire.daemon.ring import PAGE, SLOT_BYTES, Ring, State, layout
from fusewire.daemon.settings import Loader as LoaderSettings
from fusewire.daemon.settings import Model, Settings
from fusewire.daemon.stimuli import Inspected, Placed, Refused, Verified
from fusewire.model import TORCH_DTYPES, DeepseekV2Config, DeepseekV2ForCausalLM, Destination, Slot, TensorMeta, Update

CHECKPOINT = Path(demo.__file__).parent / "checkpoints" / "v2"
FP8 = Path(__file__).parents[1] / "data" / "checkpoints" / "v3-fp8"
TIMEOUT = 10.0
NORM, HEAD = "model.norm.weight", "lm_head.weight"
Golden = Callable[[str], dict[str, Tensor]]


class Mood:
    """What the device does before each thing that it does: nothing, lag, fail or hang."""

    def __init__(self, seed: int | None = None) -> None:
        self._dice = random.Random(seed)
        self._lags = seed is not None
        self.fails_in = -1
        """How many things are done before one fails; below 0: none fails."""
        self.hangs = threading.Event()
        self.awake = threading.Event()

    def __call__(self) -> None:
        if self.hangs.is_set():
            assert self.awake.wait(TIMEOUT)
        if self._lags:
            time.sleep(self._dice.choice([0, 0, 0, 0.0002, 0.001]))
        self.fails_in -= 1
        if self.fails_in == -1:
            time.sleep(0.05)  # late: after all has been sent
            raise OSError("an illegal address")


def model_of(folder: Path = CHECKPOINT, **options: Any) -> DeepseekV2ForCausalLM:
    return DeepseekV2ForCausalLM(DeepseekV2Config.from_file(folder / "config.json"), **options)


def random_tensors(slots: list[Slot], dtype: Callable[[Slot], str], seed: int) -> dict[str, Tensor]:
    """Values that differ for each seed, NaN and infinity left out."""
    dice = torch.Generator().manual_seed(seed)
    return {slot.name: torch.randn(slot.shape, generator=dice).to(TORCH_DTYPES[dtype(slot)]) for slot in slots}


def whole(tensors: dict[str, Tensor]) -> BytesPayload:
    return BytesPayload.parse(save(tensors), header_limit=1 << 20)


def begin(model: DeepseekV2ForCausalLM, payload: BytesPayload) -> tuple[Update, list[list[Copy]]]:
    entries = {entry.name: entry for entry in payload.header.tensors}
    plan = model.table.plan({name: TensorMeta(e.dtype, e.shape) for name, e in entries.items()})
    update = model.begin(plan, None, "shard")
    rounds = [
        [Copy(e.start, e.stop - e.start, e.dtype, d) for d in one for e in (entries[d.slot.name],)]
        for one in update.rounds
    ]
    return update, rounds


def assert_in_place(model: DeepseekV2ForCausalLM, tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        rows = model.generation.rows(model.table.slots[name])
        expected = tensor.reshape(-1).to(rows)
        assert rows.view(torch.uint8).equal(expected.view(torch.uint8)), name


def at_rest(ring: Ring) -> bool:
    """Whether all slots are free; waits for the thread that frees them."""
    deadline = time.monotonic() + TIMEOUT
    while ring._free.qsize() < ring.slots and time.monotonic() < deadline:
        time.sleep(0.001)
    return ring._free.qsize() == ring.slots


@contextmanager
def ring_and_copier(
    mood: Mood, slots: int = 3, slot_bytes: int = PAGE, threads: int = 3, timeout: float = TIMEOUT
) -> Iterator[tuple[Ring, Copier]]:
    """A ring, and a copier whose threads take part however small the shard; in the end all slots have to be free."""
    ring = Ring(HostDevice(mood), slots, slot_bytes, timeout)
    copier = Copier(threads, 65536, lambda _: None, ring=ring)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "INLINE_BYTES", 0)
        patch.setattr(copying, "SMALL_BYTES", 0)
        patch.setattr(copying, "BATCH_BYTES", 1)
        try:
            yield ring, copier
            assert at_rest(ring), "a slot did not come back"
        finally:
            mood.awake.set()
            copier.close()


MODELS = {dtype: model_of(dtype=dtype) for dtype in (torch.bfloat16, torch.float32)}


@settings(max_examples=60)
@given(data=st.data())
def test_when_a_shard_is_done_its_bytes_are_in_place(data: st.DataObject) -> None:
    """Any tensors in any order and dtype, any ring, any number of threads; a second shard goes over the first."""
    model = MODELS[data.draw(st.sampled_from(list(MODELS)))]
    shape = {
        "slots": data.draw(st.integers(1, 6), label="slots"),
        "slot_bytes": PAGE * data.draw(st.integers(1, 8), label="pages"),
        "threads": data.draw(st.integers(1, 4), label="threads"),
    }
    with ring_and_copier(Mood(data.draw(st.integers(0, 1000), label="lag")), **shape) as (_, copier):
        for seed in range(2):
            chosen = data.draw(st.permutations(list(model.table.slots.values())))
            chosen = chosen[: data.draw(st.integers(1, len(chosen)))]
            dtypes = {slot.name: data.draw(st.sampled_from(sorted(slot.dtypes))) for slot in chosen[:8]}
            tensors = random_tensors(chosen, lambda slot: dtypes.get(slot.name, "BF16"), seed)  # noqa: B023 - at once
            payload = whole(tensors)
            update, rounds = begin(model, payload)
            with update.writing(1.0):
                for one in rounds:
                    copier.run(payload, one)
                assert_in_place(model, tensors)
            model.abort(update)


@pytest.mark.parametrize("seed", range(8))
def test_quantised_weights_are_dequantised_on_the_device(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some rows at a time, in any cut: the values of `load_weights`, which have tests of their own."""
    monkeypatch.setattr(copying, "SCALED_BYTES", 1000)
    model, expected = model_of(FP8, keep_fp8=False), model_of(FP8, keep_fp8=False)
    tensors = random_tensors(list(model.table.slots.values()), lambda slot: min(slot.dtypes), seed)
    expected.load_weights(tensors.items())
    payload = whole(tensors)
    with ring_and_copier(Mood(seed), slots=1 + seed % 4, slot_bytes=PAGE * (1 + seed // 4)) as (_, copier):
        update, rounds = begin(model, payload)
        with update.writing(1.0):
            for one in rounds:
                copier.run(payload, one)
            for name, parameter in model.generation.parameters.items():
                assert parameter.view(torch.uint8).equal(expected.generation.parameters[name].view(torch.uint8)), name
        model.abort(update)


def test_two_shards_at_a_time_share_a_ring() -> None:
    model = MODELS[torch.float32]
    slots = list(model.table.slots.values())
    parts = [random_tensors(slots[first::2], lambda _: "BF16", first) for first in (0, 1)]
    failed: list[BaseException] = []
    with ring_and_copier(Mood(1), slots=2, threads=2) as (_, copier):
        payloads = [whole(part) for part in parts]
        begun = [begin(model, payload) for payload in payloads]

        def place(index: int) -> None:
            try:
                with begun[index][0].writing(1.0):
                    copier.run(payloads[index], begun[index][1][0])
                    assert_in_place(model, parts[index])
            except BaseException as error:  # noqa: BLE001 - told to the test
                failed.append(error)

        threads = [threading.Thread(target=place, args=(index,)) for index in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT)
    for update, _ in begun:
        model.abort(update)

    assert failed == []


def test_nothing_is_allocated_after_the_start() -> None:
    model = MODELS[torch.float32]
    slots = list(model.table.slots.values())
    used: set[int] = set()
    with ring_and_copier(Mood()) as (ring, copier):
        at_first = ring.device.allocated if isinstance(ring.device, HostDevice) else 0
        launch = ring.launch

        def noting(slot: Any, pieces: Any, transfer: Any) -> None:
            used.add(slot.memory.data_ptr())
            launch(slot, pieces, transfer)

        ring.launch = noting  # type: ignore[method-assign]
        for seed in range(30):
            payload = whole(random_tensors(slots, lambda _: "BF16", seed))
            update, rounds = begin(model, payload)
            with update.writing(1.0):
                copier.run(payload, rounds[0])
            model.abort(update)

        assert at_first == (ring.slots + 1) * ring.slot_bytes
        assert isinstance(ring.device, HostDevice)
        assert ring.device.allocated == at_first
        assert len(used) == ring.slots


def test_small_tensors_share_a_slot_and_its_event() -> None:
    model = MODELS[torch.bfloat16]
    norms = [slot for slot in model.table.slots.values() if slot.name.endswith("norm.weight")]
    payload = whole(random_tensors(norms, lambda _: "BF16", 0))
    batches: list[int] = []
    with ring_and_copier(Mood(), slot_bytes=16 * PAGE) as (ring, copier):
        launch = ring.launch

        def noting(slot: Any, pieces: Any, transfer: Any) -> None:
            batches.append(len(pieces))
            launch(slot, pieces, transfer)

        ring.launch = noting  # type: ignore[method-assign]
        copying.BATCH_BYTES = 1 << 20
        update, rounds = begin(model, payload)
        with update.writing(1.0):
            copier.run(payload, rounds[0])
        model.abort(update)

    assert batches == [len(norms)]


def test_a_row_that_does_not_fit_into_a_slot_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(FP8, keep_fp8=False)
    payload = whole(random_tensors(list(model.table.slots.values()), lambda slot: min(slot.dtypes), 0))
    with ring_and_copier(Mood()) as (ring, copier):
        monkeypatch.setattr(ring, "slot_bytes", 32)
        update, rounds = begin(model, payload)
        with update.writing(1.0), pytest.raises(ShardRejected, match=r"loader\.ring_bytes"):
            copier.run(payload, rounds[1])
        model.abort(update)


# ------------------------------------------------------------------------------------------------- failures


class Failing(BytesPayload):
    """A shard that changes while it is read."""

    reads = 0

    def read_into(self, offset: int, target: Bytes) -> None:
        self.reads += 1
        if self.reads == 20:
            raise ShardRejected(Reason.CHANGED_WHILE_READING, "somebody wrote to it")
        super().read_into(offset, target)


def test_a_shard_that_can_not_be_read_leaves_the_ring_as_it_was() -> None:
    model = MODELS[torch.bfloat16]
    tensors = random_tensors(list(model.table.slots.values()), lambda _: "BF16", 0)
    with ring_and_copier(Mood(3)) as (ring, copier):
        failing = Failing.parse(save(tensors), header_limit=1 << 20)
        update, rounds = begin(model, failing)
        with update.writing(1.0), pytest.raises(ShardRejected):
            copier.run(failing, rounds[0])
        assert ring._free.qsize() == ring.slots, "nothing of a shard that was given up is under way any more"
        model.abort(update)

        payload = whole(tensors)
        update, rounds = begin(model, payload)
        with update.writing(1.0):
            copier.run(payload, rounds[0])
            assert_in_place(model, tensors)
        model.abort(update)


@pytest.mark.parametrize("when", [0, 1, 7, 100, -1])
def test_a_copy_that_fails_is_the_end_of_its_shard_alone(when: int) -> None:
    """Whether the first, one in between or the last: also when the shard has been sent as a whole by then."""
    model = MODELS[torch.bfloat16]
    tensors = random_tensors(list(model.table.slots.values()), lambda _: "BF16", when)
    payload = whole(tensors)
    mood = Mood(1)
    with ring_and_copier(mood) as (_, copier):
        update, rounds = begin(model, payload)
        copies = rounds[0] if when >= 0 else rounds[0][:1]
        mood.fails_in = max(when, 0)
        with update.writing(1.0), pytest.raises(DeviceError, match="the device failed: an illegal address"):
            copier.run(payload, copies)
        model.abort(update)

        update, rounds = begin(model, payload)
        with update.writing(1.0):
            copier.run(payload, rounds[0])
            assert_in_place(model, tensors)
        model.abort(update)


def test_a_device_that_hangs_is_waited_for_so_long_and_no_longer() -> None:
    """The shard is given up; once the device goes on the ring is as good as new."""
    model = MODELS[torch.bfloat16]
    tensors = random_tensors(list(model.table.slots.values()), lambda _: "BF16", 5)
    payload = whole(tensors)
    few = dict(list(tensors.items())[:2])
    mood = Mood()
    with ring_and_copier(mood, timeout=0.2) as (ring, copier):
        for part, why in ((tensors, "has taken no bytes"), (few, "have not ended|has taken no bytes")):
            mood.hangs.set()
            mood.awake.clear()
            shard = whole(part)
            update, rounds = begin(model, shard)
            begun = time.monotonic()
            with update.writing(1.0), pytest.raises(TimeoutError, match=why):
                copier.run(shard, rounds[0])
            assert time.monotonic() - begun < 3.0
            model.abort(update)
            mood.hangs.clear()
            mood.awake.set()
            assert at_rest(ring)

        update, rounds = begin(model, payload)
        with update.writing(1.0):
            copier.run(payload, rounds[0])
            assert_in_place(model, tensors)
        model.abort(update)


def test_a_shard_that_was_sent_whole_to_a_device_that_hangs_is_not_told_of() -> None:
    model = MODELS[torch.bfloat16]
    payload = whole(random_tensors([model.table.slots[NORM]], lambda _: "BF16", 5))
    mood = Mood()
    mood.hangs.set()
    with ring_and_copier(mood, slots=100, timeout=0.2) as (_, copier):
        update, rounds = begin(model, payload)
        with update.writing(1.0), pytest.raises(TimeoutError, match="have not ended"):
            copier.run(payload, rounds[0])
        model.abort(update)
        mood.awake.set()


def test_closing_does_not_wait_for_a_device_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusewire.daemon.ring.CLOSE_TIMEOUT", 0.1)
    model, mood = MODELS[torch.bfloat16], Mood()
    mood.hangs.set()
    ring = Ring(HostDevice(mood), 2, PAGE, timeout=0.1)
    transfer = ring.transfer(())
    destination = Destination.of_rows(model.generation, model.table.slots[NORM])
    transfer.put(np.zeros(128, dtype=np.uint8), 0, "BF16", destination)
    begun = time.monotonic()
    ring.close()
    mood.awake.set()

    assert time.monotonic() - begun < 3.0
    assert not ring._thread.is_alive()


def test_a_slot_can_not_be_filled_while_it_flies() -> None:
    with ring_and_copier(Mood()) as (ring, _):
        slot = ring.take()
        slot.move(State.FLYING)
        with pytest.raises(RuntimeError, match="FILLING while it is FLYING"):
            slot.move(State.FILLING)
        ring.give_back(slot)


def test_memory_that_can_not_be_pinned_is_pageable_and_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("here it can be pinned")
    memory, note = pinned(4096)

    assert memory.nbytes == 4096
    assert "LimitMEMLOCK" in note


def test_the_stand_in_has_what_the_device_has() -> None:
    """Both are called by the same names; the type checker says the rest."""
    public = [{name for name in dir(kind) if not name.startswith("_")} for kind in (CudaDevice, HostDevice)]

    assert public[0] == public[1]


@pytest.mark.parametrize(("megabytes", "threads"), [(16, 1), (128, 2), (128, 8), (128, 64), (100, 7), (4096, 2)])
def test_a_ring_has_two_slots_for_each_thread_or_more(megabytes: int, threads: int) -> None:
    slots, slot_bytes = layout(megabytes << 20, threads)

    assert slots >= 2 * threads
    assert slot_bytes % PAGE == 0
    assert slot_bytes <= SLOT_BYTES
    assert (megabytes << 20) - slot_bytes < slots * slot_bytes <= megabytes << 20


# ------------------------------------------------------------------------------- what has to be ordered


def test_copies_to_memory_of_others_come_after_what_was_begun_there() -> None:
    """Staged rows belong to nobody else, and are written beside forward passes; all else comes after them."""
    model = model_of(FP8, keep_fp8=False)
    with ring_and_copier(Mood()) as (ring, copier):
        device = ring.device
        assert isinstance(device, HostDevice)

        def followed(destination: Destination) -> int:
            before = device.followed
            copier.transfer([Copy(0, 0, "BF16", destination)])
            return device.followed - before

        norm = model.table.slots[NORM]
        scaled = next(slot for slot in model.table.slots.values() if slot.scale is not None)
        rows = model.generation.rows(norm)
        assert followed(Destination.of_rows(model.generation, norm)) == 0
        assert followed(Destination.of_rows(model.generation, norm, in_place=True)) == 1
        assert followed(Destination(norm, model.generation, torch.empty_like(rows))) == 1
        assert followed(Destination.of_rows(model.generation, scaled)) == 1


# ------------------------------------------------------------------------------------ the loader with a ring


class Bench:
    """A loader with a ring, driven one job at a time."""

    def __init__(self, mood: Mood, timeout: float = TIMEOUT, **model: Any) -> None:
        self.model = model_of(generations=2, **model)
        self.told: queue.Queue[Any] = queue.Queue()
        self.placed: list[dict[str, Tensor]] = []
        """The rows as they were when each shard was told to be in place."""
        effective = msgspec.structs.replace(Settings(model=Model(config="")), loader=LoaderSettings(threads=2))
        self.ring = Ring(HostDevice(mood), 3, PAGE, timeout)
        self.loader = Loader(self.model, effective, self._sink, self.ring)
        self.loader.start()

    def _sink(self, outcome: Any) -> None:
        if isinstance(outcome, Placed):
            staged = self.model.staging.staged
            self.placed.append({name: staged.rows(slot).clone() for name, slot in self.model.table.slots.items()})
        self.told.put(outcome)

    def load(self, tensors: dict[str, Tensor], version: int | None = None) -> Any:
        self.loader.inspect("k", Source("shard", lambda: whole(tensors)))
        outcome = self.told.get(timeout=TIMEOUT)
        if isinstance(outcome, Inspected):
            self.loader.place("k", "shard", version)
            outcome = self.told.get(timeout=TIMEOUT)
        self.loader.release("k")
        return outcome

    def stream(self, tensors: dict[str, Tensor], version: int | None, cut: Callable[[], int]) -> Any:
        """Send a shard in chunks whose memory is used again at once."""
        shard = save(tensors)
        length = 8 + int.from_bytes(shard[:8], "little")
        head, data = shard[:length], np.frombuffer(shard, dtype=np.uint8)[length:]
        self.loader.inspect("k", Source("shard", lambda: HeadPayload.parse(head, data.size, header_limit=1 << 20)))
        assert isinstance(self.told.get(timeout=TIMEOUT), Inspected)
        self.loader.place("k", "shard", version)
        assert isinstance(self.told.get(timeout=TIMEOUT), Wanted)
        position, outcome = 0, None
        while outcome is None and position < data.size:
            chunk = data[position : position + cut()].copy()
            position += chunk.size
            self.loader.feed("k", chunk, None, None)
            while not isinstance(told := self.told.get(timeout=TIMEOUT), Consumed):
                outcome = told
            chunk[:] = 0xEE
        outcome = outcome or self.told.get(timeout=TIMEOUT)
        self.loader.release("k")
        return outcome


@contextmanager
def loading(mood: Mood, **options: Any) -> Iterator[Bench]:
    bench = Bench(mood, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "INLINE_BYTES", 0)
        patch.setattr(copying, "SMALL_BYTES", 0)
        try:
            yield bench
            assert at_rest(bench.ring)
        finally:
            mood.awake.set()
            assert bench.loader.stop(TIMEOUT)


def assert_told_in_place(bench: Bench, tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        found = bench.placed[-1][name]
        assert found.equal(tensor.reshape(-1).to(found)), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_shard_is_told_of_once_its_bytes_are_in_place(dtype: torch.dtype, checkpoint_tensors: Golden) -> None:
    tensors = checkpoint_tensors("v2")
    with loading(Mood(1), dtype=dtype) as bench:
        placed = bench.load(tensors, version=1)
        assert isinstance(placed, Placed), placed
        assert placed.fused == (0, 1, 2)
        assert_told_in_place(bench, tensors)
        bench.loader.verify(1)
        assert isinstance(bench.told.get(timeout=TIMEOUT), Verified)


@settings(max_examples=15)
@given(data=st.data())
def test_chunks_go_through_the_ring(data: st.DataObject) -> None:
    """Cut anywhere, also within an element; with and without casts; a chunk's memory is free once it was fed."""
    slots = list(MODELS[torch.bfloat16].table.slots.values())[:: data.draw(st.integers(1, 9))]
    dtype = data.draw(st.sampled_from(["BF16", "F32"]))
    tensors = random_tensors(slots, lambda _: dtype, 1)
    sizes = st.integers(1, 3 * PAGE)
    with loading(Mood(data.draw(st.integers(0, 100)))) as bench:
        placed = bench.stream(tensors, 1, lambda: data.draw(sizes) + 2000)
        assert isinstance(placed, Placed), placed
        assert_told_in_place(bench, tensors)

        again = bench.stream(tensors, 1, lambda: data.draw(sizes) + 2000)
        assert isinstance(again, Placed), again
        assert again.duplicates == len(tensors)

        changed = {name: tensor + 1 for name, tensor in tensors.items()}
        refused = bench.stream(changed, 1, lambda: data.draw(sizes) + 2000)
        assert isinstance(refused, Refused)
        assert refused.reason is Reason.CONFLICT


def test_repeats_are_compared_and_others_refused(checkpoint_tensors: Golden) -> None:
    tensors = checkpoint_tensors("v2")
    with loading(Mood(2), dtype=torch.float32) as bench:
        assert isinstance(bench.load(tensors, version=1), Placed)
        again = bench.load(tensors, version=1)
        assert isinstance(again, Placed)
        assert again.duplicates == len(tensors)
        refused = bench.load({HEAD: tensors[HEAD] + 1, NORM: tensors[NORM]}, version=1)
        assert isinstance(refused, Refused)
        assert (refused.reason, HEAD in refused.detail) == (Reason.CONFLICT, True)


@pytest.mark.parametrize("chunks", [False, True])
def test_a_device_that_fails_is_told_and_the_next_try_succeeds(chunks: bool, checkpoint_tensors: Golden) -> None:
    tensors = checkpoint_tensors("v2")
    mood = Mood()
    with loading(mood) as bench:

        def send() -> Any:
            return bench.stream(tensors, 1, lambda: 50_000) if chunks else bench.load(tensors, version=1)

        mood.fails_in = 5
        refused = send()
        assert isinstance(refused, Refused), refused
        assert refused.reason is Reason.INTERNAL_ERROR
        assert "an illegal address" in refused.detail
        assert len(refused.unfilled) == len(tensors)
        assert bench.loader.health() == "ok"

        assert isinstance(send(), Placed)
        assert_told_in_place(bench, tensors)


def test_a_stream_whose_last_copy_fails_is_refused(checkpoint_tensors: Golden) -> None:
    mood = Mood()
    mood.fails_in = 0
    with loading(mood) as bench:
        tensors = {NORM: checkpoint_tensors("v2")[NORM]}
        refused = bench.stream(tensors, 1, lambda: 50_000)
        assert isinstance(refused, Refused), "what was sent is not yet in place"
        assert isinstance(bench.stream(tensors, 1, lambda: 50_000), Placed)
        assert_told_in_place(bench, tensors)


@pytest.mark.parametrize("chunks", [False, True])
def test_a_device_that_hangs_puts_the_shard_off(chunks: bool, checkpoint_tensors: Golden) -> None:
    tensors = checkpoint_tensors("v2")
    mood = Mood()
    with loading(mood, timeout=0.2) as bench:

        def send() -> Any:
            return bench.stream(tensors, 1, lambda: 50_000) if chunks else bench.load(tensors, version=1)

        mood.hangs.set()
        refused = send()
        assert isinstance(refused, Refused), refused
        assert (refused.reason, refused.transient) == (Reason.MODEL_BUSY, True)
        mood.hangs.clear()
        mood.awake.set()
        assert at_rest(bench.ring)

        assert isinstance(send(), Placed)
        assert_told_in_place(bench, tensors)


def test_the_header_of_a_shard_is_what_safetensors_writes() -> None:
    """The streams above cut a shard behind its header."""
    shard = save({"a": torch.ones(3)})

    assert json.loads(shard[8 : 8 + int.from_bytes(shard[:8], "little")])["a"]["shape"] == [3]
