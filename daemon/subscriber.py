"""The subscriber's side: events as they come, a picture of the state that has no holes, and waiting with deadlines.

How nothing is missed: subscribe first; the daemon greets every subscription with a heartbeat, so that its arrival
says from when on events are heard; then ask for a snapshot, and pass over the events that it already contains. From
then on sequence numbers tell of gaps: what is missing is asked for (`replay`), or, if the daemon has forgotten it or
is another one by now, a new snapshot takes its place.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

import zmq

from . import events, wire
from .errors import DaemonUnreachable
from .events import AnyEvent
from .keys import ClientKeys, hint
from .rpc import HEARTBEAT_MS, Closing, Control

ANY: Final = "any"
"""For `Subscriber.wait_for_layer`: whatever version fuses the layer."""
SILENCE = 30.0
"""Seconds without any event, heartbeats included, after which the daemon counts as gone."""
HEARD = 20_000
"""Events that are kept for `Subscriber.events` while something is waited for, the latest: the picture has them all."""


class Subscriber(Closing):
    """Hears a daemon's events and keeps a picture of its state. Not thread-safe.

    Args:
        events_endpoint: The daemon's events socket.
        control_endpoint: Its control socket.
        timeout: Seconds in which it has to greet us and to answer questions.
        silence: Seconds without a heartbeat after which the daemon counts as gone.
        curve: Keys, for a daemon that asks for them over TCP: a subscriber's or an operator's.

    Attributes:
        snapshot: The state that the picture began with.
        fused: Layer -> the version that fused it last (None: the rolling one).
        loaded: Layer -> the version that filled it last.
        ready: Whether the model answers.
        version: The live numbered version.
        healed: How many times events had been lost, and were replayed or replaced by a snapshot.

    Raises:
        DaemonUnreachable: No daemon greets us in time.
    """

    def __init__(
        self,
        events_endpoint: str,
        control_endpoint: str,
        timeout: float = 10.0,
        silence: float = SILENCE,
        *,
        curve: ClientKeys | None = None,
    ) -> None:
        self._endpoint = events_endpoint
        self._silence = silence
        self._control = Control(control_endpoint, timeout, curve=curve)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.linger = 0
        self._socket.rcvhwm = 100_000
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
        self._socket.subscribe(b"")
        if curve is not None:
            curve.secure(self._socket)
        self._socket.connect(events_endpoint)
        self._heard: deque[AnyEvent] = deque(maxlen=HEARD)
        """Events that have been taken into the picture and not been given out yet."""
        self._last = time.monotonic()
        self.fused: dict[int, int | None] = {}
        self.loaded: dict[int, int | None] = {}
        self.ready = False
        self.version: int | None = None
        self.healed = 0
        try:
            if not self._socket.poll(round(timeout * 1000)):
                raise DaemonUnreachable(
                    f"no daemon publishes at {events_endpoint} (waited {timeout:g} s): is it running, on this host if "
                    f"the endpoint is ipc, and may this user write to its socket?{hint(events_endpoint, curve)}"
                )
            self._take_snapshot()
        except BaseException:
            self.close()
            raise

    def events(self, timeout: float) -> Iterator[AnyEvent]:
        """Yield events in order, each once, as they come; heartbeats too.

        Args:
            timeout: Seconds after which the iteration ends, counted from its beginning.

        Raises:
            DaemonUnreachable: The daemon has fallen silent, or does not answer when a gap has to be healed.
        """
        deadline = time.monotonic() + timeout
        while True:
            while self._heard:
                yield self._heard.popleft()
            if not self._receive(deadline):
                return

    def wait_for_layer(self, layer: int, version: int | str | None = ANY, timeout: float = 60.0) -> int | None:
        """Wait until a layer has been fused; return the version that did it.

        A layer that has no pair (a model without q_lora_rank) counts when it is loaded.

        Args:
            layer: Which layer.
            version: At least this one; None: by the rolling version; ANY: by any.
            timeout: Seconds.

        Raises:
            TimeoutError: It was not fused in time; the message says how things stand.
            DaemonUnreachable: The daemon has fallen silent.
        """

        def there() -> bool:
            if layer not in self.fused:
                return False
            by = self.fused[layer]
            return version in (ANY, by) or (isinstance(version, int) and by is not None and by >= version)

        wanted = "" if version == ANY else f" by version {'(rolling)' if version is None else version}"
        now = f"layer {layer} was fused by {self.fused[layer]}" if layer in self.fused else "it was never fused"
        self._wait(there, timeout, f"layer {layer} was not fused{wanted} within {timeout:g} s: {now}")
        return self.fused[layer]

    def wait_ready(self, timeout: float = 60.0) -> None:
        """Wait until the model answers.

        Raises:
            TimeoutError: It was not ready in time; the message says how things stand.
            DaemonUnreachable: The daemon has fallen silent.
        """
        self._wait(lambda: self.ready, timeout, f"the model was not ready within {timeout:g} s")

    def wait_version(self, version: int, timeout: float = 60.0) -> None:
        """Wait until a version, or a newer one, is live; raises as `wait_ready` does."""
        self._wait(
            lambda: self.version is not None and self.version >= version,
            timeout,
            f"version {version} was not live within {timeout:g} s",
        )

    def close(self) -> None:
        """Close the connections."""
        self._context.destroy(linger=0)
        self._control.close()

    # ---------------------------------------------------------------------------------------- picture

    def _wait(self, there: Callable[[], bool], timeout: float, failure: str) -> None:
        deadline = time.monotonic() + timeout
        while not there():
            if not self._receive(deadline):
                raise TimeoutError(
                    f"{failure}. Ready: {self.ready}; layers fused: {sorted(self.fused)}; see fusewire status"
                )

    def _receive(self, deadline: float) -> bool:
        """Take in one event, or heal a gap; False when the deadline has passed."""
        silent_at = self._last + self._silence
        until = min(deadline, silent_at)
        if not self._socket.poll(max(0, round((until - time.monotonic()) * 1000))):
            if time.monotonic() >= silent_at:
                raise DaemonUnreachable(
                    f"the daemon at {self._endpoint} has been silent for {self._silence:g} s, without a heartbeat"
                )
            return time.monotonic() < deadline
        event = events.decode(self._socket.recv_multipart())
        self._last = time.monotonic()
        if event.boot == self._boot and event.seq <= self._seq:
            return True  # the picture contains it already
        if event.boot != self._boot:
            self.healed += 1
            self._take_snapshot()
            if event.boot == self._boot and event.seq <= self._seq:
                self._heard.append(event)
            return True
        if event.seq > self._seq + 1 and not self._replay():
            self._take_snapshot()
            return True
        if event.seq == self._seq + 1:
            self._apply(event)
        return True

    def _replay(self) -> bool:
        """Ask for the events that were lost; False if the daemon does not remember them."""
        self.healed += 1
        replay = self._control.replay(self._seq + 1)
        if replay.boot != self._boot or not replay.complete:
            return False
        for event in replay.events:
            self._apply(event)
        return True

    def _apply(self, event: AnyEvent) -> None:
        self._seq = event.seq
        self._heard.append(event)
        match event:
            case events.LayerFused():
                self.fused[event.layer] = event.version
            case events.LayerLoaded():
                self.loaded[event.layer] = event.version
            case events.VersionLive() | events.VersionRolledBack():
                self.version = event.version if event.version is not None else self.version
            case events.ModelReady():
                self.ready = True
            case events.Heartbeat():
                self.ready = event.ready
            case _:
                pass

    def _take_snapshot(self) -> None:
        self.snapshot: wire.Snapshot = self._control.snapshot()
        self._boot, self._seq = self.snapshot.boot, self.snapshot.seq
        self.fused, self.loaded = dict(self.snapshot.fused), dict(self.snapshot.loaded)
        self.ready, self.version = self.snapshot.ready, self.snapshot.version
