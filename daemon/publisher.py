"""The events socket: numbers events, remembers and sends them. One XPUB socket; the reactor's thread only."""

from __future__ import annotations

import time
from collections import deque

import msgspec
import zmq

from . import endpoints, events, wire
from .curve import Door
from .settings import Events

SEND_HIGH_WATER = 100_000
"""Events that may queue for one slow subscriber; what is beyond is dropped, and a gap in ``seq`` shows it."""


class Publisher:
    """Stamps each event with ``boot``, ``seq`` and ``time``, and sends it to whoever subscribed.

    Every subscription is answered by a heartbeat, so that a newcomer knows from when on it hears everything.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        settings: Events,
        *,
        boot: str,
        mode: int,
        door: Door | None = None,
    ) -> None:
        self.boot = boot
        self.seq = 0
        self.history: deque[events.AnyEvent] = deque(maxlen=settings.remembered)
        self.socket = endpoints.create(context, zmq.XPUB)
        # Without it the second subscriber of a topic would not be seen, nor greeted.
        self.socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self.socket.sndhwm = SEND_HIGH_WATER
        self.endpoint = endpoints.bind(self.socket, settings.endpoint, mode=mode, setting="events.endpoint", door=door)

    def publish(self, event: events.AnyEvent) -> events.AnyEvent:
        """Send an event now; return it as it was sent."""
        self.seq += 1
        event = msgspec.structs.replace(event, boot=self.boot, seq=self.seq, time=time.time())
        self.history.append(event)
        self.socket.send_multipart(events.encode(event), zmq.DONTWAIT)
        return event

    def take_subscriptions(self) -> bool:
        """Read what subscribers sent; return whether any of them is new."""
        new = False
        while True:
            try:
                frame = self.socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                return new
            new = new or frame[:1] == b"\x01"

    def replay(self, since: int) -> wire.Replay:
        """Return the remembered events with ``seq >= since``."""
        oldest = self.history[0].seq if self.history else self.seq + 1
        found = tuple(event for event in self.history if event.seq >= since)
        return wire.Replay(boot=self.boot, complete=since >= oldest, events=found)

    def close(self) -> None:
        """Close the socket; what is queued may take `endpoints.LINGER_MS`."""
        self.socket.close()
