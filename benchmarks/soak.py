"""Ten thousand versions of a tiny model by folder and socket: memory, descriptors, threads and latency stay the same.

Run: ``python benchmarks/soak.py [--versions N] [--minutes M]``. Of three versions one comes as a shard in the drop
folder, one as two shards, and one as a shard over the socket that brings half of the tensors, and a commit. Each is
waited for until it is live; its files are deleted once it is over. Exit code 1 if anything grows by more than is stated
below.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness import SETTINGS, Daemon, daemon, machine, process_status, save
from safetensors.torch import load_file
from safetensors.torch import save as serialize

from fusewire.daemon import demo
from fusewire.daemon.client import Control, Subscriber, Trainer

CHECKPOINT = Path(demo.__file__).parent / "checkpoints" / "v2"
SOAKED = SETTINGS.replace("[events]\n", "[events]\nremembered = 1000\n") + '[versions]\nretention = "delete"\n'
"""What is remembered for replay is so little that it has filled up before anything is measured."""
EVERY = 100
"""Versions between two looks at the daemon."""
WARM_UP = 0.25
"""Share of the versions after which the slopes begin."""
BYTES = 1_000_000
"""Growth of private memory in 1000 versions that is let pass. If their bytes leaked, it would be 360 times as much."""
COUNT = 0.5
"""Growth of descriptors and threads in 1000 versions that is let pass: less than one."""
DRIFT = 1.5
"""Median latency in the last quarter against the first that is let pass: other programs run beside it."""
TIMEOUT = 60.0
"""Seconds until a version has to be live."""

Record = dict[str, Any]


class Versions:
    """Brings one version after the other, each in another way than the one before."""

    def __init__(self, running: Daemon) -> None:
        tensors = {}
        for path in sorted(CHECKPOINT.glob("model-*.safetensors")):
            tensors.update(load_file(path))
        names = list(tensors)
        self._running = running
        self._whole = serialize(tensors)
        self._halves = [serialize({name: tensors[name] for name in names[half::2]}) for half in (0, 1)]
        self._trainer = Trainer(running.endpoint("ingest"), timeout=TIMEOUT)
        self._subscriber = Subscriber(running.endpoint("events"), running.endpoint("control"), timeout=TIMEOUT)
        self._ways: tuple[Callable[[int], None], ...] = (self._as_one, self._as_two, self._pushed)

    def bring(self, version: int) -> float:
        """Bring a version; return the seconds until it was live."""
        begin = time.perf_counter()
        self._ways[version % len(self._ways)](version)
        self._subscriber.wait_version(version, timeout=TIMEOUT)
        seconds = time.perf_counter() - begin
        for _ in self._subscriber.events(timeout=0):
            pass
        return seconds

    def _as_one(self, version: int) -> None:
        self._drop(version, self._whole)

    def _as_two(self, version: int) -> None:
        self._drop(version, *self._halves)

    def _drop(self, version: int, *shards: bytes) -> None:
        folder = self._running.shards / f"step_{version}"
        folder.mkdir()
        for number, shard in enumerate(shards):
            (folder / f"{number}.safetensors").write_bytes(shard)

    def _pushed(self, version: int) -> None:
        answer = self._trainer.push_bytes(self._halves[0], version=version, name=f"half of {version}")
        if answer.status not in {"applied", "accepted"}:
            raise SystemExit(f"version {version}: {answer.status}: {answer.reason}: {answer.detail}")
        self._trainer.commit(version)


def look(pid: int, version: int, seconds: Sequence[float]) -> Record:
    """Return how things stand after some versions."""
    status, own = process_status(pid), process_status("self")
    return {
        "version": version,
        "rss": status["VmRSS"],
        "private": status["RssAnon"],
        "threads": status["Threads"],
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),  # noqa: PTH208 - a number is all that is wanted
        "client_private": own["RssAnon"],
        "latency": statistics.median(seconds),
        "slowest": max(seconds),
    }


def slope(records: Sequence[Record], what: str) -> float:
    """Return the growth of something in 1000 versions, by the method of least squares."""
    if len(records) < 2:  # noqa: PLR2004 - a line needs two points
        return 0.0
    fit = statistics.linear_regression([one["version"] for one in records], [one[what] for one in records])
    return 1000 * fit.slope


def verdict(records: Sequence[Record]) -> dict[str, tuple[float, float]]:
    """Return what was found and what is let pass."""
    late = [one for one in records if one["version"] >= WARM_UP * records[-1]["version"]]
    quarter = max(1, len(records) // 4)
    early, last = (
        statistics.median(one["latency"] for one in part) for part in (records[:quarter], records[-quarter:])
    )
    return {
        "private bytes in 1000 versions": (slope(late, "private"), BYTES),
        "private bytes of the client in 1000 versions": (slope(late, "client_private"), BYTES),
        "descriptors in 1000 versions": (slope(late, "descriptors"), COUNT),
        "threads in 1000 versions": (slope(late, "threads"), COUNT),
        "median latency, last quarter / first": (last / early, DRIFT),
    }


def _line(one: Record) -> str:
    return (
        f"  version {one['version']:6}: {one['rss'] / 1e6:7.1f} MB resident, {one['private'] / 1e6:7.2f} MB private, "
        f"{one['descriptors']} descriptors, {one['threads']} threads, latency {one['latency'] * 1e3:5.1f} ms"
    )


def soak(running: Daemon, count: int, seconds: float) -> list[Record]:
    """Bring so many versions, or as many as there is time for; print how things stand now and then."""
    versions, records, latencies = Versions(running), list[Record](), list[float]()
    deadline = time.monotonic() + seconds
    for version in range(1, count + 1):
        latencies.append(versions.bring(version))
        if version % EVERY == 0:
            records.append(one := look(running.pid, version, latencies))
            latencies = []
            if version % (10 * EVERY) == 0 or version == EVERY:
                print(_line(one), flush=True)
            if time.monotonic() > deadline:
                break
    with Control(running.endpoint("control"), timeout=TIMEOUT) as control:
        status = control.status()
    left = sum(path.is_file() for path in running.shards.rglob("*"))
    print(f"  {status.counters['versions_live']:.0f} versions were live; {left} files are left in the folder")
    if status.counters["shards_rejected"] or status.version != version:
        raise SystemExit(f"shards were rejected, or versions did not go live: {status}")
    return records


def main() -> int:
    """Run it; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=10_000, help="default: 10,000; at least 200")
    parser.add_argument("--minutes", type=float, default=24 * 60.0, help="stop after so long")
    given = parser.parse_args()
    print(machine())
    print("versions of the demo's model, by folder (one shard, two shards) and by socket (half of it, and a commit)")
    config = json.loads((CHECKPOINT / "config.json").read_text())
    with daemon(config, settings=SOAKED) as running:
        records = soak(running, max(2 * EVERY, given.versions), 60 * given.minutes)
    found = verdict(records)
    good = True
    for what, (value, most) in found.items():
        good = good and value <= most
        print(f"  {what:46} {value:12,.2f}   at most {most:11,.2f}   {'ok' if value <= most else 'TOO MUCH'}")
    summary = {what: {"found": value, "at_most": most} for what, (value, most) in found.items()}
    print(f"written to {save('soak', [*records, {'summary': summary}])}")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
