"""What the benchmarks share: a daemon of their own, interleaved rounds, and ratios instead of bare times."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fusewire.daemon.client import Control
from fusewire.daemon.errors import FusewireError

TUNABLES = "glibc.cpu.x86_non_temporal_threshold=0x200000"
"""As in systemd/fusewire.service: large copies bypass the cache."""
START_TIMEOUT = 120.0

SETTINGS = """\
[model]
config = "config.json"
[folder]
path = "shards"
[socket]
endpoint = "ipc://ingest.sock"
[events]
endpoint = "ipc://events.sock"
[control]
endpoint = "ipc://control.sock"
[state]
path = "state"
[metrics]
port = 0
"""

RESULTS = Path(__file__).parent / "results"

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Daemon:
    """A running daemon and the folder that it lives in."""

    root: Path
    pid: int

    @property
    def shards(self) -> Path:
        """The drop folder."""
        return self.root / "shards"

    def endpoint(self, name: str) -> str:
        """Return the endpoint ``ingest``, ``events`` or ``control``."""
        return f"ipc://{self.root}/{name}.sock"


@contextlib.contextmanager
def daemon(
    config: Mapping[str, object], *, where: str | None = None, settings: str = SETTINGS, log_level: str = "warning"
) -> Iterator[Daemon]:
    """Run a daemon with an empty model of this config.json, in a temporary folder under ``where``."""
    leave_nothing_running()
    with tempfile.TemporaryDirectory(prefix="fusewire-bench-", dir=where) as folder:
        root = Path(folder)
        (root / "shards").mkdir()
        (root / "config.json").write_text(json.dumps(config))
        (root / "fusewire.toml").write_text(settings + f'[log]\nlevel = "{log_level}"\n')
        process = subprocess.Popen(
            [sys.executable, "-m", "fusewire.daemon", "run", "--config", str(root / "fusewire.toml")],
            env=os.environ | {"GLIBC_TUNABLES": TUNABLES},
        )
        try:
            running = Daemon(root, process.pid)
            deadline = time.monotonic() + START_TIMEOUT
            while True:
                try:
                    with Control(running.endpoint("control"), timeout=5) as control:
                        control.status()
                    break
                except FusewireError:
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise
            yield running
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            finally:
                process.kill()  # a daemon that hangs must not outlive its benchmark


def leave_nothing_running() -> None:
    """Let SIGTERM end this program as Ctrl-C does, so that its daemon is stopped and its folder removed."""

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, end)


def private_bytes(process: Daemon | int) -> int:
    """Return what a process (by its id) has allocated, in bytes: without mapped files, which are the page cache's."""
    pid = process if isinstance(process, int) else process.pid
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("no RssAnon in /proc")


def process_status(pid: int | str) -> dict[str, int]:
    """Return the numbers of a process's /proc/PID/status; sizes are in bytes."""
    found = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, *words = line.replace(":", " ").split()
        if words and words[0].isdecimal():
            found[name] = int(words[0]) * (1024 if words[-1] == "kB" else 1)
    return found


class Peak:
    """Watches how much memory something takes, from construction to `stop`.

    Args:
        measure: Returns bytes; called on a thread, every 2 ms.
    """

    def __init__(self, measure: Callable[[], int]) -> None:
        self._measure = measure
        self._stop = threading.Event()
        self._most = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.002):
            self._most = max(self._most, self._measure())

    def stop(self) -> int:
        """Return the most bytes that were seen."""
        self._stop.set()
        self._thread.join()
        return max(self._most, self._measure())


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, of all its threads, in seconds and to the microsecond."""
    return time.clock_gettime((~pid << 3) | 2)  # the process's own clock: clock_getcpuclockid(3), as glibc computes it


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile, in the values' unit."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


class Memcpy:
    """The floor: the same number of bytes, RAM to RAM, warm on both sides, on several threads.

    Args:
        nbytes: How many.
        threads: How many.
        beside: Another one of the same size, whose memory is used: for large ones.
    """

    def __init__(self, nbytes: int, threads: int = 2, beside: Memcpy | None = None) -> None:
        self.source: Bytes = np.ones(nbytes, dtype=np.uint8) if beside is None else beside.source
        self.target: Bytes = np.zeros(nbytes, dtype=np.uint8) if beside is None else beside.target
        self._pool = ThreadPoolExecutor(threads)
        step = -(-nbytes // threads)
        self._parts = [slice(at, at + step) for at in range(0, nbytes, step)]

    def __call__(self) -> float:
        """Copy once; return the seconds that it took."""
        begin = time.perf_counter()
        list(self._pool.map(lambda part: np.copyto(self.target[part], self.source[part]), self._parts))
        return time.perf_counter() - begin


def interleave(ways: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run each way once a round, in turn, so that a drift of the machine meets them all alike."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            seconds = way()
            if number:  # the first round only warms up
                times[name].append(seconds)
    return times


def table(title: str, nbytes: int, times: Mapping[str, Sequence[float]], floor: str) -> list[dict[str, object]]:
    """Print one line per way; return the same as records."""
    reference = statistics.median(times[floor])
    print(f"\n{title}: {nbytes / 1e6:,.1f} MB, {len(times[floor])} interleaved rounds")
    print(f"  {'':44} {'median':>10} {'fastest':>10} {'slowest':>10} {'GB/s':>7} {'floor/it':>9}")
    records: list[dict[str, object]] = []
    for name, seconds in times.items():
        median = statistics.median(seconds)
        print(
            f"  {name:44} {median * 1e3:8.1f}ms {min(seconds) * 1e3:8.1f}ms {max(seconds) * 1e3:8.1f}ms "
            f"{nbytes / median / 1e9:7.2f} {reference / median:9.2f}"
        )
        records.append({"title": title, "way": name, "bytes": nbytes, "seconds": list(seconds)})
    return records


def with_tunables() -> None:
    """Start this program again with TUNABLES, so that the floor is a non-temporal copy, as the daemon's is."""
    if os.environ.get("GLIBC_TUNABLES") != TUNABLES:
        os.environ["GLIBC_TUNABLES"] = TUNABLES
        os.execv(sys.executable, [sys.executable, *sys.argv])  # noqa: S606 - ourselves


def machine() -> str:
    """Return what the figures were measured on."""
    return (
        f"{os.cpu_count()} cores, {platform.machine()}, kernel {platform.release()}, Python {platform.python_version()}"
    )


def cpu_model() -> str:
    """Return the processor's name, or ``unknown``."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in {"model name", "Processor"}:
                return value.strip()
    return "unknown"


def save(name: str, records: Sequence[Mapping[str, object]], *, quick: bool = False) -> Path:
    """Write the records as JSON under benchmarks/results/; those of shorter runs in a folder of their own there."""
    folder = RESULTS / "quick" if quick else RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    about = {
        "machine": machine(),
        "cpu": cpu_model(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "measured": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
    path.write_text(json.dumps(about | {"records": list(records)}, indent=1))
    return path
