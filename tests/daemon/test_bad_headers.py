"""Bad headers, made by construction, by every way in: as a message, as the head of a stream, as a file, to a daemon.

What is refused names its reason, the same one whichever way it came; what is accepted is what safetensors reads. A
header is small against its data, and all that is spent on it is bounded: time, memory, and the words about it.
"""

from __future__ import annotations

import json
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from safetensors import deserialize
from safetensors.numpy import save

from fusewire.daemon import events
from fusewire.daemon.errors import Reason, ShardRejected
from fusewire.daemon.payload import BytesPayload, HeadPayload, open_file
from fusewire.daemon.settings import Limits
from fusewire.daemon.shard import EXPLAINED_BYTES, LENGTH_BYTES, MAX_COLONS, MAX_TENSORS, ShardHeader

LIMIT = Limits().header_bytes
TIMEOUT = 30.0
MEMORY = 24
"""Bytes allocated at the same time for each byte of a header, at most."""


def raw(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(shape: Any = (2,), offsets: Any = (0, 4), dtype: Any = "BF16", **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


SMALL = save({"a": np.arange(3, dtype=np.float32), "b": np.ones((2, 2), dtype=np.int8)}, {"format": "pt"})

BAD: dict[str, tuple[bytes, Reason]] = {
    "empty": (b"", Reason.TRUNCATED),
    "7 bytes": (b"\0" * 7, Reason.TRUNCATED),
    "length 0": (b"\0" * 8, Reason.MALFORMED_HEADER),
    "length 1": (raw(b"{"), Reason.MALFORMED_HEADER),
    "length over the file": (struct.pack("<Q", 100) + b"{}", Reason.TRUNCATED),
    "length 2^63": (struct.pack("<Q", 2**63) + b"{}", Reason.TOO_LARGE),
    "length 2^64-1": (b"\xff" * 8 + b"{}", Reason.TOO_LARGE),
    "not UTF-8": (raw(b'{"\xff\xfe":1}'), Reason.MALFORMED_HEADER),
    "open brace": (raw(b"{ "), Reason.MALFORMED_HEADER),
    "list": (raw([]), Reason.MALFORMED_HEADER),
    "null": (raw(None), Reason.MALFORMED_HEADER),
    "string": (raw("x"), Reason.MALFORMED_HEADER),
    "leading space": (raw(b" {}"), Reason.MALFORMED_HEADER),
    "BOM": (raw(b"\xef\xbb\xbf{}"), Reason.MALFORMED_HEADER),
    "two objects": (raw(b"{}{}"), Reason.MALFORMED_HEADER),
    "200k brackets": (raw(b"[" * 200_000), Reason.MALFORMED_HEADER),
    "200k objects": (raw(b'{"a":' * 200_000), Reason.MALFORMED_HEADER),
    "digits": (raw(b'{"a":' + b"9" * 100_000 + b"}"), Reason.MALFORMED_HEADER),
    "duplicate tensor": (
        raw(b'{"a":%b,"a":%b}' % ((json.dumps(entry()).encode(),) * 2), bytes(4)),
        Reason.MALFORMED_HEADER,
    ),
    "duplicate key": (
        raw(b'{"a":{"dtype":"BF16","dtype":"BF16","shape":[2],"data_offsets":[0,4]}}', bytes(4)),
        Reason.MALFORMED_HEADER,
    ),
    "duplicate metadata": (raw(b'{"__metadata__":{"a":"1","a":"2"}}'), Reason.MALFORMED_HEADER),
    "trailing byte": (raw({"a": entry()}, bytes(5)), Reason.TRAILING_BYTES),
    "missing byte": (raw({"a": entry()}, bytes(3)), Reason.TRUNCATED),
    "no data": (raw({"a": entry()}), Reason.TRUNCATED),
    "overlap": (raw({"a": entry(), "b": entry(offsets=[2, 6])}, bytes(6)), Reason.MALFORMED_HEADER),
    "same bytes twice": (raw({"a": entry(), "b": entry()}, bytes(4)), Reason.MALFORMED_HEADER),
    "hole": (raw({"a": entry(), "b": entry(offsets=[6, 10])}, bytes(10)), Reason.MALFORMED_HEADER),
    "hole at the front": (raw({"a": entry(offsets=[2, 6])}, bytes(6)), Reason.MALFORMED_HEADER),
    "reversed": (raw({"a": entry(offsets=[4, 0])}, bytes(4)), Reason.MALFORMED_HEADER),
    "negative offset": (raw({"a": entry(offsets=[-4, 0])}, bytes(4)), Reason.MALFORMED_HEADER),
    "float offset": (raw({"a": entry(offsets=[0, 4.0])}, bytes(4)), Reason.MALFORMED_HEADER),
    "exponent": (raw(b'{"a":{"dtype":"BF16","shape":[2],"data_offsets":[0,4e0]}}', bytes(4)), Reason.MALFORMED_HEADER),
    "NaN": (raw(b'{"a":{"dtype":"BF16","shape":[NaN],"data_offsets":[0,4]}}', bytes(4)), Reason.MALFORMED_HEADER),
    "true": (raw({"a": entry(shape=[True, 2])}, bytes(4)), Reason.MALFORMED_HEADER),
    "string shape": (raw({"a": entry(shape="2")}, bytes(4)), Reason.MALFORMED_HEADER),
    "negative shape": (raw({"a": entry(shape=[-1, -2])}, bytes(4)), Reason.MALFORMED_HEADER),
    "huge shape": (raw({"a": entry(shape=[2**62, 2**62])}, bytes(4)), Reason.MALFORMED_HEADER),
    "overflow to fit": (raw({"a": entry(shape=[2**32, 2**32, 2], offsets=[0, 0])}), Reason.MALFORMED_HEADER),
    "overflow behind a zero": (raw({"a": entry(shape=[0, 2**62, 4], offsets=[0, 0])}), Reason.MALFORMED_HEADER),
    "dimension over 63 bits": (raw({"a": entry(shape=[0, 2**63], offsets=[0, 0])}), Reason.MALFORMED_HEADER),
    "half a surrogate pair": (raw(b'{"\\ud800":%b}' % json.dumps(entry()).encode(), bytes(4)), Reason.MALFORMED_HEADER),
    "not UTF-8 where nobody looks": (raw(b'{"a":{"x":"\xff"}}'), Reason.MALFORMED_HEADER),
    "duplicate by escape": (
        raw(b'{"a:":%b,"a\\u003A":%b}' % ((json.dumps(entry()).encode(),) * 2), bytes(4)),
        Reason.MALFORMED_HEADER,
    ),
    "duplicate of another kind": (
        raw(b'{"a":{},"a":%b}' % json.dumps(entry()).encode(), bytes(4)),
        Reason.MALFORMED_HEADER,
    ),
    "duplicate __metadata__": (raw(b'{"__metadata__":{"a":"1"},"__metadata__":{"a":"1"}}'), Reason.MALFORMED_HEADER),
    "minus zero": (raw(b'{"a":{"dtype":"BF16","shape":[2],"data_offsets":[-0,4]}}', bytes(4)), Reason.MALFORMED_HEADER),
    "minus zero in a shape": (
        raw(b'{"a,-0,":{"dtype":"U8","shape":[ -0 ],"data_offsets":[0,0]}}'),
        Reason.MALFORMED_HEADER,
    ),
    "offset over 63 bits": (raw({"a": entry(offsets=[2**63, 2**63 + 4])}, bytes(4)), Reason.MALFORMED_HEADER),
    "offset of 400 digits": (raw({"a": entry(offsets=[0, 10**400])}, bytes(4)), Reason.MALFORMED_HEADER),
    "control character in a name": (
        raw(b'{"a\n":%b}' % json.dumps(entry()).encode(), bytes(4)),
        Reason.MALFORMED_HEADER,
    ),
    "many dimensions": (raw({"a": entry(shape=[1] * 64 + [2])}, bytes(4)), Reason.MALFORMED_HEADER),
    "wrong size": (raw({"a": entry(shape=[3])}, bytes(4)), Reason.MALFORMED_HEADER),
    "one offset": (raw({"a": entry(offsets=[4])}, bytes(4)), Reason.MALFORMED_HEADER),
    "three offsets": (raw({"a": entry(offsets=[0, 2, 4])}, bytes(4)), Reason.MALFORMED_HEADER),
    "no dtype": (raw({"a": {"shape": [2], "data_offsets": [0, 4]}}, bytes(4)), Reason.MALFORMED_HEADER),
    "one key more": (raw({"a": entry(extra=1)}, bytes(4)), Reason.MALFORMED_HEADER),
    **{
        f"dtype {dtype}": (raw({"a": entry([2], [0, nbytes], dtype)}, bytes(nbytes)), Reason.MALFORMED_HEADER)
        for dtype, nbytes in {
            "F4": 1,
            "F6_E2M3": 2,
            "F6_E3M2": 2,
            "F8_E4M3FNUZ": 2,
            "F8_E5M2FNUZ": 2,
            "C64": 16,
            "F128": 32,
            "bf16": 4,
            "BF16 ": 4,
            "torch.bfloat16": 4,
            "": 4,
        }.items()
    },
    "unknown dtype": (raw({"a": entry(dtype="F4")}, bytes(4)), Reason.MALFORMED_HEADER),
    "dtype of another type": (raw({"a": entry(dtype=["BF16"])}, bytes(4)), Reason.MALFORMED_HEADER),
    "tensor is a list": (raw({"a": []}), Reason.MALFORMED_HEADER),
    "tensor is null": (raw({"a": None}), Reason.MALFORMED_HEADER),
    "metadata is a list": (raw({"__metadata__": []}), Reason.MALFORMED_HEADER),
    "metadata is null": (raw({"__metadata__": None}), Reason.MALFORMED_HEADER),
    "metadata of numbers": (raw({"__metadata__": {"a": 1}}), Reason.MALFORMED_HEADER),
    "nested metadata": (raw({"__metadata__": {"a": {"b": "c"}}}), Reason.MALFORMED_HEADER),
}


def as_message(shard: bytes, _folder: Path, limit: int) -> ShardHeader:
    return BytesPayload.parse(shard, header_limit=limit).header


def as_head(shard: bytes, _folder: Path, limit: int) -> ShardHeader:
    end = min(len(shard), LENGTH_BYTES + int.from_bytes(shard[:LENGTH_BYTES], "little"))
    return HeadPayload.parse(shard[:end], len(shard) - end, header_limit=limit).header


def as_file(shard: bytes, folder: Path, limit: int, *, leases: bool = False) -> ShardHeader:
    path = folder / "x.safetensors"
    path.unlink(missing_ok=True)
    path.write_bytes(shard)
    opened = open_file(path, leases=leases, settle=0.0, incomplete_after=0.0, header_limit=limit)
    opened.close()
    return opened.header


def as_leased_file(shard: bytes, folder: Path, limit: int) -> ShardHeader:
    return as_file(shard, folder, limit, leases=True)


Way = Callable[[bytes, Path, int], ShardHeader]
WAYS: list[Way] = [as_message, as_head, as_file, as_leased_file]
every_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


def attempt(way: Way, shard: bytes, folder: Path, limit: int) -> ShardHeader | ShardRejected:
    try:
        return way(shard, folder, limit)
    except ShardRejected as refused:
        return refused


def refusal(way: Way, shard: bytes, folder: Path, limit: int = LIMIT) -> ShardRejected | None:
    """Return why a shard is refused, fit to be told; None: it is accepted, and safetensors reads the same."""
    header = attempt(way, shard, folder, limit)
    if isinstance(header, ShardRejected):
        assert header.detail.isprintable()
        assert 10 < len(header.detail) < 400
        return header
    theirs = {name: (e["dtype"], tuple(e["shape"]), bytes(e["data"])) for name, e in deserialize(shard)}
    data = shard[header.data_offset :]
    assert {e.name: (e.dtype, e.shape, data[e.start : e.stop]) for e in header.tensors} == theirs
    assert len(header.tensors) == len(theirs)
    return None


@every_way
@pytest.mark.parametrize("case", BAD)
def test_bad_shards(case: str, way: Way, tmp_path: Path) -> None:
    shard, reason = BAD[case]
    begin = time.process_time()
    refused = refusal(way, shard, tmp_path)

    assert refused is not None
    assert refused.reason is reason
    assert time.process_time() - begin < 1


@every_way
def test_every_truncation_of_a_small_shard(way: Way, tmp_path: Path) -> None:
    assert refusal(way, SMALL, tmp_path) is None
    for size in range(len(SMALL)):
        refused = refusal(way, SMALL[:size], tmp_path)
        assert refused is not None
        assert refused.reason is Reason.TRUNCATED


@every_way
def test_trailing_bytes(way: Way, tmp_path: Path) -> None:
    for more in (b"\0", SMALL):
        refused = refusal(way, SMALL + more, tmp_path)
        assert refused is not None
        assert refused.reason is Reason.TRAILING_BYTES


def flipped(position: int, flips: int) -> bytes:
    shard = bytearray(SMALL)
    shard[position] ^= flips
    return bytes(shard)


HEAD = LENGTH_BYTES + int.from_bytes(SMALL[:LENGTH_BYTES], "little")


def test_every_value_of_every_byte_of_the_header(tmp_path: Path) -> None:
    """As a message and as a head: both say the same. What is accepted, safetensors reads alike."""
    accepted = 0
    for position in range(HEAD):
        for flips in range(1, 256):
            shard = flipped(position, flips)
            message, head = (refusal(way, shard, tmp_path) for way in (as_message, as_head))
            assert (message and (message.reason, message.detail)) == (head and (head.reason, head.detail))
            accepted += message is None
    assert accepted > 500, "changes within names and metadata are legal"


@pytest.mark.parametrize("flips", [0x01, 0x20, 0x80, 0xFF])
def test_every_flip_of_a_byte_of_the_header_in_a_file(flips: int, tmp_path: Path) -> None:
    for position in range(HEAD):
        shard = flipped(position, flips)
        message, file = (refusal(way, shard, tmp_path) for way in (as_message, as_file))
        assert (message and (message.reason, message.detail)) == (file and (file.reason, file.detail))


LEGAL = {
    "unaligned": raw(
        {"a": entry([1], [0, 1], "U8"), "b": entry([1], [1, 5], "F32"), "c": entry([2], [5, 9])}, bytes(9)
    ),
    "empty tensors": raw({"a": entry([0, 7], [0, 0]), "b": entry([], [0, 2]), "c": entry([0], [2, 2])}, bytes(2)),
    "no tensors": raw({}),
    "out of order": raw({"b": entry([2], [4, 8]), "a": entry([2], [0, 4])}, bytes(8)),
    "spaces at the end": raw(json.dumps({"a": entry()}).encode() + b"   ", bytes(4)),
    "escapes in names": raw(b'{"\\u0061\\u001b[31m\\ud83d\\ude00":%b}' % json.dumps(entry()).encode(), bytes(4)),
    "minus zero in a name": raw({"a,-0,": entry(), "b": entry([2], [4, 8])}, bytes(8)),
    "a name of 10 kB": raw({"a" * 10_000: entry()}, bytes(4)),
}


@every_way
@pytest.mark.parametrize("case", LEGAL)
def test_odd_and_legal(case: str, way: Way, tmp_path: Path) -> None:
    assert refusal(way, LEGAL[case], tmp_path) is None


# ------------------------------------------------------------------------------------------- what a header may cost


def filled(head: bytes, unit: bytes, tail: bytes) -> bytes:
    """As long a header as is read at all."""
    return head + unit * ((LIMIT - len(head) - len(tail)) // len(unit)) + tail


TENSORS = b",".join(b'"%x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % n for n in range(MAX_TENSORS + 2))
LONG: dict[str, bytes] = {
    "objects": filled(b'{"a":[', b"{},", b"{}]}"),
    "lists": filled(b'{"a":[', b"[],", b"[]]}"),
    "numbers": filled(b'{"a":{"dtype":"U8","shape":[', b"0,", b'0],"data_offsets":[0,0]}}'),
    "the same key": filled(b'{"__metadata__":{', b'"":"",', b'"":""}}'),
    "keys": b'{"__metadata__":{' + b",".join(b'"%x":""' % n for n in range(MAX_COLONS)) + b"}}",
    "brackets": filled(b'{"a":', b"[", b""),
    "digits": filled(b'{"a":', b"9", b"}"),
    "tensors": b"{" + TENSORS + b"}",
    "escapes": filled(b'{"a', b"\\u003a", b'":0}'),
    "short, but slow to explain": b'{"a":[' + b"[]," * (EXPLAINED_BYTES // 3 - 10) + b"[]]}",
}


def cost(way: Way, shard: bytes, folder: Path, limit: int) -> tuple[float, int, Reason | None]:
    """Return the CPU seconds and the bytes of memory that a shard's header takes, and what came of it."""
    begin = time.process_time()
    found = attempt(way, shard, folder, limit)
    seconds = time.process_time() - begin
    tracemalloc.start()
    try:
        attempt(way, shard, folder, limit)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return seconds, peak, found.reason if isinstance(found, ShardRejected) else None


@pytest.mark.parametrize("case", LONG)
def test_no_header_costs_more_than_a_second_and_a_bound_of_memory(case: str, tmp_path: Path) -> None:
    shard = raw(LONG[case])
    assert len(LONG[case]) <= LIMIT
    seconds, peak, reason = cost(as_message, shard, tmp_path, LIMIT)

    assert reason in {Reason.MALFORMED_HEADER, Reason.TOO_LARGE}
    assert seconds < 1
    assert peak < MEMORY * len(shard)


@pytest.mark.parametrize("limit", [LIMIT, 100_000_000], ids=["as set", "as much as can be set"])
@pytest.mark.parametrize("way", [as_message, as_file], ids=lambda way: way.__name__)
def test_a_legal_header_of_99_mb_with_empty_tensors(way: Way, limit: int, tmp_path: Path) -> None:
    """1.7 million of them cost safetensors eight seconds."""
    entries = b",".join(b'"%07x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % n for n in range(1_700_000))
    shard = raw(b"{" + entries + b"}")
    assert 90_000_000 < len(shard) < 100_000_000
    seconds, peak, reason = cost(way, shard, tmp_path, limit)

    assert reason is Reason.TOO_LARGE
    assert seconds < 1
    assert peak < 3 * len(shard)


# -------------------------------------------------------------------------------------------------- by a daemon


@pytest.fixture(scope="module")
def daemon(start_shared_daemon: Callable[..., Any]) -> Any:
    return start_shared_daemon("v2", folder={"incomplete_after": 0.5, "settle": 0.1})


def test_a_daemon_refuses_them_all_as_messages(daemon: Any) -> None:
    client: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REQ)
    client.connect(daemon.endpoint("ingest"))
    for case, (shard, reason) in BAD.items():
        client.send_multipart([b'{"op":"put"}', shard])
        assert client.poll(round(TIMEOUT * 1000)), case
        answer = json.loads(client.recv())
        assert (answer["status"], answer["reason"]) == ("rejected", reason), case
        assert answer["detail"].isprintable()
        assert len(answer["detail"]) <= 200
    client.close(0)


def test_a_daemon_refuses_them_all_as_files(daemon: Any) -> None:
    expected = {f"{case.replace('/', ' ')}.safetensors": reason for case, (_, reason) in BAD.items()}
    with daemon.subscriber() as subscriber:
        for (shard, _), name in zip(BAD.values(), expected, strict=True):
            (daemon.shards / name).write_bytes(shard)
        found: dict[str, str] = {}
        for event in subscriber.events(timeout=TIMEOUT):
            if isinstance(event, events.ShardRefused) and event.source == "folder":
                found[event.shard] = event.reason
            if len(found) == len(expected):
                break

    assert found == expected
    with daemon.trainer() as trainer:
        good = save({"model.norm.weight": np.ones(64, dtype=np.float32)})
        assert trainer.push_bytes(good).status == "applied", "the rest goes on"
