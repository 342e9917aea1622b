"""Requests, answers and events: what goes in comes out, and nothing else gets in."""

from __future__ import annotations

import pickle
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusewire.daemon import events, wire
from fusewire.daemon.errors import ProtocolError, printable

DECODERS = [
    wire.decode_ingest_request,
    wire.decode_control_request,
    wire.decode_ingest_reply,
    wire.decode_control_reply,
]


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"op":"put","op":"hello","x":1}',
        b'{"op":"put","version":1.5}',
        b'{"op":"put","version":true}',
        b'{"op":"put","version":-1}',
        b'{"op":"put","version":9223372036854775808}',
        b'{"op":"put","unknown":1}',
        b'{"op":["put"]}',
        b"\xff\xfe",
        b'{"op":"put","name":"\xff"}',
        b"[" * 60_000,
        b'{"op":"put","name":"' + b"x" * 201 + b'"}',
        b"x" * (wire.CONTROL_LIMIT + 1),
        pickle.dumps({"op": "put"}),
    ],
)
def test_malformed_requests_are_refused_in_words(frame: bytes) -> None:
    for decode in (wire.decode_ingest_request, wire.decode_control_request):
        with pytest.raises(ProtocolError) as refused:
            decode(frame)
        assert str(refused.value).isprintable()
        assert len(str(refused.value)) < 300


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_rubbish_is_refused_and_nothing_else_happens(frame: bytes) -> None:
    for decode in DECODERS:
        try:
            decode(frame)
        except ProtocolError:
            continue
    with pytest.raises(ProtocolError):
        events.decode([b"layer.fused/1/", bytes(8), frame])


@given(
    version=st.none() | st.integers(0, 2**63 - 1),
    name=st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=200),
)
def test_a_put_survives_the_wire(version: int | None, name: str | None) -> None:
    put = wire.Put(version=version, name=name)

    assert wire.decode_ingest_request(wire.encode(put)) == put


def test_requests_are_told_apart_by_op() -> None:
    for request in (wire.GetStatus(), wire.GetReplay(since=3), wire.Generate(token_ids=[1, 2])):
        assert wire.decode_control_request(wire.encode(request)) == request
    for reply in (wire.Welcome(boot="b", max_put_bytes=1), wire.Answer(status="busy")):
        assert wire.decode_ingest_reply(wire.encode(reply)) == reply


EVENTS: list[events.AnyEvent] = [
    events.LayerFused(layer=3, seq=1),
    events.LayerLoaded(layer=30, seq=2, version=7),
    events.VersionComplete(),
    events.VersionIncomplete(version=3, missing=("a",), missing_count=2, cause="index"),
    events.VersionVerified(version=3, carried=1, carried_bytes=2, tokens=(3,), fingerprint="f", seconds=0.5),
    events.VersionLive(version=0),
    events.VersionRolledBack(version=0, previous=1),
    events.VersionAborted(version=1, cause="NaN"),
    events.VersionSuperseded(version=1, cause="newer"),
    events.ModelReady(),
    events.ShardApplied(shard="a", source="folder", tensors=1, skipped=0, waiting=("x",), nbytes=2, seconds=0.1),
    events.ShardRefused(shard="ü\n", source="socket", reason="truncated", detail="…"),
    events.FusionExpired(layer=0, tensor="t", age=1.5, nbytes=3, cause="age"),
    events.Heartbeat(ready=True),
    events.Stopping(waiting=("a", "b"), seq=2**63 - 1),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_survives_the_wire(event: events.AnyEvent) -> None:
    frames = events.encode(event)
    topic, sequence, body = frames

    assert events.decode(frames) == event
    assert topic.endswith(b"/"), "a subscription is a prefix"
    assert struct.unpack(">Q", sequence) == (event.seq,)
    assert {"event", "boot", "seq", "time", "version", "message"} <= set(msgspec.json.decode(body))


def test_every_kind_of_event_is_tried_above() -> None:
    assert {type(event) for event in EVENTS} == set(events.AnyEvent.__args__)


def test_a_layer_is_a_topic_of_its_own() -> None:
    three, thirty = (events.encode(events.LayerFused(layer=n))[0] for n in (3, 30))

    assert three == b"layer.fused/3/"
    assert not thirty.startswith(three)


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"a"],
        [b"layer.fused/1/", bytes(7), events.encode(events.LayerFused(layer=1))[2]],
        [b"layer.fused/2/", bytes(8), events.encode(events.LayerFused(layer=1))[2]],
        [b"layer.fused/1/", bytes(7) + b"\1", events.encode(events.LayerFused(layer=1))[2]],
        [*events.encode(events.LayerFused(layer=1)), b""],
        [b"layer.fused/1/", bytes(8), b'{"event":"layer.fused","layer":1,"x":' + b"[" * 100_000],
    ],
)
def test_frames_that_contradict_each_other_are_no_event(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        events.decode(frames)


@given(st.text(st.characters(), max_size=400), st.integers(1, 50))
def test_printable_text_is_one_line_bounded_and_harmless(text: str, limit: int) -> None:
    safe = printable(text, limit)

    assert len(safe) <= limit
    assert "\n" not in safe
    assert "\x1b" not in safe
    safe.encode()


@pytest.mark.parametrize(("given_", "expected"), [("a\nb", "a\\nb"), ("\x1b[0m", "\\x1b[0m"), ("ü", "ü"), (7, "7")])
def test_printable_examples(given_: Any, expected: str) -> None:
    assert printable(given_) == expected
