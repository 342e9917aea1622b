"""Two generations: histories of stages against a record that is nothing but dicts of what was sent.

A state machine loads tensors, breaks loads off half-way, carries over, commits, gives up, rolls back, holds leases over
flips, lets time pass and begins to count anew. After each step it compares the bytes of what is live and of what is
leased with the record, and asks where every half is: in its rows, visibly waiting, or told as given up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from fusewire.model import (
    Carried,
    ConflictError,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Destination,
    ExpiredHalf,
    FusionCacheFull,
    Lease,
    LoadReport,
    Slot,
    StagingError,
    Stamp,
)

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
MAX_AGE = 50.0


class Set(NamedTuple):
    """Whose values a tensor has."""

    run: int
    """Of the trainer; 0 for the rolling version, which has none."""
    version: int | None
    variant: int
    """The rolling version brings one of two sets of values."""


class Piece(NamedTuple):
    """A tensor that came in the present stage."""

    values: Set
    since: float


class Reading(NamedTuple):
    """A lease that is held, and what must be read under it until it ends."""

    lease: Lease
    rows: dict[str, Set]
    holder: contextlib.ExitStack


class BrokenOffError(Exception):
    """A copy failed half-way."""


class Staged(RuleBasedStateMachine):
    """Steps of any kind. `live`, `retired`, `rows` and `waiting` are the record: name -> whose values."""

    config: ClassVar[DeepseekV2Config] = DeepseekV2Config.from_dict(PLAIN)
    keep_fp8: ClassVar[bool] = True
    versions = st.sampled_from([None, 5, 6])
    variants = st.sampled_from([0, 1])
    _values: ClassVar[dict[tuple[object, ...], dict[str, Tensor]]] = {}
    _bytes: ClassVar[dict[tuple[object, ...], bytes]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.model = DeepseekV2ForCausalLM(
            self.config,
            keep_fp8=self.keep_fp8,
            generations=2,
            clock=lambda: self.now,
            fusion_max_age=MAX_AGE,
            fusion_max_bytes=1 << 30,
        )
        self.table = self.model.table
        self.slots = self.table.slots
        self.grouped = [slot.name for slot in self.slots.values() if slot.group is not None]
        if self.grouped_in_copies:
            largest = max(self.slots[name].numel for name in self.grouped)
            self.model.fusion.max_bytes = 5 * largest // 2
        self.addresses = self.pointers()
        self.run = 1
        self.live: dict[str, Set] = {}
        self.live_version: int | None = None
        self.retired: dict[str, Set] = {}
        self.retired_version: int | None = None
        self.intact = False
        """Whether nothing has been written over what is retired."""
        self.differing = set(self.slots)
        """In which the two generations may differ: what the live version brought, and what has been written since."""
        self.staging: bool = False
        self.version: int | None = None
        self.rows: dict[str, Piece] = {}
        """Of the present stage: in the staged rows."""
        self.waiting: dict[str, Piece] = {}
        """Of the present stage: in copies."""
        self.untold: list[tuple[str, Piece]] = []
        """Given up, and to be told by the next sweep."""
        self.readings: list[Reading] = []

    # ------------------------------------------------------------------------------------- the oracle

    @property
    def grouped_in_copies(self) -> bool:
        return any(group.computed for group in self.table.groups)

    def values(self, key: Set) -> dict[str, Tensor]:
        """The tensors of a version, the same whenever asked."""
        known = self._values.get((id(self.config), key))
        if known is None:
            dice = torch.Generator().manual_seed(100 * key.run + 10 * (key.version or 0) + key.variant)
            known = self._values[id(self.config), key] = {
                name: torch.randn(slot.shape, generator=dice).to(
                    TORCH[next(iter(slot.dtypes))] if len(slot.dtypes) == 1 else torch.bfloat16
                )
                for name, slot in self.slots.items()
            }
        return known

    def expected(self, slot: Slot, rows: dict[str, Set]) -> bytes:
        """What a slot's rows have to hold, if these are the sets that its tensor and its scale come from."""
        scale_name = f"{slot.name}_scale_inv"
        key = (id(self.config), self.keep_fp8, slot.name, rows[slot.name], rows.get(scale_name))
        known = self._bytes.get(key)
        if known is None:
            tensor = self.values(rows[slot.name])[slot.name]
            if slot.scale is not None:
                scale = self.values(rows[scale_name])[scale_name].repeat_interleave(128, 0).repeat_interleave(128, 1)
                tensor = tensor.float() * scale[: tensor.shape[0], : tensor.shape[1]]
            there = self.model.generation.rows(slot)
            known = self._bytes[key] = tensor.to(there.dtype).flatten().view(torch.uint8).numpy().tobytes()
        return known

    def pointers(self) -> list[int]:
        return [p.data_ptr() for generation in self.model.staging.generations for p in generation.parameters.values()]

    def parts(self, name: str) -> tuple[Slot, ...]:
        """The slots that have to come together with one; none if it may go alone."""
        group = self.slots[name].group
        return () if group is None else self.table.groups[group].slots

    def in_copies(self, name: str) -> bool:
        group = self.slots[name].group
        return group is not None and self.table.groups[group].computed

    def whole(self, layer: int) -> bool:
        return all(slot.name in self.rows for slot in self.table.fusions[layer].slots)

    def halves_in_rows(self) -> set[str]:
        return {
            slot.name
            for layer, fusion in self.table.fusions.items()
            if not self.whole(layer)
            for slot in fusion.slots
            if slot.name in self.rows
        }

    def told(self, halves: Iterable[ExpiredHalf]) -> None:
        """What is given up is something that waited; it is told once."""
        waited = self.halves_in_rows()
        for half in halves:
            piece = next((p for n, p in self.untold if (n, p.values.version, p.since) == half_key(half)), None)
            if piece is not None:
                self.untold.remove((half.tensor, piece))
                continue
            record = self.waiting if half.tensor in self.waiting else self.rows
            assert record is self.waiting or half.tensor in waited
            if record is self.rows:
                self.wrote([half.tensor])
            piece = record.pop(half.tensor)
            assert half_key(half) == (half.tensor, piece.values.version, piece.since)

    def wrote(self, names: Collection[str]) -> None:
        """Something has happened to staged rows."""
        self.differing.update(names)
        self.intact &= not names

    def carry(self) -> Carried:
        """Carry over; only what may differ is copied."""
        report = self.model.carry(self.version)
        assert report.slots <= len(self.differing - set(self.rows))
        self.intact &= report.slots == 0
        return report

    def close(self) -> None:
        """The stage is over; its copies will be told as given up."""
        self.untold += self.waiting.items()
        self.rows, self.waiting, self.staging = {}, {}, False

    def leased(self, generation: int) -> bool:
        return any(reading.lease.generation == generation for reading in self.readings)

    # ---------------------------------------------------------------------------------------- loading

    def send(self, names: Sequence[str], version: int | None, variant: int, fail_after: int | None = None) -> None:
        """Load tensors; the copy of one of them may fail after so many copies."""
        key = Set(0, None, variant) if version is None else Set(self.run, version, 0)
        values = self.values(key)
        pairs = [(name, values[name]) for name in names]
        before = self.stamps(), self.model.pending()
        was_open = self.staging
        if was_open and version != self.version:
            with pytest.raises(StagingError, match="is not being staged"):
                self.model.load_weights(pairs, version)
            assert (self.stamps(), self.model.pending()) == before
            return
        if not was_open and self.leased(self.model.staging.generations.index(self.model.staging.staged)):
            with pytest.raises(StagingError, match="requests still read"):
                self.model.load_weights(pairs, version)
            assert (self.stamps(), self.model.pending()) == before
            return

        here = {*self.rows, *self.waiting}
        new = set(names) if version is None else set(names) - here
        completed = {
            part.name
            for name in new
            if self.in_copies(name) and all(part.name in {*names, *self.waiting} for part in self.parts(name))
            for part in self.parts(name)
        }
        written = {name for name in new if not self.in_copies(name)} | completed
        whole = {layer for layer in self.table.fusions if self.whole(layer)}
        try:
            with failing(fail_after):
                report = self.model.load_weights(pairs, version)
        except FusionCacheFull:
            assert (self.stamps(), self.model.pending()) == before
            assert self.model.staging.is_open is was_open
            return
        except BrokenOffError:
            self.staging, self.version = True, version
            self.wrote(written)
            for name in written:
                self.rows.pop(name, None)
            self.told(self.model.sweep())
            return
        self.staging, self.version = True, version
        self.wrote(written)
        self.told(report.expired)
        for name in new:
            (self.waiting if self.in_copies(name) else self.rows)[name] = Piece(key, self.now)
        for name in completed:
            self.rows[name] = Piece(self.waiting.pop(name).values, self.now)
        assert set(report.loaded) == written
        assert set(report.duplicates) == set(names) - new
        self.fused_as_told(report, whole, completed)

    def fused_as_told(self, report: LoadReport, whole: set[int], completed: set[str]) -> None:
        for layer, fusion in self.table.fusions.items():
            fused = fusion.slots[0].name in completed if fusion.computed else self.whole(layer) and layer not in whole
            assert (layer in report.fused) is fused

    def stamps(self) -> list[list[Stamp | None]]:
        return [list(generation.stamps) for generation in self.model.staging.generations]

    @initialize(served=st.booleans())
    def begin(self, served: bool) -> None:
        if served:
            self.send(list(self.slots), 5, 0)
            self.commit(carried=True)

    @rule(data=st.data(), version=versions, variant=variants)
    def load_some(self, data: st.DataObject, version: int | None, variant: int) -> None:
        names = st.lists(st.sampled_from(list(self.slots)), min_size=1, max_size=6, unique=True)
        self.send(data.draw(names), version, variant)

    @rule(data=st.data(), follow=st.booleans(), variant=variants)
    def load_parts(self, data: st.DataObject, follow: bool, variant: int) -> None:
        """Parts of one group, of the version that is being staged."""
        parts = [slot.name for slot in data.draw(st.sampled_from(self.table.groups)).slots]
        names = data.draw(st.lists(st.sampled_from(parts), min_size=1, unique=True))
        self.send(names, self.version if follow else None, variant)

    @rule(version=versions, variant=variants)
    def load_all(self, version: int | None, variant: int) -> None:
        self.send(list(self.slots), version, variant)

    @rule(data=st.data(), follow=st.booleans(), version=versions, variant=variants, after=st.integers(0, 6))
    def break_off(self, data: st.DataObject, follow: bool, version: int | None, variant: int, after: int) -> None:
        names = data.draw(st.lists(st.sampled_from(list(self.slots)), min_size=1, max_size=6, unique=True))
        self.send(names, self.version if follow else version, variant, after)

    @rule(data=st.data(), variant=variants, after=st.integers(0, 3))
    def break_off_a_completion(self, data: st.DataObject, variant: int, after: int) -> None:
        """The last part of a group comes, so that all are written, in several rounds."""
        version = self.version if self.staging else None
        parts = [slot.name for slot in data.draw(st.sampled_from(self.table.groups)).slots]
        last = data.draw(st.sampled_from(parts))
        for name in parts:
            if name != last:
                self.send([name], version, variant)
        self.send([last], version, variant, after)

    @rule(data=st.data())
    def change_what_came(self, data: st.DataObject) -> None:
        """Other bytes under a number."""
        came = [*self.rows, *self.waiting]
        version = self.version if self.staging else 6
        if version is None:
            return
        name = data.draw(st.sampled_from(came or list(self.slots)))
        pairs = [(name, self.values(Set(0, None, variant))[name]) for variant in (0, 1)]
        before = self.stamps(), self.model.pending()
        with pytest.raises((ConflictError, StagingError)):
            self.model.load_weights(pairs, version)
        assert (self.stamps(), self.model.pending()) == before

    # --------------------------------------------------------------------------------------- versions

    @precondition(lambda self: self.live)
    @rule(data=st.data(), version=versions, variant=variants)
    def small_version(self, data: st.DataObject, version: int | None, variant: int) -> None:
        """Some groups, whole, and whatever else has come; the rest is carried over."""
        names = data.draw(st.lists(st.sampled_from([*self.slots, *self.grouped]), min_size=1, max_size=3, unique=True))
        if self.grouped_in_copies:
            names = list(dict.fromkeys(part.name for name in names for part in self.parts(name) or [self.slots[name]]))
        self.send(names, self.version if self.staging else version, variant)
        if self.staging:
            self.commit(carried=True)

    @precondition(lambda self: self.staging)
    @rule(carried=st.sampled_from([True, True, True, False]))
    def commit(self, carried: bool) -> None:
        """The version goes live, with or without what it lacks; without only if that makes no difference."""
        if carried:
            stamps = self.stamps()
            if self.waiting or (not self.live and len(self.rows) < len(self.slots)):
                with pytest.raises(StagingError):
                    self.model.carry(self.version)
                assert self.stamps() == stamps
                return
            report = self.carry()
            came = {layer for layer, f in self.table.fusions.items() if any(s.name in self.rows for s in f.slots)}
            assert set(report.fused) == {layer for layer in came if not self.whole(layer)}
        before = self.stamps()
        try:
            self.model.commit(self.version)
        except StagingError:
            assert not carried
            assert self.stamps() == before
            return
        made = self.live | {name: piece.values for name, piece in self.rows.items()}
        self.differing = set(self.rows)
        self.retired, self.live, self.intact = self.live, made, bool(self.live)
        self.retired_version, self.live_version = self.live_version, self.version
        self.close()

    @precondition(lambda self: self.staging)
    @rule()
    def carry_early(self) -> None:
        """More may come after it."""
        with contextlib.suppress(StagingError):
            self.carry()

    @precondition(lambda self: not self.staging)
    @rule(version=versions)
    def commit_nothing(self, version: int | None) -> None:
        before = self.stamps()
        with pytest.raises(StagingError):
            self.model.carry(version)
        with pytest.raises(StagingError):
            self.model.commit(version)
        assert self.stamps() == before

    @precondition(lambda self: self.live)
    @rule(ahead=st.booleans(), variant=variants)
    def roll_back(self, ahead: bool, variant: int) -> None:
        """Also while a part waits that has written nothing yet."""
        if ahead:
            self.send(self.grouped[:1], self.version if self.staging else None, variant)
        assert self.model.staging.retired is self.intact
        if not self.intact:
            with pytest.raises(StagingError, match="no retired version"):
                self.model.rollback()
            return
        self.model.rollback()
        self.live, self.retired = self.retired, self.live
        self.live_version, self.retired_version = self.retired_version, self.live_version
        self.close()

    @rule(version=versions)
    def drop(self, version: int | None) -> None:
        theirs = {*self.waiting, *self.halves_in_rows()}
        told = self.model.drop_version(version)
        if not self.staging or version != self.version:
            assert told == ()
            return
        assert {half.tensor for half in told} == theirs
        self.waiting = {}
        self.close()

    @rule()
    def count_anew(self) -> None:
        self.model.forget_numbers()
        self.run += 1
        if self.staging and self.version is not None:
            self.untold += [(name, self.rows[name]) for name in self.halves_in_rows()]
            self.close()

    @rule(seconds=st.sampled_from([10, 40, 60]))
    def let_time_pass(self, seconds: int) -> None:
        self.now += seconds
        self.told(self.model.sweep())
        assert not self.untold
        for half in self.model.pending():
            may_stay = not half.owned and (half.version is not None or not self.live)
            assert may_stay or self.now - half.since < MAX_AGE

    # ---------------------------------------------------------------------------------------- readers

    @precondition(lambda self: self.live and len(self.readings) < 3)
    @rule()
    def begin_to_read(self) -> None:
        holder = contextlib.ExitStack()
        lease = holder.enter_context(self.model.lease())
        assert lease.version == self.live_version
        self.readings.append(Reading(lease, dict(self.live), holder))

    @precondition(lambda self: self.readings)
    @rule(data=st.data())
    def end_reading(self, data: st.DataObject) -> None:
        reading = self.readings.pop(data.draw(st.integers(0, len(self.readings) - 1)))
        reading.holder.close()

    # ------------------------------------------------------------------------------------- invariants

    @invariant()
    def readers_read_what_they_began_with(self) -> None:
        generations = self.model.staging.generations
        assert self.model.serving is bool(self.live)
        if self.live:
            self.holds(generations.index(self.model.generation), self.live)
        for reading in self.readings:
            self.holds(reading.lease.generation, reading.rows)

    def holds(self, index: int, rows: dict[str, Set]) -> None:
        generation = self.model.staging.generations[index]
        for slot in self.slots.values():
            there = generation.bytes(slot).tobytes()
            assert there == self.expected(slot, rows), f"{slot.name} is not {rows[slot.name]}"

    @invariant()
    def what_came_is_there(self) -> None:
        staging = self.model.staging
        assert staging.is_open is self.staging
        if not self.staging:
            return
        assert {slot.name for slot in staging.brought()} == set(self.rows)
        rows = {name: piece.values for name, piece in self.rows.items()}
        for name in rows:
            slot = self.slots[name]
            assert staging.staged.bytes(slot).tobytes() == self.expected(slot, rows)

    @invariant()
    def what_waits_is_seen(self) -> None:
        pending = [(half.tensor, half.since, half.owned) for half in self.model.pending()]
        expected = [(name, piece.since, True) for name, piece in self.waiting.items()]
        expected += [(name, self.rows[name].since, False) for name in self.halves_in_rows()]
        assert sorted(pending) == sorted(expected)

    @invariant()
    def nothing_moves_or_overlaps(self) -> None:
        assert self.pointers() == self.addresses
        assert len(set(self.addresses)) == len(self.addresses)
        self.model.fusion.check()
        for generation in self.model.staging.generations:
            assert generation.filled == sum(stamp is not None for stamp in generation.stamps)

    def teardown(self) -> None:
        """Whatever happened: a version that brings everything goes live."""
        while self.readings:
            self.readings.pop().holder.close()
        self.drop(self.version)
        self.send(list(self.slots), 6, 0)
        self.commit(carried=True)
        assert set(self.live.values()) == {Set(self.run, 6, 0)}
        self.readers_read_what_they_began_with()
        self.told(self.model.sweep())
        assert not self.untold


def half_key(half: ExpiredHalf) -> tuple[str, int | None, float]:
    return half.tensor, half.version, half.since


@contextlib.contextmanager
def failing(after: int | None) -> Iterator[None]:
    """Let the copy after so many fail half-way, if any."""
    whole, count = Destination.write, 0

    def write(self: Destination, first: int, values: Tensor) -> None:
        nonlocal count
        if count == after:
            self.tensor.view(torch.uint8).fill_(0x55)
            raise BrokenOffError
        count += 1
        whole(self, first, values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Destination, "write", write)
        yield


class QuantisedStaged(Staged):
    config = DeepseekV2Config.from_dict(QUANTISED)


class DequantisedStaged(QuantisedStaged):
    keep_fp8 = False


steps = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestStaged = Staged.TestCase
TestStaged.settings = steps
TestQuantisedStaged = QuantisedStaged.TestCase
TestQuantisedStaged.settings = steps
TestDequantisedStaged = DequantisedStaged.TestCase
TestDequantisedStaged.settings = steps
