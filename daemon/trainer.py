"""The trainer's side: pushing shards over the ingest socket. Needs no torch; takes its tensors if it has it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import wire
from .errors import FusewireError, ProtocolError, ShardRejected, printable
from .rpc import Closing, Requester
from .shard import LENGTH_BYTES, ShardHeader, TensorEntry, header_length, parse_header

FIRST_PAUSE, LONGEST_PAUSE = 0.02, 1.0
"""Seconds between two tries when the daemon is busy: doubled from the first to the longest."""
_HEADER_ROOM = 1024 * 1024
"""Bytes that are left for a part's header when a shard is split."""
_HEADER_LIMIT = 100_000_000


class TensorTooLarge(FusewireError):
    """One tensor is larger than the daemon takes in one message."""


class Trainer(Closing):
    """Pushes shards to a daemon; every call returns when the daemon has answered.

    Args:
        endpoint: The daemon's ingest socket, such as ``ipc:///run/fusewire/ingest.sock``.
        timeout: Seconds that each push may take, waiting for a busy daemon included.
        run: The trainer's incarnation: a new one, of any name, restarts the numbering of versions.
        digest: Whether to send an xxh3-128 of each shard's data, for the daemon to check.

    A rejection is an answer (``status == "rejected"``), not an exception. DaemonUnreachable is raised when no
    answer came in time; what was sent may then have been applied or not, and may safely be sent again.
    """

    def __init__(self, endpoint: str, timeout: float = 60.0, *, run: str | None = None, digest: bool = False) -> None:
        self._requester = Requester(endpoint, timeout)
        self._run = run
        self._digest = digest
        self._max_put_bytes = 0

    @property
    def max_put_bytes(self) -> int:
        """Largest shard that the daemon takes in one message, in bytes; asked for once."""
        if not self._max_put_bytes:
            welcome = self._requester.request([wire.encode(wire.Hello())], wire.decode_ingest_reply)
            if not isinstance(welcome, wire.Welcome):
                raise ProtocolError(f"the daemon did not say hello: {printable(welcome)}")
            self._max_put_bytes = welcome.max_put_bytes
        return self._max_put_bytes

    def push_bytes(
        self, shard: bytes | bytearray | memoryview, *, version: int | None = None, name: str | None = None
    ) -> wire.Answer:
        """Push a shard that lies in memory in safetensors' format, in one message.

        Args:
            shard: The whole shard. It is sent from where it lies: leave it unchanged until this returns.
            version: The trainer's step.
            name: What to call it in events and logs.

        Raises:
            TensorTooLarge: It does not fit into one message.
            DaemonUnreachable: No answer came in time.
        """
        size = memoryview(shard).nbytes
        if size > self.max_put_bytes:
            raise TensorTooLarge(
                f"a shard of {size} bytes: the daemon takes {self.max_put_bytes} in one message "
                "(socket.max_put_bytes). Use push_file, which splits it, or put it into the drop folder"
            )
        digest = _data_digest(shard) if self._digest else None
        return self._ask([wire.encode(wire.Put(version=version, name=name, run=self._run, xxh3=digest)), shard])

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
        deadline = time.monotonic() + self._requester.timeout
        pause = FIRST_PAUSE
        while True:
            left = max(0.001, deadline - time.monotonic())
            answer = self._requester.request(frames, wire.decode_ingest_reply, left)
            if not isinstance(answer, wire.Answer):
                raise ProtocolError(f"the daemon's answer was {printable(answer)}")
            if answer.status != "busy" or time.monotonic() + pause > deadline:
                return answer
            time.sleep(pause)
            pause = min(LONGEST_PAUSE, 2 * pause)

    def push_file(
        self, path: str | os.PathLike[str], *, version: int | None = None, name: str | None = None
    ) -> list[wire.Answer]:
        """Push a shard file; one that is too large for a message goes in several, cut between tensors.

        Returns:
            The answer to each message, in order. After a rejection, or a daemon that stays busy, nothing more is sent.

        Raises:
            OSError: The file can't be read.
            ShardRejected: It is no safetensors file.
            TensorTooLarge: A single tensor does not fit into a message.
            DaemonUnreachable: No answer came in time.
        """
        path = Path(path)
        name = name or path.name
        size = path.stat().st_size
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
        """Close the connection."""
        self._requester.close()


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
