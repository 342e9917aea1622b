"""Another process changes a shard file at any moment while it is loaded: the right bytes, or a clean refusal.

Never a dead process (an unleased mapping of a truncated file would be one: SIGBUS), and never a mixture that counts as
applied. On both ways of reading: a mapping under a read lease, and preadv without one.
"""

from __future__ import annotations

import os
import queue
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fusewire.daemon import events, lease
from fusewire.daemon.errors import Reason
from fusewire.daemon.loader import Loader, Source
from fusewire.daemon.payload import open_file
from fusewire.daemon.settings import Loader as LoaderSettings
from fusewire.daemon.settings import Model, Settings
from fusewire.daemon.stimuli import Inspected, NotReady, Placed, Refused
from fusewire.model import DeepseekV2Config, DeepseekV2ForCausalLM

TIMEOUT = 20.0
ROUNDS = 20
CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "vocab_size": 16,
    "hidden_size": 512,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 64,
    "torch_dtype": "bfloat16",
}
"""About 5 MB: copying it takes long enough to be met in the middle. Every expert has a part in every token, so that
the canary's fingerprint tells of each tensor."""
OLD_AGE = 3600
"""Seconds by which a file's time is set back: it has settled, and any change shows."""
REFUSALS = {Reason.CHANGED_WHILE_READING, Reason.TRUNCATED, Reason.VANISHED, Reason.UNREADABLE}
"""What a shard that was tampered with may be refused for: anything else, a defect above all, is none of these."""

VANDAL = """
import os, sys, time
path_of_other = sys.argv[1]
for line in sys.stdin:
    deed, delay, share, path = line.rstrip("\\n").split(" ", 3)
    until = time.monotonic() + float(delay)
    while time.monotonic() < until:
        pass
    try:
        if deed == "truncate":
            os.truncate(path, int(float(share) * os.stat(path).st_size))
        elif deed in ("overwrite", "rewrite"):
            with open(path_of_other, "rb") as source:
                content = source.read()
            flags = os.O_WRONLY | (os.O_TRUNC if deed == "rewrite" else 0)
            target = os.open(path, flags)
            for start in range(0, len(content), 1 << 18):
                os.write(target, content[start : start + (1 << 18)])
            os.close(target)
        elif deed == "replace":
            os.link(path_of_other, path + ".new")
            os.replace(path + ".new", path)
        elif deed == "delete":
            os.unlink(path)
        elif deed == "chmod":
            os.chmod(path, 0)
        elif deed != "nothing":
            raise SystemExit(deed)
    except (FileNotFoundError, PermissionError) as error:
        print(error, file=sys.stderr)
    print("done", flush=True)
"""
"""A process that tampers with files when told to. It waits in a loop: a sleep is late by more than a copy takes."""
DEEDS = ("truncate", "overwrite", "rewrite", "replace", "delete", "chmod")
KEEPS_OLD = {"truncate", "delete", "chmod", "nothing"}
"""Deeds after which there is only one content that may have been read."""


