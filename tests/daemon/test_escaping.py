"""Names, shapes and messages from outside, as hostile as can be, and every way out of a daemon: none lets them through.

A daemon is fed by folder, by socket and by its control socket; then everything that it has said is looked at, and what
the command line makes of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from safetensors.numpy import save

from fusewire.daemon import events
from fusewire.daemon.errors import Reason

TIMEOUT = 30.0
NORM = "model.norm.weight"
TEXTS = {
    "colours": "\x1b[31mred\x1b[0m",
    "title": "\x1b]0;owned\x07",
    "8-bit": "\x9b31m\x90\x7f",
    "lines": "a\nb\r\tc\x0b\x0c\x85",
    "nul": "nul\0nul",
    "right to left": "\u202egnp.exe\u2066",
    "separators": "\u2028x\u2029",
    "invisible": "\u200b\u00ad\ufeff\U000e0041",
    "markup": "[/bold][red]x[link=http://x]",
    "long": "n" * 10_000,
    "long and wide": "\x1b" * 10_000,
    "a log line": '"}\n{"event":"daemon.owned"}',
    "a metric": 'x"} 1\nfusewire_owned{a="',
}
SURROGATE = b"\\ud800"
"""JSON for what is no text."""
OWNED = ("daemon.owned", "fusewire_owned")


def header(tensors: dict[str, Any] | bytes, size: int = 0) -> bytes:
    text = tensors if isinstance(tensors, bytes) else json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text + bytes(size)


def entry(shape: list[int], nbytes: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [0, nbytes]}


def good(**metadata: str) -> bytes:
    return save({NORM: np.ones(64, dtype=np.float32)}, metadata)


def shards() -> Iterator[bytes]:
    """Yield shards that say something hostile."""
    for text in TEXTS.values():
        yield header({text: entry([], 4)}, 4)
        yield header({f"model.layers.0.{text}.weight": entry([2], 8)}, 8)
        yield header({"a": {"dtype": text, "shape": [1], "data_offsets": [0, 4]}}, 4)
        yield header({"a": {"dtype": "F32", "shape": text, "data_offsets": [0, 4]}}, 4)
        yield header({"a": {"dtype": "F32", "shape": [1], "data_offsets": text}}, 4)
        yield header({"__metadata__": {"version": text}, NORM: entry([64], 256)}, 256)
        yield header({"__metadata__": {"run": text}, NORM: entry([64], 256)}, 256)
        yield header({"__metadata__": {"xxh3": text}, NORM: entry([64], 256)}, 256)
        yield header({text: {text: text}}, 4)
        yield text.encode() * 9
    yield header(b'{"%b":%b}' % (SURROGATE, json.dumps(entry([], 4)).encode()), 4)
    yield header({NORM: entry([0] + [2**62] * 7, 0)})
    yield header({NORM: entry([1] * 8, 4)}, 4)
    yield header({NORM: entry([9] * 500, 4)}, 4)
    yield header({f"{number}\x1b": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for number in range(5000)})


def requests() -> Iterator[list[bytes]]:
    """Yield messages to the ingest socket."""
    for shard in shards():
        yield [b'{"op":"put"}', shard]
    for text in TEXTS.values():
        short = text[:150]
        yield [json.dumps({"op": "put", "name": short}).encode(), b"x" * 9]
        yield [json.dumps({"op": "put", "name": short}).encode(), good()]
        yield [json.dumps({"op": "put", "name": text + "n" * 200}).encode(), good()]
        yield [json.dumps({"op": text}).encode()]
        yield [json.dumps({"op": "put", text: 1}).encode(), b""]
        yield [json.dumps({"op": "put", "xxh3": text}).encode(), b""]
        yield [json.dumps({"op": "commit", "version": 3, "tensors": [short]}).encode()]
        yield [json.dumps({"op": "put", "version": 7, "run": short}).encode(), good()]
        yield [json.dumps({"op": "put", "version": 7, "run": "r"}).encode(), good(run=short)]
        yield [json.dumps({"op": "commit", "version": 7, "run": short}).encode()]
        yield [json.dumps({"op": "abort", "version": 99, "run": short}).encode()]
        yield [text.encode()]
    yield [json.dumps({"op": "put", "version": 7, "run": "r"}).encode(), good()]  # an old run, told beside the new one
    yield [b'{"op":"put","name":"' + SURROGATE + b'"}', good()]
    yield [b"\xff\xfe\x1b[31m", b"\x1b[31m"]


def file_names() -> Iterator[bytes]:
    """Yield names of files below the drop folder."""
    for text in TEXTS.values():
        name = text.replace("\0", "").replace("/", "").encode()
        name = name[: 255 - len(".safetensors")] + b".safetensors"
        yield name
        yield b"step_8" + name[:100] + b"/x.safetensors"
        yield b"step_9/" + name
        yield b"a/b/c/d/" + name[:100] + b"/too/deep.safetensors"
    yield b"\xff\xfe\xed\xa0\x80\x1b[31m.safetensors"
    yield b"\xff" * 200 + b"/\xfe.safetensors"


class Poisoned:
    """The daemon, and all that it has said."""

    def __init__(self, daemon: Any) -> None:
        self.daemon = daemon
        self.answers: list[bytes] = []
        self.frames: list[list[bytes]] = []
        self.datagrams: list[bytes] = []

    def ask(self, endpoint: str, frames: list[bytes]) -> bytes:
        client: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REQ)
        client.connect(self.daemon.endpoint(endpoint))
        try:
            client.send_multipart(frames)
            assert client.poll(round(TIMEOUT * 1000)), frames
            return client.recv()
        finally:
            client.close(0)

    def control(self, request: dict[str, Any]) -> bytes:
        return self.ask("control", [json.dumps(request).encode()])


@pytest.fixture(scope="module")
def poisoned(start_shared_daemon: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Poisoned]:
    address = str(tmp_path_factory.mktemp("notify") / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(address)
        listening.settimeout(0)
        daemon = start_shared_daemon(
            "v2",
            folder={"incomplete_after": 0.5, "settle": 0.1},
            log={"level": "debug"},
            popen={"env": {"NOTIFY_SOCKET": address}},
        )
        made = Poisoned(daemon)
        subscriber: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        subscriber.rcvhwm = 0
        subscriber.subscribe(b"")
        subscriber.connect(daemon.endpoint("events"))
        assert subscriber.poll(round(TIMEOUT * 1000))
        files, deadline = _feed(made), time.monotonic() + TIMEOUT
        while sum(b'"source":"folder"' in frames[2] for frames in made.frames) < files:
            assert time.monotonic() < deadline, "not all files have been refused"
            if subscriber.poll(100):
                made.frames.append(subscriber.recv_multipart())
        subscriber.close(0)
        daemon.wait_status(lambda status: bool(status.notes))
        with contextlib.suppress(BlockingIOError):
            while True:
                made.datagrams.append(listening.recv(65536))
        yield made


def _feed(poisoned: Poisoned) -> int:
    """Hand everything to the daemon; return how many files it will refuse."""
    daemon = poisoned.daemon
    names = list(file_names())
    for name in names:
        path = Path(os.fsdecode(os.fsencode(daemon.shards) + b"/" + name))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(header({"\x1b[31m" * 50: entry([], 4)}, 4))
    hostile = [{"weight_map": dict.fromkeys(TEXTS.values(), "\x1b")}, {"weight_map": list(TEXTS.values())}]
    for number, text in enumerate(["{", *map(json.dumps, hostile)]):
        folder = daemon.shards / f"step_{1000 + number}"
        folder.mkdir()
        (folder / "\x1b[31m.safetensors.index.json").write_text(text)
    for frames in requests():
        poisoned.answers.append(poisoned.ask("ingest", frames))
    for text in TEXTS.values():
        poisoned.answers.append(poisoned.control({"op": text}))
        poisoned.answers.append(poisoned.control({"op": "status", text: 1}))
        poisoned.answers.append(poisoned.ask("control", [text.encode(), text.encode()]))
    return sum(b"/too/" not in name for name in set(names)) + 3


# ----------------------------------------------------------------------------------------------- the ways out


def strings(value: Any) -> Iterator[str]:
    """Yield all texts of what JSON holds, keys too."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner)
    elif isinstance(value, str):
        yield value


