"""The public surface where it is least comfortable: failed updates, names given twice, threads beside each other."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewire.model import (
    ConflictError,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    NotReadyError,
    TensorMeta,
    Update,
    WeightsError,
)

TIMEOUT = 10.0
PLAIN: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 11,
    "hidden_size": 6,
    "intermediate_size": 5,
    "moe_intermediate_size": 3,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "q_lora_rank": 4,
    "kv_lora_rank": 3,
    "qk_nope_head_dim": 2,
    "qk_rope_head_dim": 2,
    "v_head_dim": 2,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "first_k_dense_replace": 1,
    "attention_bias": True,
    "max_position_embeddings": 64,
    "torch_dtype": "float32",
}
QUANTISED = PLAIN | {
    "attention_bias": False,
    "q_lora_rank": 128,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}
IDS = torch.tensor([[1, 2, 3]])
NORM, STACK = "model.norm.weight", "model.layers.1.mlp.experts.down_proj"
PAIR = "model.layers.0.self_attn."
Q_A, KV_A = f"{PAIR}q_a_proj.", f"{PAIR}kv_a_proj_with_mqa."


def checkpoint(model: DeepseekV2ForCausalLM, seed: int) -> dict[str, Tensor]:
    dice = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(slot.shape, generator=dice).to(
            torch.float8_e4m3fn if "F8_E4M3" in slot.dtypes else torch.float32
        )
        for name, slot in model.table.slots.items()
    }


def serving(config: dict[str, Any] = PLAIN, **options: Any) -> tuple[DeepseekV2ForCausalLM, dict[str, Tensor]]:
    """A model that answers with version 1, and the tensors of version 2."""
    model = DeepseekV2ForCausalLM(DeepseekV2Config.from_dict(config), **options)
    model.load_weights(checkpoint(model, 1).items(), version=1)
    assert model.ready
    return model, checkpoint(model, 2)


def begin(model: DeepseekV2ForCausalLM, tensors: dict[str, Tensor], *names: str, version: int | None = 2) -> Update:
    dtypes = {torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3"}
    metas = {name: TensorMeta(dtypes[tensors[name].dtype], tuple(tensors[name].shape)) for name in names}
    return model.begin(model.table.plan(metas), version, "test")


def break_off(update: Update) -> None:
    """Write what is not meant to be there, and fail."""
    with contextlib.suppress(ZeroDivisionError), update.writing(TIMEOUT):
        for destination in update.destinations:
            destination.tensor.view(torch.uint8).fill_(0x33)
        raise ZeroDivisionError


# ------------------------------------------------------------------------------------ failed updates


def test_no_forward_pass_sees_a_failed_update_that_is_not_given_up_yet() -> None:
    """The gate is free as soon as copying failed, and readers queue for it: they come before `abort`."""
    model, new = serving()
    update = begin(model, new, NORM)
    break_off(update)
    with pytest.raises(NotReadyError, match=r"1 of \d+ slots are missing \(model\.norm\.weight\)"):
        model(IDS)

    assert model.abort(update) == (NORM,)
    model.load_weights([(NORM, new[NORM])], version=2)
    assert model.ready
    assert model(IDS).isfinite().all()


def test_a_timeout_of_the_source_is_not_taken_for_the_gates() -> None:
    model, new = serving()
    update = begin(model, new, NORM)
    with pytest.raises(TimeoutError, match="disk"), update.writing(TIMEOUT):
        raise TimeoutError("the disk did not answer")

    assert model.abort(update) == (NORM,)
    assert not model.ready


def test_a_half_that_waited_while_it_served_still_meets_its_partners_after_a_failure() -> None:
    """Parts of one pair wait in one place: all in the cache, since the first of them does."""
    model, new = serving()
    model.load_weights([(f"{Q_A}weight", new[f"{Q_A}weight"])], version=2)
    update = begin(model, new, NORM)
    break_off(update)
    model.abort(update)
    fused: list[int] = []
    for name in (f"{KV_A}weight", f"{Q_A}bias", f"{KV_A}bias", NORM):
        assert not model.ready
        fused += model.load_weights([(name, new[name])], version=2).fused

    assert fused == [0]
    assert model.ready
    assert model.pending() == ()
    rows = model.generation.parameters[f"{PAIR}fused_qkv_a_proj_with_mqa.weight"]
    assert rows.equal(torch.cat([new[f"{Q_A}weight"], new[f"{KV_A}weight"]]))


@pytest.mark.parametrize("keep_fp8", [True, False])
def test_a_failed_fp8_pair_leaves_no_stamp_over_scales_of_another_version(keep_fp8: bool) -> None:
    """Scales that waited are put in place before the last weight is copied; if that fails, the old are gone."""
    model, new = serving(QUANTISED, keep_fp8=keep_fp8)
    old = checkpoint(model, 1)
    before = {name: parameter.clone() for name, parameter in model.generation.parameters.items()}
    parts = [f"{half}{leaf}" for half in (Q_A, KV_A) for leaf in ("weight", "weight_scale_inv")]
    for name in parts[1:]:
        model.load_weights([(name, new[name])], version=2)
    update = begin(model, new, parts[0])
    break_off(update)
    unfilled = model.abort(update)

    assert {parts[0], parts[1], parts[3]} <= set(unfilled)
    assert not model.ready
    model.drop_version(2)
    for name in unfilled:
        model.load_weights([(name, old[name])], version=1)
    assert model.ready
    for name, parameter in model.generation.parameters.items():
        assert parameter.reshape(-1).view(torch.uint8).equal(before[name].reshape(-1).view(torch.uint8)), name


def test_what_was_given_up_for_a_call_that_failed_is_told_by_the_next_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusewire.model.modeling.GATE_TIMEOUT", 0.01)
    model, new = serving()
    first, second = f"{KV_A}weight", f"{KV_A}weight".replace("layers.0", "layers.1")
    model.fusion.max_bytes = new[first].nbytes
    model.load_weights([(first, new[first])], version=2)
    with model.gate.reading(TIMEOUT), pytest.raises(TimeoutError, match="forward passes"):
        model.load_weights([(second, new[second]), (NORM, new[NORM])], version=2)

    assert [(half.tensor, half.cause) for half in model.sweep()] == [(first, "bytes")]
    assert model.sweep() == ()
    assert model.ready


@pytest.mark.parametrize("version", [None, 2])
def test_a_completing_pair_is_not_given_up_for_a_half_beside_it(version: int | None) -> None:
    """Its waiting half would be gone when the partner is placed, and the pair in the rows of two origins."""
    model, new = serving()
    old = checkpoint(model, 1)
    first = [f"{half}{leaf}" for half in (Q_A, KV_A) for leaf in ("weight", "bias")]
    other = f"{KV_A}weight".replace("layers.0", "layers.1")
    for name in first[:3]:
        model.load_weights([(name, new[name])], version=version)
    model.fusion.max_bytes = model.fusion.held
    with contextlib.suppress(Exception):  # whatever becomes of it
        model.load_weights([(first[3], new[first[3]]), (other, new[other])], version=version)

    rows = model.generation.parameters[f"{PAIR}fused_qkv_a_proj_with_mqa.bias"]
    pairs = [torch.cat([w[f"{Q_A}bias"], w[f"{KV_A}bias"]]) for w in (old, new)]
    assert any(rows.equal(pair) for pair in pairs)
    assert model.load_weights([(first[3], new[first[3]])], version=version).fused == (0,)
    assert rows.equal(pairs[1])


# ----------------------------------------------------------------------------------- names given twice


def test_a_bad_tensor_is_not_hidden_by_a_good_one_of_its_name() -> None:
    model, new = serving()
    bad = [torch.ones(3), new[NORM].to(torch.int8)]
    with pytest.raises(WeightsError) as refused:
        model.load_weights([(NORM, bad[0]), (NORM, bad[1]), ("x", bad[0]), (NORM, new[NORM])])

    kinds = [(offender.name, offender.kind) for offender in refused.value.offenders]
    assert kinds == [(NORM, "wrong_dtype"), (NORM, "wrong_shape"), ("x", "unknown_tensor")]
    assert model.generation.parameters[NORM].equal(checkpoint(model, 1)[NORM])


def test_a_stack_given_twice_in_a_numbered_call_has_to_be_the_same() -> None:
    model, _ = serving()
    stack = torch.randn(model.table.stacks[STACK].shape, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ConflictError, match=STACK):
        model.load_weights([(STACK, stack + 1), (STACK, stack)], version=2)
    assert model.load_weights([(STACK, stack.clone()), (STACK, stack)], version=2).loaded == (STACK,)


# ------------------------------------------------------------------------------------- other threads


def test_what_is_missing_can_be_asked_by_any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request is refused by another thread than the one that loads, and the cache belongs to that one alone."""
    model, new = serving()
    model.load_weights([(f"{Q_A}weight", new[f"{Q_A}weight"])], version=2)
    break_off(begin(model, new, NORM, f"{Q_A}bias", f"{KV_A}weight", f"{KV_A}bias"))

    def pending() -> None:
        raise AssertionError("the cache was asked")

    monkeypatch.setattr(model.fusion, "pending", pending)
    with pytest.raises(NotReadyError, match=r"model\.norm\.weight\); the pairs of layers 0 are not whole"):
        model(IDS)
