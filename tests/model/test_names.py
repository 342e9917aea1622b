"""The slot table: against listings of released checkpoints, and against itself."""

from __future__ import annotations

import dataclasses
import json
import lzma
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fusewire.model import DeepseekV2Config, Offender, SlotTable, TensorMeta, WeightsError

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "config" / "models"
NAMES = ROOT / "tests" / "data" / "names"


def config(name: str) -> DeepseekV2Config:
    return DeepseekV2Config.from_dict(json.loads((CONFIGS / f"{name}.json").read_text()))


def listing(name: str) -> dict[str, TensorMeta]:
    found = {}
    with lzma.open(NAMES / f"{name}.txt.xz", "rt") as lines:
        for line in lines:
            if not line.startswith("#"):
                tensor, shape, dtype = line.split()
                found[tensor] = TensorMeta(dtype, tuple(map(int, shape.split("x"))))
    return found


@pytest.mark.parametrize(("name", "count"), [("DeepSeek-V2-Lite-Chat", 5291), ("DeepSeek-V2-236B_mscale0.707", 29102)])
def test_every_tensor_of_a_released_checkpoint_has_its_slot(name: str, count: int) -> None:
    released = listing(name)
    table = SlotTable.build(config(name))
    plan = table.plan(released)

    assert len(released) == count
    assert {slot.name for slot in plan.slots} == set(table.slots) == set(released)
    assert plan.skipped == ()


@pytest.mark.parametrize("keep_fp8", [True, False])
def test_every_tensor_of_v3_has_its_slot_or_its_reason(keep_fp8: bool) -> None:
    """91,991 names, scales included; the 62nd layer is skipped as a whole."""
    released = listing("DeepSeek-V3")
    table = SlotTable.build(config("DeepSeek-V3"), keep_fp8=keep_fp8)
    plan = table.plan(released)

    assert len(released) == 91991
    assert {slot.name for slot in plan.slots} == set(table.slots)
    assert len(plan.slots) + len(plan.skipped) == 91991
    assert all(name.startswith("model.layers.61.") for name, _ in plan.skipped)
    assert {reason for _, reason in plan.skipped} == {"multi-token prediction layer, not used for decoding"}


@pytest.mark.parametrize("keep_fp8", [True, False])
@pytest.mark.parametrize(
    "name",
    [
        "DeepSeek-V2-Lite-Chat",
        "DeepSeek-V2-236B_mscale1.0",
        "DeepSeek-V3",
        "DeepSeek-R1",
        "Kimi-K2-Instruct",
        "Moonlight-16B-A3B-Instruct",
    ],
)
def test_the_table_is_what_the_architecture_prescribes(name: str, keep_fp8: bool) -> None:
    """Against names written down from the modules of the architecture, with no code of the table in them."""
    prescribed = dict(reference_names(json.loads((CONFIGS / f"{name}.json").read_text())))
    table = SlotTable.build(config(name), keep_fp8=keep_fp8)
    plan = table.plan(prescribed)

    assert {slot.name for slot in plan.slots} == set(table.slots)
    assert len(plan.slots) + len(plan.skipped) == len(prescribed)
    table.check()


