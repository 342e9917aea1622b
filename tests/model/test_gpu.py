"""The same on a CUDA device: `make test-gpu`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fusewire.daemon.copying import Copier, Copy
from fusewire.daemon.lease import install_lease_signal_handling
from fusewire.daemon.payload import open_file
from fusewire.model import DeepseekV2Config, DeepseekV2ForCausalLM, TensorMeta
from fusewire.model.fp8 import dequantize, values

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", ["v2", "v2lite", "v3", "v3-fp8"])
def test_logits_and_tokens_on_a_gpu(
    family: str,
    golden_config: Callable[[str], DeepseekV2Config],
    golden_values: Callable[[str], dict[str, Tensor]],
    shard_paths: Callable[[str], list[Path]],
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    model = DeepseekV2ForCausalLM(golden_config(family), device="cuda", dtype=torch.float32)
    for path in shard_paths(family):
        model.load_weights(load_file(path).items())
    values = golden_values(family)
    for prompt in ("a", "b"):
        difference = model(values[f"ids.{prompt}"].cuda())[0].cpu() - values[f"logits.{prompt}"]
        assert difference.abs().max() < 1e-4
    generated = model.generate(values["ids.a"].cuda())[0, -24:]
    assert generated.tolist() == values["gen.a"].tolist()


def test_fp8_is_dequantised_by_one_kernel_to_the_same_values() -> None:
    for shape in [(4096, 7168), (576, 7168), (1536, 512), (129, 127)]:
        raw = torch.randn(shape).to(torch.float8_e4m3fn)
        scale = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128))
        found = values(raw.cuda(), scale.cuda(), torch.bfloat16)

        assert found.cpu().equal(dequantize(raw, scale).bfloat16())


def test_the_daemons_copies_reach_the_device(
    golden_config: Callable[[str], DeepseekV2Config],
    cold_load: Callable[..., dict[str, Tensor]],
    golden_tensors: Callable[[str], dict[str, Tensor]],
    shard_paths: Callable[[str], list[Path]],
) -> None:
    config = golden_config("v3")
    model = DeepseekV2ForCausalLM(config, device="cuda")
    install_lease_signal_handling()
    copier = Copier(2, 4 << 20, lambda _: None)
    for path in shard_paths("v3"):
        payload = open_file(path, leases=True, settle=0.0, incomplete_after=0.0, header_limit=1 << 20)
        entries = {entry.name: entry for entry in payload.header.tensors}
        plan = model.table.plan({name: TensorMeta(e.dtype, e.shape) for name, e in entries.items()})
        update = model.begin(plan, None, path.name)
        with update.writing(10.0):
            for destination in update.destinations:
                entry = entries[destination.slot.name]
                copier.run(payload, [Copy(entry.start, entry.stop - entry.start, entry.dtype, destination)])
            model.finish(update)
        payload.close()
    copier.close()

    expected = cold_load(config, golden_tensors("v3"), torch.bfloat16)
    for name, parameter in model.generation.parameters.items():
        assert parameter.cpu().equal(expected[name]), name
