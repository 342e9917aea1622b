"""The loader alone: what comes of a shard that changes, fails or is refused half-way, byte by byte."""

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

from fusewire.daemon import demo
from fusewire.daemon.copying import Copy
from fusewire.daemon.errors import Reason, ShardNotReady, ShardRejected
from fusewire.daemon.loader import Loader, Source
from fusewire.daemon.payload import Bytes, BytesPayload, Payload
from fusewire.daemon.settings import Limits, Model, Settings, Versions
from fusewire.daemon.settings import Loader as LoaderSettings
from fusewire.daemon.stimuli import Expired, Inspected, NotReady, Placed, Refused, Verified
from fusewire.daemon.versions import Claim
from fusewire.model import DeepseekV2Config, DeepseekV2ForCausalLM, Destination

CHECKPOINT = Path(demo.__file__).parent / "checkpoints" / "v2"
TIMEOUT = 10.0
NORM, HEAD = "model.norm.weight", "lm_head.weight"
Golden = Callable[[str], dict[str, Tensor]]


class Unproven(BytesPayload):
    """Like a file without a lease, on which things happen while it is read."""

    proven = False
    on_read: Callable[[], None] = staticmethod(lambda: None)
    on_verify: Callable[[], None] = staticmethod(lambda: None)
    closed = 0

    def read_into(self, offset: int, target: Bytes) -> None:
        self.on_read()
        super().read_into(offset, target)

    def verify(self) -> None:
        self.on_verify()

    def close(self) -> None:
        self.closed += 1
        super().close()


class Bench:
    """A loader with a golden model, driven one job at a time."""

    def __init__(
        self,
        config: DeepseekV2Config | None = None,
        *,
        keep_fp8: bool = True,
        generations: Literal[1, 2] = 1,
        **settings: Any,
    ) -> None:
        config = config or DeepseekV2Config.from_file(CHECKPOINT / "config.json")
        self.model = DeepseekV2ForCausalLM(config, keep_fp8=keep_fp8, generations=generations)
        self.told: queue.Queue[Any] = queue.Queue()
        effective = msgspec.structs.replace(Settings(model=Model(config="")), **settings)
        self.loader = Loader(self.model, effective, self.told.put)
        self.loader.start()

    def inspect(self, open_: Callable[[], Payload], *claims: Claim) -> Any:
        self.loader.inspect("k", Source("shard", open_, claims))
        return self.told.get(timeout=TIMEOUT)

    def load(self, payload: Payload, version: int | None = None) -> Any:
        outcome = self.inspect(lambda: payload)
        if isinstance(outcome, Inspected):
            self.loader.place("k", "shard", version)
            outcome = self.told.get(timeout=TIMEOUT)
        self.loader.release("k")
        return outcome

    def slot(self, name: str) -> int:
        return self.model.table.slots[name].index


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    assert made.loader.stop(TIMEOUT)
    made.model.fusion.check()


def payload(tensors: dict[str, Tensor], kind: type[BytesPayload] = Unproven, **happens: Any) -> Any:
    made = kind.parse(save(tensors), header_limit=1 << 20)
    for name, what in happens.items():
        setattr(made, name, what)
    return made


def changed() -> None:
    raise ShardRejected(Reason.CHANGED_WHILE_READING, "somebody wrote to it")


def fill(bench: Bench, tensors: dict[str, Tensor]) -> None:
    placed = bench.load(payload(tensors, BytesPayload))
    assert isinstance(placed, Placed)
    assert placed.serving


def test_a_whole_checkpoint(bench: Bench, checkpoint_tensors: Golden) -> None:
    placed = bench.load(payload(checkpoint_tensors("v2"), BytesPayload), version=3)

    assert isinstance(placed, Placed)
    assert (placed.fused, placed.pending, placed.serving, placed.filled) == ((0, 1, 2), (), True, 89)
    norm = bench.model.generation.parameters[NORM]
    assert norm.equal(checkpoint_tensors("v2")[NORM])


def test_a_file_that_changed_leaves_its_slots_unfilled(bench: Bench, checkpoint_tensors: Golden) -> None:
    """Not serving: the bytes went straight to their rows, so they have to count as nothing."""
    refused = bench.load(payload(checkpoint_tensors("v2"), on_verify=changed))

    assert isinstance(refused, Refused)
    assert (refused.reason, refused.transient, len(refused.unfilled)) == (Reason.CHANGED_WHILE_READING, True, 89)
    assert (bench.model.generation.filled, bench.model.ready) == (0, False)


