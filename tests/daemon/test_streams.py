"""Shards in chunks: right bytes by frames and by shared memory, fair credit, and clients that stop, lie or die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save
from torch import Tensor

from fusewire.daemon import demo, wire
from fusewire.daemon.client import Trainer
from fusewire.daemon.errors import ProtocolError
from fusewire.daemon.segment import Segment
from fusewire.daemon.sources.streams import Streams
from fusewire.model import DeepseekV2Config, DeepseekV2ForCausalLM

CHECKPOINTS = Path(demo.__file__).parent / "checkpoints"
MADE = Path(__file__).parents[1] / "data" / "checkpoints"
TIMEOUT = 30.0
SMALL = {"chunk_bytes": 65536, "window_bytes": 262144, "stream_timeout": 1.0}
NORM = "model.norm.weight"
SHM = Path("/dev/shm")  # noqa: S108 - a tmpfs by definition
StartDaemon = Callable[..., Any]
Tensors = dict[str, Tensor]
Golden = Callable[[str], Tensors]
PROMPT = [5, 9, 2]


def vary(tensors: Tensors, version: int) -> Tensors:
    return {name: tensor.roll(version, 0).contiguous() for name, tensor in tensors.items()}


def answer_of(config: Path, tensors: Tensors, **options: Any) -> list[int]:
    model = DeepseekV2ForCausalLM(DeepseekV2Config.from_file(config), dtype=torch.float32, **options)
    model.load_weights(tensors.items())
    tokens: list[int] = model.generate(torch.tensor([PROMPT]), 12)[0, len(PROMPT) :].tolist()
    return tokens


class Raw:
    """A client that says exactly what it is told."""

    def __init__(self, endpoint: str) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)

    def say(self, header: Any, *frames: bytes) -> None:
        body = header if isinstance(header, bytes) else wire.encode(header)
        self.socket.send_multipart([b"", body, *frames])

    def hear(self) -> Any:
        assert self.socket.poll(round(TIMEOUT * 1000)), "the daemon is silent"
        return wire.decode_ingest_reply(self.socket.recv_multipart()[-1])

    def begin(self, shard: bytes, stream: str = "s", **fields: Any) -> bytes:
        """Announce a shard; return its data."""
        size = 8 + int.from_bytes(shard[:8], "little")
        self.say(wire.Begin(stream=stream, nbytes=len(shard) - size, **fields), shard[:size])
        return shard[size:]

    def close(self) -> None:
        self.socket.close(0)


@pytest.fixture
def raw() -> Iterator[Callable[[Any], Raw]]:
    made: list[Raw] = []

    def connect(daemon: Any) -> Raw:
        made.append(Raw(daemon.endpoint("ingest")))
        return made[-1]

    yield connect
    for client in made:
        client.close()


# ------------------------------------------------------------------------------------------ right bytes


@pytest.mark.parametrize(
    ("shared", "generations", "digest"), [(True, 2, True), (True, 2, False), (False, 2, True), (False, 1, False)]
)
def test_a_checkpoint_in_chunks_gives_the_tokens_of_a_cold_load(
    shared: bool,
    generations: int,
    digest: bool,
    start_daemon: StartDaemon,
    checkpoint_tensors: Golden,
    tmp_path: Path,
) -> None:
    """Chunks of 64 KiB cut tensors anywhere, in the middle of an element that is cast, too."""
    base = checkpoint_tensors("v2")
    daemon = start_daemon("v2", socket=SMALL, model={"generations": generations})
    with (
        Trainer(daemon.endpoint("ingest"), timeout=TIMEOUT, digest=digest, shared_memory=shared) as trainer,
        daemon.control() as control,
    ):
        for version in (1, 2):
            tensors = vary(base, version)
            path = tmp_path / f"{version}.safetensors"
            path.write_bytes(b"" if version == 1 else save(tensors))
            answer = (
                trainer.push_bytes(save(tensors), version=version)
                if version == 1
                else trainer.push_file(path, version=version)[0]
            )
            assert (answer.status, answer.fused, answer.tensors) == ("applied", (0, 1, 2), 89), answer
            assert trainer._sender is not None
            assert trainer._sender.shares_memory is shared
            daemon.wait_status(lambda status, version=version: status.version == version)
            reply = control.generate(PROMPT, max_new_tokens=12)
            assert list(reply.token_ids) == answer_of(CHECKPOINTS / "v2" / "config.json", tensors)
        again = trainer.push_bytes(save(vary(base, 2)), version=2)
        assert again.status == "applied"
        conflict = trainer.push_bytes(save(vary(base, 3)), version=2)
        assert (conflict.status, conflict.reason) == ("rejected", "conflict")
        assert control.generate(PROMPT, max_new_tokens=12).token_ids == reply.token_ids
    assert "UserWarning" not in daemon.log_path.read_text()


@pytest.mark.parametrize("fp8", ["keep", "dequantize"])
def test_a_quantised_checkpoint_in_chunks(fp8: str, start_daemon: StartDaemon) -> None:
    """Kept weights go straight into their rows; those that are dequantised are gathered, as they need their scales."""
    folder = MADE / "v3-fp8"
    tensors: Tensors = {}
    for path in sorted(folder.glob("model-*.safetensors")):
        tensors.update(load_file(path))
    daemon = start_daemon("v3", model={"config": str(folder / "config.json"), "fp8": fp8}, socket=SMALL)
    with daemon.trainer() as trainer, daemon.control() as control:
        assert trainer.push_bytes(save(tensors), version=1).status == "applied"
        daemon.wait_status(lambda status: status.version == 1)
        reply = control.generate(PROMPT, max_new_tokens=12)
    assert list(reply.token_ids) == answer_of(folder / "config.json", tensors, keep_fp8=fp8 == "keep")


def test_a_conflict_within_a_staged_version(
    start_daemon: StartDaemon, checkpoint_tensors: Golden, raw: Callable[[Any], Raw]
) -> None:
    base = checkpoint_tensors("v2")
    daemon = start_daemon("v2", socket=SMALL)
    head = "lm_head.weight"
    with daemon.trainer() as trainer:
        assert trainer.push_bytes(save({head: base[head]}), version=1).status == "applied"
    client = raw(daemon)
    data = client.begin(save({head: base[head] + 1, NORM: base[NORM]}), version=1)
    send_all(client, data)
    answer = client.hear()
    while isinstance(answer, wire.Credit):
        answer = client.hear()
    assert (answer.status, answer.reason, answer.stream) == ("rejected", "conflict", "s")
    assert head in answer.detail


def send_all(client: Raw, data: bytes, stream: str = "s", chunk: int = 65536) -> Any:
    """Send data as credit allows; return the answer, or None if all is sent and none has come yet."""
    position = 0
    while position < len(data):
        reply = client.hear()
        if isinstance(reply, wire.Answer):
            return reply
        for _ in range(reply.chunks):
            if position < len(data):
                client.say(wire.Chunk(stream=stream, offset=position), data[position : position + chunk])
                position += min(chunk, len(data) - position)
    return None


# ------------------------------------------------------------------------------------- several clients


def test_a_slow_and_a_dead_client_stall_nobody(
    start_daemon: StartDaemon, checkpoint_tensors: Golden, raw: Callable[[Any], Raw]
) -> None:
    base = checkpoint_tensors("v2")
    daemon = start_daemon("v2", socket=SMALL)
    names = [name for name in base if name != NORM]
    slow, dead = raw(daemon), raw(daemon)
    slow.begin(save({NORM: base[NORM]}), version=1)
    dead.begin(save({names[0]: base[names[0]]}), version=1)
    assert isinstance(slow.hear(), wire.Credit)
    assert isinstance(dead.hear(), wire.Credit)
    dead.close()
    begin = time.monotonic()
    with daemon.trainer() as trainer:
        answer = trainer.push_bytes(save({name: base[name] for name in names[1:]}), version=1)
        assert answer.status == "applied"
        assert time.monotonic() - begin < 1.0, "before anybody's time is up"
        silent = slow.hear()
        assert (silent.status, silent.reason) == ("rejected", "client_silent")
        status = daemon.wait_status(lambda status: len(status.rejected) == 2)
        assert {rejected.reason for rejected in status.rejected} == {"client_silent"}
        left = {name: base[name] for name in (names[0], NORM)}
        assert trainer.push_bytes(save(left), version=1).status == "applied"
    daemon.wait_status(lambda status: status.version == 1)


def test_a_client_that_is_killed_between_chunks(start_daemon: StartDaemon, checkpoint_tensors: Golden) -> None:
    base = checkpoint_tensors("v2")
    daemon = start_daemon("v2", socket=SMALL)
    program = f"""
