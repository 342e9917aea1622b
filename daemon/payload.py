"""A shard that is open for reading: its checked header, and its bytes on request, from several threads at once.

A file is mapped only under a read lease (see `lease`): an unleased mapping of a file that somebody truncates kills
the process. Without a lease its bytes are read with preadv, and what was read is worth something only after
`verify` has found the file unchanged. A message lies in memory already.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import time
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from . import lease
from .errors import Reason, ShardNotReady, ShardRejected
from .shard import LENGTH_BYTES, ShardHeader, header_length, parse_header

Bytes: TypeAlias = npt.NDArray[np.uint8]

FIRST_READ = 64 * 1024
"""Bytes read at first: the header of most shards is not longer."""
COPY_BYTES = 8 << 20
"""Block in which a whole payload is copied: a mapping must not be read for long without a look at its lease."""
CHECK_INTERVAL = 0.001
"""Seconds for which a lease that was found unbroken is not asked for again: nothing against a break's seconds."""
_BREAK_TIME = Path("/proc/sys/fs/lease-break-time")
_SHORTEST_BREAK_TIME = 5.0
"""Seconds. With less warning than this before a lease is taken away, files are not mapped."""


class Identity(NamedTuple):
    """What tells one state of a file from another."""

    dev: int
    ino: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Identity:
        """Take it from a stat."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    @property
    def content(self) -> tuple[int, int, int, int]:
        """The part that changes only when the bytes may have: a chmod or a hard link changes ctime alone."""
        return self[:4]


class Payload(Protocol):
    """What the loader needs of a shard."""

    header: ShardHeader

    @property
    def identity(self) -> Identity | None:
        """The state in which its file was opened; None: it is no file."""

    @property
    def proven(self) -> bool:
        """Whether its bytes can't change, from now on and for as long as copying them may take."""

    def read_into(self, offset: int, target: Bytes) -> None:
        """Fill ``target`` with the bytes from ``offset`` of the data on. For any thread; the GIL is released.

        Raises:
            ShardRejected: The bytes can't be had any more.
        """

    def verify(self) -> None:
        """Prove what has been read.

        Raises:
            ShardRejected: CHANGED_WHILE_READING.
        """

    def close(self) -> None:
        """Give everything back. May be called twice."""


class BytesPayload:
    """A shard in memory."""

    identity = None
    proven = True

    def __init__(self, header: ShardHeader, data: Bytes) -> None:
        self.header = header
        self._data: Bytes | None = data

    @classmethod
    def parse(cls, buffer: memoryview | bytes, *, header_limit: int) -> BytesPayload:
        """Check a whole shard in memory; nothing is copied.

        Raises:
            ShardRejected: It breaks the format.
        """
        whole: Bytes = np.frombuffer(buffer, dtype=np.uint8)
        length = header_length(whole[:LENGTH_BYTES].tobytes(), whole.size, header_limit)
        header = parse_header(whole[LENGTH_BYTES : LENGTH_BYTES + length].tobytes(), whole.size)
        return cls(header, whole[header.data_offset :])

    @classmethod
    def copy_of(cls, other: Payload) -> BytesPayload:
        """Read all of another payload and prove it.

        Raises:
            ShardRejected: It changed while it was read.
        """
        data: Bytes = np.empty(other.header.nbytes, dtype=np.uint8)
        for start in range(0, data.size, COPY_BYTES):
            other.read_into(start, data[start : start + COPY_BYTES])
        other.verify()
        return cls(other.header, data)

    def read_into(self, offset: int, target: Bytes) -> None:
        """See `Payload`."""
        assert self._data is not None
        np.copyto(target, self._data[offset : offset + target.size])

    def verify(self) -> None:
        """See `Payload`: nobody else has these bytes."""

    def close(self) -> None:
        """See `Payload`."""
        self._data = None


