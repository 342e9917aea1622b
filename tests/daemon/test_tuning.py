"""The second start with glibc's threshold lowered: once, with the same process id, and only where it helps."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusewire.daemon import tuning

SET = "glibc.cpu.x86_non_temporal_threshold=0x200000"


def environment_of(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(pair.decode().split("=", 1) for pair in pairs if pair)


@pytest.mark.parametrize(
    ("environment", "libc", "machine", "expected"),
    [
        ({}, "glibc", "x86_64", True),
        ({"GLIBC_TUNABLES": "glibc.malloc.check=1"}, "glibc", "x86_64", True),
        ({"GLIBC_TUNABLES": SET}, "glibc", "x86_64", False),
        ({"FUSEWIRE_TUNED": "1"}, "glibc", "x86_64", False),
        ({}, "", "x86_64", False),
        ({}, "glibc", "aarch64", False),
    ],
)
def test_when_it_is_needed(environment: dict[str, str], libc: str, machine: str, expected: bool) -> None:
    assert tuning.needed(environment, libc=libc, machine=machine) is expected
    assert not tuning.needed(tuning.tuned(environment), libc=libc, machine=machine), "never twice"


def test_other_tunables_stay() -> None:
    assert tuning.tuned({"GLIBC_TUNABLES": "a=1"})["GLIBC_TUNABLES"] == f"a=1:{SET}"
    assert tuning.tuned({})["GLIBC_TUNABLES"] == SET


@pytest.mark.parametrize("on", [True, False])
def test_the_daemon_has_it_and_its_process_id_stays(on: bool, start_daemon: Callable[..., Any]) -> None:
    daemon = start_daemon("v2", loader={"non_temporal": on})
    assert daemon.status().pid == daemon.process.pid
    here = dict(os.environ)
    helps = tuning.needed(here, libc=platform.libc_ver()[0], machine=platform.machine())
    expected = SET in here.get("GLIBC_TUNABLES", "") or (on and helps)
    assert (SET in environment_of(daemon.process.pid).get("GLIBC_TUNABLES", "")) is expected
    assert daemon.stop() == 0
