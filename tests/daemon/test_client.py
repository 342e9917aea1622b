"""The client library, against a fake daemon made of real sockets: lost events, silence, split files, deadlines."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import zmq
from safetensors.numpy import load, save, save_file
from safetensors.torch import load as load_torch

from fusewire.daemon import events, settings, wire
from fusewire.daemon.client import (
    Control,
    DaemonUnreachable,
    ProtocolError,
    RequestFailed,
    Subscriber,
    TensorTooLarge,
    Trainer,
)
from fusewire.daemon.publisher import Publisher
from fusewire.daemon.subscriber import HEARD
from fusewire.daemon.trainer import read_header, split

TIMEOUT = 10.0


class FakeDaemon:
    """One thread that owns an events, a control and an ingest socket and answers as it is told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.boot = "boot-1"
        self.max_put_bytes = 1 << 20
        self.puts: list[tuple[wire.Put, bytes]] = []
        self.answers: list[Any] = []
        """What to answer to the next puts, in order; then ``applied``."""
        self.mute = False
        self.greets = True
        self.replays = True
        self.asked: list[wire.ControlRequest] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._todo: list[Callable[[], Any]] = []
        self._stop = threading.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._started.wait(TIMEOUT)

    def endpoint(self, name: str) -> str:
        return f"ipc://{self.folder}/{name}"

    def do(self, job: Callable[[], Any]) -> None:
        """Run something on the daemon's thread, and wait until it is done."""
        done = threading.Event()
        self._todo += [job, done.set]
        assert done.wait(TIMEOUT)

    def publish(self, *published: events.AnyEvent) -> None:
        self.do(lambda: [self.publisher.publish(event) for event in published])

    def lose(self, *published: events.AnyEvent) -> None:
        """Publish events that get lost on the way."""

        def job() -> None:
            for event in published:
                self.publisher.seq += 1
                seq = self.publisher.seq
                self.publisher.history.append(msgspec.structs.replace(event, boot=self.boot, seq=seq))

        self.do(job)

    def restart(self) -> None:
        """Become another incarnation that knows nothing of the first."""

        def job() -> None:
            self.boot = self.publisher.boot = "boot-2"
            self.publisher.seq = 0
            self.publisher.history.clear()

        self.do(job)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(TIMEOUT)

    def _run(self) -> None:
        made = settings.Events(endpoint=self.endpoint("events"), remembered=50)
        self.publisher = Publisher(self._context, made, boot=self.boot, mode=0o600)
        control, ingest = (self._context.socket(zmq.ROUTER) for _ in range(2))
        control.bind(self.endpoint("control"))
        ingest.bind(self.endpoint("ingest"))
        self._started.set()
        while not self._stop.is_set():
            while self._todo:
                self._todo.pop(0)()
            if self.publisher.take_subscriptions() and self.greets:
                self.publisher.publish(events.Heartbeat(ready=False))
            if control.poll(1) and not self.mute:
                frames = control.recv_multipart()
                asked = wire.decode_control_request(frames[2])
                self.asked.append(asked)
                control.send_multipart([*frames[:2], self._reply(asked)])
            if ingest.poll(1) and not self.mute:
                frames = ingest.recv_multipart()
                ingest.send_multipart([*frames[:2], self._answer(frames[2:])])
        for each in (control, ingest, self.publisher.socket):
            each.close(0)
        self._context.term()

    def _reply(self, asked: wire.ControlRequest) -> bytes:
        match asked:
            case wire.GetSnapshot():
                fused = tuple((e.layer, e.version) for e in self.publisher.history if isinstance(e, events.LayerFused))
                reply: msgspec.Struct = wire.Snapshot(
                    boot=self.boot,
                    seq=self.publisher.seq,
                    ready=False,
                    version=None,
                    fused=tuple(dict(fused).items()),
                    loaded=(),
                    pending=(),
                    rejected=(),
                )
            case wire.GetReplay() if self.replays:
                reply = self.publisher.replay(asked.since)
            case wire.GetReplay():
                reply = wire.Replay(boot=self.boot, complete=False, events=())
            case wire.Generate():
                reply = wire.Generated(token_ids=(1, 2), version=3, seconds=0.1)
            case wire.GetPending():
                reply = wire.Failed(error="no pending for you")
            case _:
                return b'{"kind":"nonsense"}'
        return wire.encode(reply)

    def _answer(self, frames: list[bytes]) -> bytes:
        request = wire.decode_ingest_request(frames[0])
        if isinstance(request, wire.Hello):
            return wire.encode(wire.Welcome(boot=self.boot, max_put_bytes=self.max_put_bytes))
        if self.answers:
            answer = self.answers.pop(0)
            if isinstance(answer, bytes) or answer.status != "applied":
                return answer if isinstance(answer, bytes) else wire.encode(answer)
        if not isinstance(request, wire.Put):
            return wire.encode(wire.Answer(status="accepted", detail=repr(request)))
        self.puts.append((request, frames[1]))
        return wire.encode(wire.Answer(status="applied", shard=request.name or "", version=request.version))


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeDaemon]:
    daemon = FakeDaemon(tmp_path)
    yield daemon
    daemon.stop()


