"""The drop folder: watched, and scanned again and again, since events are hints and the scan is the truth.

A thread of our own scans: once everything is watched, on request, and every few seconds. It also finds out when the
folder was replaced or the watching has died, and sets it up anew. The reactor never waits for the file system here.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
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

from fusewire.daemon.errors import StartError, printable
from fusewire.daemon.manifest import is_marker
from fusewire.daemon.payload import Identity
from fusewire.daemon.settings import Folder

from .filesystems import is_private_tmp, needs_polling
from .scan import FileHint, Found, is_wanted, look, scan

POLL_INTERVAL = 1.0
"""Seconds between scans where inotify can't be relied upon, and between attempts to get out of trouble.

When polling, a file must have looked the same for as long.
"""
RETRY_INTERVAL = 60.0
"""Seconds until inotify is tried again after one of its limits was reached."""
STALL = 60.0
"""Seconds after which a scan counts as hanging."""
STOP_TIMEOUT = 1.0
LIMITS = {
    errno.EMFILE: "fs.inotify.max_user_instances (or LimitNOFILE=)",
    errno.ENFILE: "fs.file-max",
    errno.ENOSPC: "fs.inotify.max_user_watches",
}
"""Which limit an error of inotify's speaks of (inotify_init(2), inotify_add_watch(2))."""
UNWATCH_TIMEOUT = 0.8
"""Seconds for which `Watching.stop` waits."""
FILE_EVENTS: list[type[FileSystemEvent]] = [FileClosedEvent, FileMovedEvent, FileCreatedEvent]
FOLDER_EVENTS: list[type[FileSystemEvent]] = [DirCreatedEvent, DirMovedEvent]
"""All that is asked of the kernel: with every event subscribed, a few thousand files overflow its queue."""
_SHOWN = 5
"""Most subfolders that are named in a note or a log line."""

log = structlog.get_logger()


class PathHint(NamedTuple):
    """Something happened to this path; whoever gets the hint has to look."""

    relative: PurePath


class ScanResult(NamedTuple):
    """What changed since the last scan, in the order in which it should be taken; vanished files last."""

    hints: Sequence[FileHint]
    at: float
    """When it began: what is told may be older than what has been heard since."""


