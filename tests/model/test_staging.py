"""Two generations: what is staged is not seen, a commit flips, what did not come is carried over, a rollback is exact.

The oracle is a cold load of the same tensors into a model of its own, byte by byte, and the logits of transformers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusewire.model import DeepseekV2Config, DeepseekV2ForCausalLM, NotReadyError, StagingError
from fusewire.model.finite import all_finite

FAMILIES = ["v2", "v2lite", "v3", "v2-greedy", "moonlight", "kimi", "v3-fp8"]
Tensors = dict[str, Tensor]
Golden = Callable[[str], Tensors]
Config = Callable[[str], DeepseekV2Config]


def resident(config: DeepseekV2Config, *, keep_fp8: bool = True) -> DeepseekV2ForCausalLM:
    return DeepseekV2ForCausalLM(config, generations=2, keep_fp8=keep_fp8)


def bring(model: DeepseekV2ForCausalLM, tensors: Mapping[str, Tensor], version: int | None, size: int = 7) -> None:
    names = list(tensors)
    for first in range(0, len(names), size):
        model.load_weights([(name, tensors[name]) for name in names[first : first + size]], version)


def put_live(model: DeepseekV2ForCausalLM, tensors: Mapping[str, Tensor], version: int | None, size: int = 7) -> None:
    bring(model, tensors, version, size)
    model.carry(version)
    model.commit(version)


def other(tensors: Tensors) -> Tensors:
    """Weights that differ from these in every tensor, and are as harmless."""
    return {name: tensor.flip(0).contiguous() if tensor.dim() else tensor for name, tensor in tensors.items()}


def snapshot(model: DeepseekV2ForCausalLM) -> dict[str, bytes]:
    return {name: p.view(torch.uint8).numpy().tobytes() for name, p in model.generation.parameters.items()}


def cold(config: DeepseekV2Config, tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    model = DeepseekV2ForCausalLM(config)
    model.load_weights(tensors.items())
    assert model.ready
    return snapshot(model)


@pytest.mark.parametrize(("family", "keep_fp8"), [*((family, True) for family in FAMILIES), ("v3-fp8", False)])
def test_a_then_b_then_a_equals_cold_loads(
    family: str, keep_fp8: bool, golden_config: Config, golden_tensors: Golden, golden_values: Golden
) -> None:
    """Nothing that is derived or cached survives a flip: bytes and logits, for every family."""
    config, first = golden_config(family), golden_tensors(family)
    ids = golden_values(family)["ids.a"]
    weights = [first, other(first)]
    models = []
    for tensors in weights:
        model = DeepseekV2ForCausalLM(config, keep_fp8=keep_fp8)
        model.load_weights(tensors.items())
        models.append(model)
    assert not models[0](ids).equal(models[1](ids))

    model = resident(config, keep_fp8=keep_fp8)
    addresses = [p.data_ptr() for g in model.staging.generations for p in g.parameters.values()]
    for version, which in enumerate((0, 1, 0, 0, 1)):
        put_live(model, weights[which], version)
        assert snapshot(model) == snapshot(models[which])
        assert model(ids).equal(models[which](ids))
        assert model.generate(ids, 8).equal(models[which].generate(ids, 8))
    assert addresses == [p.data_ptr() for g in model.staging.generations for p in g.parameters.values()]


def test_nothing_staged_is_seen_until_the_flip(
    golden_config: Config, golden_tensors: Golden, golden_values: Golden
) -> None:
    config, old = golden_config("v2"), golden_tensors("v2")
    ids = golden_values("v2")["ids.a"]
    model = resident(config)
    bring(model, old, 1)
    with pytest.raises(NotReadyError):
        model(ids)
    model.commit(1)
    before, logits = snapshot(model), model(ids)

    bring(model, other(old), 2)
    assert snapshot(model) == before
    assert model(ids).equal(logits)
    model.drop_version(2)
    assert snapshot(model) == before
    with pytest.raises(StagingError, match="no retired version"):
        model.rollback()
    put_live(model, other(old), 3)
    assert snapshot(model) == cold(config, other(old))


def test_a_rollback_is_exact_and_can_be_taken_back(golden_config: Config, golden_tensors: Golden) -> None:
    config, old = golden_config("v3"), golden_tensors("v3")
    model = resident(config)
    put_live(model, old, 1)
    with pytest.raises(StagingError, match="there is none"):
        model.rollback()
    one = snapshot(model)
    put_live(model, other(old), 2)
    two = snapshot(model)
    for _ in range(2):
        model.rollback()
        assert (snapshot(model), model.generation.version) == (one, 1)
        model.rollback()
        assert (snapshot(model), model.generation.version) == (two, 2)
    model.rollback()
    name = "model.norm.weight"
    put_live(model, {name: old[name] + 1}, 3)
    assert snapshot(model) == cold(config, old | {name: old[name] + 1}), "the rest is carried over from what was live"


def test_a_lease_keeps_its_weights_and_staging_waits_for_it(golden_config: Config, golden_tensors: Golden) -> None:
    config, old = golden_config("v2"), golden_tensors("v2")
    model = resident(config)
    put_live(model, old, 1)
    idle: list[int] = []
    model.staging.leases.on_idle = idle.append
    with model.lease() as lease:
        bring(model, other(old), 2)
        assert model.commit(2) == 1
        assert lease.version == 1
        with pytest.raises(StagingError, match="1 requests still read"):
            model.stage(3)
        with model.lease() as newer:
            assert newer.version == 2
        assert idle == []
    assert idle == [lease.generation]
    model.stage(3)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    data=st.data(),
    family=st.sampled_from(["v2", "v3", "v3-fp8"]),
    rounds=st.integers(1, 5),
)
def test_partial_versions_carry_the_rest_over(
    data: st.DataObject, family: str, rounds: int, golden_config: Config, golden_tensors: Golden
) -> None:
    """Any run of partial versions, aborted ones and rollbacks among them, against a plain dict of tensors."""
    config, base = golden_config(family), golden_tensors(family)
    model = resident(config)
    put_live(model, base, 0, size=1000)
    names = [name for name in base if name in model.table.slots]
    history = [dict(base)]
    intact = False
    for version in range(1, rounds + 1):
        chosen = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=9, unique=True))
        what = data.draw(st.sampled_from(["commit", "commit", "drop", "rollback"]))
        if what == "rollback":
            if intact:
                model.rollback()
                history.reverse()
            else:
                with pytest.raises(StagingError):
                    model.rollback()
        else:
            changed = {name: (base[name].float() + version).to(base[name].dtype) for name in chosen}
            bring(model, changed, version, size=data.draw(st.integers(1, 4)))
            if what == "drop":
                model.drop_version(version)
                intact = False
            elif any(model.blocked(half.tensor) for half in model.pending()):
                with pytest.raises(StagingError, match="can't be placed without"):
                    model.carry(version)
                model.drop_version(version)
                intact = False
            else:
                carried = model.carry(version)
                assert carried.slots <= len(names)
                model.commit(version)
                history = [history[0] | changed, history[0]]
                intact = True
        assert snapshot(model) == cold(config, history[0])


def test_only_what_differs_is_carried_over(golden_config: Config, golden_tensors: Golden) -> None:
    config, base = golden_config("v2"), golden_tensors("v2")
    model = resident(config)
    put_live(model, base, 0)
    put_live(model, base, 1)
    norm, head = "model.norm.weight", "lm_head.weight"
    put_live(model, {norm: base[norm] + 2}, 2)

    bring(model, {head: base[head] + 3}, 3)
    carried = model.carry(3)
    assert (carried.slots, carried.nbytes) == (1, base[norm].nbytes), "what version 2 brought, and no more"
    model.commit(3)
    bring(model, {norm: base[norm] + 4, head: base[head] + 4}, 4)
    assert model.carry(4).slots == 0


def test_a_pair_of_which_one_half_came_is_completed_by_the_live_one(
    golden_config: Config, golden_tensors: Golden
) -> None:
    config, base = golden_config("v2"), golden_tensors("v2")
    half = "model.layers.1.self_attn.q_a_proj.weight"
    for model in (resident(config), DeepseekV2ForCausalLM(config)):
        put_live(model, base, 0)
        bring(model, {half: base[half] + 1}, 1)
        assert [p.tensor for p in model.pending()] == [half]
        assert model.carry(1).fused == (1,)
        model.commit(1)
        assert model.pending() == ()
        if not model.staging.in_place:
            model.rollback()
            assert model.pending() == ()
            model.rollback()
        assert snapshot(model) == cold(config, base | {half: base[half] + 1})
        assert model.ready
        model.fusion.check()


def test_another_version_is_refused_while_one_is_staged(golden_config: Config, golden_tensors: Golden) -> None:
    model = resident(golden_config("v2"))
    base = golden_tensors("v2")
    bring(model, {"model.norm.weight": base["model.norm.weight"]}, 1)
    with pytest.raises(StagingError, match="version 2 is not being staged"):
        bring(model, {"model.norm.weight": base["model.norm.weight"]}, 2)
    with pytest.raises(StagingError, match="88 slots are missing"):
        model.carry(1)


def test_numbers_begin_anew(golden_config: Config, golden_tensors: Golden) -> None:
    config, base = golden_config("v2"), golden_tensors("v2")
    for model in (resident(config), DeepseekV2ForCausalLM(config)):
        put_live(model, base, 57)
        model.forget_numbers()
        put_live(model, other(base), 1)
        assert snapshot(model) == cold(config, other(base))
        bring(model, {"model.norm.weight": base["model.norm.weight"]}, 2)
        model.carry(2)


def test_no_address_changes_over_a_thousand_versions(golden_config: Config, golden_tensors: Golden) -> None:
    base = golden_tensors("v2")
    model = resident(golden_config("v2"))
    put_live(model, base, 0, size=1000)

    def addresses() -> list[int]:
        views = [w for weights in model._weights for w in (weights.embed_tokens, weights.layers[1].attention.w_kc)]
        owned = [p for g in model.staging.generations for p in g.parameters.values()]
        return [tensor.data_ptr() for tensor in (*owned, *views)]

    before = addresses()
    names = [name for name in base if name in model.table.slots]
    for version in range(1, 1001):
        name = names[version % len(names)]
        put_live(model, {name: base[name]}, version)
        if version % 7 == 0:
            model.rollback()
        if version % 50 == 0:
            assert addresses() == before
    assert snapshot(model) == cold(model.config, base)


# -------------------------------------------------------------------------------------- verification


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_every_bit_pattern_is_told_finite_or_not(dtype: torch.dtype) -> None:
    width = dtype.itemsize
    if width == 4:
        patterns = torch.cat(
            [torch.arange(0x7F7FFF00, 0x7F800100, dtype=torch.int64), torch.arange(0, 1 << 32, 65521)]
        ).to(torch.uint32)
    else:
        patterns = torch.arange(1 << (8 * width)).to(torch.uint8 if width == 1 else torch.uint16)
    values = patterns.view(dtype)
    expected = values.float().isfinite()

    for sign_and_position in range(0, values.numel(), max(1, values.numel() // 5000)):
        one = values[sign_and_position : sign_and_position + 1]
        assert all_finite(one) is bool(expected[sign_and_position])
    assert all_finite(values[expected])
    assert not all_finite(values)


@pytest.mark.parametrize("generations", [1, 2])
def test_what_is_not_finite_is_named_and_counted(
    generations: int, golden_config: Config, golden_tensors: Golden
) -> None:
    base = golden_tensors("v3-fp8")
    model = DeepseekV2ForCausalLM(golden_config("v3-fp8"), generations=2 if generations == 2 else 1)
    bad = {name: tensor.clone() for name, tensor in base.items()}
    norm, quantised = "model.norm.weight", "model.layers.0.self_attn.q_a_proj.weight"
    bad[norm][3], bad[norm][4], bad[norm][5] = float("nan"), float("inf"), float("-inf")
    bad[quantised].view(torch.uint8)[1, 1] = 0xFF
    bring(model, bad, 1)

    found = {one.tensor: (one.nan, one.inf) for one in model.not_finite()}
    assert found == {norm: (1, 2), quantised: (1, 0)}
    assert "1 NaN and 2 Inf of" in str(next(one for one in model.not_finite() if one.tensor == norm))


def test_the_canary_sees_the_staged_weights(
    golden_config: Config, golden_tensors: Golden, golden_values: Golden
) -> None:
    config, base = golden_config("v2"), golden_tensors("v2")
    ids = golden_values("v2")["ids.a"]
    model = DeepseekV2ForCausalLM(config, generations=2, dtype=torch.float32)
    put_live(model, base, 1)
    bring(model, other(base), 2)
    model.carry(2)
    canary = model.canary(ids[0].tolist())
    model.commit(2)

    logits = model(ids)[0, -1]
    assert canary.tokens == tuple(logits.topk(4).indices.tolist())
    assert canary.finite
    again, different = model.canary(ids[0].tolist()), model.canary(ids[0].tolist()[::-1])
    assert canary.fingerprint != again.fingerprint, "the staged weights are version 1's again"
    assert again.fingerprint != different.fingerprint


# ------------------------------------------------------------------------------ requests across flips


def test_requests_across_flips_answer_by_their_own_version(
    golden_config: Config, golden_tensors: Golden, golden_values: Golden
) -> None:
    config, base = golden_config("v2"), golden_tensors("v2")
    ids = golden_values("v2")["ids.a"]
    weights = [base, other(base)]
    alone = []
    for tensors in weights:
        model = DeepseekV2ForCausalLM(config)
        model.load_weights(tensors.items())
        alone.append(model.generate(ids, 12).tolist())
    assert alone[0] != alone[1]
    model = resident(config)
    put_live(model, weights[0], 0, size=1000)
    idle = threading.Event()
    model.staging.leases.on_idle = lambda _: idle.set()
    stop, wrong, answered = threading.Event(), [], []

    def ask() -> None:
        while not stop.is_set():
            with model.lease() as lease:
                found = model.generate(ids, 12, lease=lease).tolist()
            assert lease.version is not None
            answered.append(lease.version)
            if found != alone[lease.version % 2]:
                wrong.append((lease.version, found))

    readers = [threading.Thread(target=ask) for _ in range(3)]
    for reader in readers:
        reader.start()
    for version in range(1, 25):
        deadline = time.monotonic() + 30
        while True:
            try:
                model.stage(version)
                break
            except StagingError:
                assert time.monotonic() < deadline
                idle.wait(0.01)
                idle.clear()
        put_live(model, weights[version % 2], version, size=20)
    stop.set()
    for reader in readers:
        reader.join(30)

    assert wrong == []
    assert len(set(answered)) > 3
