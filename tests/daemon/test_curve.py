"""Keys: who is let in over TCP and who is not, with real sockets, real daemons and real key files.

ZeroMQ tells a refused peer nothing, so a refusal is seen as a deadline that passes, and on the daemon's side: nothing
was applied, and the handler has counted.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
import stat
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, get_args

import msgspec
import pytest
import zmq
import zmq.auth
from safetensors.torch import save
from torch import Tensor

from fusewire.daemon import curve, endpoints, keys, settings, wire
from fusewire.daemon.assembly import Parts, assemble
from fusewire.daemon.client import ClientKeys, Control, DaemonUnreachable, RequestFailed, Subscriber, Trainer
from fusewire.daemon.control import QUESTIONS
from fusewire.daemon.control import Control as Answers
from fusewire.daemon.errors import StartError
from fusewire.daemon.metrics import HOST
from fusewire.daemon.segment import Attached, Segment

ROOT = Path(__file__).parents[2]
SHM = Path("/dev/shm")  # noqa: S108 - a tmpfs by definition
TIMEOUT = 30.0
SHORT = 1.5
"""Seconds after which a silence is taken for a refusal: a connection that is let in takes a hundredth of it."""
TIMEOUT_MS, SILENCE_MS = round(TIMEOUT * 1000), round(SHORT * 1000)
NORM = "model.norm.weight"
Golden = Callable[[str], dict[str, Tensor]]
StartDaemon = Callable[..., Any]
Shell = Callable[..., subprocess.CompletedProcess[str]]
PEERS = {"trainers": "trainer", "operators": "operator", "subscribers": "subscriber"}
SOCKETS = ("socket", "events", "control")


class Ring:
    """Key pairs of a daemon and of its peers, in the folders that the settings name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.secret = keys.make(folder, "fusewire")[1]
        for role, name in PEERS.items():
            keys.make(folder, name)
            (folder / role).mkdir()
            self.admit(name, role)
        keys.make(folder, "stranger")

    def admit(self, name: str, role: str) -> Path:
        target = self.folder / role / f"{name}.key"
        target.write_bytes((self.folder / f"{name}.key").read_bytes())
        return target

    def of(self, name: str, server: str = "fusewire") -> ClientKeys:
        return ClientKeys.load(self.folder / f"{name}.key_secret", self.folder / f"{server}.key")

    def settings(self) -> dict[str, str]:
        folders = {role: str(self.folder / role) for role in PEERS}
        return {"secret_key": str(self.secret), **folders}


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Ring:
    return Ring(tmp_path_factory.mktemp("keys"))


class Guarded:
    """A daemon on TCP with keys, and where its sockets are."""

    def __init__(self, running: Any, ring: Ring) -> None:
        self.running = running
        self.ring = ring
        started = wait_log(running, "daemon.started")
        self.ingest, self.events, self.control = (
            started[name].replace("0.0.0.0", "127.0.0.1")  # noqa: S104 - where to connect, not to bind
            for name in ("ingest", "events", "control")
        )

    def trainer(self, key: ClientKeys | None, timeout: float = TIMEOUT) -> Trainer:
        return Trainer(self.ingest, timeout, curve=key)

    def ask(self, key: ClientKeys | None, timeout: float = TIMEOUT) -> Control:
        return Control(self.control, timeout, curve=key)

    def listen(self, key: ClientKeys | None, timeout: float = TIMEOUT) -> Subscriber:
        return Subscriber(self.events, self.control, timeout, curve=key)

    def status(self) -> wire.Status:
        with self.ask(self.ring.of("operator")) as control:
            return control.status()

    def refusals(self) -> dict[str, float]:
        counters = self.status().counters
        return {domain: counters[f"refused_at_{domain}"] for domain in curve.DOMAINS}


def wait_log(running: Any, event: str, after: int = 0) -> dict[str, Any]:
    deadline = time.monotonic() + TIMEOUT
    while True:
        found = [line for line in running.log()[after:] if line["event"] == event]
        if found:
            return dict(found[-1])
        assert running.process.poll() is None, running.log_path.read_text()
        assert time.monotonic() < deadline, running.log_path.read_text()
        time.sleep(0.02)


