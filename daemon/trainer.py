"""The trainer's side: pushing shards over the ingest socket. Needs no torch; takes its tensors if it has it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from . import wire
from .errors import FusewireError, ProtocolError, ShardRejected, printable
from .keys import ClientKeys
from .rpc import Closing, Requester
from .sending import Sender
from .shard import LENGTH_BYTES, ShardHeader, TensorEntry, header_length, parse_header

FIRST_PAUSE, LONGEST_PAUSE = 0.02, 1.0
"""Seconds between two tries when the daemon is busy: doubled from the first to the longest."""
WHOLE_CHUNKS = 2
"""A shard that is not larger than so many chunks goes in one message."""
_HEADER_ROOM = 1024 * 1024
"""Bytes that are left for a part's header when a shard is split."""
_HEADER_LIMIT = 100_000_000
_DIGEST_BYTES = 4 << 20
_NAME_CHARACTERS = 180
"""Of a file's name, which may hold what is no text at all; with the number of a part it still fits into a message."""
_CACHED_BYTES = 512 << 10
"""Block that memcpy does not take for one that had better go past the cache."""


class TensorTooLarge(FusewireError):
    """One tensor is larger than the daemon takes in one message."""


class _Source(Protocol):
    """A shard to be sent in chunks."""

    head: bytes
    nbytes: int

    def fill(self, position: int, target: memoryview) -> None:
        """Copy data into memory."""

    def cut(self, position: int, nbytes: int) -> memoryview | bytes:
        """Hand out data."""

    def digest(self) -> str:
        """Return the xxh3-128 of all data."""


class _InMemory:
    """A shard in memory."""

    def __init__(self, shard: memoryview, begin: int) -> None:
        self.head = bytes(shard[:begin])
        self._data = shard[begin:]
        self.nbytes = self._data.nbytes

    def fill(self, position: int, target: memoryview) -> None:
        """See `_Source`: in blocks that stay in the cache, from which the daemon then reads them."""
        for begin in range(0, len(target), _CACHED_BYTES):
            part = target[begin : begin + _CACHED_BYTES]
            part[:] = self._data[position + begin : position + begin + len(part)]

    def cut(self, position: int, nbytes: int) -> memoryview:
        """See `_Source`."""
        return self._data[position : position + nbytes]

    def digest(self) -> str:
        """See `_Source`."""
        import xxhash  # noqa: PLC0415 - only who wants digests needs it

        return xxhash.xxh3_128_hexdigest(self._data)


class _InFile:
    """A shard in a file. Raises OSError and ShardRejected as `read_header` does."""

    def __init__(self, descriptor: int, size: int) -> None:
        header = read_header(descriptor, size)
        self._descriptor = descriptor
        self._begin = header.data_offset
        self.head = os.pread(descriptor, header.data_offset, 0)
        self.nbytes = header.nbytes

    def fill(self, position: int, target: memoryview) -> None:
        """See `_Source`."""
        _read_all(self._descriptor, target, self._begin + position)

    def cut(self, position: int, nbytes: int) -> bytes:
        """See `_Source`."""
        data = os.pread(self._descriptor, nbytes, self._begin + position)
        if len(data) != nbytes:
            raise OSError("the file became shorter while it was read")
        return data

    def digest(self) -> str:
        """See `_Source`."""
        import xxhash  # noqa: PLC0415 - only who wants digests needs it

        made = xxhash.xxh3_128()
        for position in range(0, self.nbytes, _DIGEST_BYTES):
            made.update(self.cut(position, min(_DIGEST_BYTES, self.nbytes - position)))
        return made.hexdigest()


