"""The drop folder: watched, and scanned again and again, since events are hints and the scan is the truth.

Watchdog's handler does one `put` and nothing else: an exception in it would end watchdog's thread in silence. A
thread of our own scans: once everything is watched, on request, and every few seconds. It also finds out when the
folder was replaced or the watching has died, and sets it up anew.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path, PurePath
from typing import NamedTuple

import structlog
from watchdog.events import (
    DirCreatedEvent,
    DirMovedEvent,
    FileClosedEvent,
    FileCreatedEvent,
    FileMovedEvent,
    FileSystemEvent,
    FileSystemEventHandler,
)
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver

from fusewire.daemon.errors import StartError
from fusewire.daemon.payload import Identity
from fusewire.daemon.settings import Folder

from .filesystems import is_private_tmp, needs_polling
from .scan import FileHint, is_shard_name, look, scan

POLL_INTERVAL = 1.0
"""Seconds between scans where inotify can't be relied upon."""
STOP_TIMEOUT = 1.0
FILE_EVENTS: list[type[FileSystemEvent]] = [FileClosedEvent, FileMovedEvent, FileCreatedEvent]
FOLDER_EVENTS: list[type[FileSystemEvent]] = [DirCreatedEvent, DirMovedEvent]
"""All that is asked of the kernel: with every event subscribed, a few thousand files overflow its queue."""

log = structlog.get_logger()


class PathHint(NamedTuple):
    """Something happened to this path; whoever gets the hint has to look."""

    relative: PurePath


class ScanResult(NamedTuple):
    """What changed since the last scan, in the order in which it should be taken; vanished files last."""

    hints: Sequence[FileHint]


