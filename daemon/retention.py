"""What becomes of the files of versions that no live weights rest on any more: deleted, or moved into an archive.

Only files that the daemon has applied, and only if they are still the same: another one under the same name is somebody
else's. A thread of its own does it, since a file system may take its time.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Hashable, Sequence
from pathlib import Path, PurePath
from typing import NamedTuple

import structlog

from .errors import StartError, printable
from .payload import Identity
from .settings import Versions

WAITING = 10_000
"""Versions whose files may wait for their removal; those beyond stay where they are."""

log = structlog.get_logger()


class _Job(NamedTuple):
    version: int
    files: Sequence[tuple[str, Hashable]]


class Retention:
    """Removes files.

    Args:
        settings: What to do with them.
        root: The drop folder.

    Raises:
        StartError: The archive is no folder, or lies on another file system.
    """

    def __init__(self, settings: Versions, root: Path) -> None:
        self._root = root
        self._archive = Path(settings.archive) if settings.retention == "archive" else None
        if self._archive is not None:
            try:
                elsewhere = self._archive.stat().st_dev != root.stat().st_dev
            except OSError as error:
                raise StartError(f"versions.archive = {self._archive}: {error.strerror}") from error
            if elsewhere or not self._archive.is_dir():
                raise StartError(f"versions.archive = {self._archive}: has to be a folder on the file system of {root}")
            if self._archive.resolve().is_relative_to(root.resolve()):
                raise StartError(f"versions.archive = {self._archive}: lies within the drop folder {root}")
        self._jobs: queue.Queue[_Job | None] = queue.Queue(WAITING)
        self._failed = 0
        self._last = ""
        self._thread = threading.Thread(target=self._run, name="fusewire-retention", daemon=True)

    def start(self) -> None:
        """Begin to take files away."""
        self._thread.start()

    def retire(self, version: int, files: Sequence[tuple[str, Hashable]]) -> None:
        """Take a version's files away, as the settings say. Does not wait.

        Args:
            version: Whose files they are.
            files: (path relative to the drop folder, identity that it had when it was applied).
        """
        with contextlib.suppress(queue.Full):
            self._jobs.put_nowait(_Job(version, files))

    def notes(self) -> tuple[str, ...]:
        """Say what an operator should know."""
        return (f"{self._failed} files could not be taken away, the last: {self._last}",) if self._failed else ()

    def stop(self, timeout: float) -> None:
        """End the thread."""
        with contextlib.suppress(queue.Full):
            self._jobs.put_nowait(None)
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            done = 0
            for relative, identity in job.files:
                try:
                    done += self._take_away(relative, identity)
                except OSError as error:
                    self._failed += 1
                    self._last = f"{printable(relative, 100)}: {error.strerror}"
                    log.warning("retention.failed", path=printable(relative), reason=error.strerror)
            self._tidy({PurePath(relative).parent for relative, _ in job.files})
            if done:
                log.info("retention.done", version=job.version, files=done, archive=str(self._archive or "deleted"))

    def _take_away(self, relative: str, identity: Hashable) -> bool:
        path = self._root / relative
        try:
            found = Identity.of(path.lstat())
        except FileNotFoundError:
            return False
        if not isinstance(identity, tuple) or found.content != Identity(*identity).content:
            return False
        if self._archive is not None:
            target = self._archive / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.link(path, target, follow_symlinks=False)  # a rename would hold up the folder's next event
        path.unlink()
        return True

    def _tidy(self, folders: set[PurePath]) -> None:
        """Remove the folders that have become empty by it."""
        for folder in folders:
            while folder.parts:
                try:
                    (self._root / folder).rmdir()
                except OSError:
                    break
                folder = folder.parent  # noqa: PLW2901 - up the tree