def assert_harmless(content: bytes, longest: int) -> Any:
    """See that JSON holds nothing but printable texts that are not too long; return what it holds."""
    found = json.loads(content)
    for text in strings(found):
        assert text.isprintable(), f"{text!r} in {content[:300]!r}"
        assert len(text) <= longest, f"{len(text)} characters in {content[:300]!r}"
    return found


def in_the_log(poisoned: Poisoned) -> None:
    """Whole lines of ASCII, each JSON."""
    lines = poisoned.daemon.log_path.read_bytes().splitlines()
    assert len(lines) > 200
    for line in lines:
        assert len(line) < 48 * 1024
        assert line.isascii()
        assert line.decode().isprintable()
        assert_harmless(line, 2000)
    found = [json.loads(line) for line in lines]
    assert not [line for line in found if line["event"] in OWNED or line["level"] == "error"]
    assert {"shard.rejected", "shard.offenders", "folder.passed_over"} <= {line["event"] for line in found}


def in_events(poisoned: Poisoned) -> None:
    """Topics are ours, and texts are those of a line."""
    kinds = set()
    for topic, _, body in poisoned.frames:
        assert re.fullmatch(rb"[a-z._]+/([0-9]+/)?", topic)
        assert len(body) < 4096
        kinds.add(assert_harmless(body, 500)["event"])
        assert events.decode([topic, _, body])
    assert {"shard.rejected", "shard.applied", "daemon.heartbeat"} <= kinds