import sys, time
from fusewire.daemon import wire
from fusewire.daemon.client import Trainer
from fusewire.daemon.sending import Sender
trainer = Trainer({daemon.endpoint("ingest")!r})
def fill(position, target):
    if position:
        print("half way", flush=True)
        time.sleep(60)
shard = open(sys.argv[1], "rb").read()
head = 8 + int.from_bytes(shard[:8], "little")
sender = Sender(trainer._requester.endpoint, trainer.welcome)
sender.send(wire.Begin(stream="", nbytes=len(shard) - head, version=1), shard[:head], fill, None, 60)
"""
    path = daemon.root / "shard"
    path.write_bytes(save(base))
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, env=os.environ) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"half way\n"
        client.send_signal(signal.SIGKILL)
    with daemon.trainer() as trainer:
        answer = trainer.push_bytes(save(base), version=1)
    assert answer.status == "applied", "it waits for the rows that the dead one was writing, and then writes them"
    daemon.wait_status(lambda status: status.version == 1)
    with daemon.control() as control:
        reply = control.generate(PROMPT, max_new_tokens=12)
    assert list(reply.token_ids) == answer_of(CHECKPOINTS / "v2" / "config.json", base)


@pytest.mark.parametrize("shared", [True, False])
def test_several_clients_at_once_within_their_memory(
    shared: bool, start_daemon: StartDaemon, checkpoint_tensors: Golden
) -> None:
    """Six clients with parts of one version, and with the same part twice; the daemon's memory does not grow by it."""
    base = checkpoint_tensors("v3")
    names = list(base)
    daemon = start_daemon("v3", socket=SMALL | {"streams": 4})
    answers: list[wire.Answer] = []

    def push(part: int) -> None:
        with Trainer(daemon.endpoint("ingest"), timeout=TIMEOUT, shared_memory=shared) as trainer:
            shard = {name: base[name] for name in names[part % 5 :: 5]}
            answers.append(trainer.push_bytes(save(shard), version=1))

    pushers = [threading.Thread(target=push, args=(part,)) for part in range(6)]
    for pusher in pushers:
        pusher.start()
    for pusher in pushers:
        pusher.join(TIMEOUT)
    assert [answer.status for answer in answers] == ["applied"] * 6, answers
    daemon.wait_status(lambda status: status.version == 1)
    with daemon.control() as control:
        reply = control.generate(PROMPT, max_new_tokens=12)
    assert list(reply.token_ids) == answer_of(CHECKPOINTS / "v3" / "config.json", base)


