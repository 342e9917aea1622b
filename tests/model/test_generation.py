"""One set of weights in memory: addresses, bytes and stamps."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from fusewire.model import TORCH_DTYPES, DeepseekV2Config, Generation, SlotTable, Stamp

CONFIG: dict[str, Any] = {
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
    "n_shared_experts": 1,
    "num_experts_per_tok": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 64,
    "torch_dtype": "bfloat16",
}
STACK = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.fixture
def generation() -> Generation:
    return Generation(SlotTable.build(DeepseekV2Config.from_dict(CONFIG)))


def test_each_parameter_has_pages_of_its_own(generation: Generation) -> None:
    spans = sorted((p.data_ptr(), p.data_ptr() + p.nbytes) for p in generation.parameters.values())

    assert all(start % 4096 == 0 for start, _ in spans)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert spans[-1][1] - spans[0][0] <= generation.nbytes


def test_parameters_are_as_the_table_says(generation: Generation) -> None:
    for name, spec in generation.table.parameters.items():
        parameter = generation.parameters[name]
        assert (tuple(parameter.shape), parameter.dtype) == (spec.shape, TORCH_DTYPES[spec.dtype])
        assert parameter.is_contiguous()


def test_bytes_and_rows_are_the_same_memory(generation: Generation) -> None:
    """Written slot by slot through either, all of the storage that parameters show is written once."""
    for number, slot in enumerate(generation.table.slots.values()):
        rows, memory = generation.rows(slot), generation.bytes(slot)
        assert memory.ctypes.data == rows.data_ptr()
        assert memory.nbytes == rows.nbytes == slot.numel * rows.element_size()
        assert not memory.any(), "nobody has written here"
        memory[:] = number % 255 + 1
        assert bool((rows.view(torch.uint8) == number % 255 + 1).all())
    for parameter in generation.parameters.values():
        assert bool(parameter.reshape(-1).view(torch.uint8).all())


def test_stamps_are_counted_once(generation: Generation) -> None:
    slot = generation.table.slots["model.norm.weight"]
    assert len(generation.missing()) == len(generation.table.slots)
    for stage in (1, 2):
        generation.stamp(slot, Stamp(None, "shard", 0.0, stage))
        assert generation.filled == 1
        assert generation.carries(slot, stage)
        assert not generation.carries(slot, 3)
    assert slot not in generation.missing()
    for _ in range(2):
        generation.clear(slot)
        assert generation.filled == 0
    assert not generation.carries(slot, 2)
    assert slot in generation.missing()


def test_a_stack_is_whole_when_all_its_slots_are_of_one_version(generation: Generation) -> None:
    stack = generation.table.stacks[STACK]
    parts = [slot for slot in generation.table.slots.values() if slot.index in stack.indices]
    assert len(parts) == 4
    generation.stamp(stack, Stamp(None, "shard", 0.0, 1))
    assert generation.filled == 4
    assert generation.carries(stack, 1)
    for part in parts:
        generation.stamp(part, Stamp(None, "shard", 0.0, 2))
        assert not generation.carries(stack, 1)
        assert generation.carries(stack, 2) is (part is parts[-1])
    generation.clear(parts[1])
    assert not generation.carries(stack, 2)
    assert generation.filled == 3
