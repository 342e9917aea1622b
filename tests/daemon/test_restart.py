"""Killed and started again: the daemon comes back to what was live, by itself, or says what it lacks."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fusewire.daemon import wire
from fusewire.daemon.client import Trainer
from fusewire.model import DeepseekV2Config, DeepseekV2ForCausalLM
from fusewire.model.generation import digest

from .conftest import CHECKPOINTS, TIMEOUT, RunningDaemon, StartDaemon

Tensors = dict[str, Tensor]
Golden = Callable[[str], Tensors]
BASE = {"model": {"checkpoint": str(CHECKPOINTS / "v2")}}


@pytest.fixture(scope="module")
def base(checkpoint_tensors: Golden) -> Tensors:
    return checkpoint_tensors("v2")


@pytest.fixture(scope="module")
def cold() -> Callable[[Tensors], str]:
    """Digest of one cold load."""
    config = DeepseekV2Config.from_file(CHECKPOINTS / "v2/config.json")
    model = DeepseekV2ForCausalLM(config, dtype=torch.float32)

    def load(tensors: Tensors) -> str:
        model.load_weights(tensors.items())
        return digest(model.generation)[0]

    return load


def ready(daemon: RunningDaemon, version: int | None = None) -> tuple[int | None, str]:
    """Wait until it is ready, and a version is live; return that and the digest of all weights."""
    daemon.wait_up()
    daemon.wait_status(lambda s: s.state == "ready" and version in {None, s.version})
    with daemon.control() as control:
        found = control.digest()
    return found.version, found.digest


def again(daemon: RunningDaemon) -> tuple[int | None, str]:
    daemon.kill()
    daemon.start()
    return ready(daemon)


def pick(tensors: Tensors, *parts: str, plus: float = 1.0) -> Tensors:
    """Changed tensors: those whose names hold one of the parts."""
    return {name: tensor + plus for name, tensor in tensors.items() if any(part in name for part in parts)}


def drop(daemon: RunningDaemon, folder: str, *shards: Tensors) -> None:
    place = daemon.shards / folder
    place.mkdir(exist_ok=True)
    for number, shard in enumerate(shards):
        save_file(shard, place / f"{number}.safetensors")
    time.sleep(0.005)
    (place / "STABLE").touch()


def push(daemon: RunningDaemon, version: int | None, *shards: Tensors, commit: bool = True) -> list[wire.Answer]:
    with daemon.trainer() as trainer:
        answers = [trainer.push_tensors(shard, version=version) for shard in shards]
        if commit and version is not None:
            answers.append(trainer.commit(version))
    return answers


@pytest.fixture
def chained(start_daemon: StartDaemon, base: Tensors) -> tuple[RunningDaemon, Tensors]:
    """Live weights that rest on the base checkpoint, a pushed version, a file and a pushed rolling shard."""
    daemon = start_daemon(**BASE)
    ready(daemon)
    one = pick(base, "layers.0.")
    push(daemon, 1, one)
    ready(daemon, 1)
    two = pick(base, "layers.1.self_attn", plus=2.0)
    drop(daemon, "step_2", two)
    ready(daemon, 2)
    rolling = pick(base, "layers.0.self_attn", plus=3.0)
    (answer,) = push(daemon, None, rolling)
    assert answer.durability == "spool"
    daemon.wait_status(lambda s: s.version is None)
    return daemon, base | one | two | rolling


def test_live_weights_that_rest_on_many_shards(
    chained: tuple[RunningDaemon, Tensors], cold: Callable[[Tensors], str]
) -> None:
    daemon, expected = chained
    assert ready(daemon) == (None, cold(expected))
    for _ in range(2):
        assert again(daemon) == (None, cold(expected))
        status = daemon.status()
        assert not status.rejected
        assert status.health["journal"] == status.health["spool"] == "ok"
    stale = push(daemon, 2, pick(expected, "layers.0."), commit=False)[0]
    assert (stale.status, stale.reason) == ("rejected", "stale_version"), "what is over stays over"


def test_what_is_not_live_yet_waits_for_the_rest(
    start_daemon: StartDaemon, base: Tensors, cold: Callable[[Tensors], str]
) -> None:
    """Half of a version by either way, a kill, and the other half: nothing is sent twice."""
    daemon = start_daemon(**BASE)
    before = ready(daemon)
    push(daemon, 5, pick(base, "q_a_proj", plus=5.0), commit=False)
    (daemon.shards / "step_5").mkdir()
    save_file(pick(base, "layers.1.mlp", plus=5.0), daemon.shards / "step_5/a.safetensors")
    daemon.wait_status(lambda s: s.counters["shards_applied"] == 6 + 2)
    assert again(daemon) == before
    daemon.wait_status(lambda s: len(s.pending) == 3)
    push(daemon, 5, pick(base, "kv_a_proj", plus=5.0))
    expected = base | pick(base, "q_a_proj", "kv_a_proj", "layers.1.mlp", plus=5.0)
    assert ready(daemon, 5) == (5, cold(expected))
    assert again(daemon) == (5, cold(expected))


def test_a_commit_that_was_accepted_counts(
    start_daemon: StartDaemon, base: Tensors, cold: Callable[[Tensors], str]
) -> None:
    daemon = start_daemon(**BASE)
    ready(daemon)
    with daemon.trainer() as trainer:
        told = trainer.commit(4, sorted(pick(base, "layers.2.")))
        assert told.status == "accepted"
        trainer.push_tensors(pick(base, "layers.2.mlp", plus=4.0), version=4)
    again(daemon)
    push(daemon, 4, pick(base, "layers.2.self_attn", plus=4.0), commit=False)
    missing = daemon.wait_status(lambda s: any(v.version == 4 and v.missing_count for v in s.versions))
    assert next(v for v in missing.versions if v.version == 4).missing_count == 2, "two layernorms"
    push(daemon, 4, pick(base, "layers.2.", plus=4.0), commit=False)
    assert ready(daemon, 4) == (4, cold(base | pick(base, "layers.2.", plus=4.0)))


def test_a_rollback_is_remembered(start_daemon: StartDaemon, base: Tensors) -> None:
    daemon = start_daemon(**BASE, versions={"retention": "delete"})
    ready(daemon)
    drop(daemon, "step_1", {name: tensor + 1 for name, tensor in base.items()})
    first = ready(daemon, 1)
    drop(daemon, "step_2", {name: tensor + 2 for name, tensor in base.items()})
    ready(daemon, 2)
    with daemon.control() as control:
        control.rollback()
    assert ready(daemon, 1) == first
    assert again(daemon) == first
    assert daemon.status().version == 1, "the files of version 2 are there, and it stays rolled back"
    drop(daemon, "step_3", {name: tensor + 3 for name, tensor in base.items()})
    ready(daemon, 3)
    push(daemon, 4, pick(base, "layers.0."), commit=False)  # from now on there is no way back to version 1
    deadline = time.monotonic() + 20
    while (daemon.shards / "step_1").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert (daemon.shards / "step_3").exists()


def test_what_can_not_be_restored_is_named_and_waited_for(
    chained: tuple[RunningDaemon, Tensors], cold: Callable[[Tensors], str], tmp_path: Path
) -> None:
    daemon, expected = chained
    shard, away = daemon.shards / "step_2/0.safetensors", tmp_path / "away"
    times = shard.stat()
    shutil.copy2(shard, away)
    daemon.kill()
    shard.rename(tmp_path / "original")
    daemon.start()
    daemon.wait_up()
    status = daemon.wait_status(lambda s: any("deleted" in w.why for w in s.waiting_shards))
    assert status.state == "starting"
    (waiting,) = [w for w in status.waiting_shards if w.shard == "step_2/0.safetensors"]
    assert waiting.why.startswith("needed to restore the rolling version, and can't be read: deleted")
    assert any(line["event"] == "restore.missing" and "step_2" in line["shard"] for line in daemon.log())

    save_file(pick(expected, "layers.1.self_attn", plus=9.0), shard)  # another file of that name
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    daemon.wait_status(lambda s: any("another file" in w.why for w in s.waiting_shards))

    shard.unlink()
    (tmp_path / "original").rename(shard)
    assert ready(daemon) == (None, cold(expected)), "it comes back by itself"
    assert not daemon.status().waiting_shards


def test_a_whole_version_makes_up_for_what_is_lost(
    start_daemon: StartDaemon, base: Tensors, cold: Callable[[Tensors], str]
) -> None:
    daemon = start_daemon(**BASE, versions={"stale_after": 0.5})
    ready(daemon)
    drop(daemon, "step_1", pick(base, "layers.0."))
    ready(daemon, 1)
    daemon.kill()
    (daemon.shards / "step_1/0.safetensors").unlink()
    daemon.start()
    daemon.wait_up()
    daemon.wait_status(lambda s: any("deleted" in w.why for w in s.waiting_shards))
    new = {name: tensor + 2 for name, tensor in base.items()}
    push(daemon, 2, new)
    assert ready(daemon, 2) == (2, cold(new))
    assert again(daemon) == (2, cold(new))


def test_a_spooled_shard_that_is_damaged_is_named_and_waited_for(start_daemon: StartDaemon, base: Tensors) -> None:
    daemon = start_daemon(**BASE)
    ready(daemon)
    push(daemon, 1, pick(base, "layers.0."))
    before = ready(daemon, 1)
    daemon.kill()
    (spooled,) = (daemon.root / "state/spool").iterdir()
    whole = spooled.read_bytes()
    spooled.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    other = daemon.root / "other"
    shutil.copytree(CHECKPOINTS / "v2", other)
    daemon.write_settings({"model": {"checkpoint": str(other)}})
    daemon.start()
    daemon.wait_up()
    status = daemon.wait_status(lambda s: any("digest_mismatch" in w.why for w in s.waiting_shards))
    assert status.state == "starting"
    assert any(line["event"] == "restore.other_checkpoint" for line in daemon.log())
    spooled.write_bytes(whole)
    assert ready(daemon) == before


@pytest.mark.parametrize("by_folder", [True, False])
def test_the_one_file_is_replaced_while_it_is_down(
    start_daemon: StartDaemon, base: Tensors, cold: Callable[[Tensors], str], by_folder: bool
) -> None:
    """As trainers do that always write the same name: what was live is gone, and what is there makes up for it."""
    daemon = start_daemon()
    latest, aside = daemon.shards / "latest.safetensors", daemon.root / "aside"
    save_file(base, latest)
    ready(daemon)
    daemon.kill()
    new = {name: tensor + 1 for name, tensor in base.items()}
    if by_folder:
        save_file(new, aside)
        aside.rename(latest)
    else:
        latest.unlink()
    daemon.start()
    daemon.wait_up()
    if not by_folder:
        daemon.wait_status(lambda s: any("deleted" in w.why for w in s.waiting_shards))
        push(daemon, None, new)
    assert ready(daemon) == (None, cold(new))
    assert again(daemon) == (None, cold(new))


def test_a_base_checkpoint_of_links(start_daemon: StartDaemon, tmp_path: Path) -> None:
    """As a hub's cache keeps it."""
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for path in (CHECKPOINTS / "v2").iterdir():
        (folder / path.name).symlink_to(path)
    daemon = start_daemon(model={"checkpoint": str(folder)})
    before = ready(daemon)
    assert again(daemon) == before


