"""Key files: made, read and checked; the command that makes them; and the page that tells how to use them."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.auth

from fusewire.daemon import keys
from fusewire.daemon.client import ClientKeys, DaemonUnreachable, Trainer
from fusewire.daemon.errors import KeyFileError

ROOT = Path(__file__).parents[2]
TIMEOUT = 30.0
SHORT = 1.5
StartDaemon = Callable[..., Any]
Shell = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """Return a folder with the key pairs of a daemon and of a trainer."""
    folder = tmp_path / "pairs"
    for name in ("fusewire", "trainer"):
        keys.make(folder, name)
    return folder


def wait_log(running: Any, event: str, after: int = 0) -> dict[str, Any]:
    deadline = time.monotonic() + TIMEOUT
    while not (found := [line for line in running.log()[after:] if line["event"] == event]):
        assert running.process.poll() is None, running.log_path.read_text()
        assert time.monotonic() < deadline, running.log_path.read_text()
        time.sleep(0.02)
    return dict(found[-1])


def secret_of(path: Path) -> str:
    pair = zmq.auth.load_certificate(path)
    assert pair[1] is not None
    return pair[1].decode()


def test_keygen_writes_what_zmq_reads_and_reads_what_zmq_writes(tmp_path: Path) -> None:
    public, secret = keys.make(tmp_path / "new", "alice")
    pair = keys.read_pair(secret)
    assert zmq.auth.load_certificate(secret) == (pair.public, pair.secret)
    assert zmq.auth.load_certificate(public) == (pair.public, None)
    assert zmq.curve_public(pair.secret) == pair.public
    assert keys.read_public(public) == pair.public

    theirs_public, theirs_secret = zmq.auth.create_certificates(tmp_path, "bob", metadata={"team": "rl"})
    Path(theirs_secret).chmod(0o600)
    pair = keys.read_pair(Path(theirs_secret))
    assert zmq.auth.load_certificate(theirs_secret) == (pair.public, pair.secret)
    assert keys.read_public(Path(theirs_public)) == pair.public
    assert keys.read_folder(tmp_path) == ({pair.public: "bob"}, [])


def test_a_secret_file_is_never_readable_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for a moment: it has its mode before it has its content, whatever the umask."""
    seen = []
    before = os.umask(0)
    real = os.fchmod

    def look(descriptor: int, mode: int) -> None:
        seen.append((stat.S_IMODE(os.fstat(descriptor).st_mode), os.fstat(descriptor).st_size))
        real(descriptor, mode)

    monkeypatch.setattr(os, "fchmod", look)
    try:
        public, secret = keys.make(tmp_path, "alice")
    finally:
        os.umask(before)
    assert seen == [(0o600, 0), (0o600, 0)]
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert stat.S_IMODE(public.stat().st_mode) == 0o644
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alice.key", "alice.key_secret"]


@pytest.mark.parametrize("there", ["alice.key", "alice.key_secret"])
def test_keys_are_not_overwritten_unless_told_to(tmp_path: Path, there: str) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / there).symlink_to(precious)
    with pytest.raises(KeyFileError, match=rf"{there} is there already.*--force"):
        keys.make(tmp_path, "alice")
    assert (tmp_path / there).is_symlink()
    public, secret = keys.make(tmp_path, "alice", force=True)
    assert keys.read_public(public) == keys.read_pair(secret).public
    assert precious.read_text() == "precious"


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "-x", ".x", "x\n", "x" * 101, "ü"])
def test_impossible_names_of_keys_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(KeyFileError, match="key name"):
        keys.make(tmp_path / "keys", name)
    assert not list(tmp_path.iterdir())


GOOD = b"0" * 40


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "no public key"),
        (b"public-key", "no public key"),
        (b'# public-key = "' + GOOD + b'"', "no public key"),
        (b'public-key = "' + GOOD[1:] + b'"', "is not 40 characters of Z85"),
        (b'public-key = "' + GOOD[5:] + b'"', "is not 40 characters of Z85"),
        (b'public-key = "' + b"#" * 40 + b'"', "is not 40 characters of Z85"),
        (b'public-key = "' + b"~" * 40 + b'"', "is not 40 characters of Z85"),
        (b"public-key = \xff" + b"0" * 39, "is not 40 characters of Z85"),
        (b"public-key = " + GOOD + b"\npublic-key = " + b"1" * 40, "has two public keys"),
        (b"public-key = " + GOOD + b"\nsecret-key = " + GOOD, "holds a secret key"),
        (b"\0" * keys.FILE_LIMIT + b"\0", "larger than"),
    ],
)
def test_files_that_hold_no_public_key_are_named_with_the_reason(tmp_path: Path, content: bytes, told: str) -> None:
    file = tmp_path / "x.key"
    file.write_bytes(content)
    with pytest.raises(KeyFileError, match=told) as caught:
        keys.read_public(file)
    assert str(file) in str(caught.value)
    assert GOOD.decode() not in str(caught.value)
    with pytest.raises(KeyFileError):
        keys.read_pair(file)


def test_a_secret_file_whose_keys_do_not_belong_together_is_refused(tmp_path: Path, pairs: Path) -> None:
    other = keys.read_public(pairs / "trainer.key").decode()
    own = keys.read_public(pairs / "fusewire.key").decode()
    mixed = tmp_path / "mixed.key_secret"
    mixed.touch(0o600)
    mixed.write_text((pairs / "fusewire.key_secret").read_text().replace(own, other))
    with pytest.raises(KeyFileError, match="not that of its secret key"):
        keys.read_pair(mixed)