class Trainer(Closing):
    """Pushes shards to a daemon; every call returns when the daemon has answered.

    Args:
        endpoint: The daemon's ingest socket, such as ``ipc:///run/fusewire/ingest.sock``.
        timeout: Seconds that each push may take, waiting for a busy daemon included.
        run: The trainer's incarnation: a new one, of any name, restarts the numbering of versions.
        digest: Whether to send an xxh3-128 of each shard's data, for the daemon to check.
        shared_memory: Whether to hand large shards over in the daemon's shared memory, if it is on this host.
        curve: Keys, for a daemon that asks for them over TCP.

    A rejection is an answer (``status == "rejected"``), not an exception. DaemonUnreachable is raised when no
    answer came in time; what was sent may then have been applied or not, and may safely be sent again.
    """

    def __init__(
        self,
        endpoint: str,
        timeout: float = 60.0,
        *,
        run: str | None = None,
        digest: bool = False,
        shared_memory: bool = True,
        curve: ClientKeys | None = None,
    ) -> None:
        self._requester = Requester(endpoint, timeout, curve)
        self._run = run
        self._digest = digest
        self._shared = shared_memory
        self._welcome: wire.Welcome | None = None
        self._sender: Sender | None = None

    @property
    def welcome(self) -> wire.Welcome:
        """The daemon's limits; asked for once."""
        if self._welcome is None:
            welcome = self._requester.request([wire.encode(wire.Hello())], wire.decode_ingest_reply)
            if not isinstance(welcome, wire.Welcome):
                raise ProtocolError(f"the daemon did not say hello: {printable(welcome)}")
            self._welcome = welcome
        return self._welcome

    @property
    def max_put_bytes(self) -> int:
        """Largest shard that the daemon takes in one message, in bytes."""
        return self.welcome.max_put_bytes

    def push_bytes(
        self, shard: bytes | bytearray | memoryview, *, version: int | None = None, name: str | None = None
    ) -> wire.Answer:
        """Push a shard that lies in memory in safetensors' format: a small one in one message, else in chunks.

        Args:
            shard: The whole shard. It is sent from where it lies: leave it unchanged until this returns.
            version: The trainer's step.
            name: What to call it in events and logs.

        Raises:
            TensorTooLarge: It does not fit into one message, and the daemon takes no chunks.
            DaemonUnreachable: No answer came in time.
        """
        view = memoryview(shard).cast("B")
        if self._in_chunks(view.nbytes) and view.nbytes > LENGTH_BYTES:
            begin = LENGTH_BYTES + int.from_bytes(view[:LENGTH_BYTES], "little")
            if begin <= view.nbytes:
                return self._stream(_InMemory(view, begin), version, name)
        if view.nbytes > self.max_put_bytes:
            raise TensorTooLarge(
                f"a shard of {view.nbytes} bytes: the daemon takes {self.max_put_bytes} in one message "
                "(socket.max_put_bytes). Use push_file, which splits it, or put it into the drop folder"
            )
        digest = _data_digest(shard) if self._digest else None
        return self._ask([wire.encode(wire.Put(version=version, name=name, run=self._run, xxh3=digest)), shard])

    def _in_chunks(self, nbytes: int) -> bool:
        """Whether a shard of this size goes in chunks: a message is in memory as a whole, and large ones are slow."""
        return self.welcome.chunk_bytes > 0 and nbytes > WHOLE_CHUNKS * self.welcome.chunk_bytes

    def _stream(self, source: _Source, version: int | None, name: str | None) -> wire.Answer:
        if self._sender is None:
            requester = self._requester
            self._sender = Sender(requester.endpoint, self.welcome, shared=self._shared, curve=requester.curve)
        digest = source.digest() if self._digest else None
        begin = wire.Begin(stream="", nbytes=source.nbytes, version=version, name=name, run=self._run, xxh3=digest)
        sender = self._sender

        def once(left: float) -> wire.Answer:
            return sender.send(begin, source.head, source.fill, source.cut, left)

        return self._until_taken(once)

    def commit(self, version: int, tensors: Sequence[str] | None = None) -> wire.Answer:
        """Say that a version has been sent: what it did not bring is carried over from the live one.

        Args:
            version: The trainer's step.
            tensors: All that it consists of; None: whatever has been sent.

        Returns:
            ``accepted``, with what it still waits for in ``detail``, or ``rejected``. That it is live is an event.

        Raises:
            DaemonUnreachable: No answer came in time.
        """
        listed = None if tensors is None else list(tensors)
        return self._ask([wire.encode(wire.Commit(version=version, tensors=listed, run=self._run))])

    def abort(self, version: int) -> wire.Answer:
        """Give a version up; what is live is not touched. Raises DaemonUnreachable when no answer came in time."""
        return self._ask([wire.encode(wire.Abort(version=version, run=self._run))])

    def _ask(self, frames: Sequence[Any]) -> wire.Answer:
        """Send a request until the daemon is not too busy for it, within the timeout."""

        def once(left: float) -> wire.Answer:
            answer = self._requester.request(frames, wire.decode_ingest_reply, left)
            if not isinstance(answer, wire.Answer):
                raise ProtocolError(f"the daemon's answer was {printable(answer)}")
            return answer

        return self._until_taken(once)

    def _until_taken(self, once: Callable[[float], wire.Answer]) -> wire.Answer:
        deadline = time.monotonic() + self._requester.timeout
        pause = FIRST_PAUSE
        while True:
            answer = once(max(0.001, deadline - time.monotonic()))
            if answer.status != "busy" or time.monotonic() + pause > deadline:
                return answer
            time.sleep(pause)
            pause = min(LONGEST_PAUSE, 2 * pause)

    def push_file(
        self, path: str | os.PathLike[str], *, version: int | None = None, name: str | None = None
    ) -> list[wire.Answer]:
        """Push a shard file; a large one goes in chunks, or, if the daemon takes none, in parts, cut between tensors.

        Returns:
            The answer to each part, in order. After a rejection, or a daemon that stays busy, nothing more is sent.

        Raises:
            OSError: The file can't be read.
            ShardRejected: It is no safetensors file.
            TensorTooLarge: A single tensor does not fit into a message.
            DaemonUnreachable: No answer came in time.
        """
        path = Path(path)
        name = printable(name or path.name, _NAME_CHARACTERS)
        size = path.stat().st_size
        if self._in_chunks(size):
            with path.open("rb") as file:
                return [self._stream(_InFile(file.fileno(), size), version, name)]
        if size <= self.max_put_bytes:
            return [self.push_bytes(path.read_bytes(), version=version, name=name)]
        answers = []
        with path.open("rb") as file:
            header = read_header(file.fileno(), size)
            parts = split(header, self.max_put_bytes)
            for number, part in enumerate(parts, 1):
                shard = build_part(file.fileno(), header, part)
                answers.append(self.push_bytes(shard, version=version, name=f"{name} {number}/{len(parts)}"))
                if answers[-1].status in {"rejected", "busy"}:
                    break
        return answers

    def push_tensors(
        self, tensors: Mapping[str, Any], *, version: int | None = None, name: str | None = None
    ) -> wire.Answer:
        """Push torch tensors or numpy arrays by name, as one shard; see `push_bytes`."""
        return self.push_bytes(serialize(tensors), version=version, name=name)

    def close(self) -> None:
        """Close the connections."""
        self._requester.close()
        if self._sender is not None:
            self._sender.close()