def test_a_wrong_digest_does_not_touch_live_weights(bench: Bench, checkpoint_tensors: Golden) -> None:
    """In place: the shard is looked at before a byte of it is applied, since nothing is there to go back to."""
    old = checkpoint_tensors("v2")
    fill(bench, old)
    new = save({NORM: old[NORM] + 1})
    bench.loader.inspect("k", Source("shard", lambda: BytesPayload.parse(new, header_limit=1 << 20), xxh3="0" * 32))
    assert isinstance(bench.told.get(timeout=TIMEOUT), Inspected)
    bench.loader.place("k", "shard", None)
    refused = bench.told.get(timeout=TIMEOUT)

    assert isinstance(refused, Refused)
    assert (refused.reason, refused.unfilled) == (Reason.DIGEST_MISMATCH, ())
    assert bench.model.generation.parameters[NORM].equal(old[NORM])
    assert bench.model.ready


def test_a_file_that_changed_does_not_touch_live_weights(bench: Bench, checkpoint_tensors: Golden) -> None:
    """Serving: an unproven shard is read as a whole, and proven, before a byte of it goes to live rows."""
    old = checkpoint_tensors("v2")
    fill(bench, old)
    refused = bench.load(payload({name: tensor + 1 for name, tensor in old.items()}, on_verify=changed), version=9)

    assert isinstance(refused, Refused)
    assert (refused.reason, refused.unfilled) == (Reason.CHANGED_WHILE_READING, ())
    assert bench.model.ready
    assert bench.model.generation.parameters[NORM].equal(old[NORM])
    assert all(stamp is not None and stamp.version is None for stamp in bench.model.generation.stamps)


def test_an_unproven_shard_that_holds_is_applied(bench: Bench, checkpoint_tensors: Golden) -> None:
    old = checkpoint_tensors("v2")
    fill(bench, old)
    assert isinstance(bench.load(payload({NORM: old[NORM] + 1}), version=9), Placed)
    assert bench.model.generation.parameters[NORM].equal(old[NORM] + 1)


def test_an_unproven_shard_too_large_to_be_buffered_is_refused(checkpoint_tensors: Golden) -> None:
    bench = Bench(limits=Limits(unleased_bytes=127))
    fill(bench, checkpoint_tensors("v2"))
    refused = bench.load(payload({NORM: checkpoint_tensors("v2")[NORM]}))
    bench.loader.stop(TIMEOUT)

    assert isinstance(refused, Refused)
    assert refused.reason is Reason.TOO_LARGE
    assert "limits.unleased_bytes" in refused.detail


@pytest.mark.parametrize("serves", [True, False])
def test_a_defect_is_told_and_the_loader_lives_on(serves: bool, bench: Bench, checkpoint_tensors: Golden) -> None:
    tensors = checkpoint_tensors("v2")
    if serves:
        fill(bench, tensors)

    def defect() -> None:
        raise RuntimeError("a defect")

    refused = bench.load(payload(tensors, on_read=defect))
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.detail) == (Reason.INTERNAL_ERROR, "RuntimeError: a defect")
    assert bench.model.ready is serves
    assert bench.loader.health() == "ok"
    assert isinstance(bench.load(payload(tensors, BytesPayload)), Placed)


def test_a_failure_while_live_rows_are_written_is_visible(checkpoint_tensors: Golden) -> None:
    """A proven payload that fails all the same: holes are told, the model refuses, the next load heals it."""
    bench = Bench(versions=Versions(finite=False))
    tensors = checkpoint_tensors("v2")
    fill(bench, tensors)
    failing = payload({NORM: tensors[NORM], HEAD: tensors[HEAD]}, on_read=changed)
    failing.proven = True
    refused = bench.load(failing)

    assert isinstance(refused, Refused)
    assert sorted(refused.unfilled) == sorted([bench.slot(NORM), bench.slot(HEAD)])
    assert not bench.model.ready
    fill(bench, {NORM: tensors[NORM], HEAD: tensors[HEAD]})
    assert bench.loader.stop(TIMEOUT)


def test_a_conflict_changes_nothing(bench: Bench, checkpoint_tensors: Golden) -> None:
    tensors = checkpoint_tensors("v2")
    assert isinstance(bench.load(payload(tensors, BytesPayload), version=3), Placed)
    again = bench.load(payload(tensors, BytesPayload), version=3)
    assert isinstance(again, Placed)
    assert (again.duplicates, again.fused) == (89, ())
    refused = bench.load(payload({NORM: tensors[NORM], HEAD: tensors[HEAD] + 1}), version=3)

    assert isinstance(refused, Refused)
    assert refused.reason is Reason.CONFLICT
    assert HEAD in refused.detail
    assert NORM not in refused.detail
    assert bench.model.generation.parameters[HEAD].equal(tensors[HEAD])


