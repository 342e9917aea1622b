"""Trainers as they are: each layout written by the real program, and streamed while it is being written.

The oracle is a cold load of the same tensors in this process: the fingerprint of its logits has to be the one that the
daemon tells in `version.verified`, and each version has to go live exactly once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from transformers import AutoModelForCausalLM

from fusewire.daemon import demo, events
from fusewire.model import DeepseekV2Config, DeepseekV2ForCausalLM

CHECKPOINTS = Path(demo.__file__).parent / "checkpoints"
TIMEOUT = 30.0
CANARY = [3, 1, 4, 1, 5]
StartDaemon = Callable[..., Any]
Tensors = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As in the daemon, so that logits are the same to the last bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def vary(tensors: Mapping[str, Tensor], version: int) -> Tensors:
    """Weights of another version: each tensor differs, and is as harmless."""
    return {name: tensor.roll(version, 0).contiguous() for name, tensor in tensors.items()}


def fingerprint(family: str, tensors: Mapping[str, Tensor]) -> str:
    """Of the logits of a cold load of these tensors."""
    model = DeepseekV2ForCausalLM(DeepseekV2Config.from_file(CHECKPOINTS / family / "config.json"), dtype=torch.float32)
    model.load_weights(tensors.items())
    assert model.ready
    return model.canary(CANARY).fingerprint


class Watch:
    """A daemon, and all that it tells of versions."""

    def __init__(self, daemon: Any) -> None:
        self.daemon = daemon
        self.subscriber = daemon.subscriber()
        self.live: list[int | None] = []
        self.verified: dict[int | None, str] = {}
        self.other: list[str] = []

    def until_live(self, version: int) -> str:
        """Wait until a version is live; return its fingerprint."""
        for event in self.subscriber.events(timeout=TIMEOUT):
            match event:
                case events.VersionVerified():
                    self.verified[event.version] = event.fingerprint
                case events.VersionLive():
                    self.live.append(event.version)
                    if event.version == version:
                        return self.verified[version]
                case events.VersionAborted() | events.VersionSuperseded() | events.ShardRefused():
                    self.other.append(event.message)
                case _:
                    pass
        raise AssertionError(f"version {version} is not live: {self.daemon.status()}")


@pytest.fixture
def watch(start_daemon: StartDaemon) -> Iterator[Watch]:
    made = Watch(start_daemon("v2", versions={"canary": CANARY}))
    yield made
    made.subscriber.close()


WRITE_WITH_TRANSFORMERS = """
import sys
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
for version in (1, 2):
    for parameter in model.parameters():
        parameter.data = parameter.data.roll(1, 0)
    model.save_pretrained(f"{sys.argv[2]}/step_{version}", max_shard_size="60KB")