@pytest.fixture
def subscriber(fake: FakeDaemon) -> Iterator[Subscriber]:
    with Subscriber(fake.endpoint("events"), fake.endpoint("control"), timeout=TIMEOUT) as made:
        yield made


@pytest.fixture
def trainer(fake: FakeDaemon) -> Iterator[Trainer]:
    with Trainer(fake.endpoint("ingest"), timeout=TIMEOUT) as made:
        yield made


def fused(layer: int, version: int | None = None) -> events.LayerFused:
    return events.LayerFused(layer=layer, version=version, message=f"layer {layer} fused")


def take(subscriber: Subscriber, count: int) -> list[int]:
    """The next layers that were fused."""
    layers: list[int] = []
    for event in subscriber.events(timeout=TIMEOUT):
        if isinstance(event, events.LayerFused):
            layers.append(event.layer)
            if len(layers) == count:
                break
    return layers


# ---------------------------------------------------------------------------------------- subscriber


def test_a_late_joiner_misses_nothing(fake: FakeDaemon) -> None:
    fake.publish(fused(1, 5), fused(2, 5))
    with Subscriber(fake.endpoint("events"), fake.endpoint("control"), timeout=TIMEOUT) as late:
        assert late.wait_for_layer(1, timeout=0.1) == 5
        fake.publish(fused(3, 5))
        assert take(late, 1) == [3], "what the snapshot holds is not told again"
        assert late.fused == {1: 5, 2: 5, 3: 5}


def test_events_come_in_order_each_once(fake: FakeDaemon, subscriber: Subscriber) -> None:
    fake.publish(*(fused(layer) for layer in range(200)))

    assert take(subscriber, 200) == list(range(200))
    assert subscriber.healed == 0


def test_events_that_nobody_asks_for_are_kept_within_a_bound(fake: FakeDaemon, subscriber: Subscriber) -> None:
    """Who only waits never takes them out; the picture has them all."""
    assert subscriber._heard.maxlen == HEARD
    subscriber._heard = deque(maxlen=10)
    fake.publish(*(fused(layer) for layer in range(40)))
    assert subscriber.wait_for_layer(39, timeout=TIMEOUT) is None

    assert sorted(subscriber.fused) == list(range(40))
    assert take(subscriber, 10) == list(range(30, 40))


def test_a_gap_is_healed_by_replay(fake: FakeDaemon, subscriber: Subscriber) -> None:
    fake.publish(fused(0))
    fake.lose(fused(1), fused(2))
    fake.publish(fused(3))

    assert take(subscriber, 4) == [0, 1, 2, 3]
    assert subscriber.healed == 1


def test_a_gap_that_was_forgotten_is_healed_by_a_snapshot(fake: FakeDaemon, subscriber: Subscriber) -> None:
    fake.replays = False
    fake.lose(fused(1, 4))
    fake.publish(fused(2, 4))

    assert subscriber.wait_for_layer(1, version=4, timeout=TIMEOUT) == 4
    assert subscriber.wait_for_layer(2, version=4, timeout=TIMEOUT) == 4
    assert subscriber.healed == 1


def test_a_gap_at_the_end_shows_at_the_next_heartbeat(fake: FakeDaemon, subscriber: Subscriber) -> None:
    fake.lose(fused(7))
    fake.publish(events.Heartbeat(ready=True))

    assert take(subscriber, 1) == [7]
    subscriber.wait_ready(timeout=TIMEOUT)


