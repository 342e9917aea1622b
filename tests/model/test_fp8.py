"""Block-quantised checkpoints: values, not just shapes. The oracle dequantises each tensor alone, block by block."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusewire.model import DeepseekV2Config, DeepseekV2ForCausalLM, WeightsError
from fusewire.model.fp8 import by_index, dequantize, fused
from fusewire.model.fp8 import values as values_of
from fusewire.model.weights import Linear

Tensors = dict[str, Tensor]
ColdLoad = Callable[[DeepseekV2Config, Mapping[str, Tensor], torch.dtype], Tensors]

SMALL: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 19,
    "hidden_size": 192,
    "intermediate_size": 160,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "q_lora_rank": 128,
    "kv_lora_rank": 136,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 40,
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "num_experts_per_tok": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 64,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}
"""Only q_lora_rank and the experts' width are multiples of a block; kv_a has 144 rows and 2 rows of scales."""
PAIR = "model.layers.0.self_attn."
FUSED = f"{PAIR}fused_qkv_a_proj_with_mqa."
Q_A, KV_A = f"{PAIR}q_a_proj.", f"{PAIR}kv_a_proj_with_mqa."


def make_config(**changes: Any) -> DeepseekV2Config:
    return DeepseekV2Config.from_dict(json.loads(json.dumps(SMALL | changes)))


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise as the released checkpoints are: each 128x128 block divided by its largest value over 448."""
    rows, columns = weight.shape
    scale = torch.empty(-(-rows // 128), -(-columns // 128))
    raw = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    for i, j in itertools.product(range(scale.shape[0]), range(scale.shape[1])):
        block = (slice(i * 128, i * 128 + 128), slice(j * 128, j * 128 + 128))
        scale[i, j] = weight[block].abs().max() / 448
        raw[block] = (weight[block] / scale[i, j]).to(torch.float8_e4m3fn)
    return raw, scale


def dequantised_alone(raw: Tensor, scale: Tensor) -> Tensor:
    """The oracle: one block after the other."""
    out = raw.float()
    for i, j in itertools.product(range(scale.shape[0]), range(scale.shape[1])):
        out[i * 128 : i * 128 + 128, j * 128 : j * 128 + 128] *= scale[i, j]
    return out


def random_checkpoint(config: DeepseekV2Config, seed: int) -> Tensors:
    dice = torch.Generator().manual_seed(seed)
    plain = DeepseekV2ForCausalLM(config.replace(fp8=None)).table
    quantised = DeepseekV2ForCausalLM(config).table.slots
    made: Tensors = {}
    for name, slot in plain.slots.items():
        values = torch.randn(slot.shape, generator=dice) * 0.05
        scale = f"{name.removesuffix('weight')}weight_scale_inv"
        if scale in quantised:
            made[name], made[scale] = quantize(values * torch.rand(1, generator=dice).exp())
        else:
            made[name] = values if slot.leaf == "e_score_correction_bias" else values.bfloat16()
    return made


def dequantised_checkpoint(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    return {
        name: dequantised_alone(tensor, tensors[f"{name}_scale_inv"]).to(dtype)
        if tensor.dtype == torch.float8_e4m3fn
        else tensor
        for name, tensor in tensors.items()
        if not name.endswith("_scale_inv")
    }


CONFIG = make_config()
A, B = random_checkpoint(CONFIG, 1), random_checkpoint(CONFIG, 2)
NAMES = sorted(A)


def worth(model: DeepseekV2ForCausalLM) -> Tensors:
    """What each parameter is worth, scales applied."""
    parameters = model.generation.parameters
    made: Tensors = {}
    for name, parameter in parameters.items():
        if name.endswith("weight_scale_inv"):
            continue
        if parameter.dtype != torch.float8_e4m3fn:
            made[name] = parameter.float()
            continue
        scales = parameters[f"{name.removesuffix('weight')}weight_scale_inv"]
        if parameter.dim() == 2:
            made[name] = dequantised_alone(parameter, scales)
        else:
            made[name] = torch.stack([dequantised_alone(p, s) for p, s in zip(parameter, scales, strict=True)])
    return made


def assert_worth(model: DeepseekV2ForCausalLM, tensors: Tensors, cold_load: ColdLoad) -> None:
    """Kept weights are worth exactly what each tensor is worth alone; those stored dequantised are its rounding."""
    found = worth(model)
    exact = cold_load(model.config, dequantised_checkpoint(tensors, torch.float32), torch.float32)
    assert found.keys() == exact.keys()
    for name, values in found.items():
        kept = model.generation.parameters[name].dtype == torch.float8_e4m3fn
        expected = exact[name] if kept else exact[name].to(model.generation.parameters[name].dtype).float()
        assert values.equal(expected), name


# -------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (129, 127), (576, 300), (300, 576)])
@pytest.mark.parametrize("step", [1, 64, 128, 1000])
def test_dequantize_is_position_by_position(shape: tuple[int, int], step: int) -> None:
    raw, scale = quantize(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    parts = [dequantize(raw[first : first + step], scale, first) for first in range(0, shape[0], step)]

    assert torch.cat(parts).equal(dequantised_alone(raw, scale))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_kernel_is_the_same_for_every_shape(dtype: torch.dtype) -> None:
    """Traced here; made into a kernel on a GPU (test_gpu)."""
    compiled = fused("aot_eager")
    for shape in [(128, 128), (129, 127), (576, 300), (300, 576), (1, 5), (256, 128)]:
        raw, scale = quantize(torch.randn(shape, generator=torch.Generator().manual_seed(1)))
        expected = dequantised_alone(raw, scale).to(dtype)

        assert compiled(raw, scale, dtype).equal(expected)
        assert by_index(raw, scale, dtype).equal(expected)
        assert values_of(raw, scale, dtype).equal(expected)


def test_a_fused_pair_is_worth_what_its_halves_are_worth_alone() -> None:
    model = DeepseekV2ForCausalLM(CONFIG)
    model.load_weights(A.items())
    weight, scale = (
        model.generation.parameters[f"{FUSED}weight"],
        model.generation.parameters[f"{FUSED}weight_scale_inv"],
    )

    assert weight.dtype == torch.float8_e4m3fn
    assert weight.shape == (128 + 144, 192)
    assert scale.shape == (1 + 2, 2)
    halves = [dequantised_alone(A[f"{half}weight"], A[f"{half}weight_scale_inv"]) for half in (Q_A, KV_A)]
    assert dequantised_alone(weight, scale).equal(torch.cat(halves))


@pytest.mark.parametrize("q_lora_rank", [96, 192])
def test_a_pair_whose_blocks_would_shift_is_stored_dequantised(q_lora_rank: int, cold_load: ColdLoad) -> None:
    config = make_config(q_lora_rank=q_lora_rank)
    tensors = random_checkpoint(config, 3)
    model = DeepseekV2ForCausalLM(config)
    model.load_weights(tensors.items())

    assert model.generation.parameters[f"{FUSED}weight"].dtype == torch.bfloat16
    assert model.generation.parameters[f"{PAIR}q_b_proj.weight"].dtype == torch.float8_e4m3fn
    assert_worth(model, tensors, cold_load)


@pytest.mark.parametrize("keep", [True, False])
def test_all_of_a_checkpoint(keep: bool, cold_load: ColdLoad) -> None:
    model = DeepseekV2ForCausalLM(CONFIG, keep_fp8=keep)
    model.load_weights(A.items())
    kept = sum(p.dtype == torch.float8_e4m3fn for p in model.generation.parameters.values())

    assert kept == (10 if keep else 0)
    assert_worth(model, A, cold_load)


@pytest.mark.parametrize("keep", [True, False])
def test_logits_are_those_of_the_dequantised_checkpoint(keep: bool) -> None:
    ids = torch.randint(19, (2, 9), generator=torch.Generator().manual_seed(0))
    plain = DeepseekV2ForCausalLM(CONFIG.replace(fp8=None), dtype=torch.float32)
    plain.load_weights(dequantised_checkpoint(A, torch.float32).items())
    model = DeepseekV2ForCausalLM(CONFIG, dtype=torch.float32, keep_fp8=keep)
    model.load_weights(A.items())

    assert (model(ids) - plain(ids)).abs().max() < 1e-4
    assert model.generate(ids[:1], 8).equal(plain.generate(ids[:1], 8))


def test_a_large_weight_is_dequantised_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusewire.model.weights.ROWS", 128)
    raw, scale = quantize(torch.randn(300, 140, generator=torch.Generator().manual_seed(0)))
    x, bias = torch.randn(3, 140), torch.randn(300)

    found = Linear(raw, bias, scale)(x)
    assert torch.allclose(found, torch.nn.functional.linear(x, dequantised_alone(raw, scale), bias), atol=1e-5)


# ------------------------------------------------------------------------------------- in any order

many = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@many
@given(
    order=st.permutations([*NAMES, *NAMES[::7]]),
    size=st.sampled_from([1, 2, 3, 10, 100]),
    keep=st.booleans(),
    serves=st.booleans(),
)
def test_any_delivery(order: list[str], size: int, keep: bool, serves: bool, cold_load: ColdLoad) -> None:
    """Weight and scale apart, halves apart, some twice: the values of a cold load, each layer told once."""
    model = DeepseekV2ForCausalLM(CONFIG, keep_fp8=keep)
    if serves:
        model.load_weights(A.items())
    fused: list[int] = []
    for first in range(0, len(order), size):
        part = order[first : first + size]
        fused += model.load_weights([(name, B[name]) for name in part], version=4).fused
        model.fusion.check()

    assert_worth(model, B, cold_load)
    assert sorted(fused) == [0, 1]
    assert model.ready
    assert model.pending() == ()


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(
    "order",
    list(
        itertools.permutations([f"{Q_A}weight", f"{Q_A}weight_scale_inv", f"{KV_A}weight", f"{KV_A}weight_scale_inv"])
    ),
)
def test_a_layer_is_fused_when_weights_and_scales_are_in(
    order: tuple[str, ...], keep: bool, cold_load: ColdLoad
) -> None:
    model = DeepseekV2ForCausalLM(CONFIG, keep_fp8=keep)
    model.load_weights(A.items())
    for name in order[:3]:
        report = model.load_weights([(name, B[name])], version=1)
        assert report.fused == ()
        assert_worth(model, A, cold_load)
    assert model.load_weights([(order[3], B[order[3]])], version=1).fused == (0,)
    assert_worth(model, A | {name: B[name] for name in order}, cold_load)


def test_a_lone_weight_waits_for_its_scale_and_says_so() -> None:
    model = DeepseekV2ForCausalLM(CONFIG, keep_fp8=False)
    name = "model.layers.1.mlp.experts.1.up_proj.weight"
    report = model.load_weights([(name, A[name])])

    (half,) = report.pending
    assert (half.tensor, half.missing, half.owned, half.nbytes) == (name, (f"{name}_scale_inv",), True, 128 * 192)
    assert model.load_weights([(f"{name}_scale_inv", A[f"{name}_scale_inv"])]).pending == ()
    assert model.generation.filled == 2


@pytest.mark.parametrize("keep", [True, False])
def test_the_cache_owns_raw_weights(keep: bool, cold_load: ColdLoad) -> None:
    model = DeepseekV2ForCausalLM(CONFIG, keep_fp8=keep)
    model.load_weights(A.items())
    sent = {name: B[name].clone() for name in NAMES}
    for name in NAMES:
        model.load_weights([(name, sent[name])], version=2)
        sent[name].view(torch.uint8).zero_()
    assert_worth(model, B, cold_load)


# ------------------------------------------------------------------------------------------ refusals


def test_fp8_is_never_cast_without_its_scale() -> None:
    model = DeepseekV2ForCausalLM(CONFIG.replace(fp8=None))
    name = f"{Q_A}weight"
    with pytest.raises(WeightsError, match="never cast without its scale") as refused:
        model.load_weights([(name, A[name]), (f"{name}_scale_inv", A[f"{name}_scale_inv"])])
    assert {o.kind for o in refused.value.offenders} == {"wrong_dtype", "unknown_tensor"}


def test_a_plain_weight_is_not_taken_for_a_quantised_one() -> None:
    model = DeepseekV2ForCausalLM(CONFIG)
    with pytest.raises(WeightsError, match="dtype BF16, accepted F8_E4M3"):
        model.load_weights([(f"{Q_A}weight", A[f"{Q_A}weight"].to(torch.bfloat16))])


@pytest.mark.parametrize("leaf", ["qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale"])
def test_other_quantisations_are_refused_by_name(leaf: str) -> None:
    model = DeepseekV2ForCausalLM(CONFIG)
    for half in (Q_A, KV_A):
        with pytest.raises(WeightsError, match=rf"{leaf}: {leaf} belongs to a quantisation that is not supported"):
            model.load_weights([(f"{half}{leaf}", torch.ones(1))])