def test_in_memory_only(start_daemon: StartDaemon, base: Tensors) -> None:
    daemon = start_daemon(**BASE, socket={"durability": "memory"})
    ready(daemon)
    answers = push(daemon, 1, pick(base, "layers.0."))
    assert [a.durability for a in answers] == ["memory", None]
    ready(daemon, 1)
    daemon.kill()
    daemon.start()
    daemon.wait_up()
    status = daemon.wait_status(lambda s: any("push a whole version" in w.why for w in s.waiting_shards))
    assert status.state == "starting"


def test_without_a_journal(start_daemon: StartDaemon, base: Tensors) -> None:
    daemon = start_daemon(**BASE, state={"path": ""})
    before = ready(daemon)
    answers = push(daemon, 1, pick(base, "layers.0."))
    assert answers[0].durability == "memory"
    ready(daemon, 1)
    assert again(daemon) == before
    assert not (daemon.root / "state").exists()


@pytest.mark.parametrize("generations", [1, 2])
def test_fp8_and_one_generation(start_daemon: StartDaemon, checkpoint_tensors: Golden, generations: int) -> None:
    family = "v3_fp8" if (CHECKPOINTS / "v3_fp8").exists() else "v3"
    daemon = start_daemon(family, model={"checkpoint": str(CHECKPOINTS / family), "generations": generations})
    ready(daemon)
    tensors = checkpoint_tensors(family)
    part = {name: tensor for name, tensor in tensors.items() if "layers.0.self_attn" in name}
    part = {name: (t.flip(0) if t.dtype == torch.float32 else t) for name, t in part.items()}
    push(daemon, 3, part)
    before = ready(daemon, 3)
    assert again(daemon) == before