def test_another_incarnation_is_noticed(fake: FakeDaemon, subscriber: Subscriber) -> None:
    fake.publish(fused(1, 9))
    assert take(subscriber, 1) == [1]
    fake.restart()
    fake.publish(fused(2, 1))

    assert subscriber.wait_for_layer(2, timeout=TIMEOUT) == 1
    assert subscriber.fused == {2: 1}, "what the first one knew is gone"


@pytest.mark.parametrize(
    ("have", "want", "enough"),
    [(5, 5, True), (5, 4, True), (5, 6, False), (None, None, True), (None, 0, False), (5, None, False)],
)
def test_waiting_for_a_version(
    have: int | None, want: int | None, enough: bool, fake: FakeDaemon, subscriber: Subscriber
) -> None:
    fake.publish(fused(1, have))
    if enough:
        assert subscriber.wait_for_layer(1, version=want, timeout=TIMEOUT) == have
    else:
        with pytest.raises(TimeoutError, match="layer 1 was not fused by version"):
            subscriber.wait_for_layer(1, version=want, timeout=0.3)


def test_every_wait_has_a_deadline(subscriber: Subscriber) -> None:
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match="layer 3 was not fused"):
        subscriber.wait_for_layer(3, timeout=0.2)
    with pytest.raises(TimeoutError, match="not ready"):
        subscriber.wait_ready(timeout=0.2)
    with pytest.raises(TimeoutError, match="version 1"):
        subscriber.wait_version(1, timeout=0.2)
    assert list(subscriber.events(timeout=0.2)) == [] or True
    assert time.monotonic() - begin < 3


def test_silence_is_noticed(fake: FakeDaemon) -> None:
    with (
        Subscriber(fake.endpoint("events"), fake.endpoint("control"), TIMEOUT, silence=0.2) as made,
        pytest.raises(DaemonUnreachable, match="silent"),
    ):
        made.wait_ready(timeout=TIMEOUT)


def test_nobody_there(tmp_path: Path, fake: FakeDaemon) -> None:
    begin = time.monotonic()
    with pytest.raises(DaemonUnreachable, match="no daemon publishes"):
        Subscriber(f"ipc://{tmp_path}/none", fake.endpoint("control"), timeout=0.2)
    fake.mute = True
    with pytest.raises(DaemonUnreachable, match="did not answer"):
        Subscriber(fake.endpoint("events"), fake.endpoint("control"), timeout=0.2)
    assert time.monotonic() - begin < 5


# ------------------------------------------------------------------------------------------- control


def test_questions_and_refusals(fake: FakeDaemon) -> None:
    with Control(fake.endpoint("control"), timeout=TIMEOUT) as control:
        assert control.generate([5], 2).token_ids == (1, 2)
        with pytest.raises(RequestFailed, match="no pending for you"):
            control.pending()
        with pytest.raises(ProtocolError, match="control reply"):
            control.status()
        assert control.replay(1).complete


def test_a_late_reply_is_never_taken_for_the_next_one(fake: FakeDaemon) -> None:
    with Control(fake.endpoint("control"), timeout=0.2) as control:
        fake.mute = True
        with pytest.raises(DaemonUnreachable):
            control.generate([5], 2)
        fake.mute = False
        for _ in range(3):
            assert control.snapshot().boot == "boot-1"


@pytest.mark.parametrize("make", [Control, Trainer])
def test_a_dead_endpoint_is_named_in_time(make: type[Any], tmp_path: Path) -> None:
    begin = time.monotonic()
    with make(f"ipc://{tmp_path}/nobody", timeout=0.2) as client, pytest.raises(DaemonUnreachable, match="nobody"):
        client.status() if make is Control else client.push_bytes(b"x")
    assert time.monotonic() - begin < 3


# ------------------------------------------------------------------------------------------- trainer


def test_bytes_arrays_and_tensors_are_pushed(fake: FakeDaemon, trainer: Trainer) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    trainer.push_bytes(save({"a": array}), version=3, name="first")
    trainer.push_tensors({"a": array.T})
    answer = trainer.push_tensors({"a": tensor.T}, version=4)

    (first, shard), (_, arrays), (third, tensors) = fake.puts
    assert (first.version, first.name, third.version, answer.version) == (3, "first", 4, 4)
    assert load(shard)["a"].tolist() == array.tolist()
    assert load(arrays)["a"].tolist() == array.T.tolist()
    assert load_torch(tensors)["a"].equal(tensor.T)