def test_a_version_waits_for_what_is_still_coming(
    start_daemon: StartDaemon, checkpoint_tensors: Golden, raw: Callable[[Any], Raw]
) -> None:
    base = checkpoint_tensors("v2")
    daemon = start_daemon("v2", socket=SMALL | {"stream_timeout": 20.0}, model={"checkpoint": str(CHECKPOINTS / "v2")})
    client = raw(daemon)
    data = client.begin(save({NORM: base[NORM] + 1}), version=3)
    assert isinstance(client.hear(), wire.Credit)
    with daemon.trainer() as trainer:
        trainer.push_bytes(save({"lm_head.weight": base["lm_head.weight"] * 2}), version=3)
        assert trainer.commit(3).status == "accepted"
        time.sleep(0.3)
        assert daemon.status().version is None
        client.say(wire.Chunk(stream="s", offset=0), data)
        assert client.hear().status == "applied"
        daemon.wait_status(lambda status: status.version == 3)
        other = raw(daemon)
        other.begin(save({NORM: base[NORM] + 2}), version=4)
        assert isinstance(other.hear(), wire.Credit)
        assert trainer.abort(4).status == "accepted"
        assert other.hear().reason == "stale_version"
        cancelled = raw(daemon)
        cancelled.begin(save({NORM: base[NORM] + 2}), version=5)
        assert isinstance(cancelled.hear(), wire.Credit)
        cancelled.say(wire.Cancel(stream="s"))
        assert cancelled.hear().reason == "client_silent"
    assert daemon.stop() == 0


