"""Bad shards, by folder and by socket: each gets one clear message, and the daemon goes on serving."""

from __future__ import annotations

import json
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from safetensors.torch import save
from torch import Tensor

from fusewire.daemon import events

TIMEOUT = 30.0
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def daemon(start_shared_daemon: Callable[..., Any]) -> Any:
    return start_shared_daemon("v2", folder={"incomplete_after": 0.5, "settle": 0.1})


def shard(**tensors: Tensor) -> bytes:
    return save(tensors or {NORM: torch.ones(64, dtype=torch.bfloat16)})


def raw(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str, shape: list[int], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


BAD: dict[str, tuple[bytes, set[str]]] = {
    "empty": (b"", {"truncated", "malformed_header"}),
    "seven bytes": (b"1234567", {"truncated", "malformed_header"}),
    "garbage": (os.urandom(4096), {"malformed_header", "too_large", "truncated"}),
    "text": (
        b"<html>not a shard at all, but long enough to have a length</html>",
        {"malformed_header", "too_large", "truncated"},
    ),
    "truncated": (shard()[:-1], {"truncated"}),
    "trailing": (shard() + b"x", {"trailing_bytes", "malformed_header"}),
    "wrong shape": (save({NORM: torch.ones(63, dtype=torch.bfloat16)}), {"wrong_shape"}),
    "transposed": (
        save({"model.layers.0.self_attn.q_a_proj.weight": torch.ones(64, 24, dtype=torch.bfloat16)}),
        {"wrong_shape"},
    ),
    "wrong dtype": (save({NORM: torch.ones(64, dtype=torch.int32)}), {"wrong_dtype"}),
    "unknown name": (save({"model.layers.0.self_attn.q_a_proj.qweight": torch.ones(4)}), {"unknown_tensor"}),
    "layer out of range": (
        save({"model.layers.3.input_layernorm.weight": torch.ones(64)}),
        {"unknown_tensor"},
    ),
    "no tensors": (raw({}), {"no_known_tensor", "malformed_header"}),
    "duplicate key": (
        raw(
            b'{"model.norm.weight":{"dtype":"BF16","shape":[64],"data_offsets":[0,128]},'
            b'"model.norm.weight":{"dtype":"BF16","shape":[64],"data_offsets":[0,128]}}',
            bytes(128),
        ),
        {"malformed_header"},
    ),
    "hole": (raw({NORM: entry("BF16", [64], 8, 136)}, bytes(136)), {"malformed_header"}),
    "control characters": (save({"\x1b[31mred": torch.ones(1)}), {"unknown_tensor"}),
}


@pytest.mark.parametrize("case", BAD)
def test_by_socket(case: str, daemon: Any) -> None:
    content, reasons = BAD[case]
    with daemon.trainer() as trainer, daemon.subscriber() as subscriber:
        answer = _put(daemon, content)
        event = next(e for e in subscriber.events(timeout=TIMEOUT) if isinstance(e, events.ShardRefused))
        good = trainer.push_bytes(shard())

    assert answer["status"] == "rejected"
    assert answer["reason"] in reasons, answer["detail"]
    assert 10 < len(answer["detail"]) <= 200
    assert answer["detail"].isprintable()
    assert (event.reason, event.detail, event.source) == (answer["reason"], answer["detail"], "socket")
    assert good.status == "applied", "the rest goes on"


def _put(daemon: Any, content: bytes) -> dict[str, Any]:
    client: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REQ)
    client.connect(daemon.endpoint("ingest"))
    try:
        client.send_multipart([b'{"op":"put"}', content])
        assert client.poll(round(TIMEOUT * 1000))
        return dict(json.loads(client.recv()))
    finally:
        client.close(0)


@pytest.mark.parametrize("case", BAD)
def test_by_folder(case: str, daemon: Any) -> None:
    content, reasons = BAD[case]
    name = f"{case.replace(' ', '-')}.safetensors"
    with daemon.subscriber() as subscriber:
        (daemon.shards / name).write_bytes(content)
        event = next(
            e for e in subscriber.events(timeout=TIMEOUT) if isinstance(e, events.ShardRefused) and e.shard == name
        )

    assert event.reason in reasons, event.detail
    assert any(r.shard == name and r.reason == event.reason for r in daemon.status().rejected)
    assert any(line["event"] == "shard.rejected" and name in line["message"] for line in daemon.log())
    _still_serving(daemon)


def _still_serving(daemon: Any) -> None:
    with daemon.trainer() as trainer:
        assert trainer.push_bytes(shard()).status == "applied"


def test_weights_that_are_not_finite_again_and_again(daemon: Any, checkpoint_tensors: Callable[..., Any]) -> None:
    """Without a version each is a round of the rolling one, which is given up; the next has nothing of it."""
    tensors = checkpoint_tensors("v2")
    with daemon.trainer() as trainer, daemon.subscriber() as subscriber:
        assert trainer.push_bytes(save(tensors)).status == "applied"
        subscriber.wait_ready(TIMEOUT)
        for content, kind in [(torch.nan, events.VersionAborted)] * 3 + [(1.0, events.VersionLive)]:
            answer = trainer.push_bytes(save({NORM: tensors[NORM] * content}))
            assert answer.status == "applied"
            assert any(isinstance(event, kind) for event in subscriber.events(timeout=TIMEOUT))
    assert daemon.status().state == "ready"


