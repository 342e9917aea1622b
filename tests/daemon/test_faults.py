"""What goes wrong around a daemon: a clear word in the status, the rest goes on, and it mends itself afterwards.

The folder's own troubles (unmounted, deleted, made again, inotify's limits, a full queue) are in test_folder, files
that change while they are read in test_races, clients that die or break the protocol in test_streams.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import zmq
from safetensors.torch import save_file
from torch import Tensor

from fusewire.daemon import wire

from .conftest import CHECKPOINTS, TIMEOUT, RunningDaemon, StartDaemon

Tensors = dict[str, Tensor]
Golden = Callable[[str], Tensors]
BASE = {"model": {"checkpoint": str(CHECKPOINTS / "v2")}}


@pytest.fixture
def daemon(start_daemon: StartDaemon) -> RunningDaemon:
    made = start_daemon(**BASE)
    made.wait_status(lambda s: s.state == "ready")
    return made


@pytest.fixture
def shard(checkpoint_tensors: Golden) -> Tensors:
    return {name: t + 1 for name, t in checkpoint_tensors("v2").items() if "layers.0." in name}


@contextlib.contextmanager
def limited(daemon: RunningDaemon, what: int, soft: int) -> Iterator[None]:
    """Give a running process a lower limit for a while."""
    before = resource.prlimit(daemon.process.pid, what)
    resource.prlimit(daemon.process.pid, what, (soft, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(daemon.process.pid, what, before)


def _comes_back(daemon: RunningDaemon, version: int, digest: str) -> None:
    """Start it again: the same version has to be live, with the same bytes."""
    daemon.start()
    daemon.wait_up()
    daemon.wait_status(lambda s: s.state == "ready" and s.version == version)
    with daemon.control() as control:
        assert control.digest().digest == digest


def test_no_room_in_the_state_directory(daemon: RunningDaemon, shard: Tensors) -> None:
    """As on a full disk, every write of a file fails: shards go live all the same, and answers say what that means."""
    with daemon.trainer() as trainer:
        with limited(daemon, resource.RLIMIT_FSIZE, 1):
            answer = trainer.push_tensors(shard, version=1)
            assert (answer.status, answer.durability) == ("applied", "memory")
            assert trainer.commit(1).status == "accepted"
            status = daemon.wait_status(lambda s: s.version == 1)
            assert "records wait to be written" in status.health["journal"]
            assert "File too large" in status.health["spool"]
            assert status.state == "ready"
        daemon.wait_status(lambda s: s.health["journal"] == "ok")
        answer = trainer.push_tensors(shard, version=2)
        assert answer.durability == "spool"
        trainer.commit(2)
        daemon.wait_status(lambda s: s.version == 2 and s.health["spool"] == "ok")
    with daemon.control() as control:
        before = control.digest().digest
    daemon.kill()
    _comes_back(daemon, 2, before)


def test_nothing_is_thrown_away_before_that_is_written_down(daemon: RunningDaemon, shard: Tensors) -> None:
    """The journal on the disk still says that the old version is live: its bytes have to be there."""
    with daemon.trainer() as trainer:
        trainer.push_tensors(shard, version=1)
        trainer.commit(1)
        daemon.wait_status(lambda s: s.version == 1)
        with daemon.control() as control:
            before = control.digest().digest
        with limited(daemon, resource.RLIMIT_FSIZE, 1):
            for version in (2, 3, 4):
                trainer.push_tensors({name: t + version for name, t in shard.items()}, version=version)
                trainer.commit(version)
                daemon.wait_status(partial(_live, version))
            time.sleep(1.2)  # longer than it takes to clear away
            daemon.kill()
    _comes_back(daemon, 1, before)


def _live(version: int, status: wire.Status) -> bool:
    return status.version == version


def test_what_could_not_be_kept_is_named_after_a_restart(daemon: RunningDaemon, shard: Tensors) -> None:
    with daemon.trainer() as trainer, limited(daemon, resource.RLIMIT_FSIZE, 1):
        trainer.push_tensors(shard, version=1)
        trainer.commit(1)
        daemon.wait_status(lambda s: s.version == 1)
    daemon.wait_status(lambda s: s.health["journal"] == "ok")
    daemon.kill()
    daemon.start()
    daemon.wait_up()
    status = daemon.wait_status(lambda s: any("push a whole version" in w.why for w in s.waiting_shards))
    assert status.state == "starting"


def test_no_more_file_descriptors(daemon: RunningDaemon, shard: Tensors) -> None:
    """A file that can't be opened for that reason is not refused, but looked at again."""
    with daemon.control() as control:
        control.status()
        used = {int(path.name) for path in Path(f"/proc/{daemon.process.pid}/fd").iterdir()}
        lowest_free = min(set(range(1000)) - used)
        with limited(daemon, resource.RLIMIT_NOFILE, lowest_free):
            save_file(shard, daemon.shards / "a.safetensors")
            deadline = time.monotonic() + TIMEOUT
            while not any("Too many open files" in w.why for w in control.status().waiting_shards):
                assert time.monotonic() < deadline, control.status()
                time.sleep(0.05)
    status = daemon.wait_status(lambda s: not s.waiting_shards and s.counters["shards_applied"] == 6 + 1)
    assert not status.rejected
    assert status.health == dict.fromkeys(status.health, "ok")