def tcp(**more: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return sections with all three sockets on TCP."""
    sections: dict[str, dict[str, Any]] = {name: {"endpoint": "tcp://127.0.0.1:*"} for name in SOCKETS}
    for section, values in more.items():
        sections.setdefault(section, {}).update(values)
    return sections


@pytest.fixture(scope="module")
def guarded(start_shared_daemon: StartDaemon, ring: Ring) -> Guarded:
    """One daemon for all tests that only knock."""
    small = {"chunk_bytes": 65536, "window_bytes": 262144}
    return Guarded(start_shared_daemon("v2", up=False, **tcp(curve=ring.settings(), socket=small)), ring)


@pytest.fixture
def own(start_daemon: StartDaemon, tmp_path: Path) -> Guarded:
    """A daemon of this test's own, with keys of its own."""
    made = Ring(tmp_path / "keys")
    return Guarded(start_daemon("v2", up=False, **tcp(curve=made.settings())), made)


# ------------------------------------------------------------------------------------------- who is let in


def test_each_role_does_its_work(guarded: Guarded, checkpoint_tensors: Golden) -> None:
    """Push (whole and in chunks), listen, ask and order, all over CURVE."""
    tensors = checkpoint_tensors("v2")
    with (
        guarded.listen(guarded.ring.of("subscriber")) as subscriber,
        guarded.listen(guarded.ring.of("operator")) as too,
        guarded.trainer(guarded.ring.of("trainer")) as trainer,
        Trainer(guarded.ingest, TIMEOUT, curve=guarded.ring.of("trainer"), shared_memory=False) as chunks,
        guarded.ask(guarded.ring.of("operator")) as operator,
    ):
        assert trainer.push_tensors({NORM: tensors[NORM]}, version=1).status == "applied"
        answer = chunks.push_tensors({n: t for n, t in tensors.items() if n != NORM}, version=1)
        assert answer.status == "applied"
        assert 0 in answer.fused
        subscriber.wait_version(1, timeout=TIMEOUT)
        too.wait_version(1, timeout=TIMEOUT)
        assert operator.status().version == 1
        assert len(operator.generate([1, 2], 3).token_ids) == 3


@pytest.mark.parametrize("who", ["trainer", "operator"])
@pytest.mark.parametrize("server", ["fusewire", "stranger"])
def test_the_keys_are_needed_both(guarded: Guarded, who: str, server: str) -> None:
    """The right key with another server's public key gets nowhere: the daemon can't be impersonated."""
    key = guarded.ring.of(who, server)
    before = guarded.status().counters["shards_applied"]
    with guarded.trainer(key, SHORT) as trainer, guarded.ask(key, SHORT) as control:
        if (who, server) == ("trainer", "fusewire"):
            assert trainer.max_put_bytes
        else:
            with pytest.raises(DaemonUnreachable, match="could not be reached"):
                trainer.push_bytes(b"x")
        if (who, server) == ("operator", "fusewire"):
            assert control.status().pid == guarded.running.process.pid
        else:
            with pytest.raises(DaemonUnreachable, match="could not be reached"):
                control.status()
    assert guarded.status().counters["shards_applied"] == before


@pytest.mark.parametrize("who", ["stranger", None])
def test_strangers_are_refused_at_all_three_sockets(
    guarded: Guarded, checkpoint_tensors: Golden, who: str | None
) -> None:
    """A key that nobody knows, though with the right server key; and no key at all."""
    key = guarded.ring.of(who) if who else None
    before, refused = guarded.status(), guarded.refusals()
    told = "curve.trainers" if who else r"it may want keys \(CURVE\)"
    with guarded.trainer(key, SHORT) as trainer, pytest.raises(DaemonUnreachable, match=told):
        trainer.push_bytes(save({NORM: checkpoint_tensors("v2")[NORM]}))
    with guarded.ask(key, SHORT) as control, pytest.raises(DaemonUnreachable, match=told):
        control.status()
    with pytest.raises(DaemonUnreachable, match=told):
        guarded.listen(key, SHORT)
    after = guarded.status()
    for counter in ("shards_applied", "shards_rejected", "messages_malformed"):
        assert after.counters[counter] == before.counters[counter]
    more = {domain: count - refused[domain] for domain, count in guarded.refusals().items()}
    assert all(more.values()) if who else not any(more.values()), "a peer without CURVE never comes to the handler"


@pytest.mark.parametrize(
    ("who", "sockets"),
    [
        ("trainer", {"ingest"}),
        ("operator", {"control", "events"}),
        ("subscriber", {"control", "events"}),
        ("stranger", set()),
    ],
)
def test_each_key_opens_its_own_doors_only(guarded: Guarded, who: str, sockets: set[str]) -> None:
    """Above all: a trainer's key is refused on control."""
    key = guarded.ring.of(who)
    opened = set()
    with zmq.Context() as context:
        for name, kind in (("ingest", zmq.DEALER), ("control", zmq.DEALER), ("events", zmq.SUB)):
            with context.socket(kind) as made:
                made.linger = 0
                key.secure(made)
                made.connect(getattr(guarded, name))
                if kind == zmq.SUB:
                    made.subscribe(b"")
                else:
                    made.send_multipart([b"", wire.encode(wire.Hello() if name == "ingest" else wire.GetStatus())])
                if made.poll(SILENCE_MS):
                    opened.add(name)
    assert opened == sockets


def test_a_subscriber_asks_and_does_not_order(guarded: Guarded) -> None:
    with guarded.ask(guarded.ring.of("subscriber")) as control:
        assert control.snapshot().boot == control.status().boot
        assert control.replay(0).boot
        control.pending()
        control.versions()
        orders: list[Callable[[], Any]] = [
            control.rollback,
            lambda: control.commit(1),
            lambda: control.abort(1),
            lambda: control.generate([1], 1),
            control.digest,
        ]
        for order in orders:
            with pytest.raises(RequestFailed, match=r"is for operators.*curve\.operators"):
                order()
    tried = {wire.RollbackVersion, wire.CommitVersion, wire.AbortVersion, wire.Generate, wire.GetDigest}
    assert set(get_args(wire.ControlRequest)) - set(QUESTIONS) == tried, "a request is a question, or was tried here"


def test_refusals_are_told_in_status_metrics_and_the_log_but_not_each(guarded: Guarded) -> None:
    key = guarded.ring.of("stranger")
    before = guarded.refusals()["ingest"]
    lines = len(guarded.running.log())
    began = time.monotonic()
    with zmq.Context() as context:
        crowd = [context.socket(zmq.DEALER) for _ in range(20)]
        for made in crowd:
            made.linger = 0
            key.secure(made)
            made.connect(guarded.ingest)
        while guarded.refusals()["ingest"] < before + 20:
            assert time.monotonic() < began + TIMEOUT
        for made in crowd:
            made.close()
    took = time.monotonic() - began
    said = [line for line in guarded.running.log()[lines:] if line["event"] == "peer.refused"]
    assert len(said) <= 1 + took / curve.LOG_INTERVAL
    note = next(note for note in guarded.status().notes if "ingest" in note)
    assert key.public.decode() in note
    assert "127.0.0.1" in note
    port = wait_log(guarded.running, "daemon.started")["metrics_port"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response:
        text = response.read().decode()
    counted = re.search(r'fusewire_peers_refused_total{socket="ingest"} (\d+)', text)
    assert counted is not None
    assert int(counted[1]) >= before + 20


# ------------------------------------------------------------------------------------- changing who is let in


def reload(guarded: Guarded) -> dict[str, Any]:
    after = len(guarded.running.log())
    guarded.running.process.send_signal(signal.SIGHUP)
    wait_log(guarded.running, "settings.reloaded", after)
    return wait_log(guarded.running, "keys.reloaded", after)


def test_a_key_is_added_and_revoked_without_a_restart(own: Guarded, checkpoint_tensors: Golden) -> None:
    shard = save({NORM: checkpoint_tensors("v2")[NORM]})
    with own.trainer(own.ring.of("stranger"), SHORT) as trainer, pytest.raises(DaemonUnreachable):
        trainer.push_bytes(shard)
    file = own.ring.admit("stranger", "trainers")
    assert reload(own)["added"] == ["stranger"]
    with own.trainer(own.ring.of("stranger")) as old:
        assert old.push_bytes(shard).status == "applied"

        file.unlink()
        assert reload(own)["revoked"] == 1

        applied = own.status().counters["shards_applied"]
        with own.trainer(own.ring.of("stranger"), SHORT) as new, pytest.raises(DaemonUnreachable, match="reached"):
            new.push_bytes(shard)
        with pytest.raises(DaemonUnreachable, match="did not answer"):
            old._requester.request([wire.encode(wire.Put()), shard], wire.decode_ingest_reply, SHORT)
    with own.trainer(own.ring.of("trainer")) as other:
        assert other.push_bytes(shard).status == "applied"
    assert own.status().counters["shards_applied"] == applied + 1


def test_a_reload_with_bad_files_lets_nobody_in_by_them_and_still_revokes(own: Guarded) -> None:
    folder = own.ring.folder / "operators"
    (folder / "broken.key").write_text("public-key = nonsense")
    (folder / "link.key").symlink_to(own.ring.folder / "stranger.key")
    (own.ring.folder / "subscribers" / "subscriber.key").unlink()
    reload(own)
    notes = " ".join(own.status().notes)
    assert "broken.key: its public key is not 40 characters of Z85" in notes
    assert "link.key: is a link" in notes
    assert "curve.subscribers holds no key" in notes
    for who in ("stranger", "subscriber"):
        with own.ask(own.ring.of(who), SHORT) as control, pytest.raises(DaemonUnreachable):
            control.status()

    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    reload(own)
    assert any("operators: No such file" in note for note in own.status().notes), "the old keys stay in force"

    (own.ring.folder / "trainers" / "trainer.key").unlink()
    own.running.config_path.write_text("nonsense = [")
    after = len(own.running.log())
    own.running.process.send_signal(signal.SIGHUP)
    wait_log(own.running, "settings.not_reloaded", after)
    with own.trainer(own.ring.of("trainer"), SHORT) as trainer, pytest.raises(DaemonUnreachable):
        trainer.push_bytes(b"")  # a slip of the editor does not keep a revoked key in force


# --------------------------------------------------------------------------------------------------- replay


class Recorder:
    """A TCP proxy that keeps what clients sent, byte for byte."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self.target = (host, int(port))
        self.sent: list[bytearray] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._open: list[socket.socket] = [self._listening]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            daemon = socket.create_connection(self.target)
            self._open += [client, daemon]
            kept = bytearray()
            self.sent.append(kept)
            for source, target, record in ((client, daemon, kept), (daemon, client, None)):
                thread = threading.Thread(target=self._pump, args=(source, target, record), daemon=True)
                self._threads.append(thread)
                thread.start()

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket, record: bytearray | None) -> None:
        try:
            while data := source.recv(65536):
                if record is not None:
                    record += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def close(self) -> None:
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join(TIMEOUT)


def test_old_bytes_played_again_do_nothing(own: Guarded, checkpoint_tensors: Golden) -> None:
    """A whole recorded session that pushed a shard: its keys were good once, and its bytes are worth nothing now."""
    recorder = Recorder(own.ingest)
    try:
        with Trainer(recorder.endpoint, TIMEOUT, curve=own.ring.of("trainer")) as trainer:
            assert trainer.push_tensors({NORM: checkpoint_tensors("v2")[NORM]}, version=1).status == "applied"
    finally:
        recorder.close()
    tape = bytes(max(recorder.sent, key=len))
    assert len(tape) > 64 + checkpoint_tensors("v2")[NORM].nbytes
    assert NORM.encode() not in tape, "it is encrypted"
    greeting, hello = 64, 64 + 2 + tape[65]
    assert b"HELLO" in tape[greeting:hello]
    before = own.status()

    at_once, _ = play(recorder.target, [tape])
    in_turn, ended = play(recorder.target, [tape[:greeting], tape[greeting:hello], tape[hello:]])

    assert b"WELCOME" in in_turn, "the daemon goes as far with it as with anybody"
    assert b"READY" not in at_once + in_turn
    assert ended
    after = own.status()
    for counter in ("shards_applied", "shards_rejected", "bytes_applied", "messages_malformed"):
        assert after.counters[counter] == before.counters[counter]
    assert [version.filled for version in after.versions] == [version.filled for version in before.versions]


def play(target: tuple[str, int], parts: list[bytes]) -> tuple[bytes, bool]:
    """Send bytes, each part once something has come in answer; return all that came, and whether it hung up."""
    heard = b""
    with socket.create_connection(target) as made:
        made.settimeout(SHORT)
        try:
            for part in parts:
                made.sendall(part)
                heard += made.recv(65536)
            while data := made.recv(65536):
                heard += data
        except TimeoutError:
            return heard, False
        except ConnectionError:
            pass
    return heard, True


# ------------------------------------------------------------------------------------------------- the start


def parts_of(folder: Path, **sections: dict[str, Any]) -> Parts:
    """Build a daemon's parts as `fusewire run` does."""
    checkpoint = ROOT / "daemon/demo/checkpoints/v2"
    written: dict[str, dict[str, Any]] = {
        "model": {"config": str(checkpoint / "config.json"), "dtype": "float32"},
        "folder": {"enabled": False},
        "metrics": {"enabled": False},
        "state": {"path": "state"},
        **{name: {"endpoint": f"ipc://{name}.sock"} for name in SOCKETS},
    }
    for section, values in sections.items():
        written.setdefault(section, {}).update(values)
    (folder / "fusewire.toml").write_bytes(msgspec.toml.encode(written))
    return assemble(settings.load(folder / "fusewire.toml"))


def refusal(folder: Path, **sections: dict[str, Any]) -> str:
    """Build parts where that has to be refused; return what is said."""
    with pytest.raises(StartError) as caught:
        parts_of(folder, **sections)
    return str(caught.value)


@pytest.mark.parametrize("name", SOCKETS)
def test_other_hosts_are_refused_without_keys(tmp_path: Path, name: str) -> None:
    said = refusal(tmp_path, **{name: {"endpoint": "tcp://0.0.0.0:*"}})

    assert f"{name}.endpoint = tcp://0.0.0.0:*" in said
    for setting in ("curve.secret_key", "curve.trainers", "curve.operators", "curve.subscribers"):
        assert setting in said


def test_a_daemon_that_would_be_open_to_all_does_not_start(start_daemon: StartDaemon) -> None:
    running = start_daemon("v2", up=False, socket={"endpoint": "tcp://0.0.0.0:*"})

    assert running.process.wait(TIMEOUT) == 1
    assert "0.0.0.0 is not a loopback address" in running.log_path.read_text()


def test_other_hosts_are_let_in_with_keys(start_daemon: StartDaemon, ring: Ring, checkpoint_tensors: Golden) -> None:
    everywhere = {name: {"endpoint": "tcp://0.0.0.0:*"} for name in SOCKETS}
    open_to_all = Guarded(start_daemon("v2", up=False, curve=ring.settings(), **everywhere), ring)
    with open_to_all.trainer(ring.of("trainer")) as trainer:
        assert trainer.push_tensors({NORM: checkpoint_tensors("v2")[NORM]}).status == "applied"
    with open_to_all.trainer(None, SHORT) as trainer, pytest.raises(DaemonUnreachable):
        trainer.push_bytes(b"")


def test_ipc_stays_governed_by_its_mode(start_daemon: StartDaemon, ring: Ring, checkpoint_tensors: Golden) -> None:
    """Keys are for TCP only: ipc beside it, as always, 0660, and whoever may connect may order."""
    running = start_daemon("v2", curve=ring.settings(), events={"endpoint": "tcp://127.0.0.1:*"})
    for name in ("ingest", "control"):
        assert stat.S_IMODE((running.root / f"{name}.sock").stat().st_mode) == 0o660
    with running.trainer() as trainer:
        assert trainer.push_tensors({NORM: checkpoint_tensors("v2")[NORM]}, version=1).status == "applied"
    with running.control() as control:
        assert control.abort(1)
    assert running.status().health["keys"] == "ok"


def test_loopback_without_keys_is_allowed_and_noted(start_daemon: StartDaemon) -> None:
    running = start_daemon("v2", socket={"endpoint": "tcp://127.0.0.1:*"})
    with Trainer(wait_log(running, "daemon.started")["ingest"], TIMEOUT) as trainer:
        assert trainer.max_put_bytes
    assert any("every user of this host can connect" in note for note in running.status().notes)
    assert "keys" not in running.status().health


def with_curve(ring: Ring, **changes: Any) -> dict[str, dict[str, Any]]:
    return tcp(curve=ring.settings() | changes)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o602])