def _data_digest(shard: bytes | bytearray | memoryview) -> str:
    """Return the xxh3-128 of a shard's data section."""
    import xxhash  # noqa: PLC0415 - only who wants digests needs it

    view = memoryview(shard).cast("B")
    begin = LENGTH_BYTES + int.from_bytes(view[:LENGTH_BYTES], "little")
    return xxhash.xxh3_128_hexdigest(view[begin:])


def serialize(tensors: Mapping[str, Any]) -> bytes:
    """Put torch tensors or numpy arrays (all of one kind) into safetensors' format."""
    if any(type(tensor).__module__.partition(".")[0] == "torch" for tensor in tensors.values()):
        from safetensors.torch import save  # noqa: PLC0415 - only a caller that has torch gets here

        return save({name: tensor.detach().contiguous() for name, tensor in tensors.items()})
    import numpy as np  # noqa: PLC0415 - the same
    from safetensors.numpy import save as save_arrays  # noqa: PLC0415 - the same

    return save_arrays({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()})


def read_header(descriptor: int, size: int) -> ShardHeader:
    """Read the header of an open shard file of ``size`` bytes."""
    length = header_length(os.pread(descriptor, LENGTH_BYTES, 0), size, _HEADER_LIMIT)
    return parse_header(os.pread(descriptor, length, LENGTH_BYTES), size)


def split(header: ShardHeader, max_put_bytes: int) -> list[list[TensorEntry]]:
    """Deal a shard's tensors out to messages, in order.

    Raises:
        TensorTooLarge: A single one does not fit.
    """
    room = max_put_bytes - min(_HEADER_ROOM, max_put_bytes // 2)
    parts: list[list[TensorEntry]] = []
    used = room + 1
    for entry in header.tensors:
        size = entry.stop - entry.start
        if size > room:
            raise TensorTooLarge(
                f"tensor {printable(entry.name, 100)} has {size} bytes: the daemon takes {max_put_bytes} in one "
                "message (socket.max_put_bytes). Put the file into the drop folder, or raise the setting"
            )
        if used + size > room or len(parts[-1]) >= _tensors_per_part(max_put_bytes):
            parts.append([])
            used = 0
        parts[-1].append(entry)
        used += size
    return parts


def build_part(descriptor: int, header: ShardHeader, part: Sequence[TensorEntry]) -> bytearray:
    """Build a shard of its own from neighbouring tensors of a file; its metadata stays."""
    table: dict[str, Any] = {"__metadata__": header.metadata} if header.metadata else {}
    end = 0
    for entry in part:
        size = entry.stop - entry.start
        table[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(table, separators=(",", ":")).encode()
    begin = LENGTH_BYTES + len(text)
    shard = bytearray(begin + end)
    shard[:begin] = len(text).to_bytes(LENGTH_BYTES, "little") + text
    _read_all(descriptor, memoryview(shard)[begin:], header.data_offset + part[0].start)
    return shard


def _tensors_per_part(max_put_bytes: int) -> int:
    """Names and shapes need room, too: 256 bytes each is more than any checkpoint of this family has."""
    return max(1, min(_HEADER_ROOM, max_put_bytes // 2) // 512)


def _read_all(descriptor: int, view: memoryview, position: int) -> None:
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], position + done)
        if not count:
            raise OSError("the file became shorter while it was read")
        done += count


__all__ = ["ShardRejected", "TensorTooLarge", "Trainer", "build_part", "read_header", "serialize", "split"]
