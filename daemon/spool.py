"""What clients have pushed, kept in files until nothing rests on it any more: a client's shard exists nowhere else.

Written on the loader's thread while a shard is placed, removed on a thread of its own, since a file system takes its
time with large files. A file that is not whole has another name; what no journal knows of is removed at the start.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Collection
from pathlib import Path

import numpy as np
import numpy.typing as npt
import structlog
import xxhash

from .errors import StartError, printable

log = structlog.get_logger()

Bytes = npt.NDArray[np.uint8]

SUFFIX, UNFINISHED = ".safetensors", ".part"
WAITING = 1_000_000
"""Files that may wait for their removal; more stay until the next start."""


class Spool:
    """A folder of shards, named by their numbers.

    Args:
        folder: Where they lie; made if it is not there.
        limit: Bytes that they may take together; what comes beyond is not kept.
        sync: Whether each is forced to disk before it counts as kept.
        known: Names of files to keep; the others are removed.

    Raises:
        StartError: The folder can't be used.
    """

    def __init__(self, folder: Path, *, limit: int, sync: bool, known: Collection[str]) -> None:
        self.folder = folder
        self.failure = ""
        """Why the last shard could not be kept; empty: it could be."""
        self._limit = limit
        self._sync = sync
        self._used = 0
        self._sizes: dict[str, int] = {}
        self._removals: queue.Queue[str | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._remove, name="fusewire-spool", daemon=True)
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            for entry in os.scandir(folder):
                if entry.name in known:
                    self._account(entry.name, entry.stat(follow_symlinks=False).st_size)
                elif entry.name.endswith((SUFFIX, UNFINISHED)):
                    Path(entry.path).unlink()
        except OSError as error:
            raise StartError(f"the spool {folder}: {error.strerror}") from error

    def start(self) -> None:
        """Begin to remove what is not needed any more."""
        self._thread.start()

    @property
    def used(self) -> int:
        """Bytes that are kept."""
        return self._used

    def begin(self, number: int, nbytes: int) -> Spooled | None:
        """Begin to keep a shard of ``nbytes``, header included; None if it can't be kept, see `failure`."""
        if self._used + nbytes > self._limit:
            self._fail(f"{self._used} bytes are kept already, {nbytes} more are over state.spool_bytes = {self._limit}")
            return None
        try:
            return Spooled(self, f"{number:012d}{SUFFIX}", nbytes)
        except OSError as error:
            self._fail(f"{self.folder}: {error.strerror}")
            return None

    def discard(self, number: int) -> None:
        """Nothing rests on a shard any more. For the reactor's thread; never waits."""
        name = f"{number:012d}{SUFFIX}"
        if name in self._sizes:
            with contextlib.suppress(queue.Full):
                self._removals.put_nowait(name)

    def stop(self, timeout: float) -> None:
        """Remove what is left to be removed, for so long."""
        with contextlib.suppress(queue.Full):
            self._removals.put_nowait(None)
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def _account(self, name: str, nbytes: int) -> None:
        self._used += nbytes - self._sizes.get(name, 0)
        self._sizes[name] = nbytes

    def _fail(self, why: str) -> None:
        if not self.failure:
            log.error("spool.failed", reason=printable(why), remedy="what is pushed now does not survive a restart")
        self.failure = printable(why)

    def _kept(self, name: str, nbytes: int) -> None:
        if self.failure:
            log.info("spool.works_again")
        self.failure = ""
        self._account(name, nbytes)

    def _remove(self) -> None:
        while (name := self._removals.get()) is not None:
            try:
                (self.folder / name).unlink(missing_ok=True)
            except OSError as error:
                log.warning("spool.not_removed", file=name, reason=error.strerror)
                continue
            self._used -= self._sizes.pop(name, 0)


class Spooled:
    """One shard that is being kept."""

    def __init__(self, spool: Spool, name: str, nbytes: int) -> None:
        self.name = name
        self.digest = ""
        """xxh3-128 of its data section, once it is kept."""
        self._spool = spool
        self._nbytes = nbytes
        self._hash = xxhash.xxh3_128()
        self._path = spool.folder / (name + UNFINISHED)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor: int | None = os.open(self._path, flags, 0o600)

    def head(self, head: Bytes | bytes) -> None:
        """Keep what comes before the data."""
        self._write(memoryview(head) if isinstance(head, bytes) else head.data)

    def data(self, piece: Bytes) -> None:
        """Keep the next bytes of the data."""
        if self._descriptor is not None:
            self._hash.update(piece.data)
            self._write(piece.data)

    def finish(self) -> str:
        """All has come. Returns the file's name; empty if it could not be kept."""
        if self._descriptor is None:
            return ""
        try:
            if self._spool._sync:  # noqa: SLF001 - ours
                os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None
            self._path.rename(self._spool.folder / self.name)
            if self._spool._sync:  # noqa: SLF001
                _sync_folder(self._spool.folder)
        except OSError as error:
            self._give_up(error)
            return ""
        self.digest = self._hash.hexdigest()
        self._spool._kept(self.name, self._nbytes)  # noqa: SLF001
        return self.name

    def abandon(self) -> None:
        """It is not needed. May be called twice, and after `finish`."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            self._path.unlink(missing_ok=True)

    def _write(self, view: memoryview) -> None:
        if self._descriptor is None:
            return
        try:
            while view.nbytes:
                view = view[os.write(self._descriptor, view) :]
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._spool._fail(f"{self._spool.folder}: {error.strerror}")  # noqa: SLF001
        with contextlib.suppress(OSError):
            self.abandon()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