def test_files_whose_outcome_is_known_are_not_read_again(start_daemon: StartDaemon, base: Tensors) -> None:
    daemon = start_daemon(**BASE)
    ready(daemon)
    drop(daemon, "step_1", pick(base, "layers.0."))
    ready(daemon, 1)
    (daemon.shards / "step_1/broken.safetensors").write_bytes(b"nothing")
    drop(daemon, "step_0", pick(base, "layers.0.", plus=7.0))
    both = {"step_1/broken.safetensors", "step_0/0.safetensors"}
    daemon.wait_status(lambda s: {r.shard for r in s.rejected} >= both)
    again(daemon)
    time.sleep(1.5)  # a scan, and one more
    status = daemon.status()
    assert status.counters["shards_rejected"] == 0
    os.utime(daemon.shards / "step_1/broken.safetensors")
    daemon.wait_status(lambda s: s.counters["shards_rejected"] == 1)


def test_the_spool_is_cleaned(start_daemon: StartDaemon, base: Tensors) -> None:
    daemon = start_daemon(**BASE)
    ready(daemon)
    spool = daemon.root / "state/spool"
    for version in range(1, 8):
        push(daemon, version, pick(base, "layers.0.", plus=version), pick(base, "layers.1.", plus=version))
        ready(daemon, version)
    deadline = time.monotonic() + 20
    while len(list(spool.iterdir())) > 4:  # of the live version and of the one before
        assert time.monotonic() < deadline
        time.sleep(0.05)
    push(daemon, 8, pick(base, "layers.2."), commit=False)
    with daemon.control() as control:
        control.abort(8)
    while len(list(spool.iterdir())) > 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    before = ready(daemon)
    assert again(daemon) == before


