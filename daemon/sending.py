"""Sending a shard in chunks, as the daemon grants credit: in shared memory on the same host, else as messages.

Needs zmq and msgspec, no torch.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import suppress

import zmq

from . import wire
from .errors import DaemonUnreachable, ProtocolError, printable
from .keys import ClientKeys, hint
from .rpc import HEARTBEAT_MS, Closing
from .segment import Attached

Fill = Callable[[int, memoryview], None]
"""(position in the data section, memory to be filled)."""
Slice = Callable[[int, int], memoryview | bytes]
"""(position in the data section, size) -> these bytes, which stay as they are until the shard has been answered."""


class Sender(Closing):
    """Sends shards in chunks. Not thread-safe, like every zmq socket.

    Args:
        endpoint: The daemon's ingest socket.
        welcome: Its greeting.
        shared: Whether to use its shared memory if that can be mapped.
        curve: Keys, for a daemon that asks for them over TCP.
    """

    def __init__(
        self, endpoint: str, welcome: wire.Welcome, *, shared: bool = True, curve: ClientKeys | None = None
    ) -> None:
        self._endpoint = endpoint
        self._curve = curve
        self._chunk_bytes = welcome.chunk_bytes
        self._segment: Attached | None = None
        if shared and welcome.shared:
            with suppress(OSError):  # another host, or not allowed: messages do as well
                self._segment = Attached(welcome.shared, welcome.chunk_bytes)
        self._names = itertools.count()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        if curve is not None:
            curve.secure(self._socket)
        self._socket.connect(endpoint)

    @property
    def shares_memory(self) -> bool:
        """Whether chunks go through shared memory."""
        return self._segment is not None

    def send(self, begin: wire.Begin, head: bytes, fill: Fill, cut: Slice, timeout: float) -> wire.Answer:
        """Send one shard; return the daemon's answer to it.

        Args:
            begin: Its header; ``stream`` and ``shared`` are filled in here.
            head: 8 bytes of length, and the JSON.
            fill: Copies data of the shard into shared memory.
            cut: Hands out data of the shard, for messages.
            timeout: Seconds for all of it.

        Raises:
            DaemonUnreachable: No answer came in time.
            ProtocolError: What came makes no sense.
        """
        name = f"s{next(self._names)}"
        deadline = time.monotonic() + timeout
        header = wire.Begin(
            stream=name,
            nbytes=begin.nbytes,
            version=begin.version,
            name=begin.name,
            run=begin.run,
            xxh3=begin.xxh3,
            shared=self.shares_memory,
        )
        self._socket.send_multipart([b"", wire.encode(header), head])
        position = 0
        try:
            while True:
                reply = self._receive(deadline, timeout)
                if reply.stream != name:
                    continue  # what is left of a shard that was given up
                if isinstance(reply, wire.Answer):
                    return reply
                for slot in reply.slots:
                    position = self._send_slot(name, slot, position, begin.nbytes, fill)
                for _ in range(reply.chunks):
                    position = self._send_frame(name, position, begin.nbytes, cut)
        except BaseException:
            self._socket.send_multipart([b"", wire.encode(wire.Cancel(stream=name))], zmq.DONTWAIT)
            raise

    def close(self) -> None:
        """Close the connection and unmap the segment."""
        self._context.destroy(linger=0)
        if self._segment is not None:
            self._segment.close()

    def _send_slot(self, name: str, slot: int, position: int, size: int, fill: Fill) -> int:
        assert self._segment is not None
        nbytes = min(self._chunk_bytes, size - position)
        if nbytes:
            fill(position, self._segment.slot(slot, nbytes))
            self._socket.send_multipart(
                [b"", wire.encode(wire.Chunk(stream=name, offset=position, slot=slot, nbytes=nbytes))]
            )
        return position + nbytes

    def _send_frame(self, name: str, position: int, size: int, cut: Slice) -> int:
        nbytes = min(self._chunk_bytes, size - position)
        if nbytes:
            header = wire.encode(wire.Chunk(stream=name, offset=position))
            self._socket.send_multipart([b"", header, cut(position, nbytes)], copy=False)
        return position + nbytes

    def _receive(self, deadline: float, timeout: float) -> wire.Answer | wire.Credit:
        left = deadline - time.monotonic()
        if left <= 0 or not self._socket.poll(round(left * 1000)):
            raise DaemonUnreachable(
                f"the daemon at {self._endpoint} did not take the shard within {timeout:g} s"
                f"{hint(self._endpoint, self._curve)}"
            )
        frames = self._socket.recv_multipart()
        reply = wire.decode_ingest_reply(frames[-1])
        if isinstance(reply, wire.Welcome):
            raise ProtocolError(f"the daemon greeted where an answer was expected: {printable(reply)}")
        if isinstance(reply, wire.Answer) and reply.stream is None:  # of a message that it could make nothing of
            raise ProtocolError(f"the daemon refused the message: {printable(reply.detail)}")
        return reply
