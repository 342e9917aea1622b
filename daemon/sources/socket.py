"""The ingest socket: trainers push shards as messages. The reactor's thread only.

It checks the message around a shard and remembers whom to answer; the shard itself is the loader's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import zmq

from fusewire.daemon import endpoints, wire
from fusewire.daemon.curve import Door
from fusewire.daemon.errors import ProtocolError, Reason, printable
from fusewire.daemon.router import Envelope, Request, Router
from fusewire.daemon.segment import PREFIX, Segment, folder_for
from fusewire.daemon.settings import Socket

from .streams import Streams

Bytes = npt.NDArray[np.uint8]

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
    client: str
    """Whoever sent it: a key, or where keys don't decide, a connection."""
    nbytes: int | None = None
    """If the shard comes in chunks: the size of its data section, and ``payload`` is its head."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The next bytes of a shard that comes in chunks."""

    key: str
    data: Bytes
    slot: int | None
    """Of the shared segment, if that is where they lie."""
    frame: zmq.Frame | None
    """Keeps the memory of ``data``, if they came as a message."""


@dataclass(frozen=True, slots=True)
class Broken:
    """The rest of a shard that comes in chunks will not come."""

    key: str
    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class Order:
    """A client wants something done with a version."""

    key: str
    request: wire.Commit | wire.Abort


Came: TypeAlias = Offer | Order | Piece | Broken


class SocketSource:
    """Takes ``put`` requests from the ingest socket and answers each exactly once."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        settings: Socket,
        *,
        boot: str,
        mode: int,
        door: Door | None = None,
    ) -> None:
        self._segment: Segment | None = None
        self._router = Router(
            context,
            settings.endpoint,
            mode=mode,
            setting="socket.endpoint",
            max_frame=max(settings.max_put_bytes, wire.HEADER_LIMIT),
            high_water=HIGH_WATER,
            door=door,
        )
        self._clients: dict[str, Envelope] = {}
        self._count = 0
        self.malformed = 0
        self.socket = self._router.socket
        self.endpoint = self._router.endpoint
        if settings.shared_memory:
            self._segment = Segment(
                folder_for(settings.shared_path, endpoints.ipc_path(self.endpoint)),
                f"{PREFIX}{boot}",
                slot_bytes=settings.chunk_bytes,
                slots=max(2, settings.window_bytes // settings.chunk_bytes),
                mode=mode,
            )
        self._welcome = wire.Welcome(
            boot=boot,
            max_put_bytes=settings.max_put_bytes,
            chunk_bytes=settings.chunk_bytes,
            shared=str(self._segment.path) if self._segment is not None else "",
        )
        self._streams = Streams(settings.chunk_bytes, settings.window_bytes, self._segment)

    def offers(self) -> Iterator[Came]:
        """Yield what has come in of shards and orders; greet, and refuse what is malformed, on the way."""
        for request in self._router.requests():
            try:
                came = self._read(request)
            except ProtocolError as error:
                self.malformed += 1
                refusal = wire.Answer(
                    status="rejected",
                    reason=Reason.MALFORMED_MESSAGE.value,
                    detail=printable(error),
                )
                self._router.reply(request.envelope, refusal)
                continue
            if isinstance(came, Offer | Order):
                self._clients[came.key] = request.envelope
            if came is not None:
                yield came

    def want(self, key: str) -> None:
        """The bytes of a shard that comes in chunks are wanted now: tell its client."""
        self._send(self._streams.open(key))

    def consumed(self, key: str, slot: int | None) -> None:
        """A chunk has been copied: its client may send another."""
        self._send(self._streams.consumed(key, slot))

    def answer(self, key: str, answer: wire.Answer) -> None:
        """Answer the client that sent the shard ``key``, if it came from a client and has no answer yet."""
        envelope = self._clients.pop(key, None)
        if envelope is not None:
            name = self._streams.name_of(key)
            self._router.reply(envelope, answer if name is None else msgspec.structs.replace(answer, stream=name))
            self._send(self._streams.end(key))

    def close(self) -> None:
        """Close the socket, and remove the shared segment."""
        self._router.close()
        if self._segment is not None:
            self._segment.close()

    def _send(self, credits: Iterable[tuple[Envelope, wire.Credit]]) -> None:  # noqa: A002 - what they are
        for envelope, credit in credits:
            self._router.reply(envelope, credit)

    def _read_chunk(self, request: Request, chunk: wire.Chunk) -> Piece | Broken | None:
        """Read a chunk. What comes after its shard was given up is passed over: the client has been told."""
        key = self._streams.key_of(request.envelope, chunk.stream)
        if key is None:
            return None
        frame = request.body[1] if len(request.body) == 2 else None  # noqa: PLR2004 - header and bytes
        if len(request.body) > 2 or (frame is None) is (chunk.slot is None):  # noqa: PLR2004
            return Broken(key, Reason.MALFORMED_MESSAGE, "a chunk is a header and either a frame or a slot")
        try:
            nbytes = self._streams.chunk(key, chunk, None if frame is None else len(frame.buffer))
        except ProtocolError as error:
            return Broken(key, Reason.MALFORMED_MESSAGE, str(error))
        if frame is not None:
            return Piece(key, np.frombuffer(frame.buffer, dtype=np.uint8), None, frame)
        assert self._segment is not None
        assert chunk.slot is not None
        return Piece(key, self._segment.slot(chunk.slot, nbytes), chunk.slot, None)

    def _read(self, request: Request) -> Came | None:
        if not request.body:
            raise ProtocolError("empty request: send a JSON header, and for put the shard in a second frame")
        header = wire.decode_ingest_request(request.body[0].bytes)
        frames = len(request.body)
        if isinstance(header, wire.Hello):
            if frames != 1:
                raise ProtocolError(f"hello is one frame, not {frames}")
            self._router.reply(request.envelope, self._welcome)
            return None
        if isinstance(header, wire.Chunk):
            return self._read_chunk(request, header)
        if isinstance(header, wire.Cancel):
            key = self._streams.key_of(request.envelope, header.stream)
            return None if key is None else Broken(key, Reason.CLIENT_SILENT, "its client has given it up")
        if isinstance(header, wire.Commit | wire.Abort):
            if frames != 1:
                raise ProtocolError(f"commit and abort are one frame, not {frames}")
            self._count += 1
            return Order(f"socket:{self._count}", header)
        if frames != 2:  # noqa: PLR2004 - header and payload
            raise ProtocolError(f"put and begin are two frames, header and shard, or its head, not {frames}")
        self._count += 1
        if isinstance(header, wire.Begin):
            self._streams.begin(f"socket:{self._count}", request.envelope, header)
        return Offer(
            key=f"socket:{self._count}",
            nbytes=header.nbytes if isinstance(header, wire.Begin) else None,
            name=printable(header.name or f"put-{self._count}"),
            version=header.version,
            payload=request.body[1],
            run=header.run,
            xxh3=header.xxh3,
            client=request.key or request.envelope[0].hex(),
        )