def test_a_key_file_with_a_bad_mode_is_refused_with_the_command(tmp_path: Path, ring: Ring, mode: int) -> None:
    copy = tmp_path / "copy.key_secret"
    copy.write_bytes(ring.secret.read_bytes())
    copy.chmod(mode)
    said = refusal(tmp_path, **with_curve(ring, secret_key=str(copy)))
    assert f"curve.secret_key: key file {copy}: its mode is {mode:#o}" in said
    assert f"chmod 600 {copy}" in said
    assert secret_of(ring.secret) not in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"secret_key": "none.key_secret"}, r"curve\.secret_key: key file .*none\.key_secret: No such file.*keygen"),
        ({"secret_key": "private"}, r"curve\.secret_key: key file .*private: holds no secret key"),
        ({"secret_key": "."}, r"curve\.secret_key: key file .*: is not a regular file"),
        ({"trainers": "none"}, r"curve\.trainers: key folder .*none: No such file or directory; create it"),
        ({"operators": "private"}, r"curve\.operators: key folder .*private: Not a directory"),
        ({"operators": "bad"}, r"curve\.operators: key file .*bad/x\.key: holds no public key; key files are"),
        ({"operators": "", "subscribers": ""}, r"\.endpoint is on TCP with CURVE.*set curve\."),
        ({"trainers": ""}, r"socket\.endpoint is on TCP with CURVE.*set curve\.trainers"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, ring: Ring, changes: dict[str, str], said: str) -> None:
    """Relative paths are those of the settings file's folder."""
    (tmp_path / "private").touch(0o600)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "x.key").touch()
    assert re.search(said, refusal(tmp_path, **with_curve(ring, **changes)))