def test_an_older_version_does_not_overwrite_a_newer_one(bench: Bench, checkpoint_tensors: Golden) -> None:
    tensors = checkpoint_tensors("v2")
    fill(bench, tensors)
    assert isinstance(bench.load(payload({NORM: tensors[NORM] + 5}), version=5), Placed)
    refused = bench.load(payload({NORM: tensors[NORM] + 4}), version=4)

    assert isinstance(refused, Refused)
    assert refused.reason is Reason.STALE_VERSION
    assert bench.model.generation.parameters[NORM].equal(tensors[NORM] + 5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("threads", [1, 3])
def test_blocks_casts_and_threads_give_the_bytes_of_copy(dtype: torch.dtype, threads: int) -> None:
    """Small blocks over several threads, from any dtype into bfloat16, against torch's own cast."""
    bench = Bench(loader=LoaderSettings(threads=threads, block_bytes=65536))
    slots = bench.model.table.slots
    dice = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(slot.shape, generator=dice).to(dtype) for name, slot in slots.items()}
    placed = bench.load(payload(tensors, BytesPayload))
    bench.loader.stop(TIMEOUT)

    assert isinstance(placed, Placed)
    for name, slot in slots.items():
        expected = tensors[name].reshape(-1).to(bench.model.generation.rows(slot))
        assert bench.model.generation.rows(slot).equal(expected), name


