"""Shards that come in chunks: whose they are, how far each has come, who may send how much. The reactor's thread only.

A client may have as many bytes on their way as its window has, whatever the others do: a slow one holds up nobody.
Chunks come in order. With shared memory, credit is a slot of the segment, which belongs to one stream until its bytes
have been copied; slots are dealt out evenly, so that several clients share them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from fusewire.daemon import wire
from fusewire.daemon.errors import ProtocolError, printable
from fusewire.daemon.router import Envelope
from fusewire.daemon.segment import Segment


@dataclass(slots=True)
class _Stream:
    key: str
    envelope: Envelope
    name: str
    """What the client calls it."""
    nbytes: int
    shared: bool
    credit: int = 0
    """Chunks that may still come as frames."""
    slots: set[int] = field(default_factory=set)
    """Slots that it may write."""
    owed: int = 0
    """Chunks that it may send besides, and has not been told of: a message for each would cost more than it brings."""
    position: int = 0
    """How far it has come, in bytes."""
    granted: int = 0
    """How far the chunks that it may send reach, at most, in bytes."""
    open: bool = False
    """Whether the daemon wants its bytes now."""


class Streams:
    """All shards that come in chunks.

    Args:
        chunk_bytes: Largest chunk.
        window_bytes: Bytes that one stream may have on their way.
        segment: The shared one, if there is one.
    """

    def __init__(self, chunk_bytes: int, window_bytes: int, segment: Segment | None) -> None:
        self._chunk_bytes = chunk_bytes
        self._window = max(1, window_bytes // chunk_bytes)
        self._batch = max(1, self._window // 4)
        self._segment = segment
        self._free = list(range(segment.slots)) if segment is not None else []
        self._streams: dict[str, _Stream] = {}
        self._by_client: dict[tuple[Envelope, str], str] = {}

    def begin(self, key: str, envelope: Envelope, begin: wire.Begin) -> None:
        """A client has announced a shard.

        Raises:
            ProtocolError: It is sending one of that name already, or wants shared memory that there is none of.
        """
        if (envelope, begin.stream) in self._by_client:
            raise ProtocolError(f"stream {printable(begin.stream, 40)} has begun already")
        if begin.shared and self._segment is None:
            raise ProtocolError("there is no shared memory here (socket.shared_memory): send chunks as frames")
        self._streams[key] = _Stream(key, envelope, begin.stream, begin.nbytes, begin.shared)
        self._by_client[envelope, begin.stream] = key

    def key_of(self, envelope: Envelope, name: str) -> str | None:
        """Return a client's stream; None if it has ended."""
        return self._by_client.get((envelope, name))

    def name_of(self, key: str) -> str | None:
        """Return what the client calls a stream."""
        stream = self._streams.get(key)
        return None if stream is None else stream.name

    def open(self, key: str) -> Iterator[tuple[Envelope, wire.Credit]]:
        """The daemon wants a shard's bytes now. Yields the credit to be sent."""
        stream = self._streams.get(key)
        if stream is None:
            return
        stream.open = True
        if stream.shared:
            yield from self._deal()
        elif stream.nbytes:
            stream.credit = min(self._window, -(-stream.nbytes // self._chunk_bytes))
            stream.granted = stream.credit * self._chunk_bytes
            yield stream.envelope, wire.Credit(stream=stream.name, chunks=stream.credit)

    def chunk(self, key: str, chunk: wire.Chunk, frame_bytes: int | None) -> int:
        """Take note of a chunk that has come; return its size in bytes.

        Args:
            key: Of the stream.
            chunk: Its header.
            frame_bytes: Size of the frame; None without one.

        Raises:
            ProtocolError: It does not continue the stream, was sent without credit, or is too large.
        """
        stream = self._streams[key]
        nbytes = chunk.nbytes if frame_bytes is None else frame_bytes
        if chunk.offset != stream.position or stream.position + nbytes > stream.nbytes or not nbytes:
            what = f"{nbytes} bytes at {chunk.offset} of {stream.nbytes}"
            raise ProtocolError(f"a chunk of {what}: the next byte of the stream is {stream.position}")
        if nbytes > self._chunk_bytes:
            raise ProtocolError(f"a chunk of {nbytes} bytes: the most is {self._chunk_bytes} (socket.chunk_bytes)")
        if frame_bytes is None:
            if chunk.slot is None or chunk.slot not in stream.slots:
                raise ProtocolError(f"slot {chunk.slot} of the shared memory is not this stream's")
            stream.slots.discard(chunk.slot)
        else:
            if stream.credit < 1:
                raise ProtocolError("a chunk without credit: wait for it")
            stream.credit -= 1
        stream.position += nbytes
        return nbytes

    def consumed(self, key: str, slot: int | None) -> Iterator[tuple[Envelope, wire.Credit]]:
        """A chunk has been copied. Yields the credit to be sent for the next ones."""
        stream = self._streams.get(key)
        if slot is not None:
            self._free.append(slot)
            if stream is None or not stream.slots or len(self._free) >= self._batch:
                yield from self._deal()
            return
        if stream is None or stream.granted >= stream.nbytes:
            return
        stream.owed += 1
        left = -(-(stream.nbytes - stream.granted) // self._chunk_bytes)
        if stream.owed >= min(self._batch, left) or not stream.credit:
            count = min(stream.owed, left)
            stream.owed = 0
            stream.credit += count
            stream.granted += count * self._chunk_bytes
            yield stream.envelope, wire.Credit(stream=stream.name, chunks=count)

    def end(self, key: str) -> Iterator[tuple[Envelope, wire.Credit]]:
        """A shard is done, or given up. Its slots go to others; those that are still being read come by `consumed`."""
        stream = self._streams.pop(key, None)
        if stream is None:
            return
        del self._by_client[stream.envelope, stream.name]
        self._free += stream.slots
        yield from self._deal()

    def _deal(self) -> Iterator[tuple[Envelope, wire.Credit]]:
        """Deal free slots out to the streams that want any, those with the fewest first."""
        assert self._segment is not None or not self._free
        dealt: dict[str, list[int]] = {}
        while self._free:
            wanting = [s for s in self._streams.values() if s.open and s.shared and self._wants(s)]
            if not wanting:
                break
            stream = min(wanting, key=lambda s: len(s.slots))
            share = max(1, (self._segment.slots if self._segment else 1) // len(self._sharing()))
            if len(stream.slots) >= share:
                break
            slot = self._free.pop()
            stream.slots.add(slot)
            dealt.setdefault(stream.key, []).append(slot)
        for key, slots in dealt.items():
            stream = self._streams[key]
            yield stream.envelope, wire.Credit(stream=stream.name, slots=tuple(slots))

    def _sharing(self) -> list[_Stream]:
        return [stream for stream in self._streams.values() if stream.open and stream.shared]

    def _wants(self, stream: _Stream) -> bool:
        return stream.position + len(stream.slots) * self._chunk_bytes < stream.nbytes