class FolderSource:
    """Watches the drop folder.

    Args:
        settings: Path and intervals.
        sink: Takes hints and scan results, from other threads; must not block or raise.

    Raises:
        StartError: The folder is missing, unreadable, or invisible to everybody else.
    """

    def __init__(self, settings: Folder, sink: Callable[[PathHint | ScanResult], None]) -> None:
        self._settings = settings
        self._path = Path(settings.path)
        self._sink = sink
        self.root, self._folder = usable(self._path)
        self._watching: Watching | None = None
        self._polls = False
        self._retry_at = math.inf
        self._note = ""
        self._known: dict[str, Identity] = {}
        self._seen: dict[str, tuple[Identity, float]] = {}
        self._passed_over: dict[str, str] = {}
        self._trouble = ""
        self._scanning_since: float | None = None
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fusewire-folder", daemon=True)

    def start(self) -> None:
        """Watch, then scan: what comes in between is seen twice, and nothing is missed.

        Raises:
            StartError: The folder can be neither watched nor polled.
        """
        try:
            self._watch()
        except OSError as error:
            raise StartError(f"folder.path = {self._path}: it can't be watched: {error.strerror or error}") from error
        self._thread.start()

    def look(self, hint: PathHint) -> FileHint:
        """Look at a path that a hint named."""
        return look(self.root, hint.relative)

    def request_scan(self) -> None:
        """Scan soon, on the folder's own thread."""
        self._wake.set()

    def health(self) -> str:
        """Return ``ok``, or what is wrong with the threads or with the folder itself."""
        return self.failure() or self._trouble or "ok"

    def failure(self) -> str:
        """Say what is wrong with the threads; empty if all are alive and get on.

        A folder that was removed or may not be read is trouble of another kind: it is tried again, and a restart
        of the daemon would cure nothing. A watching that has died is set up anew, on the folder's thread.
        """
        if self._stopping.is_set() or self._thread.ident is None:
            return ""
        if not self._thread.is_alive():
            return "the thread that scans the folder has ended"
        since = self._scanning_since
        if since is not None and time.monotonic() - since > STALL:
            return f"a scan of {self.root} hangs since {time.monotonic() - since:.0f} s; does its file system answer?"
        watching = self._watching
        if watching is not None and not watching.is_alive() and not self._trouble:
            self.request_scan()
            return f"the watching of {self.root} has ended; it is set up anew"
        return ""

    def notes(self) -> tuple[str, ...]:
        """Return what an operator should know."""
        passed_over = self._passed_over
        if not passed_over:
            return (self._note,) if self._note else ()
        named = ", ".join(f"{printable(path, 80)} ({why})" for path, why in islice(passed_over.items(), _SHOWN))
        note = f"{len(passed_over)} paths below {self.root} are passed over: {named}"
        return (self._note, note) if self._note else (note,)

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
            self._scanning_since = time.monotonic()
            try:
                self._keep_watch()
                self._report(scan(self.root))
                self._set_trouble("")
            except (OSError, StartError) as error:
                self._set_trouble(str(error))
            except Exception:
                log.exception("folder.defect")
                self._set_trouble("a defect of ours; see the log")
            self._scanning_since = None
            interval = self._settings.reconcile_interval
            self._wake.wait(min(POLL_INTERVAL, interval) if self._polls or self._trouble else interval)

    def _report(self, found: Found) -> None:
        """Tell what changed. When polling, only of what has looked the same for a while."""
        settled = self._settled(found.shards) if self._polls else found.shards
        hints = [FileHint(PurePath(path), now) for path, now in settled.items() if self._known.get(path) != now]
        gone = [path for path in self._known if path not in found.shards and not found.is_unknown(path)]
        hints += [FileHint(PurePath(path), None) for path in gone]
        self._known.update(settled)
        for path in gone:
            del self._known[path]
        if hints:
            self._sink(ScanResult(hints, self._scanning_since or 0.0))
        if found.passed_over != self._passed_over:
            self._passed_over = found.passed_over
            if found.passed_over:
                shown = dict(islice(found.passed_over.items(), _SHOWN))
                remedy = f"subfolders need r and x permission for uid {os.geteuid()}"
                log.warning("folder.passed_over", paths=shown, total=len(found.passed_over), remedy=remedy)

    def _settled(self, shards: dict[str, Identity]) -> dict[str, Identity]:
        """Leave out what has changed lately. Counted in time and not in scans: a requested one may follow at once."""
        now, before = time.monotonic(), self._seen
        self._seen = {
            path: before[path] if path in before and before[path][0] == identity else (identity, now)
            for path, identity in shards.items()
        }
        long_enough = min(POLL_INTERVAL, self._settings.reconcile_interval) * 0.9  # timers are not exact
        return {path: identity for path, (identity, since) in self._seen.items() if now - since >= long_enough}

    def _keep_watch(self) -> None:
        """Watch anew if need be.

        The folder may have been removed, renamed, unmounted or replaced, a link may lead elsewhere, or the watching
        may have died. (A folder that was removed and made again can look the same; its watching has died then.)
        """
        root, folder = usable(self._path)
        if (root, folder) != (self.root, self._folder):
            log.warning("folder.replaced", path=str(self._path), root=str(root))
        elif self._watching is not None and not self._watching.is_alive():
            log.warning("folder.watching_ended", path=str(root), remedy="it is set up anew")
        elif self._watching is not None or (self._polls and time.monotonic() < self._retry_at):
            return
        self._unwatch()
        self.root, self._folder = root, folder
        self._watch()

    def _set_trouble(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            if trouble:
                log.error("folder.trouble", reason=trouble, remedy="it is tried again")
            else:
                log.info("folder.recovered", path=str(self.root))

    def _watch(self) -> None:
        """Begin to watch, or to poll where watching is of no use or impossible."""
        kind = needs_polling(self.root) if self._settings.polling == "auto" else ""
        self._polls = self._settings.polling == "always" or bool(kind)
        self._retry_at = math.inf
        if self._polls:
            why = f"inotify does not hear of all writers on {kind}" if kind else 'folder.polling = "always"'
            self._note = f"polling {self.root}: {why}"
            return
        try:
            watching = Watching(self.root, self._hint, self.request_scan)
        except OSError as error:
            limit = LIMITS.get(error.errno or 0)
            if limit is None:
                raise
            self._polls, self._retry_at = True, time.monotonic() + RETRY_INTERVAL
            note = f"polling {self.root}: inotify can't be used ({error.strerror}); raise {limit}"
            if note != self._note:
                log.warning("folder.polls", reason=note)
            self._note = note
            return
        self._note = ""
        self._watching = watching
        if self._stopping.is_set():  # stop() has waited long enough for this thread, and is gone
            self._unwatch()

    def _unwatch(self) -> None:
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.stop()

    def _hint(self, relative: PurePath) -> None:
        self._sink(PathHint(relative))


class Watching:
    """The watching of one folder and all below it by watchdog, from construction to `stop`.

    Watchdog has three kinds of threads: one reads the kernel's queue, an emitter pairs moves, the observer calls the
    handler. When any of them ends, nothing is heard any more and nobody is told, so all of them are asked for.

    Args:
        root: The folder, without links.
        hint: Takes the relative path of a shard that something happened to. From another thread; must not block.
        request_scan: Called when something happened that no hint can tell. The same holds for it.

    Raises:
        OSError: The folder can't be watched. EMFILE and ENOSPC: a limit of the kernel's is reached.
    """

    def __init__(self, root: Path, hint: Callable[[PurePath], None], request_scan: Callable[[], None]) -> None:
        self._observer: BaseObserver | None = None
        self._alarm = Alarm(request_scan)
        logging.getLogger("watchdog").addHandler(self._alarm)
        try:
            self._observer = Observer()
            self._observer.schedule(
                Handler(root, hint, request_scan), str(root), recursive=True, event_filter=FILE_EVENTS + FOLDER_EVENTS
            )
            self._observer.start()
        except BaseException:
            self.stop()
            raise

    def is_alive(self) -> bool:
        """Whether everything that it takes to hear of a change is running."""
        return self._observer is not None and all(thread.is_alive() for thread in self._threads(self._observer))

    def stop(self) -> None:
        """End it, and wait for that a little. May be called twice."""
        logging.getLogger("watchdog").removeHandler(self._alarm)
        observer, self._observer = self._observer, None
        if observer is not None:  # watchdog joins its threads without a deadline; one may hang in the file system
            closer = threading.Thread(target=_end, args=(observer,), name="fusewire-unwatch", daemon=True)
            closer.start()
            closer.join(UNWATCH_TIMEOUT)

    @staticmethod
    def _threads(observer: BaseObserver) -> Iterator[threading.Thread]:
        yield observer
        yield from observer.emitters.copy()
        reader = getattr(observer, "_inotify_fd", None)  # of watchdog 7.1; it has no public name
        if reader is not None:
            yield reader


class Handler(FileSystemEventHandler):
    """Called on watchdog's thread, which an exception would end: it passes hints on, and does nothing else."""

    def __init__(self, root: Path, hint: Callable[[PurePath], None], request_scan: Callable[[], None]) -> None:
        self._prefix = f"{root}/"
        self._hint = hint
        self._request_scan = request_scan

    def dispatch(self, event: FileSystemEvent) -> None:
        """Pass a hint on."""
        try:
            if event.is_directory:
                self._request_scan()
                return
            path = os.fsdecode(event.dest_path or event.src_path)
            relative = PurePath(path.removeprefix(self._prefix))
            if is_marker(relative):
                self._request_scan()  # it speaks of all files beside it: they have to be known first
            elif is_wanted(relative):
                self._hint(relative)
        except Exception:  # noqa: BLE001 - whatever it was: the scan will find what the hint was about
            self._request_scan()


class Alarm(logging.Handler):
    """Requests a scan for every warning of watchdog's, whatever its text: a full kernel queue is told no other way."""

    def __init__(self, request_scan: Callable[[], None]) -> None:
        super().__init__(logging.WARNING)
        self._request_scan = request_scan

    def emit(self, record: logging.LogRecord) -> None:
        """Take a warning in."""
        del record
        self._request_scan()


def _end(observer: BaseObserver) -> None:
    observer.stop()
    if observer.is_alive():
        observer.join()


def usable(path: Path) -> tuple[Path, tuple[int, int]]:
    """Return a folder's real path and its identity (device and inode).

    Raises:
        StartError: It can't be used; the message says why and what to do.
    """
    need = f"uid {os.geteuid()} may not read it; it needs r and x permission there, and x on all folders above"
    try:
        root = Path(os.path.realpath(path, strict=True))
        status = root.stat()
        if not stat.S_ISDIR(status.st_mode):
            raise StartError(f"folder.path = {path}: not a folder; remove what is there, or change the setting")
        with os.scandir(root):  # the proof that it may be read
            os.stat(f"{root}/.")  # noqa: PTH116 - and that it may be entered; a Path would drop the dot
    except PermissionError as error:
        raise StartError(f"folder.path = {path}: {need}") from error
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StartError(f"folder.path = {path}: no such folder; create it, or change the setting") from error
    except OSError as error:
        raise StartError(f"folder.path = {path}: {error.strerror or error}") from error
    if is_private_tmp(root):
        raise StartError(
            f"folder.path = {path}: systemd has given this service a /tmp of its own (PrivateTmp=), in which nobody "
            "else can put a shard; use a folder outside of /tmp and /var/tmp"
        )
    return root, (status.st_dev, status.st_ino)
