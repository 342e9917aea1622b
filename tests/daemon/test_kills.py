"""A short kill campaign; `make campaign` has the long one, with real starts."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from .conftest import zygote

PROGRAM = Path(__file__).parents[1] / "campaign.py"


@pytest.fixture(scope="module")
def campaign() -> ModuleType:
    """The program as a module: tests are no package."""
    spec = importlib.util.spec_from_file_location("campaign", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["campaign"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("seed", "retention"), [(1, "delete"), (2, "keep")])
def test_every_byte_is_where_it_belongs_after_each_of_ten_kills(
    campaign: ModuleType, tmp_path: Path, seed: int, retention: str
) -> None:
    made = campaign.Campaign(
        tmp_path,
        seed,
        retention,
        lambda arguments, log: zygote().start(arguments, os.environ, log),
        longest=0.5,
    )
    made.run(10)
    figures = campaign.report(made)
    assert figures["kills"] == 10
    assert figures["versions_live"] >= 3
    assert figures["spool_bytes_at_the_end"] < 50_000_000