class Vandal:
    """The other process."""

    def __init__(self, other: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", VANDAL, str(other)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def begin(self, deed: str, delay: float, share: float, path: Path) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{deed} {delay} {share} {path}\n")
        self._process.stdin.flush()

    def wait(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "done\n"

    def end(self) -> None:
        self._process.communicate(timeout=TIMEOUT)
        assert self._process.returncode == 0


class Contents:
    """Two contents that differ in every tensor, as files, as tensors, and as the memory of a filled generation."""

    def __init__(self, folder: Path) -> None:
        self.config = DeepseekV2Config.from_dict(CONFIG)
        self.files: list[Path] = []
        self.tensors: list[dict[str, Tensor]] = []
        self.memories: list[Tensor] = []
        for seed in (1, 2):
            model = DeepseekV2ForCausalLM(self.config)
            dice = torch.Generator().manual_seed(seed)
            tensors = {
                name: torch.empty(slot.shape, dtype=torch.bfloat16).normal_(0, 0.05, generator=dice)
                for name, slot in model.table.slots.items()
            }
            model.load_weights(tensors.items())
            path = folder / f"content{seed}"
            save_file(tensors, path)
            self.tensors.append(tensors)
            self.files.append(path)
            self.memories.append(model.generation._storage)
        assert self.files[0].stat().st_size == self.files[1].stat().st_size
        self._bytes = [path.read_bytes() for path in self.files]

    def put(self, which: int, path: Path) -> None:
        """Write a file anew, as if long ago."""
        path.unlink(missing_ok=True)
        path.write_bytes(self._bytes[which])
        long_ago = time.time() - OLD_AGE
        os.utime(path, (long_ago, long_ago))

    def which(self, memory: Tensor) -> int | None:
        """Say which content a generation holds; None if it is neither, or a mixture."""
        return next((i for i, whole in enumerate(self.memories) if torch.equal(whole, memory)), None)


class Bench:
    """A real loader with a model that serves content 0."""

    def __init__(self, contents: Contents, generations: Literal[1, 2], *, leases: bool) -> None:
        self.contents = contents
        self.model = DeepseekV2ForCausalLM(contents.config, generations=generations)
        self.leases = leases
        self._told: queue.Queue[Any] = queue.Queue()
        settings = Settings(model=Model(config=""), loader=LoaderSettings(threads=2, block_bytes=65536))
        self.loader = Loader(self.model, settings, self._told.put)
        self.loader.start()
        self.model.load_weights(contents.tensors[0].items(), 0)
        if generations == 2:
            self.model.commit(0)
        self.version = 0
        self.took = 0.0
        """Seconds that the last load took."""

    def load(self, path: Path) -> Any:
        """Do what the daemon does with a file that it was told of; return what came of it."""
        self.version += 1

        def open_() -> Any:
            return open_file(path, leases=self.leases, settle=0.05, incomplete_after=5.0, header_limit=1 << 20)

        begin = time.monotonic()
        self.loader.inspect("k", Source("shard", open_))
        outcome = self._told.get(timeout=TIMEOUT)
        if isinstance(outcome, Inspected):
            self.loader.place("k", "shard", self.version)
            outcome = self._told.get(timeout=TIMEOUT)
        self.took = time.monotonic() - begin
        self.loader.release("k")
        return outcome

    def judge(self, outcome: Any, before: int | None, *, only_old: bool) -> int | None:
        """Hold the weights to what was told of them; return the content that answers now."""
        live = self.contents.which(self.model.generation._storage)
        written = self.model.staging.staged if not self.model.staging.in_place else self.model.generation
        stamped = {s.version for s in written.stamps if s is not None}
        if isinstance(outcome, Placed):
            holds = self.contents.which(written._storage)
            assert holds in ({0} if only_old else {0, 1}), "a mixture counts as applied"
            assert stamped == {self.version}
            assert not written.missing()
        else:
            assert isinstance(outcome, NotReady) or outcome.reason in REFUSALS, outcome
            assert self.version not in stamped, "something of a refused shard counts"
        if self.model.staging.in_place:
            assert isinstance(outcome, Placed) or live == before, "a refused shard has changed live weights"
            return live
        assert live == before == 0, "what is staged has changed live weights"
        self.loader.drop_version(self.version)
        return live

    def stop(self) -> None:
        assert self.loader.stop(TIMEOUT)
        self.model.fusion.check()


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> Contents:
    return Contents(tmp_path_factory.mktemp("contents"))


@pytest.fixture(scope="module", autouse=True)
def ignore_breaks() -> Iterator[None]:
    before = signal.getsignal(signal.SIGIO)
    lease.install_lease_signal_handling()
    yield
    signal.signal(signal.SIGIO, before)


@pytest.fixture
def vandal(contents: Contents) -> Iterator[Vandal]:
    made = Vandal(contents.files[1])
    yield made
    made.end()


def tamper(
    bench: Bench, vandal: Vandal, path: Path, deed: str, dice: random.Random, longest: float, before: int | None
) -> tuple[str, int | None]:
    """Load a file while the deed is done to it after a random delay."""
    bench.contents.put(0, path)
    vandal.begin(deed, dice.uniform(0, longest), dice.choice([0, 0.000001, 0.0005, dice.random(), 0.999999]), path)
    outcome = bench.load(path)
    vandal.wait()  # under a lease, it could not do it before the file was closed
    after = bench.judge(outcome, before, only_old=deed in KEEPS_OLD)
    told = outcome.reason.value if isinstance(outcome, Refused) else type(outcome).__name__
    return told, after


@pytest.mark.parametrize("leases", [True, False], ids=["mapped", "preadv"])
@pytest.mark.parametrize("deed", DEEDS)
def test_whatever_is_done_to_a_file_while_it_is_loaded(
    contents: Contents, vandal: Vandal, tmp_path: Path, deed: str, leases: bool
) -> None:
    path = tmp_path / "shard.safetensors"
    dice = random.Random(f"{deed} {leases}")
    benches = [Bench(contents, 2, leases=leases), Bench(contents, 1, leases=leases)]
    live: list[int | None] = [0, 0]
    outcomes: Counter[str] = Counter()
    longest = [0.0, 0.0]
    for number in range(ROUNDS):
        which = number % 2
        undisturbed = number % 10 < 2  # one of each, so that it is known to work, and how long it takes
        told, live[which] = tamper(
            benches[which], vandal, path, "nothing" if undisturbed else deed, dice, longest[which], live[which]
        )
        if undisturbed:
            assert told == "Placed"
            longest[which] = 1.1 * benches[which].took
        outcomes[told] += 1
    for bench in benches:
        bench.stop()

    assert outcomes["Placed"] >= ROUNDS // 5


@pytest.mark.parametrize("leases", [True, False], ids=["mapped", "preadv"])
def test_whatever_is_done_to_the_files_of_a_daemon(
    contents: Contents, vandal: Vandal, start_daemon: Callable[..., Any], tmp_path: Path, leases: bool
) -> None:
    """Each version is one shard that holds everything: what goes live is either content, by its fingerprint."""
    config = tmp_path / "config.json"
    config.write_bytes(msgspec.json.encode(CONFIG))
    daemon = start_daemon(
        model={"config": str(config), "dtype": "checkpoint"},
        loader={"leases": leases, "block_bytes": 65536},
        folder={"settle": 0.05, "incomplete_after": 0.2},
    )
    dice = random.Random(f"daemon {leases}")

    def drop(version: int, which: int) -> Path:
        aside, step = tmp_path / "aside", daemon.shards / f"step_{version}"
        aside.mkdir()
        contents.put(which, aside / "a.safetensors")
        aside.rename(step)
        return Path(step / "a.safetensors")

    with daemon.subscriber() as subscriber:
        heard: list[Any] = []

        def wait_live(version: int) -> str:
            """Return the fingerprint of a version that goes live."""
            for event in subscriber.events(timeout=TIMEOUT):
                heard.append(event)
                if isinstance(event, events.VersionLive) and event.version == version:
                    verified = (e for e in heard if isinstance(e, events.VersionVerified))
                    return next(e.fingerprint for e in verified if e.version == version)
            raise AssertionError(f"version {version} did not go live: {heard[-5:]}")

        fingerprints = []
        for version in (0, 1):
            drop(version, version)
            fingerprints.append(wait_live(version))
        assert len(set(fingerprints)) == 2
        for version in range(2, 2 + ROUNDS):
            path = drop(version, 0)
            vandal.begin(dice.choice(DEEDS), dice.uniform(0, 0.06), dice.random(), path)
            vandal.wait()
        drop(2 + ROUNDS, 1)
        assert wait_live(2 + ROUNDS) == fingerprints[1], "it lives on"

    verified = [e for e in heard if isinstance(e, events.VersionVerified)]
    refused = Counter(e.reason for e in heard if isinstance(e, events.ShardRefused))
    assert {e.fingerprint for e in verified} == set(fingerprints), "a mixture was verified"
    assert set(refused) <= REFUSALS | {Reason.CONFLICT, Reason.STALE_VERSION, Reason.VERSION_CLOSED}
    assert set(daemon.status().health.values()) == {"ok"}
    assert daemon.stop() == 0
    assert not [line for line in daemon.log() if "defect" in line.get("event", "")]
