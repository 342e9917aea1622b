"""A short run of the fuzzer, and the proof that it finds what it looks for: planted defects."""

from __future__ import annotations

import importlib
import inspect
import logging
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from fusewire.daemon import loader, payload, shard

FOLDER = Path(__file__).parent
COUNT = 500
SEED = 7


def test_no_input_does_harm(tmp_path: Path) -> None:
    """In a process of its own, whose memory is looked at."""
    result = subprocess.run(
        [sys.executable, FOLDER / "run.py", f"--count={COUNT}", f"--seed={SEED}", f"--failures={tmp_path}"],
        check=False,
        capture_output=True,
        text=True,
        timeout=110,
    )

    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    assert result.stdout.startswith(f"seed {SEED}\n")
    assert result.stdout.count(f"{COUNT:,} inputs") == len(result.stdout.splitlines()) - 1 >= 8
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The fuzzer, in this process; what it brings about is not logged."""
    monkeypatch.syspath_prepend(FOLDER)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield importlib.import_module("run")
    structlog.reset_defaults()


def without(module: types.ModuleType, function: Callable[..., Any], old: str, new: str) -> Callable[..., Any]:
    """Return a function as it would be with one part of its source changed."""
    source = inspect.getsource(function)
    assert source.count(old) == 1
    namespace = vars(module).copy()
    exec(inspect.cleandoc("from __future__ import annotations\n") + "\n" + source.replace(old, new), namespace)  # noqa: S102
    made: Callable[..., Any] = namespace[function.__name__]
    return made


PLANTED: dict[str, tuple[str, types.ModuleType, Any, str, str]] = {
    "overlaps": ("header", shard, shard.parse_header, "if tensor.start != end:", "if tensor.start > end:"),
    "holes": ("header", shard, shard.parse_header, "if tensor.start != end:", "if tensor.start < end:"),
    "trailing bytes": ("header", shard, shard.parse_header, "if data_offset + end < file_size:", "if False:"),
    "wrong sizes": ("header", shard, shard._tensor, "if stop - start != nbytes:", "if False:"),
    "equal keys": ("header", shard, shard._decode, 'or text.count(b":") != colons', ""),
    "deep brackets": ("header", shard, shard._decode, "(ValueError, RecursionError)", "ValueError"),
}


@pytest.mark.parametrize("defect", PLANTED)
def test_a_planted_defect_is_found(
    defect: str, run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, module, function, old, new = PLANTED[defect]
    broken = without(module, function, old, new)
    for user in (module, payload):
        monkeypatch.setattr(user, function.__name__, broken, raising=user is module)

    assert not run.fuzz(name, 20_000, SEED, tmp_path)
    (kept,) = tmp_path.iterdir()
    assert f"--replay {kept}" in capsys.readouterr().out
    assert not run.replay(kept)
    monkeypatch.undo()
    monkeypatch.syspath_prepend(FOLDER)
    assert run.replay(kept), "without the defect the same input does no harm"


def test_a_shard_that_is_applied_before_its_digest_is_looked_at_is_found(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(loader.Loader, "_look_first", lambda *_: None)

    assert not run.fuzz("loading", 5000, SEED, tmp_path)