# ----------------------------------------------------------------------------------------- hostile input


def test_clients_that_break_the_rules_are_refused_and_others_served(
    start_daemon: StartDaemon, checkpoint_tensors: Golden, raw: Callable[[Any], Raw]
) -> None:
    base = checkpoint_tensors("v2")
    daemon = start_daemon("v2", socket=SMALL)
    shard = save({"model.embed_tokens.weight": base["model.embed_tokens.weight"], NORM: base[NORM]})
    offences: list[tuple[str, Callable[[Raw, bytes], None]]] = [
        ("the next byte", lambda c, d: c.say(wire.Chunk(stream="s", offset=1), d[1:9])),
        ("the next byte", lambda c, _: c.say(wire.Chunk(stream="s", offset=0), b"")),
        ("the next byte", lambda c, d: c.say(wire.Chunk(stream="s", offset=0), d + b"more")),
        ("either a frame or a slot", lambda c, _: c.say(wire.Chunk(stream="s", offset=0))),
        ("either a frame or a slot", lambda c, d: c.say(wire.Chunk(stream="s", offset=0), d[:8], d[:8])),
        ("not this stream's", lambda c, _: c.say(wire.Chunk(stream="s", offset=0, slot=0, nbytes=8))),
        ("not this stream's", lambda c, _: c.say(wire.Chunk(stream="s", offset=0, slot=10**9, nbytes=8))),
    ]
    for told, offend in offences:
        client = raw(daemon)
        data = client.begin(shard, version=1)
        assert isinstance(client.hear(), wire.Credit)
        offend(client, data)
        answer = client.hear()
        assert (answer.status, answer.reason) == ("rejected", "malformed_message")
        assert told in answer.detail
        client.say(wire.Chunk(stream="s", offset=0), data[:8])  # too late, and passed over

    client = raw(daemon)
    client.begin(shard, version=1)
    assert isinstance(client.hear(), wire.Credit)
    client.begin(shard, version=1)
    assert "has begun already" in client.hear().detail
    client = raw(daemon)
    client.say(wire.Begin(stream="s", nbytes=7, version=1), shard[:20])
    assert client.hear().reason in {"malformed_header", "truncated"}
    client.say(wire.Begin(stream="s", nbytes=2**62, version=1), shard[: 8 + int.from_bytes(shard[:8], "little")])
    assert client.hear().reason == "trailing_bytes"
    client.say(json.dumps({"op": "chunk", "stream": "x" * 300, "offset": 0}).encode())
    assert client.hear().reason == "malformed_message"
    with daemon.trainer() as trainer:
        assert trainer.push_bytes(save(base), version=1).status == "applied"


def test_too_many_streams_are_told_to_wait(
    start_daemon: StartDaemon, checkpoint_tensors: Golden, raw: Callable[[Any], Raw]
) -> None:
    base = checkpoint_tensors("v2")
    daemon = start_daemon("v2", socket=SMALL | {"streams": 1, "stream_timeout": 20.0})
    first, second = raw(daemon), raw(daemon)
    data = first.begin(save({NORM: base[NORM]}), version=1)
    assert isinstance(first.hear(), wire.Credit)
    second.begin(save({"lm_head.weight": base["lm_head.weight"]}), version=1)
    assert second.hear().status == "busy"
    first.say(wire.Chunk(stream="s", offset=0), data)
    assert first.hear().status == "applied"
    second.begin(save({"lm_head.weight": base["lm_head.weight"]}), version=1)
    assert isinstance(second.hear(), wire.Credit)