def test_a_killed_daemon_leaves_no_memory_behind(start_daemon: StartDaemon, tmp_path: Path) -> None:
    """Its shared segment goes at the next start of any daemon; those of daemons that live stay."""
    shared = Path("/dev/shm") / f"test-{os.getpid()}-{tmp_path.name}"  # noqa: S108 - the one tmpfs that is everywhere
    shared.mkdir()
    try:
        (shared / "fusewire-is-a-folder").mkdir()
        first = start_daemon(**BASE, socket={"shared_path": str(shared)})
        second = start_daemon(socket={"shared_path": str(shared)})
        of_both = {path.name for path in shared.iterdir() if path.is_file()}
        assert len(of_both) == 2
        for _ in range(3):
            first.kill()
            first.start()
            first.wait_up()
        there = {path.name for path in shared.iterdir() if path.is_file()}
        assert len(there) == 2
        assert len(there & of_both) == 1, "the second one's"
        with second.trainer() as trainer:
            assert trainer.welcome.shared
        assert first.stop() == 0
        assert second.stop() == 0
        assert [path.name for path in shared.iterdir()] == ["fusewire-is-a-folder"]
    finally:
        shutil.rmtree(shared)


def test_a_second_daemon_on_the_same_state(start_daemon: StartDaemon) -> None:
    first = start_daemon(**BASE)
    second = start_daemon(up=False, state={"path": str(first.root / "state")})
    assert second.process.wait(30) == 1
    assert f"another fusewire (process {first.process.pid})" in second.log_path.read_text()
    assert first.status().health["journal"] == "ok"


