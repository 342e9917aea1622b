"""A memory segment that the daemon owns and clients of this host may map: chunks lie in it instead of in messages.

It is a file on a tmpfs, cut into slots of one chunk each. Clients need to be allowed to open it, as they are to
connect. Which slot is whose is told by credit; what a client writes into one that is not its own spoils the weights
that another one sends, which who may connect could do as well by sending them.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .errors import StartError
from .sources.filesystems import kind_of

Bytes = npt.NDArray[np.uint8]

PREFIX = "fusewire-"
"""What each segment's name begins with."""
MEMORY = frozenset({"tmpfs", "ramfs"})
"""File systems that a segment may lie on."""
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)


class Segment:
    """The daemon's side.

    Args:
        folder: Where the file is made; has to be on a tmpfs, or every page that is written goes to a disk.
        name: Of the file.
        slot_bytes: Size of a slot.
        slots: How many there are.
        mode: Permission bits.

    Raises:
        StartError: The folder is not on a tmpfs, or there is no room.
    """

    def __init__(self, folder: Path, name: str, *, slot_bytes: int, slots: int, mode: int) -> None:
        if kind_of(folder) not in MEMORY:
            raise StartError(f"socket.shared_path = {folder}: has to be a folder on a tmpfs, such as /dev/shm")
        self.slot_bytes = slot_bytes
        self.slots = slots
        self.path = folder / name
        size = slot_bytes * slots
        remove_left_behind(folder)
        try:
            descriptor = _create_locked(self.path)
            self._lock: int | None = descriptor
            try:
                os.posix_fallocate(descriptor, 0, size)  # now, and not by a SIGBUS when the memory is used
                with contextlib.suppress(OSError):
                    os.fchown(descriptor, -1, folder.stat().st_gid)
                os.fchmod(descriptor, mode)
                self._map = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | _POPULATE, prot=mmap.PROT_READ)
            except BaseException:
                self.path.unlink(missing_ok=True)
                os.close(descriptor)
                raise
        except OSError as error:
            raise StartError(f"socket.shared_path: {self.path} of {size} bytes: {error.strerror}") from error
        self._bytes: Bytes = np.frombuffer(self._map, dtype=np.uint8)

    def slot(self, index: int, nbytes: int) -> Bytes:
        """Return the first bytes of a slot."""
        begin = index * self.slot_bytes
        return self._bytes[begin : begin + nbytes]

    def close(self) -> None:
        """Remove the file; clients that have it mapped keep their memory until they let go. May be called twice."""
        self.path.unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_left_behind(folder: Path) -> None:
    """Remove the segments of daemons that were killed: nobody holds their locks. Those of others can't be, and stay."""
    for path in folder.glob(f"{PREFIX}*"):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # somebody else's, or a folder
            continue
        try:
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
        except OSError:  # its daemon lives
            continue
        finally:
            os.close(descriptor)


def _create_locked(path: Path) -> int:
    """Make a file that has its lock from the moment on from which others see it under its name. Raises OSError."""
    hidden = path.with_name(f".{path.name}")
    descriptor = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.link(hidden, path)  # not a rename, which would take the place of a file of that name
    except BaseException:
        os.close(descriptor)
        raise
    finally:
        hidden.unlink()
    return descriptor


class Attached:
    """A client's side.

    Args:
        path: Of the segment, as the daemon's greeting says.
        slot_bytes: Size of a slot.

    Raises:
        OSError: It can't be opened (another host, or not allowed), or is no segment: whoever answers as a daemon must
            not have us write into any file that it names.
    """

    def __init__(self, path: str, slot_bytes: int) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            ours = Path(path).name.startswith(PREFIX) and kind_of(Path(path).parent) in MEMORY
            if not ours or not stat.S_ISREG(status.st_mode) or status.st_size < slot_bytes:
                raise OSError(f"{path} is no segment")
            self._map = mmap.mmap(descriptor, status.st_size, flags=mmap.MAP_SHARED | _POPULATE)
        finally:
            os.close(descriptor)
        self._slot_bytes = slot_bytes
        self._view = memoryview(self._map)

    def slot(self, index: int, nbytes: int) -> memoryview:
        """Return the first bytes of a slot, writable."""
        begin = index * self._slot_bytes
        return self._view[begin : begin + nbytes]

    def close(self) -> None:
        """Unmap it; if a slice of it is still in somebody's hands, when that one lets go."""
        with contextlib.suppress(BufferError):
            self._view.release()
            self._map.close()


def folder_for(setting: str, endpoint_path: Path | None) -> Path:
    """Say where the segment goes: where the settings say, else beside an ipc endpoint on a tmpfs, else /dev/shm."""
    if setting:
        return Path(setting)
    if endpoint_path is not None and kind_of(beside := endpoint_path.parent) == "tmpfs":
        return beside
    return Path("/dev/shm")  # noqa: S108 - a tmpfs by definition; the file's name is new and its mode ours
