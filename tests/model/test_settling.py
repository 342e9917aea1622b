"""Weights are let go of only after the device has done what was begun with them.

`settle` is watched: what has to be held while it waits. What it waits for, tests/daemon/test_gpu_ring.py has.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusewire.model import DeepseekV2Config, DeepseekV2ForCausalLM
from fusewire.model.generation import settle

MODULES = ("generation", "loading", "modeling", "staging")
Q_A, KV_A = (f"model.layers.1.self_attn.{half}.weight" for half in ("q_a_proj", "kv_a_proj_with_mqa"))

Golden = Callable[[str], dict[str, Tensor]]


@pytest.fixture
def model(golden_config: Callable[[str], DeepseekV2Config], golden_tensors: Golden) -> DeepseekV2ForCausalLM:
    made = DeepseekV2ForCausalLM(golden_config("v2"), generations=2)
    made.load_weights(golden_tensors("v2").items(), 1)
    made.commit(1)
    return made


def watch(monkeypatch: pytest.MonkeyPatch, note: Callable[[], object]) -> list[object]:
    """Note something each time that the host waits for the device."""
    noted: list[object] = []
    for module in MODULES:
        monkeypatch.setattr(f"fusewire.model.{module}.settle", lambda _: noted.append(note()))
    return noted


def test_a_lease_ends_after_the_device_has_read(
    model: DeepseekV2ForCausalLM, golden_values: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = watch(monkeypatch, lambda: model.staging.leases.held(0).leases)
    model.generate(golden_values("v2")["ids.a"], 2)
    assert leases == [1]
    model(golden_values("v2")["ids.a"])
    assert leases == [1, 1]
    assert model.staging.leases.held(0).leases == 0


def test_a_device_that_hangs_keeps_the_lease(model: DeepseekV2ForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(_: object) -> None:
        raise TimeoutError

    monkeypatch.setattr("fusewire.model.modeling.settle", hangs)
    with pytest.raises(TimeoutError), model.lease():
        pass
    assert model.staging.leases.held(0).leases == 1


def test_in_place_the_gate_opens_after_each_pass(
    golden_config: Callable[[str], DeepseekV2Config],
    golden_tensors: Golden,
    golden_values: Golden,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = DeepseekV2ForCausalLM(golden_config("v2"))
    model.load_weights(golden_tensors("v2").items())
    readers = watch(monkeypatch, lambda: model.gate._readers)
    model.generate(golden_values("v2")["ids.a"], 3)

    assert readers == [1, 1, 1, 0], "one for each token, and one for the lease"


def test_what_is_carried_over_is_there_before_the_flip(
    model: DeepseekV2ForCausalLM, golden_tensors: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.load_weights([(Q_A, golden_tensors("v2")[Q_A])], 2)
    live = watch(monkeypatch, lambda: model.generation.version)
    model.carry(2)
    assert live == [1]
    model.commit(2)


def test_a_half_that_waited_is_in_place_before_its_layer_is_told(
    golden_config: Callable[[str], DeepseekV2Config], golden_tensors: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tensors = DeepseekV2ForCausalLM(golden_config("v2")), golden_tensors("v2")
    model.load_weights(tensors.items())
    model.load_weights([(Q_A, tensors[Q_A])], 2)
    slot = model.table.slots[Q_A]
    stamps = watch(monkeypatch, lambda: model.generation.stamps[slot.index])
    assert model.load_weights([(KV_A, tensors[KV_A])], 2).fused == (1,)

    assert stamps[-1] is None, "no stamp while the copy may be under way"


def test_host_memory_needs_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("it waited"))
    settle(torch.device("cpu"))
