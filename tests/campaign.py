"""The kill campaign: kill -9 at any moment while versions come, start again, and compare every byte.

Run: ``python tests/campaign.py [--kills N] [--seed S]``. A trainer hands over one version after the other, by the drop
folder or by the socket, whole or in parts; the daemon is killed at random moments, also while it is coming back. After
each start it has to reach by itself, without anything being sent again:

* a version that is not older than the last one that was seen live,
* every version that had been handed over as a whole,
* and for each of them exactly the parameters of one cold load of what the trainer meant (blake2b over all of them).

A shard that was acknowledged with durability ``spool`` is not sent again, whatever happened since.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from fusewire.daemon import demo
from fusewire.daemon.client import Control, Trainer
from fusewire.daemon.errors import FusewireError
from fusewire.model import DeepseekV2Config, DeepseekV2ForCausalLM
from fusewire.model.generation import digest

CHECKPOINT = Path(demo.__file__).parent / "checkpoints/v2"
DEADLINE = 60.0
"""Seconds for a start, or for a version to go live."""
SETTINGS = """\
model = {{ config = "{checkpoint}/config.json", checkpoint = "{checkpoint}", dtype = "float32", threads = 1 }}
folder = {{ path = "shards", reconcile_interval = 0.5 }}
socket = {{ endpoint = "ipc://ingest.sock", chunk_bytes = 65536 }}
events.endpoint = "ipc://events.sock"
control.endpoint = "ipc://control.sock"
versions = {{ retention = "{retention}" }}
state.path = "state"
loader.non_temporal = false
metrics.port = 0
"""


@dataclass
class Version:
    """One version as its trainer means it."""

    number: int
    parts: list[dict[str, Tensor]]
    by_folder: bool
    whole: bool
    """Whether it brings every tensor; else the rest is that of the version before."""
    acknowledged: set[int] = field(default_factory=set)
    """Parts that need not be sent again."""
    handed_over: bool = False
    """Whether its end was told, and taken."""


class Process(Protocol):
    """What a campaign needs of a process."""

    def poll(self) -> int | None: ...
    def wait(self, timeout: float) -> int: ...
    def kill(self) -> None: ...
    def send_signal(self, number: int) -> None: ...


def start_process(arguments: list[str], log: Path) -> Process:
    """Start the daemon as a user would."""
    with log.open("ab") as output:
        return subprocess.Popen([sys.executable, "-m", "fusewire.daemon", *arguments], stdout=output, stderr=output)


class Campaign:
    """One daemon and its trainer, killed and started again.

    Args:
        root: An empty folder.
        seed: Of everything that is random here.
        retention: The setting ``versions.retention``.
        start: Starts the daemon with these arguments and this log.
        longest: Seconds until a kill, at most, while the daemon is coming back.
    """

    def __init__(
        self,
        root: Path,
        seed: int,
        retention: str = "delete",
        start: Callable[[list[str], Path], Process] = start_process,
        longest: float = 4.0,
    ) -> None:
        self.root = root
        self.start, self.longest = start, longest
        self.random = random.Random(seed)
        self.tensors: dict[str, Tensor] = {}
        for path in sorted(CHECKPOINT.glob("model-*.safetensors")):
            self.tensors.update(load_file(path))
        self.names = sorted(self.tensors)
        self.now = dict(self.tensors)
        """What the model has to hold once the present version is live."""
        self.oracle = DeepseekV2ForCausalLM(DeepseekV2Config.from_file(CHECKPOINT / "config.json"), dtype=torch.float32)
        self.digests = {0: self._cold(self.now)}
        """Version -> digest of a cold load; 0: the base checkpoint."""
        self.version = self._make(1)
        self.seen_live = 0
        self.kills = self.kills_while_starting = self.versions = 0
        self.recoveries: list[float] = []
        self.problems: list[str] = []
        self._stop = threading.Event()
        (root / "shards").mkdir()
        (root / "fusewire.toml").write_text(SETTINGS.format(checkpoint=CHECKPOINT, retention=retention))

    def run(self, kills: int) -> None:
        """Kill so many times. Raises AssertionError at the first difference."""
        process = self._start()
        try:
            self._verify(process)
            while self.kills < kills:
                trainer = threading.Thread(target=self._train, daemon=True)
                self._stop.clear()
                trainer.start()
                time.sleep(self.random.uniform(0.0, 0.6))
                self._kill(process)
                self._stop.set()
                trainer.join(DEADLINE)
                assert not trainer.is_alive(), "the trainer hangs"
                assert not self.problems, self.problems
                process = self._start()
                while self.kills < kills and self.random.random() < 0.2:  # again, while it is coming back
                    time.sleep(self.random.uniform(0.0, self.longest))
                    self._kill(process)
                    self.kills_while_starting += 1
                    process = self._start()
                self._verify(process)
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0
        finally:
            process.kill()
            process.wait(10)

    # ---------------------------------------------------------------------------------------- the daemon

    def _start(self) -> Process:
        return self.start(["run", "--config", str(self.root / "fusewire.toml")], self.root / "log")

    def _kill(self, process: Process) -> None:
        assert process.poll() is None, f"it ended by itself:\n{self._log()}"
        process.kill()
        process.wait(10)
        self.kills += 1

    def _verify(self, process: Process) -> None:
        """What is live has to be what it was, or newer, and right; what was handed over has to go live by itself."""
        begin = time.monotonic()
        least = self.version.number if self.version.handed_over else self.seen_live

        def arrived(control: Control) -> bool:
            status = control.status()
            if status.state != "ready":
                return False
            live = status.version or 0
            assert live >= self.seen_live, f"version {live} is live, and {self.seen_live} was\n{self._log()}"
            found = control.digest()
            assert found.digest == self.digests[found.version or 0], f"version {live} is not itself\n{self._log()}"
            self.seen_live = found.version or 0
            return self.seen_live >= least

        self._until(arrived, f"version {least} does not come back", process)
        self.recoveries.append(time.monotonic() - begin)
        self._next()

    def _until(self, wanted: Callable[[Control], bool], what: str, process: Process | None = None) -> None:
        deadline = time.monotonic() + DEADLINE
        while time.monotonic() < deadline:
            assert process is None or process.poll() is None, f"it ended by itself:\n{self._log()}"
            with contextlib.suppress(FusewireError), Control(f"ipc://{self.root}/control.sock", timeout=2) as control:
                while time.monotonic() < deadline:
                    if wanted(control):
                        return
                    if self._stop.is_set() and process is None:
                        return
                    time.sleep(0.005)
            if self._stop.is_set() and process is None:
                return
        raise AssertionError(f"{what} within {DEADLINE} s:\n{self._log()}")

    def _log(self) -> str:
        return (self.root / "log").read_text()[-6000:]

    # ---------------------------------------------------------------------------------------- the trainer

    def _next(self) -> None:
        if self.seen_live == self.version.number:
            self.versions += 1
            self.version = self._make(self.version.number + 1)

    def _make(self, number: int) -> Version:
        choose, whole = self.random, self.random.random() < 0.3
        wanted = self.names if whole else choose.sample(self.names, choose.randint(1, len(self.names) // 2))
        brought = {name: self.tensors[name] + number for name in wanted}
        order = choose.sample(sorted(brought), len(brought))
        count = min(len(order), choose.choice((1, 2, 3, 5)))
        parts = [{name: brought[name] for name in order[n::count]} for n in range(count)]
        self.now = self.now | brought
        self.digests[number] = self._cold(self.now)
        return Version(number, parts, by_folder=choose.random() < 0.5, whole=whole)

    def _cold(self, tensors: dict[str, Tensor]) -> str:
        self.oracle.load_weights(tensors.items())
        return digest(self.oracle.generation)[0]

    def _train(self) -> None:
        """Hand over versions until the daemon is gone, each once the one before is live."""
        try:
            while not self._stop.is_set():
                version = self.version
                if not version.handed_over:
                    (self._drop if version.by_folder else self._push)(version)
                self._until(self._is_live, f"version {version.number} does not go live")
                if self.seen_live == version.number:
                    self._next()
        except FusewireError:
            return  # it has been killed
        except Exception as error:  # noqa: BLE001 - told by the main thread
            self.problems.append(f"{type(error).__name__}: {error}")

    def _is_live(self, control: Control) -> bool:
        if control.status().version == self.version.number:
            self.seen_live = self.version.number
        return self.seen_live == self.version.number

    def _push(self, version: Version) -> None:
        with Trainer(f"ipc://{self.root}/ingest.sock", timeout=3.0) as trainer:
            for number, part in enumerate(version.parts):
                if number in version.acknowledged or self._stop.is_set():
                    continue
                answer = trainer.push_bytes(save(part), version=version.number, name=f"part-{number}")
                assert answer.status == "applied", answer
                assert answer.durability == "spool", answer
                version.acknowledged.add(number)
            if len(version.acknowledged) == len(version.parts) and not self._stop.is_set():
                told = trainer.commit(version.number)
                assert told.status == "accepted", told
                version.handed_over = True

    def _drop(self, version: Version) -> None:
        folder = self.root / f"shards/step_{version.number}"
        folder.mkdir(exist_ok=True)
        for number, part in enumerate(version.parts):
            if number in version.acknowledged or self._stop.is_set():
                continue
            save_file(part, folder / f"part-{number}.safetensors")
            version.acknowledged.add(number)
        if len(version.acknowledged) == len(version.parts) and not self._stop.is_set():
            time.sleep(0.002)  # the marker's time has to come after that of the shards
            (folder / "STABLE").touch()
            version.handed_over = True


def report(campaign: Campaign) -> dict[str, float]:
    """Return what happened, as figures."""
    spool = list((campaign.root / "state/spool").iterdir())
    return {
        "kills": campaign.kills,
        "of_these_while_starting": campaign.kills_while_starting,
        "versions_live": campaign.versions,
        "recovery_median_seconds": round(statistics.median(campaign.recoveries), 2),
        "recovery_longest_seconds": round(max(campaign.recoveries), 2),
        "spool_files_at_the_end": len(spool),
        "spool_bytes_at_the_end": sum(path.stat().st_size for path in spool),
        "journal_bytes_at_the_end": (campaign.root / "state/journal.sqlite").stat().st_size,
    }


def main() -> int:
    """Run a campaign and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fusewire-campaign-") as folder:
        campaign = Campaign(Path(folder), options.seed)
        campaign.run(options.kills)
        print(json.dumps(report(campaign), indent=1))
    print("every byte was where it belongs after each of them")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