def in_answers(poisoned: Poisoned) -> None:
    """To the client that sent it, too: what it says ends up in somebody's log."""
    reasons = set()
    for answer in poisoned.answers:
        found = assert_harmless(answer, 200)
        reasons.add(found.get("reason") or found.get("status") or "")
        assert found.get("detail") or found.get("error") or found.get("status") == "applied"
    assert {"applied", Reason.MALFORMED_MESSAGE, Reason.UNKNOWN_TENSOR, Reason.WRONG_SHAPE} <= reasons
    assert {Reason.VERSION_DISAGREEMENT, Reason.STALE_VERSION, Reason.DIGEST_MISMATCH} <= reasons


def in_control_replies(poisoned: Poisoned) -> None:
    """What is shown of shards, versions and notes."""
    for op in ("status", "snapshot", "pending", "versions"):
        reply = poisoned.control({"op": op})
        assert len(reply) < 256 * 1024
        assert_harmless(reply, 1000)
    assert_harmless(poisoned.control({"op": "replay", "since": 0}), 1000)
    status = json.loads(poisoned.control({"op": "status"}))
    assert status["rejected"]
    assert any("passed over" in note for note in status["notes"])


def in_what_systemd_hears(poisoned: Poisoned) -> None:
    """STATUS= is one line, and nothing can be assigned by what is in it."""
    assert any(datagram.startswith(b"STATUS=") for datagram in poisoned.datagrams)
    for datagram in poisoned.datagrams:
        assert len(datagram) < 500
        for line in datagram.decode().split("\n"):
            assert re.match(r"(STATUS|READY|WATCHDOG|EXTEND_TIMEOUT_USEC)=", line)
            assert line.isprintable()


def in_metrics(poisoned: Poisoned) -> None:
    """Labels are of our own lists."""
    (started,) = [line for line in poisoned.daemon.log() if line["event"] == "daemon.started"]
    with urllib.request.urlopen(f"http://127.0.0.1:{started['metrics_port']}/metrics", timeout=5) as response:
        text = response.read().decode()
    assert 'fusewire_shards_rejected_total{reason="unknown_tensor",source="folder"}' in text
    allowed = {*map(str, Reason), "folder", "socket", "aborted", "live", "superseded", "index", "commit"}
    allowed |= {"loader", "generate", "journal", "spool"}
    for line in text.splitlines():
        assert line.isprintable()
        assert len(line) < 200
        for name, value in re.findall(r'(\w+)="([^"]*)"', line):
            assert value in allowed or name == "le", line
    assert not any(word in text for word in OWNED)


