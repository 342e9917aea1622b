"""Placing and pairing: any order, split and repetition gives the bytes of one cold load, and each pair is told once.

The oracle is `cold_load`: torch.cat and torch.stack by name, with no code of the loader in it.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusewire.model import (
    ConflictError,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    ExpiredHalf,
    FusionCacheFull,
    LoadReport,
    NotReadyError,
    StaleError,
    WeightsError,
)

Tensors = dict[str, Tensor]
ColdLoad = Callable[[DeepseekV2Config, Mapping[str, Tensor], torch.dtype], Tensors]
Digest = Callable[[DeepseekV2ForCausalLM], str]

TINY: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 11,
    "hidden_size": 6,
    "intermediate_size": 5,
    "moe_intermediate_size": 3,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "q_lora_rank": 4,
    "kv_lora_rank": 3,
    "qk_nope_head_dim": 2,
    "qk_rope_head_dim": 2,
    "v_head_dim": 2,
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "num_experts_per_tok": 1,
    "first_k_dense_replace": 2,
    "max_position_embeddings": 64,
    "torch_dtype": "bfloat16",
}
"""Every kind of parameter in 56 tensors: pairs, dense and stacked MLPs, biases, a correction bias."""
LAYERS = [0, 1, 2]
Q_A, KV_A = "self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"
Q_A_BIAS, KV_A_BIAS = "self_attn.q_a_proj.bias", "self_attn.kv_a_proj_with_mqa.bias"
FUSED = "self_attn.fused_qkv_a_proj_with_mqa.weight"


def layer(number: int, name: str) -> str:
    return f"model.layers.{number}.{name}"


def make_config(*, bias: bool = True) -> DeepseekV2Config:
    return DeepseekV2Config.from_dict(json.loads(json.dumps(TINY | {"attention_bias": bias})))


CONFIG = make_config()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_model(config: DeepseekV2Config = CONFIG, **options: Any) -> DeepseekV2ForCausalLM:
    return DeepseekV2ForCausalLM(config, **options)


def random_checkpoint(config: DeepseekV2Config, seed: int) -> Tensors:
    dice = torch.Generator().manual_seed(seed)
    table = make_model(config).table
    return {
        name: torch.randn(slot.shape, generator=dice).to(
            torch.float32 if slot.leaf == "e_score_correction_bias" else torch.bfloat16
        )
        for name, slot in table.slots.items()
    }


A, B = random_checkpoint(CONFIG, 1), random_checkpoint(CONFIG, 2)
NAMES = sorted(A)


def assert_bytes(model: DeepseekV2ForCausalLM, expected: Mapping[str, Tensor]) -> None:
    found = model.generation.parameters
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        assert parameter.dtype == expected[name].dtype, name
        assert parameter.contiguous().view(torch.uint8).equal(expected[name].contiguous().view(torch.uint8)), name


def check(model: DeepseekV2ForCausalLM) -> None:
    """What has to be true after every call."""
    model.fusion.check()
    generation = model.generation
    assert generation.filled == sum(stamp is not None for stamp in generation.stamps)
    assert model.serving <= (generation.filled == len(model.table.slots))
    if model.serving:
        assert all(half.owned for half in model.pending())


@pytest.fixture
def serving(cold_load: ColdLoad) -> Iterator[DeepseekV2ForCausalLM]:
    """A model that answers with the weights A, and whose invariants are checked at the end."""
    model = make_model()
    model.load_weights(A.items())
    assert model.ready
    assert_bytes(model, cold_load(CONFIG, A, torch.bfloat16))
    yield model
    check(model)


@st.composite
def deliveries(draw: st.DrawFn, names: Sequence[str] = NAMES) -> list[list[str]]:
    """Any order of all names, some of them several times, cut anywhere: down to one tensor a call."""
    halves = [name for name in names if "_a_proj" in name]
    again = draw(st.lists(st.sampled_from(names) | st.sampled_from(halves), max_size=20))
    late = draw(st.lists(st.sampled_from(halves), max_size=4))
    order = draw(st.permutations([*names, *again]))
    at = draw(st.integers(0, len(order)))
    order = [*order[:at], *late, *order[at:]]
    cuts = draw(st.lists(st.integers(0, len(order)), max_size=len(order)).map(sorted))
    return [order[i:j] for i, j in itertools.pairwise([0, *cuts, len(order)]) if i < j]


many = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def deliver(
    model: DeepseekV2ForCausalLM, weights: Mapping[str, Tensor], calls: list[list[str]], version: int | None
) -> list[LoadReport]:
    reports = []
    for names in calls:
        reports.append(model.load_weights([(name, weights[name]) for name in names], version=version))
        check(model)
    return reports


def fused_of(reports: Sequence[LoadReport]) -> list[int]:
    return [number for report in reports for number in report.fused]


def assert_only_repeated(model: DeepseekV2ForCausalLM, calls: list[list[str]]) -> None:
    arrivals = [name for names in calls for name in dict.fromkeys(names)]
    for half in model.pending():
        assert arrivals.count(half.tensor) > 1, "only what came again can be waiting again"


# ------------------------------------------------------------------------------------------- the law


@many
@given(calls=deliveries(), version=st.sampled_from([None, 0, 7]))
def test_any_delivery_into_an_empty_model(calls: list[list[str]], version: int | None, cold_load: ColdLoad) -> None:
    model = make_model()
    reports = deliver(model, A, calls, version)

    assert_bytes(model, cold_load(CONFIG, A, torch.bfloat16))
    assert model.ready
    if version is None:  # what comes again once it serves is a new update, whose halves wait for one another
        assert set(fused_of(reports)) == set(LAYERS)
        assert_only_repeated(model, calls)
    else:
        assert sorted(fused_of(reports)) == LAYERS, "each pair is told exactly once"
        assert model.pending() == ()


@many
@given(calls=deliveries())
def test_any_delivery_over_a_serving_model(calls: list[list[str]], cold_load: ColdLoad) -> None:
    model = make_model()
    model.load_weights(A.items())
    reports = deliver(model, B, calls, version=7)

    assert_bytes(model, cold_load(CONFIG, B, torch.bfloat16))
    assert sorted(fused_of(reports)) == LAYERS, "each pair is told exactly once"
    assert model.ready
    assert model.pending() == ()


@many
@given(calls=deliveries())
def test_a_rolling_delivery_over_a_serving_model(calls: list[list[str]], cold_load: ColdLoad) -> None:
    """Without versions a repetition is a new update: what is complete is B's, and what waits is the same again."""
    model = make_model()
    model.load_weights(A.items())
    reports = deliver(model, B, calls, version=None)

    assert_bytes(model, cold_load(CONFIG, B, torch.bfloat16))
    assert set(fused_of(reports)) == set(LAYERS)
    assert_only_repeated(model, calls)