def reference_names(c: dict[str, Any]) -> Iterator[tuple[str, TensorMeta]]:  # noqa: C901 - a list, not a decision
    """Every tensor that a checkpoint of this config has: name, dtype and shape."""
    hidden, heads, kv_rank = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    head, rope, value = c["qk_nope_head_dim"] + c["qk_rope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    fp8 = (c.get("quantization_config") or {}).get("quant_method") == "fp8"

    def plain(name: str, *shape: int) -> Iterator[tuple[str, TensorMeta]]:
        yield f"{name}.weight", TensorMeta("BF16", shape)

    def linear(name: str, rows: int, columns: int) -> Iterator[tuple[str, TensorMeta]]:
        if not fp8:
            yield from plain(name, rows, columns)
            return
        yield f"{name}.weight", TensorMeta("F8_E4M3", (rows, columns))
        yield f"{name}.weight_scale_inv", TensorMeta("F32", (-(-rows // 128), -(-columns // 128)))

    def mlp(name: str, width: int) -> Iterator[tuple[str, TensorMeta]]:
        yield from linear(f"{name}.gate_proj", width, hidden)
        yield from linear(f"{name}.up_proj", width, hidden)
        yield from linear(f"{name}.down_proj", hidden, width)

    def layer(number: int) -> Iterator[tuple[str, TensorMeta]]:
        prefix = f"model.layers.{number}"
        attention = f"{prefix}.self_attn"
        if c.get("q_lora_rank"):
            yield from linear(f"{attention}.q_a_proj", c["q_lora_rank"], hidden)
            yield from plain(f"{attention}.q_a_layernorm", c["q_lora_rank"])
            yield from linear(f"{attention}.q_b_proj", heads * head, c["q_lora_rank"])
        else:
            yield from linear(f"{attention}.q_proj", heads * head, hidden)
        yield from linear(f"{attention}.kv_a_proj_with_mqa", kv_rank + rope, hidden)
        yield from plain(f"{attention}.kv_a_layernorm", kv_rank)
        yield from linear(f"{attention}.kv_b_proj", heads * (head - rope + value), kv_rank)
        yield from linear(f"{attention}.o_proj", hidden, heads * value)
        if number < c["first_k_dense_replace"]:
            yield from mlp(f"{prefix}.mlp", c["intermediate_size"])
        else:
            for expert in range(c["n_routed_experts"]):
                yield from mlp(f"{prefix}.mlp.experts.{expert}", c["moe_intermediate_size"])
            yield from mlp(f"{prefix}.mlp.shared_experts", c["moe_intermediate_size"] * c["n_shared_experts"])
            yield from plain(f"{prefix}.mlp.gate", c["n_routed_experts"], hidden)
            if c["model_type"] != "deepseek_v2":
                bias = TensorMeta("F32", (c["n_routed_experts"],))
                yield f"{prefix}.mlp.gate.e_score_correction_bias", bias
        yield from plain(f"{prefix}.input_layernorm", hidden)
        yield from plain(f"{prefix}.post_attention_layernorm", hidden)

    for name in ("model.embed_tokens", "lm_head"):
        yield from plain(name, c["vocab_size"], hidden)
    yield from plain("model.norm", hidden)
    for number in range(c["num_hidden_layers"] + c.get("num_nextn_predict_layers", 0)):
        yield from layer(number)


ALL_CONFIGS = [
    path.stem
    for path in sorted(CONFIGS.glob("*.json"))
    if json.loads(path.read_text()).get("model_type") in {"deepseek_v2", "deepseek_v3", "kimi_k2"}
]


@pytest.mark.parametrize("name", ALL_CONFIGS)
@pytest.mark.parametrize(
    "changes", [{}, {"attention_bias": True}, {"tie_word_embeddings": True, "n_shared_experts": 3}]
)
def test_each_element_is_filled_exactly_once(name: str, changes: dict[str, Any]) -> None:
    SlotTable.build(config(name).replace(**changes)).check()


def test_check_finds_holes_and_overlaps() -> None:
    for shift in (-1, 1):
        table = SlotTable.build(config("DeepSeek-V2-Lite-Chat"))
        name = "model.layers.1.mlp.experts.3.up_proj.weight"
        slot = table.slots[name]
        table.slots[name] = dataclasses.replace(slot, offset=slot.offset + shift)
        with pytest.raises(AssertionError, match="w13_weight"):
            table.check()


def test_the_table_of_v3_is_built_fast_and_small() -> None:
    """Loosely, since machines differ: 91 thousand slots in well under the time of one shard."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    table = SlotTable.build(config("DeepSeek-V3"))

    assert time.perf_counter() - begin < 10
    assert len(table.slots) == 90427
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


def test_a_pair_is_rows_of_one_parameter() -> None:
    table = SlotTable.build(config("DeepSeek-V2-236B_mscale1.0"))
    q_a = table.slots["model.layers.7.self_attn.q_a_proj.weight"]
    kv_a = table.slots["model.layers.7.self_attn.kv_a_proj_with_mqa.weight"]
    spec = table.parameters["model.layers.7.self_attn.fused_qkv_a_proj_with_mqa.weight"]

    assert (q_a.parameter, q_a.offset) == (spec.name, 0)
    assert (kv_a.parameter, kv_a.offset) == (spec.name, 1536 * 5120)
    assert spec.shape == (1536 + 576, 5120)
    assert table.fusions[7].slots == (q_a, kv_a)
    assert len(table.fusions) == 60


def test_without_q_lora_rank_there_is_nothing_to_fuse() -> None:
    table = SlotTable.build(config("Moonlight-16B-A3B-Instruct"))

    assert table.fusions == {}
    assert "model.layers.0.self_attn.q_proj.weight" in table.slots


def test_a_bias_belongs_to_the_pair() -> None:
    table = SlotTable.build(config("DeepSeek-V2-236B_mscale1.0").replace(attention_bias=True))

    assert [(slot.part, slot.leaf) for slot in table.fusions[0].slots] == [
        ("q_a_proj", "weight"),
        ("kv_a_proj_with_mqa", "weight"),
        ("q_a_proj", "bias"),
        ("kv_a_proj_with_mqa", "bias"),
    ]


def test_all_offenders_are_listed() -> None:
    table = SlotTable.build(config("DeepSeek-V2-Lite-Chat"))
    norm = TensorMeta("BF16", (2048,))
    with pytest.raises(WeightsError) as refused:
        table.plan(
            {
                "model.norm.weight": norm,
                "model.layers.0.input_layernorm.weight": TensorMeta("BF16", (2047,)),
                "model.layers.1.input_layernorm.weight": TensorMeta("F8_E4M3", (2048,)),
                "model.layers.0.self_attn.q_a_proj.weight": norm,
                "model.layers.2.input_layernorm.weight.extra": norm,
            }
        )

    assert [(o.name, o.kind) for o in refused.value.offenders] == [
        ("model.layers.0.input_layernorm.weight", "wrong_shape"),
        ("model.layers.0.self_attn.q_a_proj.weight", "unknown_tensor"),
        ("model.layers.1.input_layernorm.weight", "wrong_dtype"),
        ("model.layers.2.input_layernorm.weight.extra", "unknown_tensor"),
    ]
    assert all(isinstance(o, Offender) and o.name in str(refused.value) for o in refused.value.offenders)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", "computed"),
        ("model.layers.61.eh_proj.weight", "multi-token"),
        ("model.layers.62.eh_proj.weight", None),
        ("model.layers.60.eh_proj.weight", None),
        ("model.layers.061x.eh_proj.weight", None),
        ("model.layers.6.self_attn.q_a_proj.weight.rotary_emb", None),
        ("lm_head.weight", None),
    ],
)
def test_skipping_goes_by_name_segments(name: str, reason: str | None) -> None:
    found = SlotTable.build(config("DeepSeek-V3")).skip_reason(name)

    assert (found is None) if reason is None else (found is not None and reason in found)


def test_a_tied_lm_head_is_skipped_with_that_reason() -> None:
    table = SlotTable.build(config("DeepSeek-V2-Lite-Chat").replace(tie_word_embeddings=True))

    assert table.skip_reason("lm_head.weight") == "tied to model.embed_tokens.weight"
    assert "lm_head.weight" not in table.parameters


def test_stacked_experts_lie_gate_before_up(golden_config: Callable[[str], DeepseekV2Config]) -> None:
    table = SlotTable.build(golden_config("v3"))
    offsets = [
        table.slots[f"model.layers.1.mlp.experts.{expert}.{part}.weight"].offset
        for expert in range(8)
        for part in ("gate_proj", "up_proj")
    ]

    assert offsets == [n * 24 * 64 for n in range(16)]
