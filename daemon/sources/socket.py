"""The ingest socket: trainers push shards as messages. The reactor's thread only.

It checks the message around a shard and remembers whom to answer; the shard itself is the loader's business.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import zmq

from fusewire.daemon import wire
from fusewire.daemon.errors import ProtocolError, Reason, printable
from fusewire.daemon.router import Envelope, Request, Router
from fusewire.daemon.settings import Socket

HIGH_WATER = 4
"""Messages queued per client: they may be large, and zmq counts messages, not bytes."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A shard that a client sent."""

    key: str
    name: str
    version: int | None
    payload: zmq.Frame
    """The whole shard; its memory is the message's own, nothing was copied."""
    run: str | None
    xxh3: str | None


@dataclass(frozen=True, slots=True)
class Order:
    """A client wants something done with a version."""

    key: str
    request: wire.Commit | wire.Abort


class SocketSource:
    """Takes ``put`` requests from the ingest socket and answers each exactly once."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], settings: Socket, *, boot: str, mode: int) -> None:
        self._welcome = wire.Welcome(boot=boot, max_put_bytes=settings.max_put_bytes)
        self._router = Router(
            context,
            settings.endpoint,
            mode=mode,
            setting="socket.endpoint",
            max_frame=max(settings.max_put_bytes, wire.HEADER_LIMIT),
            high_water=HIGH_WATER,
        )
        self._clients: dict[str, Envelope] = {}
        self._count = 0
        self.malformed = 0
        self.socket = self._router.socket
        self.endpoint = self._router.endpoint

    def offers(self) -> Iterator[Offer | Order]:
        """Yield the shards and orders that have come in; greet, and refuse what is malformed, on the way."""
        for request in self._router.requests():
            try:
                offer = self._read(request)
            except ProtocolError as error:
                self.malformed += 1
                refusal = wire.Answer(
                    status="rejected",
                    reason=Reason.MALFORMED_MESSAGE.value,
                    detail=printable(error),
                )
                self._router.reply(request.envelope, refusal)
                continue
            if offer is None:
                self._router.reply(request.envelope, self._welcome)
            else:
                self._clients[offer.key] = request.envelope
                yield offer

    def answer(self, key: str, answer: wire.Answer) -> None:
        """Answer the client that sent the shard ``key``, if it came from a client and has no answer yet."""
        envelope = self._clients.pop(key, None)
        if envelope is not None:
            self._router.reply(envelope, answer)

    def close(self) -> None:
        """Close the socket."""
        self._router.close()

    def _read(self, request: Request) -> Offer | Order | None:
        if not request.body:
            raise ProtocolError("empty request: send a JSON header, and for put the shard in a second frame")
        header = wire.decode_ingest_request(request.body[0].bytes)
        frames = len(request.body)
        if isinstance(header, wire.Hello):
            if frames != 1:
                raise ProtocolError(f"hello is one frame, not {frames}")
            return None
        if isinstance(header, wire.Commit | wire.Abort):
            if frames != 1:
                raise ProtocolError(f"commit and abort are one frame, not {frames}")
            self._count += 1
            return Order(f"socket:{self._count}", header)
        if frames != 2:  # noqa: PLR2004 - header and payload
            raise ProtocolError(f"put is two frames, header and shard, not {frames}")
        self._count += 1
        return Offer(
            key=f"socket:{self._count}",
            name=printable(header.name or f"put-{self._count}"),
            version=header.version,
            payload=request.body[1],
            run=header.run,
            xxh3=header.xxh3,
        )