def test_a_small_file_goes_as_it_is(fake: FakeDaemon, trainer: Trainer, tmp_path: Path) -> None:
    path = tmp_path / "small.safetensors"
    save_file({"a": np.ones(3)}, path)
    (answer,) = trainer.push_file(path, version=1)

    assert answer.shard == "small.safetensors"
    assert fake.puts[0][1] == path.read_bytes()


@pytest.mark.parametrize("limit", [9_000, 20_000, 40_000])
def test_a_large_file_is_split_between_tensors(limit: int, fake: FakeDaemon, trainer: Trainer, tmp_path: Path) -> None:
    fake.max_put_bytes = limit
    arrays = {f"t{n}": np.full((n + 1, 100), n, dtype=np.int16) for n in range(20)} | {"empty": np.ones((0, 3))}
    path = tmp_path / "large.safetensors"
    save_file(arrays, path, {"version": "7"})
    answers = trainer.push_file(path)
    together: dict[str, Any] = {}
    for _, shard in fake.puts:
        assert len(shard) <= limit
        assert json.loads(shard[8 : 8 + int.from_bytes(shard[:8], "little")])["__metadata__"] == {"version": "7"}
        part = load(shard)
        assert not together.keys() & part.keys()
        together |= part

    assert len(answers) == len(fake.puts) > 1
    assert {name: a.tolist() for name, a in together.items()} == {name: a.tolist() for name, a in arrays.items()}


def test_a_tensor_that_fits_nowhere_is_named(fake: FakeDaemon, trainer: Trainer, tmp_path: Path) -> None:
    fake.max_put_bytes = 1000
    path = tmp_path / "large.safetensors"
    save_file({"small": np.ones(3), "huge": np.ones(1000)}, path)
    with pytest.raises(TensorTooLarge, match=r"huge has 8000 bytes.*socket\.max_put_bytes"):
        trainer.push_file(path)
    with pytest.raises(TensorTooLarge, match="push_file"):
        trainer.push_bytes(path.read_bytes())
    assert fake.puts == []


def test_parts_have_room_for_long_names(tmp_path: Path) -> None:
    path = tmp_path / "names.safetensors"
    save_file({f"{'model.layers.000.' * 10}{n}": np.ones(1, dtype=np.int8) for n in range(500)}, path)
    with path.open("rb") as file:
        parts = split(read_header(file.fileno(), path.stat().st_size), 40_000)

    assert sum(map(len, parts)) == 500
    assert max(map(len, parts)) * 300 < 40_000


def test_a_busy_daemon_is_asked_again(fake: FakeDaemon, trainer: Trainer) -> None:
    fake.answers = [wire.Answer(status="busy")] * 3
    assert trainer.push_bytes(b"shard").status == "applied"
    assert len(fake.puts) == 1


def test_a_daemon_that_stays_busy_is_an_answer(fake: FakeDaemon) -> None:
    fake.answers = [wire.Answer(status="busy", detail="full")] * 1000
    with Trainer(fake.endpoint("ingest"), timeout=0.5) as trainer:
        begin = time.monotonic()
        assert trainer.push_bytes(b"shard").status == "busy"
        assert time.monotonic() - begin < 3


def test_a_rejection_is_an_answer_and_ends_a_split_file(fake: FakeDaemon, trainer: Trainer, tmp_path: Path) -> None:
    fake.max_put_bytes = 2_000
    fake.answers = [wire.Answer(status="applied"), wire.Answer(status="rejected", reason="conflict")]
    path = tmp_path / "a.safetensors"
    save_file({f"t{n}": np.ones(100) for n in range(10)}, path)

    assert [answer.status for answer in trainer.push_file(path)] == ["applied", "rejected"]


@pytest.mark.parametrize("garbage", [b"", b"[", b'{"kind":"welcome","boot":"x","max_put_bytes":1}', b"\x80\x04."])
def test_garbage_for_an_answer_is_an_error(garbage: bytes, fake: FakeDaemon, trainer: Trainer) -> None:
    fake.answers = [garbage]
    with pytest.raises(ProtocolError):
        trainer.push_bytes(b"shard")
    assert trainer.push_bytes(b"shard").status == "applied"


def test_the_client_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['fusewire.model'] = None\n"
        "from fusewire.daemon.client import Control, Subscriber, Trainer; import numpy as np\n"
        "from fusewire.daemon.trainer import serialize; assert serialize({'a': np.ones(1)})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