def test_a_subscriber_that_never_reads(daemon: RunningDaemon, shard: Tensors) -> None:
    """Its events are dropped, beyond what fits; nobody else notices."""
    name, tensor = next(iter(shard.items()))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    deaf = context.socket(zmq.SUB)
    deaf.rcvhwm = 10
    deaf.connect(daemon.endpoint("events"))
    deaf.subscribe(b"")
    try:
        with daemon.trainer() as trainer, daemon.subscriber() as subscriber:
            for _ in range(300):
                trainer.push_tensors({name: tensor})
            heard = 0
            for event in subscriber.events(timeout=TIMEOUT):
                heard += type(event).__name__ == "ShardApplied"
                if heard == 300:
                    break
        assert daemon.status().counters["shards_applied"] == 6 + 300
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize("where", ["loader", "reactor"])
def test_a_defect_of_ours(where: str, start_daemon: StartDaemon, tmp_path: Path, shard: Tensors) -> None:
    """In the loader: that shard is refused, the rest goes on. In the reactor: an end that systemd mends, no loss."""
    program = tmp_path / "defective.py"
    program.write_text(
        "import sys\n"
        "from fusewire.daemon import cli, ledger, loader\n"
        f"owner = {'ledger.Ledger' if where == 'reactor' else 'loader.Loader'}\n"
        f"name = {'_settle' if where == 'reactor' else '_placed'!r}\n"
        "sound = getattr(owner, name)\n"
        "def defective(self, *arguments):\n"
        "    shard = arguments[0] if name == '_settle' else None\n"
        "    if 'boom' in (shard.name if shard else ''.join(map(str, self._writing_names))):\n"
        "        raise RuntimeError('a defect')\n"
        "    return sound(self, *arguments)\n"
        "def place(self, key, name, version, sound=loader.Loader._place):\n"
        "    self._writing_names = [name]\n"
        "    return sound(self, key, name, version)\n"
        "loader.Loader._place = place\n"
        "setattr(owner, name, defective)\n"
        "if owner is ledger.Ledger:\n"
        "    for key, step in ledger.TRANSITIONS.items():\n"
        "        if step is sound:\n"
        "            ledger.TRANSITIONS[key] = defective\n"
        "sys.argv = ['fusewire', *sys.argv[sys.argv.index('run'):]]\n"
        "cli.main()\n"
    )
    daemon = start_daemon(**BASE, popen={"prefix": [sys.executable, str(program)]})
    daemon.wait_status(lambda s: s.state == "ready")
    with daemon.trainer() as trainer:
        trainer.push_tensors(shard, version=1)
        trainer.commit(1)
    daemon.wait_status(lambda s: s.version == 1)
    with daemon.control() as control:
        before = control.digest().digest
    save_file({name: t for name, t in shard.items() if "mlp" in name}, daemon.shards / "boom.safetensors")
    if where == "loader":
        status = daemon.wait_status(lambda s: bool(s.rejected))
        assert [r.reason for r in status.rejected] == ["internal_error"]
        save_file({name: t for name, t in shard.items() if "mlp" in name}, daemon.shards / "sound.safetensors")
        daemon.wait_status(lambda s: s.counters["shards_applied"] == 6 + 2)
        return
    assert daemon.process.wait(30) == 1
    (daemon.shards / "boom.safetensors").unlink()
    _comes_back(daemon, 1, before)


def _applied(count: int, status: wire.Status) -> bool:
    return status.counters["shards_applied"] == count


def test_the_clock_steps_back(daemon: RunningDaemon, shard: Tensors) -> None:
    """Files from the future, then one from long ago: each is loaded, and what was loaded is not loaded again."""
    ahead, behind = time.time() + 3600, time.time() - 10 * 365 * 86400
    for number, moment in enumerate((ahead, behind, ahead), 1):
        path = daemon.shards / f"{number}.safetensors"
        away = daemon.root / "away.safetensors"
        save_file(shard, away)
        os.utime(away, (moment, moment))
        away.rename(path)
        daemon.wait_status(partial(_applied, 6 + number))
    time.sleep(1.2)  # a scan
    assert daemon.status().counters["shards_applied"] == 6 + 3


def test_files_of_somebody_else_and_what_takes_their_place(daemon: RunningDaemon, shard: Tensors) -> None:
    """Unreadable, then readable; broken, then whole, under the same name: refused with its reason, then loaded."""
    path = daemon.shards / "a.safetensors"
    path.write_bytes(b"\xff" * 100)
    status = daemon.wait_status(lambda s: len(s.rejected) == 1)
    assert status.rejected[0].reason in {"malformed_header", "too_large"}
    save_file(shard, daemon.root / "whole")
    (daemon.root / "whole").rename(path)
    daemon.wait_status(lambda s: s.counters["shards_applied"] == 6 + 1)
    path.unlink()
    os.mkfifo(path)
    daemon.wait_status(lambda s: len(s.rejected) == 2)
    assert daemon.status().rejected[1].reason == "not_a_file"


def test_the_state_directory_is_taken_away(daemon: RunningDaemon, shard: Tensors) -> None:
    state = daemon.root / "state"
    state.rename(daemon.root / "away")
    with daemon.trainer() as trainer:
        answer = trainer.push_tensors(shard, version=1)
        assert (answer.status, answer.durability) == ("applied", "memory")
        assert trainer.commit(1).status == "accepted"
        assert "No such file" in daemon.wait_status(lambda s: s.version == 1).health["spool"]
        (daemon.root / "away").rename(state)
        assert trainer.push_tensors(shard, version=2).durability == "spool"


def test_signals_that_are_none_of_its_business(daemon: RunningDaemon, shard: Tensors) -> None:
    for number in (signal.SIGIO, signal.SIGPIPE, signal.SIGWINCH, signal.SIGCHLD):
        daemon.process.send_signal(number)
    with daemon.trainer() as trainer:
        assert trainer.push_tensors(shard, version=1).status == "applied"
    assert json.loads(daemon.log_path.read_text().splitlines()[-1])
