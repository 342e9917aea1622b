"""What a daemon costs before and beside its work: its start, until systemd is told READY, and its life while idle.

Run: ``python benchmarks/overhead.py [--quick]``. The demo's tiny model, and one of 2 GB as wide as DeepSeek-V2, each
with a base checkpoint in the page cache. The start is split by what the daemon itself tells over systemd's notify
socket, a real one: from the start of the process to the first word (interpreter and imports), from there to the first
word about loading (building the model, which touches the memory of both generations; sockets; threads), and from there
to READY (loading, verifying, going live). Then its CPU time in 10 s in which nothing happens, and its memory beyond two
generations of weights.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import folder
from harness import SETTINGS, TUNABLES, cpu_seconds, leave_nothing_running, machine, private_bytes, save, with_tunables

from fusewire.daemon import demo
from fusewire.daemon.client import Control
from fusewire.model import DeepseekV2Config, DeepseekV2ForCausalLM

DEMO = Path(demo.__file__).parent / "checkpoints" / "v2"
DEADLINE = 120.0
BUILDING = "STATUS=building the model"
LOADING = "STATUS=loading"
READY = "READY=1"


@dataclass(frozen=True)
class Start:
    """One start, in seconds."""

    imports: float
    building: float
    loading: float

    @property
    def total(self) -> float:
        """From the start of the process to READY."""
        return self.imports + self.building + self.loading


def _listen(listening: socket.socket, process: subprocess.Popen[bytes], *wanted: str) -> tuple[str, float]:
    """Wait for one of these words on the notify socket; return which it was, and when it came."""
    deadline = time.monotonic() + DEADLINE
    listening.settimeout(1.0)
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(TimeoutError):
            for line in listening.recv(65536).decode().splitlines():
                if line.startswith(wanted):
                    return line, time.perf_counter()
    raise SystemExit(f"the daemon did not say {' or '.join(wanted)} within {DEADLINE:g} s")


@contextlib.contextmanager
def started(checkpoint: Path) -> Iterator[tuple[int, Start, Path]]:
    """Start a daemon with a base checkpoint; yield its process id, how long what took, and its folder."""
    leave_nothing_running()
    with (
        tempfile.TemporaryDirectory(prefix="fusewire-overhead-") as temporary,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening,
    ):
        root = Path(temporary)
        (root / "shards").mkdir()
        shutil.copy(checkpoint / "config.json", root / "config.json")
        text = SETTINGS.replace("[folder]", f"checkpoint = {json.dumps(str(checkpoint))}\n[folder]")
        (root / "fusewire.toml").write_text(text + '[log]\nlevel = "warning"\n')
        listening.bind(str(root / "notify"))
        begin = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "fusewire.daemon", "run", "--config", str(root / "fusewire.toml")],
            env=os.environ | {"GLIBC_TUNABLES": TUNABLES, "NOTIFY_SOCKET": str(root / "notify")},
            stderr=subprocess.DEVNULL,
        )
        try:
            _, imported = _listen(listening, process, BUILDING)
            told, built = _listen(listening, process, LOADING, READY)  # a tiny checkpoint can be in before it is told
            ready = built if told == READY else _listen(listening, process, READY)[1]
            yield process.pid, Start(imported - begin, built - imported, ready - built), root
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            finally:
                process.kill()


def measure(title: str, checkpoint: Path, rounds: int, idle_seconds: float) -> dict[str, Any]:
    """Start it several times; the last time look at it while it is idle. Print lines, return a record."""
    starts: list[Start] = []
    config = DeepseekV2Config.from_file(checkpoint / "config.json")
    nbytes = DeepseekV2ForCausalLM.nbytes(config)
    idle, beyond = 0.0, 0
    for number in range(rounds + 1):
        with started(checkpoint) as (pid, start, root):
            if number:  # the first start only brings the files into the page cache
                starts.append(start)
            if number == rounds:
                with Control(f"ipc://{root}/control.sock", timeout=30) as control:
                    control.status()
                time.sleep(2)
                before = cpu_seconds(pid)
                time.sleep(idle_seconds)
                idle = (cpu_seconds(pid) - before) / idle_seconds
                beyond = private_bytes(pid) - 2 * nbytes
    medians = {
        phase: statistics.median(getattr(start, phase) for start in starts)
        for phase in ("total", "imports", "building", "loading")
    }
    print(
        f"  {title:22} {nbytes / 1e6:8,.1f} MB a generation: READY after {medians['total']:6.2f} s (interpreter and "
        f"imports {medians['imports']:.2f}, building the model {medians['building']:.2f}, loading "
        f"{medians['loading']:.2f}); idle {idle:.2%} of a core; {beyond / 1e6:.0f} MB beyond two generations",
        flush=True,
    )
    return {
        "model": title,
        "bytes": nbytes,
        "starts": [{"imports": s.imports, "building": s.building, "loading": s.loading} for s in starts],
        "idle_cpu": idle,
        "idle_seconds": idle_seconds,
        "beyond_bytes": beyond,
    }


def main() -> int:
    """Measure both models and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the tiny model only, one start, 3 s of idleness")
    quick = parser.parse_args().quick
    with_tunables()
    print(machine())
    rounds, idle_seconds = (1, 3.0) if quick else (3, 10.0)
    records = [measure("demo's model", DEMO, rounds, idle_seconds)]
    if not quick:
        with tempfile.TemporaryDirectory(prefix="fusewire-checkpoint-") as temporary:
            wide = Path(temporary)
            (wide / "config.json").write_text(json.dumps(folder.V2))
            folder.random_shard(folder.V2, lambda _: True, wide / "model.safetensors")
            records.append(measure("V2-wide model", wide, rounds, idle_seconds))
    print(f"\nwritten to {save('overhead', records, quick=quick)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