def test_a_key_file_that_may_not_be_read_is_named(tmp_path: Path, ring: Ring) -> None:
    copy = tmp_path / "copy.key_secret"
    copy.write_bytes(ring.secret.read_bytes())
    copy.chmod(0)
    if os.access(copy, os.R_OK):
        pytest.skip("this user may read everything")
    assert "Permission denied" in refusal(tmp_path, **with_curve(ring, secret_key=str(copy)))


def test_a_systemd_credential_is_the_daemons_key(tmp_path: Path, ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its group's bits show the ACL by which systemd lets the service's user read it: no reason to refuse it."""
    credential = tmp_path / "credentials" / "fusewire.key"
    credential.parent.mkdir()
    credential.write_bytes(ring.secret.read_bytes())
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(credential.parent))
    for named in ("", str(credential)):
        credential.chmod(0o440)
        parts = parts_of(tmp_path, **with_curve(ring, secret_key=named))
        assert parts.guard is not None
        assert parts.guard.pair == keys.read_pair(ring.secret)
        parts.close()
        credential.chmod(0o444)
        assert "fusewire.key: its mode is 0o444" in refusal(tmp_path, **with_curve(ring, secret_key=named))
    other = ring.folder / "stranger.key_secret"
    parts = parts_of(tmp_path, **with_curve(ring, secret_key=str(other)))
    assert parts.guard is not None
    assert parts.guard.pair == keys.read_pair(other), "what the settings name goes before"
    parts.close()
    credential.unlink()
    assert "is not a loopback" in refusal(tmp_path, events={"endpoint": "tcp://0.0.0.0:*"})


def test_metrics_are_bound_on_loopback_and_no_setting_can_change_it(guarded: Guarded) -> None:
    assert HOST == "127.0.0.1"
    assert settings.Metrics.__struct_fields__ == ("enabled", "port")
    port = wait_log(guarded.running, "daemon.started")["metrics_port"]
    table = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    listening = {row[1] for row in table if row[3] == "0A"}
    assert {address.split(":")[0] for address in listening if address.endswith(f":{port:04X}")} == {"0100007F"}


# ------------------------------------------------------------------------------------ the handler, alone


Context = zmq.Context[zmq.Socket[bytes]]


class Keeper(zmq.Context[zmq.Socket[bytes]]):
    """A context that keeps its sockets, so that none is collected before it is closed."""

    made: ClassVar[list[zmq.Socket[bytes]]] = []

    def socket(self, *arguments: Any, **options: Any) -> zmq.Socket[bytes]:
        new = super().socket(*arguments, **options)
        self.made.append(new)
        return new


@pytest.fixture
def context() -> Iterator[Context]:
    keeper = Keeper()
    yield keeper
    for made in keeper.made:
        made.close(0)
    keeper.made.clear()
    keeper.term()


def guard(context: Context, ring: Ring) -> curve.Guard:
    return curve.Guard(context, keys.read_pair(ring.secret), settings.Curve(**ring.settings()))


def test_a_socket_lets_nobody_in_while_there_is_no_handler(context: Context, ring: Ring) -> None:
    """CURVE alone would let in all the world that knows the server's key."""
    door = guard(context, ring).door("ingest")
    door.guard.close()
    bound = endpoints.create(context, zmq.ROUTER)
    where = endpoints.bind(bound, "tcp://127.0.0.1:*", mode=0o600, setting="x", door=door)
    client = context.socket(zmq.DEALER)
    ring.of("trainer").secure(client)
    client.connect(where)
    client.send(b"let me in")
    assert not bound.poll(SILENCE_MS)


@pytest.mark.parametrize(
    "request_",
    [
        [],
        [b"1.0"],
        [b"1.0", b"7", b"ingest", b"127.0.0.1", b"", b"NULL"],
        [b"1.0", b"7", b"ingest", b"127.0.0.1", b"", b"PLAIN", b"user", b"password"],
        [b"2.0", b"7", b"ingest", b"127.0.0.1", b"", b"CURVE", b"k" * 32],
        [b"1.0", b"7", b"nowhere", b"127.0.0.1", b"", b"CURVE", b"k" * 32],
        [b"1.0", b"7", b"", b"127.0.0.1", b"", b"CURVE", b"k" * 32],
        [b"1.0", b"7", b"ingest", b"127.0.0.1", b"", b"CURVE", b"k" * 31],
        [b"1.0", b"7", b"ingest", b"127.0.0.1", b"", b"CURVE", b""],
        [b"1.0", b"7", b"ingest", b"\xff", b"", b"CURVE", b"k" * 32],
        [b"1.0", b"7", b"ingest", b"127.0.0.1", b"", b"CURVE", b"k" * 32, b"more"],
    ],
)
def test_whatever_is_asked_the_handler_answers_and_does_not_admit(
    context: Context, ring: Ring, request_: list[bytes]
) -> None:
    made = guard(context, ring)
    asking = context.socket(zmq.REQ)
    asking.connect(curve.ENDPOINT)
    asking.send_multipart(request_ or [b""])
    assert made.socket.poll(TIMEOUT_MS)
    made.answer()
    assert asking.poll(TIMEOUT_MS)
    assert asking.recv_multipart()[2] == b"400"
    assert made.health() == "ok"


def test_a_handler_that_fails_is_a_failure_of_the_daemon(tmp_path: Path, ring: Ring) -> None:
    """Then nobody new gets in: it shows in `status`, and systemd's watchdog is no longer pinged."""
    parts = parts_of(tmp_path, **with_curve(ring))
    assert parts.guard is not None
    answers = Answers(parts, "model", lambda: "serving", lambda _: None)
    assert "keys" not in answers.failures()
    parts.guard.close()
    parts.guard.answer()
    assert "failed" in answers.failures()["keys"]
    parts.close()


def secret_of(path: Path) -> str:
    pair = zmq.auth.load_certificate(path)
    assert pair[1] is not None
    return pair[1].decode()


def test_commands_over_tcp(guarded: Guarded, shell: Shell, tmp_path: Path) -> None:
    here = f"--endpoint {guarded.control} --server-key {shlex.quote(str(guarded.ring.folder))}/fusewire.key"
    operator = f"--key {shlex.quote(str(guarded.ring.folder))}/operator.key_secret"
    told = shell(f"fusewire status --json {here} {operator}", tmp_path)
    assert (told.returncode, told.stderr) == (0, "")
    assert msgspec.json.decode(told.stdout)["pid"] == guarded.running.process.pid
    alone = shell(f"fusewire status {here}", tmp_path)
    assert alone.returncode == 2
    assert "belong together" in alone.stderr
    refused = shell(f"fusewire status -t 1 {here} {operator.replace('operator', 'trainer')}", tmp_path)
    assert refused.returncode == 1
    assert "curve.operators" in refused.stderr
    missing = shell(f"fusewire status {here} --key none.key_secret", tmp_path)
    assert missing.returncode == 1
    assert "none.key_secret: No such file or directory" in missing.stderr


# -------------------------------------------------------------------------------------- files and memory


def test_the_segment_is_neither_made_nor_opened_through_a_link(tmp_path: Path) -> None:
    """On the daemon's side and on a client's; and a client writes into nothing but a segment."""
    target = tmp_path / "precious"
    target.write_bytes(b"precious" * 1000)
    link = SHM / f"fusewire-link-{os.getpid()}"
    link.symlink_to(target)
    try:
        with pytest.raises(StartError, match="File exists"):
            Segment(SHM, link.name, slot_bytes=4096, slots=2, mode=0o600)
        with pytest.raises(OSError, match="symbolic"):
            Attached(str(link), 4096)
    finally:
        link.unlink()
    for path in (target, SHM / f"precious-{os.getpid()}"):
        path.write_bytes(b"precious" * 1000)
        try:
            with pytest.raises(OSError, match="is no segment"):
                Attached(str(path), 4096)
            assert path.read_bytes() == b"precious" * 1000
        finally:
            path.unlink()
