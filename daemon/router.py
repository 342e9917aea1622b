"""One ROUTER socket: requests in, exactly one reply each. Owns the envelope; the reactor's thread only.

Frames from a REQ client: ``identity | empty | body…``; a DEALER may leave the empty frame out, and then gets
its reply without one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import msgspec
import zmq

from . import endpoints, wire
from .curve import Door

BATCH = 64
"""Requests read in one go, so that a busy client can't keep the reactor from its other sockets."""

Envelope: TypeAlias = tuple[bytes, ...]


class Request(NamedTuple):
    """One message: where its reply goes, and its body."""

    envelope: Envelope
    body: Sequence[zmq.Frame]
    key: str = ""
    """The client's public key in Z85; empty where keys don't decide."""


class Router:
    """A bound ROUTER socket that hands out requests and sends replies without ever blocking.

    Args:
        context: The process's zmq context.
        endpoint: Where to bind.
        mode: Permission bits of an ipc socket.
        setting: Name of the setting that ``endpoint`` comes from, for messages.
        max_frame: Longest frame in bytes; libzmq drops the connection of a client that sends a longer one.
        high_water: Messages that libzmq may queue for each client.
        door: Which keys are accepted over TCP; None: no CURVE.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        *,
        mode: int,
        setting: str,
        max_frame: int,
        high_water: int,
        door: Door | None = None,
    ) -> None:
        self.socket = endpoints.create(context, zmq.ROUTER)
        self.socket.maxmsgsize = max_frame
        self.socket.rcvhwm = high_water
        # A reply to a client that has gone is an error to count, not a message to lose unseen.
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.endpoint = endpoints.bind(self.socket, endpoint, mode=mode, setting=setting, door=door)
        self._door = door if door is not None and door.secured else None
        self.unreachable = 0
        """Replies that could not be delivered, since their client had gone or did not read."""

    def requests(self) -> Iterator[Request]:
        """Yield what has come in, at most BATCH of it, without waiting.

        A client whose key has been revoked since it connected hears nothing more, as if it had tried to connect now.
        """
        for _ in range(BATCH):
            try:
                frames = self.socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            begin = 2 if len(frames) > 1 and not len(frames[1].buffer) else 1
            key = ""
            if self._door is not None:
                key = str(frames[-1].get("User-Id"))
                if not self._door.admits(key):
                    self._door.refuse(key)
                    continue
            yield Request(tuple(frame.bytes for frame in frames[:begin]), frames[begin:], key)

    def reply(self, envelope: Envelope, message: msgspec.Struct) -> None:
        """Send a reply; one that can't be delivered at once is counted and dropped."""
        try:
            self.socket.send_multipart([*envelope, wire.encode(message)], zmq.DONTWAIT)
        except zmq.ZMQError:
            self.unreachable += 1

    def close(self) -> None:
        """Close the socket; what is queued may take `endpoints.LINGER_MS`."""
        self.socket.close()
