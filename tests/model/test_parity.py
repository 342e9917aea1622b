"""The oracle is transformers: float32 logits, routing and greedy tokens of the golden checkpoints."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fusewire.model import DeepseekV2Config, DeepseekV2ForCausalLM
from fusewire.model.attention import rms_norm
from fusewire.model.cache import LatentCache
from fusewire.model.decoder import forward
from fusewire.model.moe import route
from fusewire.model.rope import Rope
from fusewire.model.weights import ModelWeights, Moe

SHIPPED = ["v2", "v2lite", "v3"]
FAMILIES = [*SHIPPED, "v2-greedy", "moonlight", "kimi", "v3-fp8"]
TOLERANCE = 1e-4

Config = Callable[[str], DeepseekV2Config]
Values = Callable[[str], dict[str, Tensor]]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(family: str, golden_config: Config, shard_paths: Callable[[str], list[Path]]) -> DeepseekV2ForCausalLM:
    """Loaded shard by shard through the public surface."""
    made = DeepseekV2ForCausalLM(golden_config(family), dtype=torch.float32)
    for path in shard_paths(family):
        made.load_weights(load_file(path).items())
    assert made.ready
    return made


@pytest.fixture(scope="module")
def values(family: str, golden_values: Values) -> dict[str, Tensor]:
    return golden_values(family)


@pytest.mark.parametrize("prompt", ["a", "b"])
def test_logits(model: DeepseekV2ForCausalLM, values: dict[str, Tensor], prompt: str) -> None:
    logits = model(values[f"ids.{prompt}"])[0]

    assert logits.dtype == torch.float32
    assert (logits - values[f"logits.{prompt}"]).abs().max() < TOLERANCE


def test_greedy_tokens(model: DeepseekV2ForCausalLM, values: dict[str, Tensor]) -> None:
    generated = model.generate(values["ids.a"], max_new_tokens=24)[0, -24:]

    assert generated.tolist() == values["gen.a"].tolist()


@pytest.mark.parametrize("family", SHIPPED, indirect=True)
def test_routing(model: DeepseekV2ForCausalLM, values: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Indices and weights of every token of prompt b, in each MoE layer."""
    seen: list[tuple[Tensor, Tensor]] = []

    def spy(config: DeepseekV2Config, weights: Moe, x: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(route(config, weights, x))
        return seen[-1]

    monkeypatch.setattr("fusewire.model.moe.route", spy)
    model(values["ids.b"])
    assert len(seen) == 2
    for layer, (indices, weights) in enumerate(seen, 1):
        expected, at = values[f"router_idx.{layer}"].sort(-1)
        found, mine = indices.sort(-1)
        assert found.equal(expected)
        difference = weights.gather(-1, mine) - values[f"router_w.{layer}"].gather(-1, at)
        assert difference.abs().max() < TOLERANCE


@pytest.mark.parametrize("pieces", [[1] * 28, [28], [5, 1, 9, 13], [27, 1]])
def test_cached_decode_equals_full_prefill(
    model: DeepseekV2ForCausalLM, values: dict[str, Tensor], pieces: list[int]
) -> None:
    ids = values["ids.b"]
    config = model.config
    weights = ModelWeights.from_parameters(config, model.generation.parameters)
    cache = LatentCache(config, 1, sum(pieces), torch.float32, torch.device("cpu"))
    rope = Rope(config, torch.device("cpu"))
    logits = [forward(config, weights, rope, piece, cache) for piece in ids.split(pieces, 1)]

    assert (torch.cat(logits, 1)[0] - values["logits.b"]).abs().max() < TOLERANCE
    assert cache.length == 28


def test_a_batch_equals_its_rows(model: DeepseekV2ForCausalLM, values: dict[str, Tensor]) -> None:
    rows = torch.cat([values["ids.a"], values["ids.b"][:, :12]])
    together = model(rows)
    apart = torch.cat([model(rows[:1]), model(rows[1:])])

    assert (together - apart).abs().max() < TOLERANCE


@pytest.mark.parametrize("family", SHIPPED, indirect=True)
def test_bfloat16_runs_and_is_near(
    family: str, golden_config: Config, golden_tensors: Values, values: dict[str, Tensor]
) -> None:
    model = DeepseekV2ForCausalLM(golden_config(family))
    model.load_weights(golden_tensors(family).items())
    logits = model(values["ids.a"])[0]

    assert model.dtype == torch.bfloat16
    # Beside the reference's own bfloat16 logits: twice their distance from float32 is allowed.
    own = (values["logits_bf16.a"] - values["logits.a"]).abs().mean()
    assert (logits - values["logits.a"]).abs().mean() < 2 * own + 1e-3


def test_near_ties_are_broken_by_scores_alone(golden_config: Config) -> None:
    """Experts whose scores are equal may be chosen in any order; the weights are the same."""
    config = golden_config("v3")
    weights = Moe(torch.ones(8, 64), torch.zeros(8), (), (), None)
    _, scale = route(config, weights, torch.randn(5, 64, generator=torch.Generator().manual_seed(0)))

    assert torch.allclose(scale, torch.full_like(scale, 2.5 / 3))


def test_rms_norm_works_in_float32() -> None:
    x = torch.full((1, 4), 300.0, dtype=torch.float16)

    assert rms_norm(x, torch.ones(4, dtype=torch.float16), 1e-6).tolist() == [[1.0] * 4]


def test_eos_ends_each_sequence_and_pads_the_others(model: DeepseekV2ForCausalLM, values: dict[str, Tensor]) -> None:
    free = model.generate(values["ids.a"], max_new_tokens=24)[0, 12:].tolist()
    stop = free[3]
    ending = copy.copy(model)
    ending.config = model.config.replace(eos_token_id=(stop,))
    found = ending.generate(values["ids.a"].repeat(2, 1), max_new_tokens=24)[:, 12:].tolist()

    assert found == [free[: free.index(stop) + 1]] * 2


def test_a_deadline_and_a_cancellation_end_generation(model: DeepseekV2ForCausalLM, values: dict[str, Tensor]) -> None:
    with pytest.raises(TimeoutError, match="after 0 of 24 tokens"):
        model.generate(values["ids.a"], deadline=0.0)
    asked = iter([False, False, True])
    with pytest.raises(TimeoutError, match="cancelled after 2 of 24"):
        model.generate(values["ids.a"], cancelled=lambda: next(asked))


def test_quantised_weights_stored_dequantised(
    golden_config: Config, golden_tensors: Values, golden_values: Values
) -> None:
    model = DeepseekV2ForCausalLM(golden_config("v3-fp8"), dtype=torch.float32, keep_fp8=False)
    model.load_weights(golden_tensors("v3-fp8").items())
    values = golden_values("v3-fp8")

    assert (model(values["ids.b"])[0] - values["logits.b"]).abs().max() < TOLERANCE


def test_the_script_reproduces_the_checkpoints(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "make_checkpoints.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    committed = Path(__file__).parents[1] / "data" / "checkpoints"
    for path in sorted(committed.rglob("*")):
        made = tmp_path / path.relative_to(committed)
        if path.suffix == ".json":
            assert json.loads(made.read_text()) == json.loads(path.read_text()), path.name
        elif path.name == "golden.safetensors":
            old, new = load_file(path), load_file(made)
            assert all((old[name].float() - new[name].float()).abs().max() < TOLERANCE for name in old)
        elif path.is_file():
            assert made.read_bytes() == path.read_bytes(), path