class HeadPayload:
    """A shard of which only the head has come: its bytes will be fed, and can't be asked for."""

    identity = None
    proven = False

    def __init__(self, header: ShardHeader) -> None:
        self.header = header

    @classmethod
    def parse(cls, head: memoryview | bytes, nbytes: int, *, header_limit: int) -> HeadPayload:
        """Check the head of a shard.

        Args:
            head: 8 bytes of length, and the JSON.
            nbytes: Size of the data that will follow.
            header_limit: Longest JSON that is read, in bytes.

        Raises:
            ShardRejected: It breaks the format.
        """
        size = len(head) + nbytes
        length = header_length(bytes(head[:LENGTH_BYTES]), size, header_limit)
        if len(head) != LENGTH_BYTES + length:
            detail = f"its head has {len(head)} bytes, and says that it has {LENGTH_BYTES + length}"
            raise ShardRejected(Reason.MALFORMED_HEADER, detail)
        return cls(parse_header(bytes(head[LENGTH_BYTES:]), size))

    def read_into(self, offset: int, target: Bytes) -> None:
        """See `Payload`: never."""
        raise AssertionError(f"{target.size} bytes at {offset} of a shard that is still coming")

    def verify(self) -> None:
        """See `Payload`."""

    def close(self) -> None:
        """See `Payload`."""


class MappedPayload:
    """A file under a read lease: nobody can change it before we give the lease up or the kernel's patience ends.

    A page of the mapping that a truncate took away would kill the process (SIGBUS). So the lease is asked for before
    each read, and a single read has to be short against ``patience``: callers read in blocks.
    """

    def __init__(self, descriptor: int, identity: Identity, header: ShardHeader, patience: float) -> None:
        self.header = header
        self.identity = identity
        self._descriptor = descriptor
        self._patience = patience
        self._held_at = time.monotonic()
        self._map = mmap.mmap(descriptor, identity.size, prot=mmap.PROT_READ)
        self._data: Bytes | None = np.frombuffer(self._map, dtype=np.uint8)[header.data_offset :]

    @property
    def proven(self) -> bool:
        """See `Payload`: with a writer at the door the time that is left may be too short, so it is no longer."""
        return lease.holds(self._descriptor)

    def read_into(self, offset: int, target: Bytes) -> None:
        """See `Payload`."""
        self._check()
        assert self._data is not None
        np.copyto(target, self._data[offset : offset + target.size])

    def verify(self) -> None:
        """See `Payload`."""
        self._check()

    def close(self) -> None:
        """See `Payload`."""
        if self._data is not None:
            self._data = None
            lease.give_up(self._descriptor)
            try:
                self._map.close()
            finally:
                os.close(self._descriptor)

    def _check(self) -> None:
        """Go on while the bytes are safe: a writer that has come waits for us, though not for ever.

        The break began after the lease was last found unbroken, and the kernel waits for twice ``patience``.
        """
        now = time.monotonic()
        if now - self._held_at < CHECK_INTERVAL:
            return
        if lease.holds(self._descriptor):
            self._held_at = now
        elif now - self._held_at > self._patience:
            raise ShardRejected(
                Reason.CHANGED_WHILE_READING,
                "a writer opened the file and could not be kept waiting any longer",
            )


class ReadPayload:
    """A file without a lease."""

    proven = False

    def __init__(self, descriptor: int, identity: Identity, header: ShardHeader) -> None:
        self.header = header
        self.identity = identity
        self._descriptor: int | None = descriptor

    def read_into(self, offset: int, target: Bytes) -> None:
        """See `Payload`."""
        assert self._descriptor is not None
        view, position, done = target.data, self.header.data_offset + offset, 0
        while done < len(view):
            try:
                count = os.preadv(self._descriptor, [view[done:]], position + done)
            except OSError as error:
                raise ShardRejected(Reason.UNREADABLE, f"while reading: {error.strerror}") from error
            if not count:
                raise ShardRejected(Reason.CHANGED_WHILE_READING, "the file became shorter while it was read")
            done += count

    def verify(self) -> None:
        """See `Payload`."""
        assert self._descriptor is not None
        if Identity.of(os.fstat(self._descriptor)) != self.identity:
            raise ShardRejected(Reason.CHANGED_WHILE_READING, "the file was written to while it was read")

    def close(self) -> None:
        """See `Payload`."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def open_file(
    path: Path, *, leases: bool, settle: float, incomplete_after: float, header_limit: int
) -> MappedPayload | ReadPayload:
    """Open a shard file and check it.

    Args:
        path: Of the file; links are not followed.
        leases: Whether to try for a read lease.
        settle: Seconds for which the file must not have changed, where no lease tells that it is finished. More
            than the granularity of the file system's times, or a change right after opening may not show in them.
        incomplete_after: Seconds without a change after which an unfinished file is given up.
        header_limit: Longest header that is read, in bytes.

    Raises:
        ShardNotReady: Somebody is still writing it.
        ShardRejected: It can't be read, is no regular file, or breaks the format.
    """
    descriptor = open_descriptor(path)
    try:
        return _examine(descriptor, leases, settle, incomplete_after, header_limit)
    except OSError as error:
        os.close(descriptor)
        raise ShardRejected(Reason.UNREADABLE, f"while reading: {error.strerror}") from error
    except BaseException:
        os.close(descriptor)
        raise


def open_descriptor(path: Path) -> int:
    """Open a file that somebody has put into the drop folder: no link is followed, and no pipe waited for.

    Raises:
        ShardRejected: It can't be opened; the detail says why, and what to do.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(path, flags)
    except OSError as error:
        raise _REFUSALS.get(error.errno or 0, _other)(error) from error


