"""Routing where scores are equal, or equal up to rounding: the oracle is transformers' router on the same numbers.

A tie is no corner case: experts that a trainer has just duplicated, or a router at its initial zeros, score alike for
every token, and a choice that differs from the trainer's sends tokens to experts that were trained on others.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV2Config as OracleV2Config
from transformers import DeepseekV3Config as OracleV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from fusewire.model import DeepseekV2Config
from fusewire.model.moe import route
from fusewire.model.weights import Moe

HIDDEN, EXPERTS, TOKENS = 32, 16, 400
SHARED: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 8,
    "n_shared_experts": 1,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "vocab_size": 16,
    "max_position_embeddings": 64,
    "intermediate_size": 16,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
METHODS: dict[str, dict[str, Any]] = {
    "greedy": {"model_type": "deepseek_v2", "topk_method": "greedy", "norm_topk_prob": False},
    "group_limited_greedy": {
        "model_type": "deepseek_v2",
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": False,
    },
    "noaux_tc": {
        "model_type": "deepseek_v3",
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
    },
    "noaux_tc, one group": {
        "model_type": "deepseek_v3",
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
    },
}


def near_ties() -> Tensor:
    """A gate in which every expert has doubles: exact ones in its group and in others, and some one bit away."""
    generator = torch.Generator().manual_seed(0)
    gate = torch.randn(4, HIDDEN, generator=generator).repeat(4, 1)[torch.randperm(EXPERTS, generator=generator)]
    for expert in range(0, EXPERTS, 3):
        column = int(torch.randint(HIDDEN, (1,), generator=generator))
        gate[expert, column] = torch.nextafter(gate[expert, column], torch.tensor(10.0))
    return gate


GATES = {
    "all alike": torch.zeros(EXPERTS, HIDDEN),
    "pairs": torch.randn(EXPERTS // 2, HIDDEN, generator=torch.Generator().manual_seed(1)).repeat_interleave(2, 0),
    "doubles in other groups": torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(2)).repeat(4, 1),
    "one bit away": near_ties(),
}


def oracle(method: str, gate: Tensor, bias: Tensor) -> Any:
    keys = {**SHARED, **{key: value for key, value in METHODS[method].items() if key != "model_type"}}
    router: Any
    if METHODS[method]["model_type"] == "deepseek_v2":
        router = DeepseekV2TopkRouter(OracleV2Config(**keys))
    else:
        router = DeepseekV3TopkRouter(OracleV3Config(**keys))
        router.e_score_correction_bias.data = bias
    router.weight.data = gate
    return router


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("biased", [False, True])
def test_the_choice_among_equals_is_the_oracles(method: str, gate: str, biased: bool) -> None:
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(3))
    is_v3 = METHODS[method]["model_type"] == "deepseek_v3"
    bias = torch.tensor([0.0, 0.0, 0.1, 0.1]).repeat(EXPERTS // 4) if biased else torch.zeros(EXPERTS)
    config = DeepseekV2Config.from_dict({**SHARED, **METHODS[method], "torch_dtype": "float32"})
    weights = Moe(GATES[gate], bias if is_v3 else None, (), (), None)

    indices, scale = route(config, weights, x)
    with torch.no_grad():
        _, expected_scale, expected = oracle(method, GATES[gate], bias)(x)

    mine, order = indices.sort(-1)
    theirs, oracle_order = expected.sort(-1)
    assert mine.equal(theirs)
    assert torch.allclose(scale.gather(-1, order), expected_scale.gather(-1, oracle_order), atol=1e-6)
    near = gate != "all alike" and (torch.nn.functional.linear(x, GATES[gate]).sort(-1).values.diff() < 1e-6).any(-1)
    assert gate == "all alike" or near.float().mean() > 0.99  # type: ignore[union-attr]  # the test tests ties