"""


def test_transformers_save_pretrained(watch: Watch) -> None:
    subprocess.run(
        [sys.executable, "-c", WRITE_WITH_TRANSFORMERS, str(CHECKPOINTS / "v2"), str(watch.daemon.shards)],
        check=True,
        capture_output=True,
        timeout=120,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    for version in (1, 2):
        if version in watch.live:
            continue
        found = watch.until_live(version)
        written: Tensors = {}
        for path in sorted((watch.daemon.shards / f"step_{version}").glob("*.safetensors")):
            written.update(load_file(path))
        assert found == fingerprint("v2", written)
    assert watch.live == [1, 2]
    assert watch.other == []
    assert AutoModelForCausalLM is not None


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("files", [1, 3])
def test_torch_distributed_checkpoint(files: int, watch: Watch, checkpoint_tensors: Callable[[str], Tensors]) -> None:
    for version in (4, 8):
        tensors = vary(checkpoint_tensors("v2"), version)
        names = {name: 1 + position % files for position, name in enumerate(tensors)}
        folder = watch.daemon.shards / f"global_step_{version}"
        writer = HuggingFaceStorageWriter(path=str(folder), fqn_to_index_mapping=names)
        save_distributed(dict(tensors), storage_writer=writer, no_dist=True)
        assert watch.until_live(version) == fingerprint("v2", tensors)
    assert (watch.live, watch.other) == ([4, 8], [])


def shard_names(count: int) -> list[str]:
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def write_index(folder: Path, placed: Mapping[str, str]) -> None:
    text = json.dumps({"metadata": {"total_size": 1}, "weight_map": dict(placed)}, indent=2)
    (folder / "model.safetensors.index.json").write_text(text)


def in_parts(tensors: Tensors, count: int) -> list[Tensors]:
    names = sorted(tensors)
    return [{name: tensors[name] for name in names[first::count]} for first in range(count)]


@pytest.mark.parametrize("partial", [False, True])
def test_shards_renamed_then_an_index_then_a_marker(
    partial: bool, watch: Watch, checkpoint_tensors: Callable[[str], Tensors]
) -> None:
    """The layout of prime-rl: ``step_N/``, temporary names in the same folder, an index, and ``STABLE`` last."""
    expected = checkpoint_tensors("v2")
    for version in (1, 2, 3):
        tensors = vary(checkpoint_tensors("v2"), version)
        if partial and version > 1:  # an adapter was merged into some of the layers only
            tensors = {name: tensor for name, tensor in tensors.items() if f"layers.{version - 1}." in name}
        expected = expected | tensors
        folder = watch.daemon.shards / f"step_{version}"
        folder.mkdir()
        placed = {}
        for name, part in zip(shard_names(4), in_parts(tensors, 4), strict=True):
            temporary = folder / f".{name}.tmp"
            temporary.write_bytes(save(part))
            temporary.rename(folder / name)
            placed.update(dict.fromkeys(part, name))
        write_index(folder, placed)
        (folder / "STABLE").touch()
        assert watch.until_live(version) == fingerprint("v2", expected)
    assert (watch.live, watch.other) == ([1, 2, 3], [])


def test_a_marker_without_an_index_ends_a_partial_version(
    watch: Watch, checkpoint_tensors: Callable[[str], Tensors]
) -> None:
    base = checkpoint_tensors("v2")
    first = watch.daemon.shards / "step_1"
    first.mkdir()
    save_file(base, first / "model.safetensors")
    watch.until_live(1)
    norm = {"model.norm.weight": base["model.norm.weight"] + 1}
    second = watch.daemon.shards / "step_2"
    second.mkdir()
    save_file(norm, second / "model.safetensors")
    watch.daemon.wait_status(lambda status: any(v.version == 2 and v.filled == 1 for v in status.versions))
    assert watch.daemon.status().version == 1, "nothing has said yet that this is all"
    (second / "STABLE").touch()
    assert watch.until_live(2) == fingerprint("v2", base | norm)


def test_a_folder_written_aside_and_renamed(watch: Watch, checkpoint_tensors: Callable[[str], Tensors]) -> None:
    """The layout of slime and miles: ``weight_v000001/`` appears as a whole."""
    for version in (1, 2, 3):
        tensors = vary(checkpoint_tensors("v2"), version)
        aside = watch.daemon.root / f"aside{version}"
        aside.mkdir()
        placed = {}
        for name, part in zip(shard_names(3), in_parts(tensors, 3), strict=True):
            save_file(part, aside / name)
            placed.update(dict.fromkeys(part, name))
        write_index(aside, placed)
        aside.rename(watch.daemon.shards / f"weight_v{version:06}")
        assert watch.until_live(version) == fingerprint("v2", tensors)
    assert (watch.live, watch.other) == ([1, 2, 3], [])


def test_an_index_first_as_the_hub_downloads(watch: Watch, checkpoint_tensors: Callable[[str], Tensors]) -> None:
    """And written in place, in two halves, with a pause: it is waited for."""
    tensors = vary(checkpoint_tensors("v2"), 5)
    folder = watch.daemon.shards / "checkpoint-5"
    folder.mkdir()
    parts = dict(zip(shard_names(2), in_parts(tensors, 2), strict=True))
    text = json.dumps({"weight_map": {name: file for file, part in parts.items() for name in part}})
    with (folder / "model.safetensors.index.json").open("w") as index:
        index.write(text[:100])
        index.flush()
        time.sleep(0.3)
        index.write(text[100:])
    for file, part in parts.items():
        save_file(part, folder / file)
    assert watch.until_live(5) == fingerprint("v2", tensors)
    assert watch.other == []


def test_versions_that_pile_up_lead_to_the_newest(
    start_daemon: StartDaemon, checkpoint_tensors: Callable[[str], Tensors]
) -> None:
    """A trainer that was faster, or a daemon that was away: what is older than the newest whole one may be left out."""
    daemon = start_daemon("v2", versions={"canary": CANARY})
    for version in range(1, 8):
        folder = daemon.shards / f"step_{version}"
        folder.mkdir()
        for name, part in zip(shard_names(3), in_parts(vary(checkpoint_tensors("v2"), version), 3), strict=True):
            save_file(part, folder / name)
    status = daemon.wait_status(lambda status: status.version == 7)
    assert status.counters["versions_live"] + status.counters["versions_superseded"] >= 1
    assert daemon.wait_status(lambda status: not status.waiting_shards).version == 7
