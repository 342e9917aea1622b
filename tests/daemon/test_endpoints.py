"""Binding: modes, sockets in use or left behind, strangers; what the publisher and the router promise."""

from __future__ import annotations

import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import zmq

from fusewire.daemon import endpoints, events, settings, wire
from fusewire.daemon.errors import StartError
from fusewire.daemon.publisher import Publisher
from fusewire.daemon.router import Router

Context = zmq.Context[zmq.Socket[bytes]]
TIMEOUT_MS = 10_000


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


def bind(context: Context, endpoint: str, mode: int = 0o660) -> str:
    return endpoints.bind(endpoints.create(context, zmq.ROUTER), endpoint, mode=mode, setting="x.endpoint")


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
def test_an_ipc_socket_gets_its_mode_whatever_the_umask(context: Context, tmp_path: Path, mode: int) -> None:
    bind(context, f"ipc://{tmp_path}/s", mode)

    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == mode


def test_a_socket_in_use_is_not_taken_over(context: Context, tmp_path: Path) -> None:
    bind(context, f"ipc://{tmp_path}/s")
    with pytest.raises(StartError, match=r"x\.endpoint.*in use"):
        bind(context, f"ipc://{tmp_path}/s")


def test_a_socket_left_behind_is_replaced(context: Context, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "s"))
    bind(context, f"ipc://{tmp_path}/s")


def test_a_tcp_port_in_use_is_named(context: Context) -> None:
    endpoint = bind(context, "tcp://127.0.0.1:*")
    with pytest.raises(StartError, match=r"x\.endpoint = tcp://127\.0\.0\.1:\d+: Address already in use"):
        bind(context, endpoint)


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://0.0.0.0:5555",
        "tcp://*:5555",
        "tcp://10.1.2.3:1",
        "tcp://[::]:1",
        "tcp://eth0:1",
        "udp://x",
        "",
        "ipc://",
    ],
)
def test_strangers_are_not_let_in(context: Context, endpoint: str) -> None:
    with pytest.raises(StartError, match=r"x\.endpoint"):
        bind(context, endpoint)


@pytest.mark.parametrize("kind", ["file", "no folder", "long"])
def test_impossible_paths_are_named(context: Context, tmp_path: Path, kind: str) -> None:
    path = {"file": tmp_path / "f", "no folder": tmp_path / "none" / "s", "long": tmp_path / ("x" * 120)}[kind]
    if kind == "file":
        path.write_text("precious")
    with pytest.raises(StartError, match=r"x\.endpoint"):
        bind(context, f"ipc://{path}")
    assert kind != "file" or path.read_text() == "precious"


@pytest.fixture
def publisher(context: Context, tmp_path: Path) -> Publisher:
    return Publisher(context, settings.Events(endpoint=f"ipc://{tmp_path}/e", remembered=5), boot="b", mode=0o600)


def test_both_subscribers_of_a_topic_are_noticed(context: Context, publisher: Publisher) -> None:
    """Without XPUB_VERBOSE the second one would not be."""
    for _ in range(2):
        subscriber = context.socket(zmq.SUB)
        subscriber.connect(publisher.endpoint)
        subscriber.subscribe(b"layer.fused/")
        assert publisher.socket.poll(TIMEOUT_MS)
        assert publisher.take_subscriptions()
        assert not publisher.take_subscriptions()


def test_events_are_numbered_stamped_and_sent(context: Context, publisher: Publisher) -> None:
    subscriber = context.socket(zmq.SUB)
    subscriber.connect(publisher.endpoint)
    subscriber.subscribe(b"layer.fused/3/")
    assert publisher.socket.poll(TIMEOUT_MS)
    publisher.take_subscriptions()
    for layer in (2, 3, 30, 3):
        publisher.publish(events.LayerFused(layer=layer))
    received = []
    for _ in range(2):
        assert subscriber.poll(TIMEOUT_MS)
        received.append(events.decode(subscriber.recv_multipart()))

    assert [(event.seq, event.boot) for event in received] == [(2, "b"), (4, "b")]
    assert all(event.time > 1e9 for event in received)


def test_replay_says_when_it_has_forgotten(publisher: Publisher) -> None:
    assert publisher.replay(1).complete
    for layer in range(8):
        publisher.publish(events.LayerFused(layer=layer))

    assert [event.seq for event in publisher.replay(6).events] == [6, 7, 8]
    assert publisher.replay(4).complete
    assert not publisher.replay(3).complete
    assert publisher.replay(9) == wire.Replay(boot="b", complete=True, events=())


def test_a_reply_to_somebody_who_left_is_counted(context: Context, tmp_path: Path) -> None:
    router = Router(context, f"ipc://{tmp_path}/r", mode=0o600, setting="x", max_frame=1000, high_water=10)
    router.reply((b"nobody", b""), wire.Answer(status="busy"))

    assert router.unreachable == 1


def test_a_frame_over_the_limit_does_not_come_in(context: Context, tmp_path: Path) -> None:
    router = Router(context, f"ipc://{tmp_path}/r", mode=0o600, setting="x", max_frame=1000, high_water=10)
    client = context.socket(zmq.DEALER)
    client.connect(router.endpoint)
    client.send(b"x" * 1001)
    assert not router.socket.poll(300)
    small = context.socket(zmq.DEALER)
    small.connect(router.endpoint)
    small.send(b"x" * 1000)
    assert router.socket.poll(TIMEOUT_MS)
    (request,) = router.requests()
    assert len(request.body[0].buffer) == 1000