def test_links_pipes_and_what_anybody_can_write_are_no_keys(tmp_path: Path, pairs: Path) -> None:
    folder = tmp_path / "keys"
    folder.mkdir()
    public = pairs / "trainer.key"
    (folder / "link.key").symlink_to(public)
    os.mkfifo(folder / "pipe.key")
    (folder / "open.key").write_bytes(public.read_bytes())
    (folder / "open.key").chmod(0o666)
    (folder / "fine.key").write_bytes(public.read_bytes())
    (folder / ".hidden.key").write_text("of an editor")
    (folder / "notes.txt").write_text("not a key")

    found, wrong = keys.read_folder(folder)

    assert list(found.values()) == ["fine"]
    assert [re.split(": ", str(one))[1].split(",")[0] for one in wrong] == [
        "is a link",
        "its mode is 0o666",
        "is not a regular file; put the file itself there",
    ]
    (tmp_path / "link.key_secret").symlink_to(pairs / "fusewire.key_secret")
    with pytest.raises(KeyFileError, match="is a link"):
        keys.read_pair(tmp_path / "link.key_secret")
    folder.chmod(0o777)
    with pytest.raises(KeyFileError, match="anybody could add a key"):
        keys.read_folder(folder)


def test_client_keys_do_not_show_the_secret(pairs: Path) -> None:
    assert secret_of(pairs / "trainer.key_secret") not in repr(
        ClientKeys.load(pairs / "trainer.key_secret", pairs / "fusewire.key")
    )
    with pytest.raises(KeyFileError, match="holds a secret key"):
        ClientKeys.load(pairs / "trainer.key_secret", pairs / "fusewire.key_secret")
    (pairs / "trainer.key").chmod(0o600)
    with pytest.raises(KeyFileError, match="holds no secret key"):
        ClientKeys.load(pairs / "trainer.key", pairs / "fusewire.key")


# ------------------------------------------------------------------------------------ the command, the page


def test_keygen_prints_where_to_put_which(shell: Shell, tmp_path: Path) -> None:
    made = shell("fusewire keygen keys --name alice", tmp_path)
    assert (made.returncode, made.stderr) == (0, "")
    assert "keys/alice.key_secret\n  secret, mode 0600" in made.stdout
    assert "keys/alice.key\n  public" in made.stdout
    assert "curve.trainers" in made.stdout
    assert secret_of(tmp_path / "keys/alice.key_secret") not in made.stdout
    again = shell("fusewire keygen keys --name alice", tmp_path)
    assert again.returncode == 1
    assert "--force" in again.stderr


def test_the_page_about_keys_works_as_written(start_daemon: StartDaemon, shell: Shell, tmp_path: Path) -> None:
    """Its commands, its settings and its pyzmq, in order, with this machine's folders and ports in place of its own."""
    page = (ROOT / "docs/keys.md").read_text()
    blocks = dict(re.findall(r"<!-- tested: (\w+) -->\n```\w+\n(.*?)```", page, re.DOTALL))
    assert list(blocks) == ["make", "client", "settings", "push", "pyzmq", "revoke"]
    etc, port = tmp_path / "etc", 0
    shard = ROOT / "daemon/demo/checkpoints/v2/model-00001-of-00006.safetensors"

    def local(text: str) -> str:
        text = text.replace("/etc/fusewire", str(etc)).replace("inference-host:7001", f"127.0.0.1:{port}")
        return re.sub(r"tcp://0\.0\.0\.0:\d+", "tcp://0.0.0.0:*", text)

    def run(name: str, **environment: str) -> None:
        done = shell(local(re.sub(r"(?m)^[#$] ", "", blocks[name])), tmp_path, **environment)
        assert done.returncode == 0, done.stdout + done.stderr

    run("make")
    run("client")
    client = tmp_path / ".fusewire"
    (etc / "keys/trainers/alice.key").write_bytes((client / "alice.key").read_bytes())
    (client / "fusewire.key").write_bytes((etc / "keys/fusewire.key").read_bytes())
    sections = msgspec.toml.decode(local(blocks["settings"]))
    sections["curve"]["secret_key"] = str(etc / "keys/fusewire.key_secret")
    running = start_daemon("v2", up=False, **sections)
    port = int(wait_log(running, "daemon.started")["ingest"].rpartition(":")[2])
    for name in ("model.safetensors", ".fusewire/model.safetensors"):
        (tmp_path / name).write_bytes(shard.read_bytes())
    run("push")

    snippet = subprocess.run(
        [sys.executable, "-c", local(blocks["pyzmq"])],
        cwd=client,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert '"status":"applied"' in snippet.stdout, snippet.stderr

    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "systemctl").write_text(f"#!/bin/sh\nkill -HUP {running.process.pid}\n")
    (tools / "systemctl").chmod(0o755)
    after = len(running.log())
    run("revoke", PATH=f"{tools}:{os.environ['PATH']}")
    assert wait_log(running, "keys.reloaded", after)["revoked"] == 1
    alice = ClientKeys.load(client / "alice.key_secret", client / "fusewire.key")
    with Trainer(f"tcp://127.0.0.1:{port}", SHORT, curve=alice) as trainer, pytest.raises(DaemonUnreachable):
        trainer.push_bytes(b"")