@many
@given(order=st.permutations([(version, name) for version in (5, 6) for name in NAMES]))
def test_two_versions_interleaved_never_mix(order: list[tuple[int, str]], cold_load: ColdLoad) -> None:
    """After every single tensor, each pair in the rows is whole and of one origin: A's, version 5's or version 6's."""
    model = make_model()
    model.load_weights(A.items())
    weights = {5: B, 6: random_checkpoint(CONFIG, 3)}
    origins = {
        number: [torch.cat([w[layer(number, Q_A)], w[layer(number, KV_A)]]) for w in (A, weights[5], weights[6])]
        for number in LAYERS
    }
    for version, name in order:
        try:
            model.load_weights([(name, weights[version][name])], version=version)
        except StaleError:
            assert version == 5
        for number, whole in origins.items():
            rows = model.generation.parameters[layer(number, FUSED)]
            assert any(rows.equal(origin) for origin in whole)
        check(model)

    assert_bytes(model, cold_load(CONFIG, weights[6], torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_has_another_dtype_is_cast(dtype: torch.dtype, cold_load: ColdLoad) -> None:
    model = make_model(dtype=dtype)
    model.load_weights(A.items())

    assert_bytes(model, cold_load(CONFIG, A, dtype))
    bias = layer(2, "mlp.gate.e_score_correction_bias")
    assert model.generation.parameters[bias].dtype == torch.float32


def test_b_over_a_over_b_at_fixed_addresses(cold_load: ColdLoad) -> None:
    model = make_model()
    addresses = {name: parameter.data_ptr() for name, parameter in model.generation.parameters.items()}
    for version in range(30):
        weights = (A, B)[version % 2]
        model.load_weights(weights.items(), version=version)
        assert_bytes(model, cold_load(CONFIG, weights, torch.bfloat16))

    assert {name: parameter.data_ptr() for name, parameter in model.generation.parameters.items()} == addresses
    assert all(address % 4096 == 0 for address in addresses.values())


# ------------------------------------------------------------------------------------- halves that wait


def test_a_half_waits_and_nothing_changes(serving: DeepseekV2ForCausalLM, cold_load: ColdLoad) -> None:
    report = serving.load_weights([(layer(1, Q_A), B[layer(1, Q_A)])], version=3)

    assert_bytes(serving, cold_load(CONFIG, A, torch.bfloat16))
    (half,) = report.pending
    assert (half.version, half.layer, half.tensor, half.owned) == (3, 1, layer(1, Q_A), True)
    assert half.missing == (layer(1, KV_A), layer(1, Q_A_BIAS), layer(1, KV_A_BIAS))
    assert half.nbytes == 4 * 6 * 2
    assert (report.loaded, report.fused) == ((), ())


def test_all_leaves_have_to_come(serving: DeepseekV2ForCausalLM) -> None:
    """Weight pair and bias pair: the rows change only when both are whole."""
    before = serving.generation.parameters[layer(0, FUSED)].clone()
    names = [layer(0, part) for part in (Q_A, KV_A, Q_A_BIAS, KV_A_BIAS)]
    for name in names[:3]:
        report = serving.load_weights([(name, B[name])], version=3)
        assert report.fused == ()
        assert serving.generation.parameters[layer(0, FUSED)].equal(before)
    report = serving.load_weights([(names[3], B[names[3]])], version=3)

    assert report.fused == (0,)
    assert serving.generation.parameters[layer(0, FUSED)].equal(torch.cat([B[names[0]], B[names[1]]]))
    assert serving.fusion.held == 0


def test_the_cache_owns_what_waits(serving: DeepseekV2ForCausalLM) -> None:
    """A sender that reuses its buffer must not reach into ours."""
    halves = [layer(0, part) for part in (Q_A, Q_A_BIAS)]
    buffers = [(name, B[name].clone()) for name in halves]
    serving.load_weights(buffers, version=1)
    for _, buffer in buffers:
        buffer.zero_()
    serving.load_weights([(layer(0, part), B[layer(0, part)]) for part in (KV_A, KV_A_BIAS)], version=1)

    rows = serving.generation.parameters[layer(0, FUSED)]
    assert rows.equal(torch.cat([B[layer(0, Q_A)], B[layer(0, KV_A)]]))


def test_a_waiting_half_that_comes_again_replaces_the_first(serving: DeepseekV2ForCausalLM) -> None:
    serving.load_weights([(layer(0, Q_A), B[layer(0, Q_A)] * 2)])
    serving.load_weights([(layer(0, Q_A), B[layer(0, Q_A)])])
    assert len(serving.pending()) == 1
    serving.load_weights([(layer(0, part), B[layer(0, part)]) for part in (KV_A, KV_A_BIAS, Q_A_BIAS)])

    rows = serving.generation.parameters[layer(0, FUSED)]
    assert rows.equal(torch.cat([B[layer(0, Q_A)], B[layer(0, KV_A)]]))


@pytest.mark.parametrize("version", [None, 3])
def test_a_half_that_comes_again_before_it_serves_is_not_told_again(version: int | None) -> None:
    model = make_model()
    names = [layer(0, part) for part in (Q_A, KV_A, Q_A_BIAS, KV_A_BIAS)]
    reports = deliver(model, A, [[name] for name in [*names, *names, names[0]]], version)

    assert fused_of(reports) == [0]


def test_before_it_serves_a_half_lies_in_its_rows_and_is_reported(cold_load: ColdLoad) -> None:
    model = make_model()
    report = model.load_weights([(layer(2, KV_A), A[layer(2, KV_A)])], version=1)

    (half,) = report.pending
    assert (half.tensor, half.owned, half.version) == (layer(2, KV_A), False, 1)
    assert model.fusion.held == 0
    assert model.generation.rows(model.table.slots[layer(2, KV_A)]).equal(A[layer(2, KV_A)].flatten())
    assert cold_load is not None


def test_halves_of_two_versions_do_not_make_a_model_ready() -> None:
    model = make_model()
    model.load_weights([(name, A[name]) for name in NAMES if name != layer(1, Q_A)], version=None)
    model.load_weights([(layer(1, Q_A), A[layer(1, Q_A)])], version=4)

    assert model.generation.filled == len(model.table.slots)
    assert not model.ready
    assert "pairs of layers 1" in model.missing_summary()
    with pytest.raises(NotReadyError, match="pairs of layers 1"):
        model(torch.tensor([[1]]))
    report = model.load_weights([(layer(1, Q_A), A[layer(1, Q_A)])], version=None)
    assert report.fused == (1,)
    assert model.ready


def test_a_half_expires_by_age() -> None:
    clock = Clock()
    model = make_model(clock=clock, fusion_max_age=60.0)
    model.load_weights(A.items())
    model.load_weights([(layer(0, Q_A), B[layer(0, Q_A)])], version=2)
    clock.now += 59
    model.load_weights([(layer(0, KV_A), B[layer(0, KV_A)]), (layer(1, KV_A), B[layer(1, KV_A)])], version=2)
    assert model.sweep() == ()
    clock.now += 1
    expired = model.sweep()

    assert [(half.tensor, half.cause, half.version) for half in expired] == [
        (layer(0, Q_A), "age", 2),
        (layer(0, KV_A), "age", 2),
    ], "an entry goes as a whole"
    assert [half.tensor for half in model.pending()] == [layer(1, KV_A)]
    check(model)
    report = model.load_weights([(layer(0, KV_A), B[layer(0, KV_A)])], version=2)
    assert report.fused == (), "what expired is gone"


def test_the_oldest_make_room_for_new_ones() -> None:
    clock = Clock()
    size = A[layer(0, KV_A)].nbytes
    model = make_model(clock=clock, fusion_max_bytes=2 * size)
    model.load_weights(A.items())
    expired: list[ExpiredHalf] = []
    for number in LAYERS:
        clock.now += 1
        report = model.load_weights([(layer(number, KV_A), B[layer(number, KV_A)])], version=2)
        expired += report.expired
        assert model.fusion.held <= 2 * size
        check(model)

    assert [(half.tensor, half.cause) for half in expired] == [(layer(0, KV_A), "bytes")]
    assert [half.layer for half in model.pending()] == [1, 2]


def test_a_half_larger_than_the_cache_is_refused(digest: Digest) -> None:
    model = make_model(fusion_max_bytes=10)
    model.load_weights(A.items())
    before = digest(model)
    with pytest.raises(FusionCacheFull, match=r"fusion\.max_bytes"):
        model.load_weights([("model.norm.weight", B["model.norm.weight"]), (layer(0, Q_A), B[layer(0, Q_A)])])

    assert digest(model) == before
    check(model)
    pair = [(layer(0, part), B[layer(0, part)]) for part in (Q_A, KV_A, Q_A_BIAS, KV_A_BIAS)]
    assert model.load_weights(pair).fused == (0,), "a whole pair needs no room"


def test_a_superseded_versions_halves_are_dropped_aloud(serving: DeepseekV2ForCausalLM) -> None:
    for version in (2, 3):
        serving.load_weights([(layer(0, Q_A), B[layer(0, Q_A)])], version=version)
    dropped = serving.drop_version(2)

    assert [(half.version, half.cause) for half in dropped] == [(2, "superseded")]
    assert [half.version for half in serving.pending()] == [3]


def test_buffers_are_used_again(serving: DeepseekV2ForCausalLM) -> None:
    """No allocation for each shard: the same memory serves half after half."""
    seen = set()
    for version in range(20):
        serving.load_weights([(layer(0, Q_A), B[layer(0, Q_A)])], version=version)
        seen.add(serving.fusion.waiting(version, 0)[serving.table.slots[layer(0, Q_A)].index].tensor.data_ptr())
        serving.drop_version(version)

    assert len(seen) == 1


# ------------------------------------------------------------------------------ refusals change nothing


def refusals() -> dict[str, tuple[Tensors, type[Exception]]]:
    good = {"model.norm.weight": B["model.norm.weight"], layer(0, Q_A): B[layer(0, Q_A)]}
    return {
        "unknown": (good | {"model.layers.0.self_attn.q_a_proj.qweight": torch.ones(1)}, WeightsError),
        "shape": (good | {layer(1, KV_A): B[layer(1, KV_A)].T.contiguous()}, WeightsError),
        "dtype": (good | {layer(1, KV_A): B[layer(1, KV_A)].to(torch.int16)}, WeightsError),
        "float8": (good | {layer(1, KV_A): B[layer(1, KV_A)].to(torch.float8_e4m3fn)}, WeightsError),
        "float64": (good | {layer(1, KV_A): B[layer(1, KV_A)].double()}, WeightsError),
        "conflict": (good | {"lm_head.weight": A["lm_head.weight"]}, ConflictError),
        "stale": (good | {layer(2, "input_layernorm.weight"): A[layer(2, "input_layernorm.weight")]}, StaleError),
    }


@pytest.mark.parametrize("case", refusals())
@pytest.mark.parametrize("serves", [True, False])
def test_a_refused_call_changes_nothing(case: str, serves: bool, digest: Digest) -> None:
    tensors, error = refusals()[case]
    model = make_model()
    if serves:
        model.load_weights(A.items())
    model.load_weights([("lm_head.weight", B["lm_head.weight"])], version=5)
    later = layer(2, "input_layernorm.weight")
    model.load_weights([(later, B[later])], version=6)
    before, waiting = digest(model), model.pending()
    with pytest.raises(error) as refused:
        model.load_weights(tensors.items(), version=5)

    assert digest(model) == before
    assert model.pending() == waiting
    check(model)
    assert list(tensors)[-1] in str(refused.value)
    assert model.ready is serves


def test_a_numbered_version_may_repeat_itself(serving: DeepseekV2ForCausalLM, digest: Digest) -> None:
    half = layer(0, Q_A)
    serving.load_weights(B.items(), version=5)
    before = digest(serving)
    report = serving.load_weights([(half, B[half]), ("lm_head.weight", B["lm_head.weight"])], version=5)

    assert (report.duplicates, report.loaded, report.fused) == ((half, "lm_head.weight"), (), ())
    assert digest(serving) == before


def test_a_waiting_half_of_a_numbered_version_may_not_change(serving: DeepseekV2ForCausalLM) -> None:
    half = layer(0, Q_A)
    serving.load_weights([(half, B[half])], version=5)
    assert serving.load_weights([(half, B[half])], version=5).duplicates == (half,)
    with pytest.raises(ConflictError, match="q_a_proj"):
        serving.load_weights([(half, A[half])], version=5)
    assert len(serving.pending()) == 1


@pytest.mark.parametrize("version", [None, 4])
def test_one_name_twice_in_a_call(version: int | None, serving: DeepseekV2ForCausalLM) -> None:
    name = "model.norm.weight"
    serving.load_weights([(name, B[name]), (name, B[name].clone())], version=version)
    assert serving.generation.parameters[name].equal(B[name])
    both = [(name, A[name]), (name, B[name])]
    if version is None:
        serving.load_weights(both)
        assert serving.generation.parameters[name].equal(B[name]), "the later one wins"
    else:
        with pytest.raises(ConflictError):
            serving.load_weights(both, version=5)


def test_nan_equals_itself_and_minus_zero_is_not_zero(serving: DeepseekV2ForCausalLM) -> None:
    name = "model.norm.weight"
    odd = torch.full((6,), float("nan"), dtype=torch.bfloat16)
    serving.load_weights([(name, odd)], version=1)
    assert serving.load_weights([(name, odd.clone())], version=1).duplicates == (name,)
    serving.load_weights([(name, torch.zeros(6, dtype=torch.bfloat16))], version=2)
    with pytest.raises(ConflictError):
        serving.load_weights([(name, -torch.zeros(6, dtype=torch.bfloat16))], version=2)


def test_skipped_tensors_are_told(serving: DeepseekV2ForCausalLM) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    report = serving.load_weights([(name, torch.ones(1))])

    assert report.skipped == ((name, "computed from the config"),)


# ------------------------------------------------------------------------------------ layout variants


def stacked(tensors: Tensors) -> Tensors:
    """The same weights with all experts of a layer in one tensor, as transformers 5 can write them."""
    made = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    prefix = layer(2, "mlp.experts.")
    pairs = [[tensors[f"{prefix}{e}.{part}.weight"] for part in ("gate_proj", "up_proj")] for e in range(2)]
    made[f"{prefix}gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
    made[f"{prefix}down_proj"] = torch.stack([tensors[f"{prefix}{e}.down_proj.weight"] for e in range(2)])
    return made


@many
@given(order=st.permutations(sorted(stacked(A))), serves=st.booleans(), version=st.sampled_from([None, 3]))
def test_stacked_experts(order: list[str], serves: bool, version: int | None, cold_load: ColdLoad) -> None:
    model = make_model()
    if serves:
        model.load_weights(A.items())
    reports = deliver(model, stacked(B), [[name] for name in order], version)

    assert_bytes(model, cold_load(CONFIG, B, torch.bfloat16))
    assert fused_of(reports) in [list(p) for p in itertools.permutations(LAYERS)]
    assert model.ready


def test_stacked_and_single_names_fill_the_same_slots(serving: DeepseekV2ForCausalLM, cold_load: ColdLoad) -> None:
    stack, single = layer(2, "mlp.experts.down_proj"), layer(2, "mlp.experts.1.down_proj.weight")
    serving.load_weights([(stack, stacked(B)[stack])], version=5)
    assert serving.load_weights([(single, B[single])], version=5).duplicates == (single,)
    assert serving.load_weights([(stack, stacked(B)[stack])], version=5).duplicates == (stack,)
    with pytest.raises(ConflictError):
        serving.load_weights([(single, A[single])], version=5)
    with pytest.raises(StaleError):
        serving.load_weights([(stack, stacked(A)[stack])], version=4)
    serving.load_weights([(single, A[single])], version=6)
    with pytest.raises(StaleError):
        serving.load_weights([(stack, stacked(A)[stack])], version=5)
    wanted = A | {
        layer(2, f"mlp.experts.{e}.down_proj.weight"): B[layer(2, f"mlp.experts.{e}.down_proj.weight")] for e in (0,)
    }
    assert_bytes(serving, cold_load(CONFIG, wanted, torch.bfloat16))


def test_a_stack_of_the_wrong_shape_is_refused(serving: DeepseekV2ForCausalLM) -> None:
    stack = layer(2, "mlp.experts.gate_up_proj")
    with pytest.raises(WeightsError, match=r"shape \[2, 6, 6\], expected|expected \[2, 6, 6\]"):
        serving.load_weights([(stack, stacked(B)[stack][:, :5])])
    with pytest.raises(WeightsError, match="no tensor"):
        serving.load_weights([(f"{stack}.weight", stacked(B)[stack])])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_router_and_its_bias_come_in_either_dtype(dtype: torch.dtype, serving: DeepseekV2ForCausalLM) -> None:
    for name in (layer(2, "mlp.gate.weight"), layer(2, "mlp.gate.e_score_correction_bias")):
        serving.load_weights([(name, B[name].to(dtype))])
        parameter = serving.generation.parameters[name]
        assert parameter.equal(B[name].to(dtype).to(parameter.dtype))


# -------------------------------------------------------------------------------------------- updates


def begin(model: DeepseekV2ForCausalLM, names: Sequence[str], version: int | None = None) -> Any:
    metas = {name: (("F32" if "correction" in name else "BF16"), tuple(A[name].shape)) for name in names}
    return model.begin(model.table.plan(metas), version, "test")  # type: ignore[arg-type]


def test_an_update_aborted_before_it_wrote_changes_nothing(serving: DeepseekV2ForCausalLM, digest: Digest) -> None:
    before = digest(serving)
    update = begin(serving, NAMES)

    assert serving.abort(update) == ()
    assert digest(serving) == before
    assert serving.ready
    assert serving.fusion.held == 0


def test_an_update_aborted_while_it_wrote_leaves_visible_holes(serving: DeepseekV2ForCausalLM) -> None:
    names = ["model.norm.weight", layer(0, Q_A)]
    update = begin(serving, names, version=3)
    with update.writing(1.0):
        update.destinations[0].tensor.zero_()

    assert serving.abort(update) == ("model.norm.weight",)
    assert not serving.ready
    assert serving.missing_summary().startswith("1 of 56 slots are missing (model.norm.weight)")
    assert serving.fusion.held == 0
    serving.load_weights([("model.norm.weight", A["model.norm.weight"])])
    assert serving.ready, "and what comes next fills them"


def test_an_update_ends_once(serving: DeepseekV2ForCausalLM) -> None:
    update = begin(serving, ["model.norm.weight"])
    with pytest.raises(RuntimeError, match="begun"):
        serving.finish(update)
    serving.abort(update)
    with pytest.raises(RuntimeError, match="aborted"):
        serving.abort(update)
    with pytest.raises(RuntimeError, match="aborted"), update.writing(1.0):
        pass


def test_destinations_are_bytes_of_the_rows(serving: DeepseekV2ForCausalLM) -> None:
    name = layer(2, "mlp.experts.1.up_proj.weight")
    update = begin(serving, [name])
    (destination,) = update.destinations
    with update.writing(1.0):
        destination.bytes[:] = B[name].view(torch.uint8).numpy().reshape(-1)
        serving.finish(update)

    assert serving.generation.parameters[layer(2, "mlp.experts.w13_weight")][1, 3:].equal(B[name])


def test_a_forward_pass_holds_off_an_update_in_place(serving: DeepseekV2ForCausalLM) -> None:
    update = begin(serving, ["model.norm.weight"])
    with (
        serving.gate.reading(1.0),
        pytest.raises(TimeoutError, match="forward passes kept"),
        update.writing(0.05),
    ):
        pass
    assert serving.abort(update) == ()
    assert serving.ready

    waiting = begin(serving, [layer(0, Q_A)], version=8)
    with serving.gate.reading(1.0), waiting.writing(0.05):
        pass
    serving.abort(waiting)


def test_readers_never_see_half_a_write() -> None:
    """Every weight of a version has the same value; a forward pass that saw two versions would show it."""
    config = make_config(bias=False)
    model = make_model(config, dtype=torch.float32)
    shapes = {name: slot.shape for name, slot in model.table.slots.items()}

    def version(value: float) -> Tensors:
        return {name: torch.full(shape, value) for name, shape in shapes.items()}

    model.load_weights(version(0.5).items())
    ids = torch.tensor([[1, 2, 3]])
    expected = {}
    for value in (0.5, -0.5):
        model.load_weights(version(value).items())
        expected[value] = model(ids)
    model.load_weights(version(0.5).items())
    wrong: list[Tensor] = []
    stop = threading.Event()
    passes = 0

    def read() -> None:
        nonlocal passes
        while not stop.is_set():
            logits = model(ids)
            passes += 1
            if not any(torch.equal(logits, good) for good in expected.values()):
                wrong.append(logits)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    deadline = time.monotonic() + 2.0
    rounds = 0
    while time.monotonic() < deadline:
        rounds += 1
        model.load_weights(version((0.5, -0.5)[rounds % 2]).items())
    stop.set()
    for reader in readers:
        reader.join(10)

    assert not wrong
    assert rounds > 10
    assert passes > 10


def test_an_empty_model_says_what_is_missing() -> None:
    model = make_model()
    with pytest.raises(NotReadyError, match=r"56 of 56 slots are missing \(layers 0-2, model\.embed_tokens\.weight"):
        model(torch.tensor([[1]]))
    model.load_weights([(name, A[name]) for name in NAMES if ".layers.1." not in name])
    with pytest.raises(NotReadyError, match=r"slots are missing \(layers 1\)"):
        model.generate(torch.tensor([[1]]))