def test_a_rejected_file_that_is_mended_is_applied(daemon: Any) -> None:
    path = daemon.shards / "mended.safetensors"
    with daemon.subscriber() as subscriber:
        path.write_bytes(shard()[:-1])
        seen: Iterator[events.Event] = subscriber.events(timeout=TIMEOUT)
        assert next(e for e in seen if isinstance(e, events.ShardRefused)).shard == path.name
        path.write_bytes(shard())
        assert next(e for e in seen if isinstance(e, events.ShardApplied)).shard == path.name


def test_links_fifos_and_directories_are_not_shards(daemon: Any, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(shard())
    (daemon.shards / "link.safetensors").symlink_to(target)
    os.mkfifo(daemon.shards / "fifo.safetensors")
    (daemon.shards / "folder.safetensors").mkdir()
    (daemon.shards / "after.safetensors").write_bytes(shard())
    status = daemon.wait_status(
        lambda status: {"link.safetensors", "fifo.safetensors"} <= {r.shard for r in status.rejected}
    )
    reasons = {r.shard: r.reason for r in status.rejected}

    assert reasons["link.safetensors"] == reasons["fifo.safetensors"] == "not_a_file"
    _still_serving(daemon)


@pytest.mark.skipif(os.geteuid() == 0 and not shutil.which("setpriv"), reason="root may read all without setpriv")
def test_a_file_that_may_not_be_read_is_named_and_a_chmod_cures_it(start_daemon: Callable[..., Any]) -> None:
    """As root, the daemon runs without the capabilities that would let it read everything."""
    prefix = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    daemon = start_daemon(popen={"prefix": prefix})
    path = daemon.shards / "private.safetensors"
    hidden = daemon.root / "hidden"
    hidden.write_bytes(shard())
    hidden.chmod(0)
    hidden.rename(path)
    status = daemon.wait_status(lambda status: bool(status.rejected))
    assert status.rejected[0].reason == "unreadable"
    assert "chmod" in status.rejected[0].detail
    path.chmod(0o644)
    daemon.wait_status(lambda status: status.counters["shards_applied"] == 1)


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"{}"],
        [b'{"op":"put"}'],
        [b'{"op":"put","verison":1}', b"x"],
        [b'{"op":"put","version":-1}', b"x"],
        [b'{"op":"put"}', b"x", b"y"],
        [b'{"op":"hello"}', b"x"],
        [b'{"op":"erase"}', b"x"],
        [b"\x80\x04K\x01.", b"x"],
        [b"[" * 70000, b"x"],
        [b'{"op":"put","name":"' + b"a" * 300 + b'"}', b"x"],
    ],
)
def test_malformed_messages_are_answered(frames: list[bytes], daemon: Any) -> None:
    client: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REQ)
    client.connect(daemon.endpoint("ingest"))
    client.send_multipart(frames)
    assert client.poll(round(TIMEOUT * 1000))
    answer = json.loads(client.recv())
    client.close(0)

    assert (answer["status"], answer["reason"]) == ("rejected", "malformed_message")
    assert answer["detail"]


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"{}"],
        [b'{"op":"status","x":1}'],
        [b'{"op":"status"}', b"x"],
        [b'{"op":"generate","token_ids":[]}'],
    ],
)
def test_malformed_control_requests_are_answered(frames: list[bytes], daemon: Any) -> None:
    client: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REQ)
    client.connect(daemon.endpoint("control"))
    client.send_multipart(frames)
    assert client.poll(round(TIMEOUT * 1000))
    reply = json.loads(client.recv())
    client.close(0)

    assert reply["kind"] == "error"
    assert reply["error"]


def test_a_dealer_without_the_empty_frame_is_served(daemon: Any) -> None:
    client: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    client.connect(daemon.endpoint("ingest"))
    client.send_multipart([b'{"op":"put"}', shard()])
    client.send_multipart([b"", b'{"op":"put"}', shard()])
    replies = []
    for _ in range(2):
        assert client.poll(round(TIMEOUT * 1000))
        replies.append(client.recv_multipart())
    client.close(0)

    assert sorted(len(reply) for reply in replies) == [1, 2]
    assert all(json.loads(reply[-1])["status"] == "applied" for reply in replies)


def test_a_file_that_is_being_written_waits_for_its_writer(daemon: Any) -> None:
    """Complete by size after the second write, but still open: not taken until it is closed."""
    path = daemon.shards / "slow.safetensors"
    content = shard()
    with path.open("wb") as writer:
        writer.write(content[:-64])
        writer.flush()
        daemon.wait_status(lambda status: any(w.shard == path.name for w in status.waiting_shards))
        writer.write(content[-64:])
        writer.flush()
        time.sleep(0.3)
        status = daemon.status()
        assert [w.state for w in status.waiting_shards if w.shard == path.name] == ["deferred"]
        applied = status.counters["shards_applied"]
    daemon.wait_status(lambda status: status.counters["shards_applied"] > applied)