WAYS_OUT = [in_the_log, in_events, in_answers, in_control_replies, in_what_systemd_hears, in_metrics]


@pytest.mark.parametrize("way", WAYS_OUT, ids=lambda way: way.__name__)
def test_nothing_hostile_gets_out(way: Callable[[Poisoned], None], poisoned: Poisoned) -> None:
    way(poisoned)


# --------------------------------------------------------------------------------------------- on a terminal


def printed(*arguments: object) -> subprocess.CompletedProcess[bytes]:
    """Run a command as on a terminal that takes everything; see that what it prints is lines of printable text."""
    command = [sys.executable, "-m", "fusewire.daemon", *(a if isinstance(a, bytes) else str(a) for a in arguments)]
    environment = os.environ | {"PYTHONUTF8": "1", "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, timeout=60, check=False, env=environment)
    for text in (done.stdout.decode(), done.stderr.decode()):
        assert all(line.isprintable() for line in text.split("\n")), text
        assert "Traceback" not in text
        assert len(text) < 300_000
    return done


@pytest.mark.parametrize("command", ["status", "pending", "versions"])
@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "json"])
def test_questions_are_answered_harmlessly(command: str, form: list[str], poisoned: Poisoned) -> None:
    done = printed(command, "--config", poisoned.daemon.config_path, *form)

    assert done.returncode == 0
    assert done.stdout
    if form:
        json.loads(done.stdout)


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "json"])
def test_events_are_shown_harmlessly(form: list[str], poisoned: Poisoned) -> None:
    listen = [sys.executable, "-m", "fusewire.daemon", "listen", "-c", poisoned.daemon.config_path, "--for", "3", *form]
    with subprocess.Popen(listen, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        for frames in list(requests())[:40]:
            poisoned.ask("ingest", frames)
        text = (first + process.stdout.read()).decode()

    assert "rejected" in text
    assert all(line.isprintable() for line in text.split("\n"))


@pytest.fixture(scope="module")
def hostile_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shard that is well-formed, and has everything that may be hostile in it."""
    name = b"[/bold]\x1b[31m\xff\xe2\x80\xae" + b"n" * 200 + b".safetensors"
    path = Path(os.fsdecode(os.fsencode(tmp_path_factory.mktemp("hostile")) + b"/" + name))
    metadata = {text: text for text in TEXTS.values()}
    path.parent.mkdir()
    path.write_bytes(save({text: np.ones(1, dtype=np.float32) for text in TEXTS.values()}, metadata))
    return path


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "json"])
def test_a_hostile_file_is_inspected(form: list[str], poisoned: Poisoned, hostile_file: Path) -> None:
    done = printed("inspect", hostile_file, "--config", poisoned.daemon.checkpoint / "config.json", *form)

    assert done.returncode == 1, "its tensors would be refused"
    if form:
        found = json.loads(done.stdout)
        assert {line["tensor"] for line in found["tensors"]} == set(TEXTS.values()), "escaped, and nothing is lost"
        assert found["metadata"] == {text: text for text in TEXTS.values()}


@pytest.mark.parametrize("content", ["hostile", "good", "garbage"])
def test_a_hostile_file_is_pushed(content: str, poisoned: Poisoned, hostile_file: Path, tmp_path: Path) -> None:
    path = tmp_path / hostile_file.name
    path.write_bytes({"hostile": hostile_file.read_bytes(), "good": good(), "garbage": b"\x1b[31m" * 9}[content])
    done = printed("push", path, "--config", poisoned.daemon.config_path)

    assert done.returncode == (0 if content == "good" else 1)
    assert done.stdout.startswith(b"applied" if content == "good" else b"rejected")


@pytest.mark.parametrize("command", ["push", "inspect"])
def test_a_hostile_file_that_is_not_there(command: str, poisoned: Poisoned, hostile_file: Path) -> None:
    arguments = ["--config", poisoned.daemon.config_path] if command == "push" else []
    assert printed(command, hostile_file.parent / ("\x1b[31m" + hostile_file.name[:100]), *arguments).returncode == 1