def test_a_shard_larger_than_a_block_is_copied_by_all_threads() -> None:
    bench = Bench(loader=LoaderSettings(threads=2, block_bytes=65536))
    copies = bench.loader._copier
    source = np.random.default_rng(0).integers(0, 255, 3_000_001, dtype=np.uint8)
    target = torch.zeros(source.size // 2, dtype=torch.bfloat16)
    shard = save({"x": torch.from_numpy(source[: source.size // 2 * 2]).view(torch.bfloat16)})
    whole = BytesPayload.parse(shard, header_limit=1 << 20)
    slot = next(iter(bench.model.table.slots.values()))
    copies.run(whole, [Copy(0, target.nbytes, "BF16", Destination(slot, bench.model.generation, target))])
    bench.loader.stop(TIMEOUT)

    assert target.view(torch.uint8).numpy().tobytes() == source[: target.nbytes].tobytes()
    assert bench.loader.pulse.copied == target.nbytes


def test_a_shard_that_meets_a_long_forward_pass_is_put_off(
    bench: Bench, checkpoint_tensors: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusewire.daemon.loader.GATE_TIMEOUT", 0.05)
    tensors = checkpoint_tensors("v2")
    fill(bench, tensors)
    with bench.model.gate.reading(1.0):
        refused = bench.load(payload({NORM: tensors[NORM] + 1}, BytesPayload))
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.transient, refused.unfilled) == (Reason.MODEL_BUSY, True, ())
    assert bench.model.ready
    assert bench.model.generation.parameters[NORM].equal(tensors[NORM])


def test_stopping_gives_up_at_the_next_block(bench: Bench, checkpoint_tensors: Golden) -> None:
    def stop() -> None:
        bench.loader._copier.cancel()

    tensors = checkpoint_tensors("v2")
    refused = bench.load(payload(tensors, on_read=stop))

    assert isinstance(refused, Refused)
    assert refused.reason is Reason.STOPPING


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (ShardNotReady("a writer"), NotReady, None),
        (ShardRejected(Reason.VANISHED, "gone"), Refused, Reason.VANISHED),
        (RuntimeError("oops"), Refused, Reason.INTERNAL_ERROR),
    ],
)
def test_what_happens_at_opening_is_told(
    error: Exception, outcome: type[Any], reason: Reason | None, bench: Bench
) -> None:
    def fails() -> Payload:
        raise error

    told = bench.inspect(fails)
    assert type(told) is outcome
    assert getattr(told, "reason", None) is reason


def test_a_refused_shard_is_closed(bench: Bench) -> None:
    two = (Claim("a", 1), Claim("b", 2))
    cases: list[tuple[dict[str, Tensor], tuple[Claim, ...]]] = [
        ({"nonsense": torch.ones(1)}, ()),
        ({NORM: torch.ones(63)}, ()),
        ({NORM: torch.ones(64)}, two),
    ]
    for bad, claims in cases:
        opened = [payload(bad)]
        told = bench.inspect(opened.copy().pop, *claims)
        assert isinstance(told, Refused)
        assert opened[0].closed == 1
    assert bench.loader._open == {}


def test_expired_and_dropped_halves_are_told(bench: Bench, checkpoint_tensors: Golden) -> None:
    tensors = checkpoint_tensors("v2")
    fill(bench, tensors)
    half = "model.layers.1.self_attn.q_a_proj.weight"
    placed = bench.load(payload({half: tensors[half]}), version=2)
    assert isinstance(placed, Placed)
    assert placed.waiting == {bench.slot(half): half}
    bench.loader.drop_version(2)
    expired = bench.told.get(timeout=TIMEOUT)

    assert isinstance(expired, Expired)
    assert [(event.tensor, event.cause) for event in expired.halves] == [(half, "superseded")]
    assert expired.slots == ((2, bench.slot(half)),)
    assert expired.pending == ()
    bench.loader.sweep()
    assert isinstance(bench.load(payload({half: tensors[half]}), version=3), Placed), "a sweep of nothing tells nothing"


# ------------------------------------------------------------------------------ fp8, and stacks of experts

FP8_CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 16,
    "hidden_size": 640,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "q_lora_rank": 128,
    "kv_lora_rank": 136,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 8,
    "v_head_dim": 32,
    "n_routed_experts": 3,
    "n_shared_experts": 1,
    "num_experts_per_tok": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 64,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


def fp8_checkpoint(seed: int) -> dict[str, Tensor]:
    dice = torch.Generator().manual_seed(seed)
    table = DeepseekV2ForCausalLM(DeepseekV2Config.from_dict(FP8_CONFIG)).table
    made = {}
    for name, slot in table.slots.items():
        values = torch.randn(slot.shape, generator=dice)
        kind = {"F8_E4M3": torch.float8_e4m3fn, "F32": torch.float32}.get(next(iter(slot.dtypes)), torch.bfloat16)
        made[name] = (
            values.abs() if name.endswith("scale_inv") else values.to(kind if len(slot.dtypes) == 1 else torch.bfloat16)
        )
    return made


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("serves", [True, False])
def test_fp8_through_the_daemons_copies(keep: bool, serves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes as load_weights gives, whose values have tests of their own; small blocks, two threads."""
    monkeypatch.setattr("fusewire.daemon.copying.CAST_BYTES", 3000)
    monkeypatch.setattr("fusewire.daemon.copying.INLINE_BYTES", 0)
    config = DeepseekV2Config.from_dict(FP8_CONFIG)
    bench = Bench(loader=LoaderSettings(threads=2, block_bytes=65536), config=config, keep_fp8=keep)
    old, new = fp8_checkpoint(1), fp8_checkpoint(2)
    if serves:
        fill(bench, old)
    names = sorted(new)
    np.random.default_rng(3).shuffle(names)
    fused: list[int] = []
    for first in range(0, len(names), 4):
        part = payload({name: new[name] for name in names[first : first + 4]}, BytesPayload)
        placed = bench.load(part, version=2)
        assert isinstance(placed, Placed), placed
        fused += placed.fused
        bench.model.fusion.check()
    again = bench.load(payload(new, BytesPayload), version=2)
    bench.loader.stop(TIMEOUT)

    expected = DeepseekV2ForCausalLM(config, keep_fp8=keep)
    expected.load_weights(new.items())
    for name, parameter in bench.model.generation.parameters.items():
        assert parameter.view(torch.uint8).equal(expected.generation.parameters[name].view(torch.uint8)), name
    assert sorted(fused) == [0, 1]
    assert isinstance(again, Placed)
    assert again.duplicates == len(new)


def test_a_changed_scale_is_a_conflict(checkpoint_tensors: Golden) -> None:
    bench = Bench(config=DeepseekV2Config.from_dict(FP8_CONFIG), keep_fp8=False)
    tensors = fp8_checkpoint(1)
    assert isinstance(bench.load(payload(tensors, BytesPayload), version=2), Placed)
    scale = "model.layers.0.mlp.down_proj.weight_scale_inv"
    weight = "model.layers.0.mlp.down_proj.weight"
    for name in (scale, weight):
        changed_ = tensors[name].clone()
        changed_.view(torch.uint8)[-1, -1] ^= 1
        refused = bench.load(payload({name: changed_}, BytesPayload), version=2)
        assert isinstance(refused, Refused)
        assert (refused.reason, name in refused.detail) == (Reason.CONFLICT, True)
    bench.loader.stop(TIMEOUT)
    assert checkpoint_tensors is not None


def test_stacked_experts_count_as_all_their_slots(bench: Bench, checkpoint_tensors: Golden) -> None:
    tensors = checkpoint_tensors("v2")
    stacks: dict[str, Tensor] = {}
    for layer in (1, 2):
        prefix = f"model.layers.{layer}.mlp.experts."
        each = [[tensors.pop(f"{prefix}{e}.{p}_proj.weight") for p in ("gate", "up", "down")] for e in range(8)]
        stacks[f"{prefix}gate_up_proj"] = torch.stack([torch.cat(three[:2]) for three in each])
        stacks[f"{prefix}down_proj"] = torch.stack([three[2] for three in each])
    inspected = bench.inspect(lambda: payload(stacks, BytesPayload))
    assert len(inspected.slots) == 2 * 24
    bench.loader.release("k")
    placed = bench.load(payload(stacks, BytesPayload))
    assert sorted(placed.arrived) == sorted(inspected.slots)
    fill(bench, tensors)


# ----------------------------------------------------------------------- small shards beside a large one


@pytest.mark.parametrize("same_rows", [False, True])
def test_a_small_shard_need_not_wait_for_a_large_one(
    same_rows: bool, checkpoint_tensors: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the copy threads are busy the loader serves others; but never two that write the same rows."""
    monkeypatch.setattr("fusewire.daemon.copying.LARGE_BYTES", 0)
    monkeypatch.setattr("fusewire.daemon.copying.INLINE_BYTES", 1000)
    monkeypatch.setattr("fusewire.daemon.copying.SMALL_BYTES", 0)
    tensors = checkpoint_tensors("v2")
    bench = Bench(generations=2)
    began, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        began.set()
        assert go_on.wait(TIMEOUT)

    large = payload({name: tensor for name, tensor in tensors.items() if name != NORM}, on_read=wait)
    name = HEAD if same_rows else NORM
    small = payload({name: tensors[name][:] if name == NORM else tensors[name] + 1}, BytesPayload)
    told: list[tuple[str, Any]] = []
    for key, opened in (("large", [large]), ("small", [small])):
        bench.loader.inspect(key, Source(key, opened.copy().pop))
        assert isinstance(bench.told.get(timeout=TIMEOUT), Inspected)
    bench.loader.place("large", "large", None)
    assert began.wait(TIMEOUT)
    bench.loader.place("small", "small", None)
    bench.loader.verify(None)
    if not same_rows:
        first = bench.told.get(timeout=TIMEOUT)
        told.append((first.key, first))
    else:
        with pytest.raises(queue.Empty):
            bench.told.get(timeout=0.2)
    go_on.set()
    while len(told) < 2:
        outcome = bench.told.get(timeout=TIMEOUT)
        told.append((outcome.key, outcome))
    verified = bench.told.get(timeout=TIMEOUT)
    assert bench.loader.stop(TIMEOUT)

    assert [key for key, _ in told] == (["large", "small"] if same_rows else ["small", "large"])
    assert all(isinstance(outcome, Placed) for _, outcome in told), told
    assert isinstance(verified, Verified), "what concerns the version waits for both"
    found = bench.model.staging.staged.rows(bench.model.table.slots[name])
    expected = tensors[name] + 1 if same_rows else tensors[name]
    assert found.equal(expected.reshape(-1).to(found))


def test_stopping_ends_a_large_copy_with_others_waiting(
    checkpoint_tensors: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusewire.daemon.copying.LARGE_BYTES", 0)
    monkeypatch.setattr("fusewire.daemon.copying.INLINE_BYTES", 1000)
    monkeypatch.setattr("fusewire.daemon.copying.SMALL_BYTES", 0)
    bench = Bench(generations=2)
    began = threading.Event()

    def slowly() -> None:
        began.set()
        time.sleep(0.01)

    bench.loader.inspect("k", Source("k", lambda: payload(checkpoint_tensors("v2"), on_read=slowly)))
    bench.told.get(timeout=TIMEOUT)
    bench.loader.place("k", "k", None)
    assert began.wait(TIMEOUT)
    assert bench.loader.stop(TIMEOUT)
    refused = bench.told.get(timeout=TIMEOUT)
    assert isinstance(refused, Refused)
    assert refused.reason is Reason.STOPPING