def _examine(
    descriptor: int, leases: bool, settle: float, incomplete_after: float, header_limit: int
) -> MappedPayload | ReadPayload:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise ShardRejected(Reason.NOT_A_FILE, "not a regular file")
    patience = _patience() if leases else 0.0
    held = lease.take(descriptor) if patience else lease.Lease.NONE
    if held is lease.Lease.WRITER:
        raise ShardNotReady("a writer has it open")
    status = os.fstat(descriptor)
    age = time.time() - status.st_mtime  # below 0 where a file server's clock is ahead; far below, the time is made up
    young = -incomplete_after <= age
    if held is lease.Lease.NONE and young and age < settle:
        raise ShardNotReady(f"changed {age:.1f} s ago; it has to rest for {settle:g} s")
    try:
        if _has_hole(descriptor, status.st_size):
            raise ShardRejected(
                Reason.TRUNCATED,
                "it has holes that were never written; if they are meant, copy it without holes",
            )
        header = _header(descriptor, status.st_size, header_limit)
    except ShardRejected as rejected:
        growing = rejected.reason is Reason.TRUNCATED and young and age < incomplete_after
        if growing and held is lease.Lease.NONE:
            raise ShardNotReady(f"not complete yet: {rejected.detail}") from rejected
        raise
    if held is lease.Lease.HELD:
        return MappedPayload(descriptor, Identity.of(status), header, patience)
    return ReadPayload(descriptor, Identity.of(status), header)


def _has_hole(descriptor: int, size: int) -> bool:
    try:
        return size > 0 and os.lseek(descriptor, 0, os.SEEK_HOLE) < size
    except OSError as error:
        if error.errno == errno.ENXIO:  # the file is empty by now
            raise ShardRejected(Reason.CHANGED_WHILE_READING, "the file was emptied while it was opened") from error
        raise


def _header(descriptor: int, size: int, limit: int) -> ShardHeader:
    begin = os.pread(descriptor, FIRST_READ, 0)
    length = header_length(begin[:LENGTH_BYTES], size, limit)
    text = begin[LENGTH_BYTES : LENGTH_BYTES + length]
    while len(text) < length:
        more = os.pread(descriptor, length - len(text), LENGTH_BYTES + len(text))
        if not more:
            raise ShardRejected(Reason.TRUNCATED, "the file ends within its header")
        text += more
    return parse_header(text, size)


def _patience() -> float:
    """Return for how long a writer may be kept waiting, in seconds: half of what the kernel allows; 0: too short."""
    try:
        allowed = float(_BREAK_TIME.read_text())
    except (OSError, ValueError):
        return 0.0
    return allowed / 2 if allowed >= _SHORTEST_BREAK_TIME else 0.0


def _not_a_file(_error: OSError) -> ShardRejected:
    return ShardRejected(Reason.NOT_A_FILE, "a link, or not a regular file; put the shard itself there")


def _vanished(_error: OSError) -> ShardRejected:
    return ShardRejected(Reason.VANISHED, "deleted or moved away before it could be read")


def _forbidden(_error: OSError) -> ShardRejected:
    return ShardRejected(
        Reason.UNREADABLE,
        f"permission denied for uid {os.geteuid()}: some writers create shards with mode 0600; "
        "chmod g+r it, with a group that the daemon is in",
    )


def _other(error: OSError) -> ShardRejected:
    return ShardRejected(Reason.UNREADABLE, f"can't be opened: {error.strerror}")


_REFUSALS = {
    errno.ELOOP: _not_a_file,
    errno.ENXIO: _not_a_file,
    errno.EISDIR: _not_a_file,
    errno.ENOENT: _vanished,
    errno.ENOTDIR: _vanished,
    errno.ESTALE: _vanished,
    errno.EACCES: _forbidden,
    errno.EPERM: _forbidden,
}
"""errno of open() -> what it means for a shard."""
