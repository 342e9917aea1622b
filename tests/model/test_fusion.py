"""The waiting room, and histories: loads, failures, evictions and expiry in any order, against a record of our own.

A state machine sends tensors of several versions to a model whose cache is nearly too small, breaks updates off, lets
time pass, and asks after each step where every tensor is: in its rows, visibly waiting, or told as given up.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from fusewire.model import (
    ConflictError,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    ExpiredHalf,
    FusionCacheFull,
    LoadReport,
    NotReadyError,
    Slot,
    SlotTable,
    StaleError,
    Stamp,
    TensorMeta,
)
from fusewire.model.fusion import FusionCache

PLAIN: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "vocab_size": 7,
    "hidden_size": 4,
    "intermediate_size": 3,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "q_lora_rank": 4,
    "kv_lora_rank": 3,
    "qk_nope_head_dim": 2,
    "qk_rope_head_dim": 2,
    "v_head_dim": 2,
    "first_k_dense_replace": 2,
    "attention_bias": True,
    "max_position_embeddings": 64,
    "torch_dtype": "bfloat16",
}
"""Two layers, each with a pair of weights and a pair of biases."""
QUANTISED = PLAIN | {
    "model_type": "deepseek_v3",
    "q_lora_rank": 128,
    "attention_bias": False,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}
"""Two layers, each with a pair of weights and a pair of scales."""
TORCH = {"BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# -------------------------------------------------------------------------------------- the cache alone


class Room(NamedTuple):
    cache: FusionCache
    table: SlotTable
    clock: Clock

    def part(self, layer: int, number: int = 0) -> Slot:
        return self.table.fusions[layer].slots[number]

    def wait(self, version: int | None, *slots: Slot, keep: Iterable[int] = ()) -> tuple[ExpiredHalf, ...]:
        """Let parts wait; returns what was given up for them."""
        buffers, expired = self.cache.reserve(version, slots, lambda _: torch.bfloat16, set(keep))
        for slot in slots:
            self.cache.put(version, slot, buffers[slot.index])
        self.cache.check()
        return expired


def make_room(max_bytes: int) -> Room:
    clock = Clock()
    table = SlotTable.build(DeepseekV2Config.from_dict(PLAIN))
    return Room(FusionCache(table.groups, torch.device("cpu"), max_bytes, 60.0, clock), table, clock)


HALF = 4 * 4 * 2
"""Bytes of a q_a_proj.weight of PLAIN."""


def test_the_oldest_entry_makes_room() -> None:
    room = make_room(2 * HALF)
    room.wait(1, room.part(0))
    room.clock.now += 1
    room.wait(2, room.part(0))
    room.clock.now += 1
    expired = room.wait(1, room.part(1))

    assert [(half.version, half.layer, half.cause) for half in expired] == [(1, 0, "bytes")]
    assert room.cache.held == 2 * HALF


def test_an_entry_that_is_counted_on_never_makes_room() -> None:
    """Its partner is on its way: with it gone, the partner would go into the rows alone."""
    room = make_room(2 * HALF)
    room.wait(1, room.part(0))
    room.clock.now += 1
    room.wait(2, room.part(0))
    room.clock.now += 1
    (group,) = {slot.group for slot in room.table.fusions[0].slots}
    assert group is not None
    expired = room.wait(1, room.part(1), keep=[group])

    assert [(half.version, half.layer) for half in expired] == [(2, 0)], "not the oldest, since that is kept"
    with pytest.raises(FusionCacheFull):
        room.wait(1, room.part(1, 1), keep=[slot.group or 0 for slot in (room.part(0), room.part(1))])
    assert [half.layer for half in room.cache.pending()] == [0, 1]


def test_who_needs_no_room_takes_none() -> None:
    """The bound may have been lowered meanwhile: what waits is not given up for a shard that has nothing to wait."""
    room = make_room(2 * HALF)
    room.wait(1, room.part(0))
    room.cache.max_bytes = HALF // 2

    assert room.wait(1) == ()
    assert [half.nbytes for half in room.cache.pending()] == [HALF]


def test_given_back_buffers_are_used_again_within_the_bound() -> None:
    room = make_room(2 * HALF)
    room.wait(1, room.part(0))
    (index,) = room.cache.waiting(1, room.part(0).group or 0)
    first = room.cache.waiting(1, room.part(0).group or 0)[index].tensor.data_ptr()
    assert [half.cause for half in room.cache.drop(1)] == ["superseded"]
    room.wait(2, room.part(1))
    second = room.cache.waiting(2, room.part(1).group or 0)[room.part(1).index].tensor.data_ptr()

    assert first == second


# -------------------------------------------------------------------------------------------- histories


class Sent(NamedTuple):
    """A tensor that the model took."""

    version: int | None
    name: str


class Before(NamedTuple):
    digest: str
    pending: tuple[object, ...]
    serving: bool
    stamps: list[Stamp | None]


class Histories(RuleBasedStateMachine):
    """Steps of any kind; `accounted` and `rows_hold_what_their_stamps_say` have to hold after each."""

    config: ClassVar[DeepseekV2Config] = DeepseekV2Config.from_dict(PLAIN)
    keep_fp8: ClassVar[bool] = True
    versions = st.sampled_from([None, 5, 6])
    variants = st.sampled_from([0, 1])
    """The rolling version brings one of two sets of values."""
    _weights: ClassVar[dict[tuple[object, ...], dict[str, Tensor]]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.model = DeepseekV2ForCausalLM(
            self.config, keep_fp8=self.keep_fp8, clock=self.clock, fusion_max_age=50.0, fusion_max_bytes=1 << 30
        )
        self.table = self.model.table
        halves = [slot for fusion in self.table.fusions.values() for slot in fusion.slots]
        largest = max(
            slot.numel * TORCH[next(iter(slot.dtypes)) if len(slot.dtypes) == 1 else "BF16"].itemsize for slot in halves
        )
        self.model.fusion.max_bytes = 5 * largest // 2
        self.halves = [slot.name for slot in halves]
        self.names = [*self.halves, *(name for name in self.table.slots if name not in self.halves)]
        self.where: dict[Sent, str] = {}
        self.told: set[Sent] = set()

    def values(self, version: int | None, variant: int) -> dict[str, Tensor]:
        """The tensors of a version, the same whenever asked."""
        key = (id(self.config), version, variant if version is None else 0)
        if key not in self._weights:
            dice = torch.Generator().manual_seed(hash((version or -1, key[2])) % 1000)
            self._weights[key] = {
                name: torch.randn(slot.shape, generator=dice).to(
                    TORCH[next(iter(slot.dtypes))] if len(slot.dtypes) == 1 else torch.bfloat16
                )
                for name, slot in self.table.slots.items()
            }
        return self._weights[key]

    def expected(self, version: int | None, variant: int, slot: Slot) -> Tensor:
        """What a slot's rows have to hold."""
        values = self.values(version, variant)
        tensor = values[slot.name]
        if slot.scale is not None:
            scale = values[f"{slot.name}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
            tensor = tensor.float() * scale[: tensor.shape[0], : tensor.shape[1]]
        return tensor.to(self.model.generation.rows(slot).dtype).flatten()

    def now(self) -> Before:
        made = hashlib.sha256()
        for parameter in self.model.generation.parameters.values():
            made.update(parameter.reshape(-1).view(torch.uint8).numpy().tobytes())
        generation = self.model.generation
        return Before(made.hexdigest(), self.model.pending(), self.model.serving, list(generation.stamps))

    def send(self, names: Sequence[str], version: int | None, variant: int = 0) -> LoadReport | None:
        before = self.now()
        values = self.values(version, variant)
        try:
            report = self.model.load_weights([(name, values[name]) for name in names], version=version)
        except (StaleError, FusionCacheFull):
            assert self.now() == before, "a refusal changes nothing"
            return None
        self.told |= {Sent(half.version, half.tensor) for half in report.expired}
        self.told -= {Sent(version, name) for name in names}
        self.where |= {Sent(version, name): "sent" for name in names if name in self.halves}
        if before.serving:
            self.pairs_change_as_a_whole(before, report.fused)
        return report

    def pairs_change_as_a_whole(self, before: Before, fused: Sequence[int]) -> None:
        """Rows that a forward pass can see: all parts of a pair are replaced, and it is told, or none is."""
        for layer, fusion in self.table.fusions.items():
            after = self.model.generation.stamps
            changed = {after[slot.index] is not before.stamps[slot.index] for slot in fusion.slots}
            assert changed == {layer in fused}

    @rule(data=st.data(), version=versions, variant=variants)
    def load_halves(self, data: st.DataObject, version: int | None, variant: int) -> None:
        names = data.draw(st.lists(st.sampled_from(self.halves), min_size=1, max_size=5, unique=True))
        self.send(names, version, variant)

    @rule(data=st.data(), version=versions, variant=variants)
    def load_some(self, data: st.DataObject, version: int | None, variant: int) -> None:
        self.send(data.draw(st.lists(st.sampled_from(self.names), min_size=1, max_size=8)), version, variant)

    @rule(version=versions, variant=variants)
    def load_all(self, version: int | None, variant: int) -> None:
        self.send(self.names, version, variant)

    @rule(data=st.data(), version=st.sampled_from([5, 6]))
    def change_what_came(self, data: st.DataObject, version: int) -> None:
        """Other bytes under a number, behind new halves that would need room."""
        came = [slot.name for slot in self.table.slots.values() if self.model.generation.carries(slot, version)]
        came += [half.tensor for half in self.model.pending() if half.version == version and half.owned]
        if not came:
            return
        name = data.draw(st.sampled_from(came))
        halves = data.draw(st.lists(st.sampled_from([n for n in self.halves if n != name]), max_size=3, unique=True))
        right, wrong = self.values(version, 0), self.values(None, 0)
        before = self.now()
        with pytest.raises((ConflictError, StaleError)):
            self.model.load_weights([*((n, right[n]) for n in halves), (name, wrong[name])], version=version)
        assert self.now() == before

    @rule(data=st.data(), version=versions, written=st.booleans())
    def break_off(self, data: st.DataObject, version: int | None, written: bool) -> None:
        """A shard that turns out to be bad while it is copied."""
        names = data.draw(st.lists(st.sampled_from(self.names), min_size=1, max_size=5, unique=True))
        values = self.values(version, 0)
        safetensors = {dtype: name for name, dtype in TORCH.items()}
        metas = {name: TensorMeta(safetensors[values[name].dtype], self.table.slots[name].shape) for name in names}
        before = self.now()
        try:
            update = self.model.begin(self.table.plan(metas), version, "broken")
        except (StaleError, FusionCacheFull):
            assert self.now() == before
            return
        self.told |= {Sent(half.version, half.tensor) for half in update.expired}
        touched = False
        if written:
            with contextlib.suppress(ZeroDivisionError), update.writing(1.0):
                for destination in update.destinations:
                    touched |= destination.in_place
                    destination.tensor.view(torch.uint8).fill_(0x55)
                raise ZeroDivisionError
        if touched:
            with pytest.raises(NotReadyError):
                self.model(torch.tensor([[1]]))
        unfilled = self.model.abort(update)
        after = self.model.generation.stamps
        lost = {slot.name for slot in self.table.slots.values() if after[slot.index] is not before.stamps[slot.index]}
        assert lost <= set(unfilled), "what no longer holds anything is told"
        assert all(after[self.table.slots[name].index] is None for name in unfilled)
        if not written:
            assert unfilled == ()

    @rule(seconds=st.sampled_from([10, 40, 60]))
    def let_time_pass(self, seconds: int) -> None:
        self.clock.now += seconds
        self.told |= {Sent(half.version, half.tensor) for half in self.model.sweep()}

    @rule(version=st.sampled_from([5, 6]))
    def drop(self, version: int) -> None:
        self.told |= {Sent(half.version, half.tensor) for half in self.model.drop_version(version)}

    @precondition(lambda self: self.model.serving)
    @rule()
    def answer(self) -> None:
        assert self.model(torch.tensor([[1, 2]])).shape == (1, 2, self.config.vocab_size)

    @invariant()
    def counts_agree(self) -> None:
        generation, fusion = self.model.generation, self.model.fusion
        fusion.check()
        assert fusion.held <= fusion.max_bytes
        assert generation.filled == sum(stamp is not None for stamp in generation.stamps)
        if self.model.serving:
            assert generation.filled == len(self.table.slots)

    @invariant()
    def rows_hold_what_their_stamps_say(self) -> None:
        generation = self.model.generation
        for slot in self.table.slots.values():
            stamp = generation.stamps[slot.index]
            if stamp is None:
                continue
            rows = generation.rows(slot).view(torch.uint8)
            variants = [0, 1] if stamp.version is None else [0]
            if slot.scale is not None and stamp.version is None:
                continue  # its scale may be the other variant's
            assert any(
                rows.equal(self.expected(stamp.version, variant, slot).view(torch.uint8)) for variant in variants
            ), f"{slot.name} is not {stamp}"

    @invariant()
    def parts_meet_in_one_place(self) -> None:
        """Of one numbered version no part of a pair waits in the cache while another lies in its rows."""
        pending = self.model.pending()
        waiting = {(half.version, half.layer) for half in pending if half.owned and half.tensor in self.halves}
        for version, layer in waiting:
            if version is not None:
                parts = self.table.fusions[layer].slots
                assert not any(self.model.generation.carries(part, self.model.staging.of(version)) for part in parts)

    @invariant()
    def accounted(self) -> None:
        """Every half that was taken is in its rows or waits; if it no longer waits, that was told."""
        waiting = {Sent(half.version, half.tensor) for half in self.model.pending()}
        for sent, was in list(self.where.items()):
            slot = self.table.slots[sent.name]
            if self.model.generation.carries(slot, self.model.staging.of(sent.version)):
                self.where[sent] = "placed"
            elif sent in waiting:
                self.where[sent] = "waiting"
            else:
                assert was == "placed" or sent in self.told, f"{sent} is nowhere, and nobody was told"
                del self.where[sent]

    def teardown(self) -> None:
        """Whatever happened: to send a version's whole checkpoint makes the model whole."""
        if self.send(self.names, 6) is None:
            pytest.fail("the newest version is refused")
        assert self.model.ready
        for slot in self.table.slots.values():
            assert self.model.generation.carries(slot, self.model.staging.of(6))
            assert self.model.generation.rows(slot).view(torch.uint8).equal(self.expected(6, 0, slot).view(torch.uint8))
        self.accounted()
        self.counts_agree()


class QuantisedHistories(Histories):
    config = DeepseekV2Config.from_dict(QUANTISED)


class DequantisedHistories(QuantisedHistories):
    keep_fp8 = False


steps = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestHistories = Histories.TestCase
TestHistories.settings = steps
TestQuantisedHistories = QuantisedHistories.TestCase
TestQuantisedHistories.settings = steps
TestDequantisedHistories = DequantisedHistories.TestCase
TestDequantisedHistories.settings = steps
