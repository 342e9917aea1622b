"""Where a shard's version may stand, and what happens when the places disagree."""

from __future__ import annotations

from pathlib import PurePath

import pytest

from fusewire.daemon.errors import Reason, ShardRejected
from fusewire.daemon.versions import Claim, reconcile, versions_of_metadata, versions_of_path


@pytest.mark.parametrize(
    ("path", "versions"),
    [
        ("step_42/a.safetensors", [42]),
        ("global_step_42/a.safetensors", [42]),
        ("checkpoint-42/a.safetensors", [42]),
        ("weight_v000042/a.safetensors", [42]),
        ("42/a.safetensors", [42]),
        ("run/step_7/actor/a.safetensors", [7]),
        ("3/step_7/a.safetensors", [3, 7]),
        ("a.safetensors", []),
        ("step_42.safetensors", []),
        ("step_/a.safetensors", []),
        ("step_-1/a.safetensors", []),
        ("step_4x/a.safetensors", []),
        ("mystep_4/a.safetensors", []),
        ("checkpoint_4/a.safetensors", []),
        ("weights/a.safetensors", []),
        ("9223372036854775807/a.safetensors", [2**63 - 1]),
        ("9223372036854775808/a.safetensors", []),
        ("٤٢/a.safetensors", []),
    ],
)
def test_folders(path: str, versions: list[int]) -> None:
    assert [claim.version for claim in versions_of_path(PurePath(path))] == versions


def test_metadata() -> None:
    assert [c.version for c in versions_of_metadata({"version": "4", "step": "4", "format": "pt"})] == [4, 4]
    assert versions_of_metadata({"format": "pt"}) == []


@pytest.mark.parametrize("text", ["", "-1", "4.0", "x", "1e3", "9223372036854775808", "٤"])
def test_metadata_that_is_no_version(text: str) -> None:
    with pytest.raises(ShardRejected, match="metadata version") as refused:
        versions_of_metadata({"version": text})
    assert refused.value.reason is Reason.VERSION_DISAGREEMENT


def test_claims_have_to_agree() -> None:
    assert reconcile([]) is None
    assert reconcile([Claim("a", 0)]) == 0
    assert reconcile([Claim("a", 3), Claim("b", 3)]) == 3
    with pytest.raises(ShardRejected, match="folder step_3 says 3, metadata step says 4"):
        reconcile([Claim("folder step_3", 3), Claim("metadata step", 4)])