class FolderSource:
    """Watches the drop folder.

    Args:
        settings: Path and intervals.
        sink: Takes hints and scan results, from other threads; must not block or raise.

    Raises:
        StartError: The folder is missing, unreadable, or invisible to everybody else.
    """

    def __init__(self, settings: Folder, sink: Callable[[PathHint | ScanResult], None]) -> None:
        self._path = Path(settings.path)
        self._sink = sink
        self.root = _checked(self._path)
        kind = needs_polling(self.root)
        self._polls = settings.polling == "always" or (settings.polling == "auto" and bool(kind))
        self._notes = [f"polling {self.root}: inotify does not hear of all writers on {kind}"] if self._polls else []
        self._interval = min(POLL_INTERVAL, settings.reconcile_interval) if self._polls else settings.reconcile_interval
        self._folder = _identity(self.root)
        self._observer: BaseObserver | None = None
        self._known: dict[PurePath, Identity] = {}
        self._last: dict[PurePath, Identity] = {}
        self._trouble = ""
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fusewire-folder", daemon=True)

    def start(self) -> None:
        """Watch, then scan: what comes in between is seen twice, and nothing is missed."""
        self._listen_to_watchdog()
        self._watch()
        self._thread.start()

    def look(self, hint: PathHint) -> FileHint:
        """Look at a path that a hint named."""
        return look(self.root, hint.relative)

    def request_scan(self) -> None:
        """Scan soon, on the folder's own thread."""
        self._wake.set()

    def health(self) -> str:
        """Return ``ok``, or what is wrong."""
        if self._thread.ident is not None and not self._thread.is_alive() and not self._stopping.is_set():
            return "the thread that scans the folder has ended"
        return self._trouble or "ok"

    def notes(self) -> tuple[str, ...]:
        """Return what an operator should know."""
        return tuple(self._notes)

    def stop(self) -> None:
        """End the watching and the thread. May be called twice."""
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(STOP_TIMEOUT)
        self._unwatch()

    # --------------------------------------------------------------------------- on the folder's thread

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wake.clear()
            try:
                self._check_root()
                self._check_observer()
                self._report(scan(self.root))
                self._set_trouble("")
            except (OSError, StartError) as error:
                self._set_trouble(str(error))
            except Exception:
                log.exception("folder.defect")
                self._set_trouble("a defect of ours; see the log")
            self._wake.wait(self._interval)

    def _report(self, found: dict[PurePath, Identity]) -> None:
        """Tell what changed. When polling, only of what has looked the same twice."""
        settled = {
            relative: identity
            for relative, identity in found.items()
            if not self._polls or self._last.get(relative) == identity
        }
        self._last = found
        hints = [FileHint(path, identity) for path, identity in settled.items() if self._known.get(path) != identity]
        hints += [FileHint(path, None) for path in self._known if path not in found]
        self._known = {path: self._known.get(path, identity) for path, identity in found.items() if path in self._known}
        self._known.update(settled)
        if hints:
            self._sink(ScanResult(hints))

    def _check_root(self) -> None:
        """Notice that the folder was removed, renamed, unmounted or replaced, or that a link leads elsewhere."""
        root = _checked(self._path)
        folder = _identity(root)
        if (root, folder) != (self.root, self._folder):
            log.warning("folder.replaced", path=str(self._path), root=str(root))
            self.root, self._folder = root, folder
            self._unwatch()
            self._watch()

    def _check_observer(self) -> None:
        observer = self._observer
        if observer is None or (observer.is_alive() and all(emitter.is_alive() for emitter in observer.emitters)):
            return
        log.warning("folder.watching_ended", path=str(self.root), remedy="it is set up anew")
        self._unwatch()
        self._watch()

    def _set_trouble(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            if trouble:
                log.error("folder.trouble", reason=trouble, remedy="it is tried again")
            else:
                log.info("folder.recovered", path=str(self.root))

    # ------------------------------------------------------------------------------------- watchdog

    def _watch(self) -> None:
        if self._polls:
            return
        observer = Observer()
        handler = _Handler(self.root, self._sink, self.request_scan)
        try:
            observer.schedule(handler, str(self.root), recursive=True, event_filter=FILE_EVENTS + FOLDER_EVENTS)
            observer.start()
        except OSError as error:
            note = (
                f"inotify can't be used ({error.strerror}): polling {self.root} instead. Raise "
                "fs.inotify.max_user_watches and fs.inotify.max_user_instances, and restart"
            )
            log.warning("folder.polls", reason=note)
            self._notes.append(note)
            self._polls, self._interval = True, min(POLL_INTERVAL, self._interval)
            return
        self._observer = observer

    def _unwatch(self) -> None:
        observer, self._observer = self._observer, None
        if observer is not None and observer.is_alive():
            observer.stop()
            observer.join(STOP_TIMEOUT)

    def _listen_to_watchdog(self) -> None:
        """Whatever watchdog warns of, events may have been lost (a full kernel queue is told no other way)."""
        handler = _Alarm(self.request_scan)
        logging.getLogger("watchdog").addHandler(handler)


class _Handler(FileSystemEventHandler):
    """Runs on watchdog's thread."""

    def __init__(
        self, root: Path, sink: Callable[[PathHint | ScanResult], None], request_scan: Callable[[], None]
    ) -> None:
        self._root = str(root)
        self._sink = sink
        self._request_scan = request_scan

    def dispatch(self, event: FileSystemEvent) -> None:
        """Pass a hint on."""
        if event.is_directory:
            self._request_scan()
            return
        path = event.dest_path or event.src_path
        relative = PurePath(os.path.relpath(os.fsdecode(path), self._root))
        if is_shard_name(relative):
            self._sink(PathHint(relative))


class _Alarm(logging.Handler):
    """Requests a scan for every warning of watchdog's, whatever its text."""

    def __init__(self, request_scan: Callable[[], None]) -> None:
        super().__init__(logging.WARNING)
        self._request_scan = request_scan

    def emit(self, record: logging.LogRecord) -> None:
        """Take a warning in."""
        del record
        self._request_scan()


def _checked(path: Path) -> Path:
    """Return the folder's real path, if it can be used."""
    root = Path(os.path.realpath(path))
    if not root.is_dir():
        raise StartError(f"folder.path = {path}: no such folder; create it, or change the setting")
    if not os.access(root, os.R_OK | os.X_OK):
        raise StartError(f"folder.path = {path}: uid {os.geteuid()} may not read it; it needs r and x permission")
    if is_private_tmp(root):
        raise StartError(
            f"folder.path = {path}: systemd has given this service a /tmp of its own (PrivateTmp=), in which nobody "
            "else can put a shard; use a folder outside of /tmp and /var/tmp"
        )
    return root


def _identity(root: Path) -> tuple[int, int]:
    status = root.stat()
    return status.st_dev, status.st_ino
