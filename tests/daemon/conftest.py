"""A real daemon for tests: its own process, folder and sockets, stopped and checked at the end."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file
from torch import Tensor

from fusewire.daemon import demo, events, wire
from fusewire.daemon.client import Control, Subscriber, Trainer
from fusewire.daemon.errors import FusewireError
from fusewire.daemon.ledger import Ledger
from fusewire.daemon.progress import Coverage
from fusewire.daemon.records import Entry
from fusewire.daemon.roster import Policy
from fusewire.daemon.stimuli import (
    Commit,
    Committed,
    Discard,
    Inspected,
    Instruction,
    Ordered,
    Placed,
    Publish,
    Record,
    Reply,
    Seen,
    Stimulus,
    Verified,
    Verify,
)

from .zygote import Forked, Zygote

CHECKPOINTS = Path(demo.__file__).parent / "checkpoints"
TIMEOUT = 30.0


@functools.cache
def zygote() -> Zygote:
    """What forks daemons, one for each process of tests."""
    made = Zygote()
    atexit.register(made.close)
    return made


class RunningDaemon:
    """`fusewire run` in a process of its own."""

    process: Forked | subprocess.Popen[bytes]

    def __init__(
        self, root: Path, family: str, settings: dict[str, Any], prefix: Sequence[str] = (), **popen: Any
    ) -> None:
        self.root = root
        self.checkpoint = CHECKPOINTS / family
        self.config_path = root / "fusewire.toml"
        self.shards = root / "shards"
        self.shards.mkdir(exist_ok=True)
        self.write_settings(settings)
        self.log_path = root / "daemon.log"
        self._prefix = prefix
        self._popen = popen
        self.start()

    def write_settings(self, changes: dict[str, Any]) -> None:
        """Write the settings file: what tests need, with ``changes`` by section on top."""
        sections: dict[str, dict[str, Any]] = {
            "model": {"config": str(self.checkpoint / "config.json"), "dtype": "float32", "threads": 1},
            "folder": {"path": "shards", "reconcile_interval": 1.0},
            "socket": {"endpoint": "ipc://ingest.sock"},
            "events": {"endpoint": "ipc://events.sock", "heartbeat_interval": 0.5},
            "control": {"endpoint": "ipc://control.sock"},
            "state": {"path": "state"},
            "metrics": {"port": 0},
            "loader": {"non_temporal": False},  # a second start for each daemon would take longer than it saves
        }
        for section, values in changes.items():
            sections.setdefault(section, {}).update(values)
        self.config_path.write_bytes(msgspec.toml.encode(sections))

    def start(self) -> None:
        """Start the process; it need not be up yet."""
        self.log_path.touch()
        if not self._popen and not self._prefix and b"non_temporal = false" in self.config_path.read_bytes():
            self.process = zygote().start(["run", "--config", str(self.config_path)], os.environ, self.log_path)
            return
        environment = os.environ | self._popen.get("env", {})
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*self._prefix, sys.executable, "-m", "fusewire.daemon", "run", "--config", str(self.config_path)],
                stderr=log,
                stdout=log,
                **(self._popen | {"env": environment}),
            )

    def endpoint(self, name: str) -> str:
        return f"ipc://{self.root}/{name}.sock"

    def log(self) -> list[dict[str, Any]]:
        """Return the log's lines; each has to be whole JSON."""
        return [json.loads(line) for line in self.log_path.read_text().splitlines()]

    def wait_up(self) -> wire.Status:
        """Wait until the control socket answers."""
        deadline = time.monotonic() + TIMEOUT
        while True:
            try:
                with Control(self.endpoint("control"), timeout=2) as control:
                    return control.status()
            except FusewireError:
                assert self.process.poll() is None, self.log_path.read_text()
                assert time.monotonic() < deadline, self.log_path.read_text()

    def control(self) -> Control:
        return Control(self.endpoint("control"), timeout=TIMEOUT)

    def trainer(self) -> Trainer:
        return Trainer(self.endpoint("ingest"), timeout=TIMEOUT)

    def subscriber(self) -> Subscriber:
        return Subscriber(self.endpoint("events"), self.endpoint("control"), timeout=TIMEOUT)

    def status(self) -> wire.Status:
        with self.control() as control:
            return control.status()

    def wait_status(self, wanted: Callable[[wire.Status], bool]) -> wire.Status:
        """Ask for the status until it is as wanted."""
        deadline = time.monotonic() + TIMEOUT
        with self.control() as control:
            while not wanted(status := control.status()):
                assert time.monotonic() < deadline, status
                time.sleep(0.02)
        return status

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Ask the daemon to stop; return its exit code."""
        self.process.send_signal(number)
        return self.process.wait(10)

    def kill(self) -> None:
        """Kill -9."""
        self.process.kill()
        self.process.wait(10)


StartDaemon = Callable[..., RunningDaemon]


@pytest.fixture
def start_daemon(tmp_path: Path) -> Iterator[StartDaemon]:
    """Start daemons with ``start_daemon(family, section={key: value}, ...)``; all end cleanly."""
    with _daemons(tmp_path) as start:
        yield start


@pytest.fixture(scope="module")
def start_shared_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartDaemon]:
    """The same, for daemons that a whole module shares."""
    with _daemons(tmp_path_factory.mktemp("shared")) as start:
        yield start


@contextlib.contextmanager
def _daemons(folder: Path) -> Iterator[StartDaemon]:
    running: list[RunningDaemon] = []

    def start(
        family: str = "v2",
        *,
        up: bool = True,
        popen: dict[str, Any] | None = None,
        **settings: dict[str, Any],
    ) -> RunningDaemon:
        root = folder / f"d{len(running)}"
        root.mkdir()
        daemon = RunningDaemon(root, family, settings, **(popen or {}))
        running.append(daemon)
        if up:
            daemon.wait_up()
        return daemon

    try:
        yield start
    finally:
        for daemon in running:
            if daemon.process.poll() is None:
                daemon.process.terminate()
        for daemon in running:
            try:
                daemon.process.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                pytest.fail(f"the daemon did not stop in 10 s:\n{daemon.log_path.read_text()}")


@pytest.fixture(scope="session")
def golden() -> Callable[[str], dict[str, Tensor]]:
    """``golden(family)``: token ids, logits and generated tokens of a golden checkpoint."""
    return lambda family: load_file(CHECKPOINTS / family / "golden.safetensors")


@pytest.fixture(scope="session")
def checkpoint_tensors() -> Callable[[str], dict[str, Tensor]]:
    """``checkpoint_tensors(family)``: all tensors of a golden checkpoint by name."""

    def load(family: str) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for path in sorted((CHECKPOINTS / family).glob("model-*.safetensors")):
            tensors.update(load_file(path))
        return tensors

    return load


@pytest.fixture
def notify_socket(tmp_path: Path) -> Iterator[socket.socket]:
    """What systemd listens on; its address is ``NOTIFY_SOCKET``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(TIMEOUT)
        yield listening