def test_one_client_cannot_take_all_streams(
    start_daemon: StartDaemon, checkpoint_tensors: Golden, raw: Callable[[Any], Raw]
) -> None:
    base = checkpoint_tensors("v2")
    names = list(base)[:4]
    daemon = start_daemon("v2", socket=SMALL | {"streams": 3, "streams_per_client": 2, "stream_timeout": 20.0})
    greedy, modest = raw(daemon), raw(daemon)
    data = [greedy.begin(save({name: base[name]}), name, version=1) for name in names[:2]]
    assert [type(greedy.hear()) for _ in range(2)] == [wire.Credit, wire.Credit]
    greedy.begin(save({names[2]: base[names[2]]}), names[2], version=1)
    refused = greedy.hear()
    assert (refused.status, refused.stream) == ("busy", names[2])
    assert "socket.streams_per_client" in refused.detail
    modest.begin(save({names[3]: base[names[3]]}), version=1)
    assert isinstance(modest.hear(), wire.Credit)
    position = 0
    while position < len(data[0]):
        piece = data[0][position : position + 65536]
        greedy.say(wire.Chunk(stream=names[0], offset=position), piece)
        position += len(piece)
    while not isinstance(answer := greedy.hear(), wire.Answer):
        pass
    assert answer.status == "applied"
    greedy.begin(save({names[2]: base[names[2]]}), names[2], version=1)
    assert isinstance(greedy.hear(), wire.Credit)


# --------------------------------------------------------------------------------------- credit, alone


@settings(deadline=None, max_examples=60)
@given(data=st.data(), clients=st.integers(1, 4), shared=st.booleans())
def test_nobody_ever_has_more_on_the_way_than_the_window(data: st.DataObject, clients: int, shared: bool) -> None:
    """Any order of chunks and of copies: within the window, without a slot that two have, and all come to their end."""
    chunk, slots = 10, 6
    segment = Segment(SHM, f"fusewire-test-{os.getpid()}", slot_bytes=4096, slots=slots, mode=0o600)
    segment.close()
    streams = Streams(chunk, 40, segment if shared else None)
    sizes = {f"k{c}": data.draw(st.integers(1, 120)) for c in range(clients)}
    credit = dict.fromkeys(sizes, 0)
    owned: dict[str, list[int]] = {key: [] for key in sizes}
    sent = dict.fromkeys(sizes, 0)
    copying: list[tuple[str, int | None]] = []

    def take(granted: Any) -> None:
        for envelope, message in granted:
            key = envelope[0].decode()
            credit[key] += message.chunks
            owned[key] += message.slots

    for key, size in sizes.items():
        begin = wire.Begin(stream="s", nbytes=size, shared=shared)
        streams.begin(key, (key.encode(),), begin)
        with pytest.raises(ProtocolError):
            streams.begin(key, (key.encode(),), begin)
    for key in sizes:
        take(streams.open(key))
    for _ in range(1000):
        assert all(credit[key] * chunk <= 40 for key in sizes)
        held = [slot for slots_ in owned.values() for slot in slots_] + [s for _, s in copying if s is not None]
        assert len(held) == len(set(held)) <= slots
        able = [key for key in sizes if sent[key] < sizes[key] and (credit[key] or owned[key])]
        if able and (not copying or data.draw(st.booleans())):
            key = data.draw(st.sampled_from(able))
            nbytes = min(chunk, sizes[key] - sent[key])
            slot = owned[key].pop(0) if shared else None
            credit[key] -= not shared
            header = wire.Chunk(stream="s", offset=sent[key], slot=slot, nbytes=nbytes if shared else 0)
            assert streams.chunk(key, header, None if shared else nbytes) == nbytes
            sent[key] += nbytes
            copying.append((key, slot))
        elif copying:
            key, slot = copying.pop(data.draw(st.integers(0, len(copying) - 1)))
            take(streams.consumed(key, slot))
            if sent[key] == sizes[key] and key not in {k for k, _ in copying} and streams.name_of(key):
                take(streams.end(key))
                owned[key].clear()
        else:
            break
    assert sent == sizes, "everybody came to the end"