def missing_while_restoring(daemon: RunningDaemon, folder: str, away: Path) -> None:
    """Kill it, take a shard away that live slots rest on, and start it: it waits for that shard."""
    daemon.kill()
    (daemon.shards / folder / "0.safetensors").rename(away)
    daemon.start()
    daemon.wait_up()
    daemon.wait_status(lambda s: any("deleted" in w.why for w in s.waiting_shards))


def test_a_version_that_was_approved_comes_back_without_being_asked_for(
    start_daemon: StartDaemon, base: Tensors
) -> None:
    daemon = start_daemon(**BASE, versions={"commit": "manual"})
    ready(daemon)
    push(daemon, 1, pick(base, "layers.0."))
    daemon.wait_status(lambda s: any(v.version == 1 and v.state == "verified" for v in s.versions))
    with daemon.control() as control:
        control.commit(1)
    before = ready(daemon, 1)
    push(daemon, 2, pick(base, "layers.1."))
    daemon.wait_status(lambda s: any(v.version == 2 and v.state == "verified" for v in s.versions))
    assert again(daemon) == before
    daemon.wait_status(lambda s: any(v.version == 2 and v.state == "verified" for v in s.versions))
    assert again(daemon) == before, "nobody has approved of version 2"


def test_what_is_being_restored_can_not_be_aborted(start_daemon: StartDaemon, base: Tensors, tmp_path: Path) -> None:
    daemon = start_daemon(**BASE)
    ready(daemon)
    drop(daemon, "step_6", pick(base, "layers.0."))
    before = ready(daemon, 6)
    missing_while_restoring(daemon, "step_6", tmp_path / "away")
    with daemon.trainer() as trainer:
        answer = trainer.abort(6)
    assert (answer.status, answer.detail) == ("rejected", "version 6 is what was live, and is being restored")
    (tmp_path / "away").rename(daemon.shards / "step_6/0.safetensors")
    assert ready(daemon) == before


@pytest.mark.parametrize("killed", [False, True])
def test_a_new_run_that_begins_while_the_old_ones_weights_are_restored(
    start_daemon: StartDaemon, base: Tensors, cold: Callable[[Tensors], str], tmp_path: Path, killed: bool
) -> None:
    """Trainer and daemon fall together, and the trainer is back first."""
    daemon = start_daemon(**BASE)
    ready(daemon)
    old, new = pick(base, "layers.0."), pick(base, "layers.1.", plus=9.0)
    with Trainer(daemon.endpoint("ingest"), timeout=TIMEOUT, run="old") as trainer:
        trainer.push_tensors(pick(base, "layers.2."), version=5)
        trainer.commit(5)
    ready(daemon, 5)
    drop(daemon, "step_6", old)
    before = ready(daemon, 6)
    missing_while_restoring(daemon, "step_6", tmp_path / "away")
    with Trainer(daemon.endpoint("ingest"), timeout=TIMEOUT, run="new") as trainer:
        assert trainer.commit(1, sorted(new)).status == "accepted"
        if killed:
            daemon.kill()
            daemon.start()
            daemon.wait_up()
        (tmp_path / "away").rename(daemon.shards / "step_6/0.safetensors")
        assert ready(daemon)[1] == before[1]
        assert daemon.status().version is None, "its number stands for nothing in the new run"
        assert trainer.push_tensors(new, version=1).status == "applied"
    expected = cold(base | pick(base, "layers.2.") | old | new)
    assert ready(daemon, 1) == (1, expected)
    assert again(daemon) == (1, expected)


def test_the_spool_is_cleaned_over_many_restarts(start_daemon: StartDaemon, base: Tensors) -> None:
    """What was kept for a rollback at the kill is over after it."""
    daemon = start_daemon(**BASE)
    ready(daemon)
    for number in range(1, 7):
        push(daemon, number, pick(base, "layers.0.", plus=number))
        before = ready(daemon, number)
        if number % 2 == 0:
            assert again(daemon) == before
    deadline = time.monotonic() + 20
    while len(list((daemon.root / "state/spool").iterdir())) > 1:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with contextlib.closing(sqlite3.connect(daemon.root / "state/journal.sqlite")) as database:
        pushed = database.execute("SELECT standing FROM shards WHERE source = 'socket'").fetchall()
    assert sorted(pushed) == [("live",), *[("over",)] * 5]