@pytest.fixture
def shell() -> Callable[..., subprocess.CompletedProcess[str]]:
    """``shell(script, home, NAME=value, ...)``: run commands; `fusewire` is found, and a failure ends them."""

    def run(script: str, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return subprocess.run(
            ["bash", "-euc", script],
            env=os.environ | {"HOME": str(home), "PATH": path} | environment,
            capture_output=True,
            text=True,
            timeout=2 * TIMEOUT,
            check=False,
            cwd=home,
        )

    return run


NextEvent = Callable[..., Any]


@pytest.fixture
def next_event() -> NextEvent:
    """``next_event(subscriber, kind, field=value, ...)``: the next event of a kind with these values."""

    def wait(subscriber: Subscriber, kind: type[events.Event], **fields: Any) -> Any:
        for event in subscriber.events(timeout=TIMEOUT):
            if isinstance(event, kind) and all(getattr(event, k) == v for k, v in fields.items()):
                return event
        raise AssertionError(f"no {kind.__name__} {fields} within {TIMEOUT} s")

    return wait


# ------------------------------------------------------------------------------------ the ledger alone

# Slots: 0 = embedding; layer 0: 1 = q_a, 2 = kv_a, 3 = rest; layer 1: 4, 5, 6.
COVERAGE = Coverage(
    layer_of=(None, 0, 0, 0, 1, 1, 1),
    fusions={0: (1, 2), 1: (4, 5)},
    layers=2,
    names=("embed", "0.q_a", "0.kv_a", "0.rest", "1.q_a", "1.kv_a", "1.rest"),
)
EVERYTHING = tuple(range(7))


class Driver:
    """A ledger whose invariants are checked after each step, and shorthands for what happens to it."""

    def __init__(
        self,
        *,
        held_limit: int = 100,
        known_limit: int = 1000,
        policy: Policy | None = None,
        stream_limit: int = 16,
        client_stream_limit: int = 16,
    ) -> None:
        self.ledger = Ledger(
            COVERAGE,
            held_limit=held_limit,
            known_limit=known_limit,
            policy=policy,
            stream_limit=stream_limit,
            client_stream_limit=client_stream_limit,
        )
        self.now = 0.0
        self.leased = 0
        """Leases on the generation before, at each commit."""
        self.written: list[Entry] = []
        """What has been asked to be written down, and the numbers of the shards that may be thrown away."""
        self.discarded: list[int] = []
        self.versions_follow = True
        """Whether a loader verifies and commits at once what it is told to."""

    def __call__(self, stimulus: Stimulus) -> list[Instruction]:
        self.now = max(self.now, stimulus.now)
        out = self.ledger.handle(stimulus)
        self.ledger.validate()
        self.written += [entry for one in out if isinstance(one, Record) for entry in one.entries]
        self.discarded += [number for one in out if isinstance(one, Discard) for number in one.numbers]
        out = [one for one in out if not isinstance(one, Record | Discard)]
        if self.versions_follow:
            for instruction in list(out):
                if isinstance(instruction, Verify):
                    out += self(Verified(now=self.now, version=instruction.version))
                elif isinstance(instruction, Commit):
                    out += self(Committed(now=self.now, version=instruction.version, leased=self.leased))
        return out

    def seen(
        self,
        key: str,
        identity: Any = 1,
        content: Any = None,
        held: int = 0,
        claimed: int | None = None,
        changed: int = 0,
        looked: float = math.inf,
    ) -> list[Instruction]:
        content = identity if content is None else content
        return self(
            Seen(
                key=key,
                name=key,
                source="socket" if held else "folder",
                identity=identity,
                content=content,
                held=held,
                claimed=claimed,
                changed=changed,
                looked=looked,
                now=self.now,
            )
        )

    def inspected(
        self, key: str, version: int | None = None, slots: tuple[int, ...] = (0,), run: str | None = None
    ) -> list[Instruction]:
        return self(Inspected(key=key, now=self.now, version=version, slots=slots, skipped=0, nbytes=10, run=run))

    def order(self, order: Any, version: int | None = None, **fields: Any) -> list[Instruction]:
        return self(Ordered(now=self.now, ticket="t", order=order, version=version, **fields))

    def placed(self, key: str, fused: tuple[int, ...] = (), **changes: Any) -> list[Instruction]:
        waiting = changes.get("waiting", {})
        halves = [slot for layer in fused for slot in COVERAGE.fusions[layer]]
        slots = self.ledger.shards[key].slots
        fields: dict[str, Any] = {
            "arrived": tuple(sorted({slot for slot in slots if slot not in waiting} | set(halves))),
            "waiting": {},
            "pending": (),
            "duplicates": 0,
            "serving": False,
            "filled": 1,
            "seconds": 0.1,
        }
        return self(Placed(key=key, now=self.now, fused=fused, **(fields | changes)))

    def apply(self, key: str, version: int | None, slots: tuple[int, ...], **placed: Any) -> list[Instruction]:
        """Take a shard through its whole life; return what its placing led to."""
        self.seen(key)
        self.inspected(key, version, slots)
        return self.placed(key, **placed)

    @staticmethod
    def published(out: list[Instruction]) -> list[str]:
        return [instruction.event.message for instruction in out if isinstance(instruction, Publish)]

    @staticmethod
    def answers(out: list[Instruction]) -> list[wire.Answer]:
        return [instruction.answer for instruction in out if isinstance(instruction, Reply)]


@pytest.fixture
def new_driver() -> Iterator[Callable[..., Driver]]:
    """``new_driver(held_limit=…, known_limit=…, policy=…)``: a ledger whose invariants are checked after each step."""
    made: list[Driver] = []

    def make(**options: Any) -> Driver:
        made.append(Driver(**options))
        return made[-1]

    yield make
    for driver in made:
        driver.ledger.validate()


@pytest.fixture(scope="session")
def driver_class() -> type[Driver]:
    """The same, for state machines."""
    return Driver
