"""The journal: what the daemon has to know after a restart, in SQLite. The only place that speaks SQL.

Written by the reactor, one transaction for each step of the ledger, before that step's answers and events go out. In
WAL mode a transaction is in the page cache once it has returned: it survives the death of the process. ``sync`` forces
it to disk as well, so that it survives the death of the machine. A thread of its own moves the log into the database,
since that waits for the disk.

A disk that is full, or gone, does not stop the daemon: what could not be written is kept, the newest for each shard,
and is written as soon as that can be done again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import structlog

from .errors import StartError, printable
from .records import Entry, Held, Memory, Runs, ShardRecord, Standing

log = structlog.get_logger()

FORMAT = 1
FILE, LOCK = "journal.sqlite", "lock"
BACKLOG = 100_000
"""Records that are kept while nothing can be written; the oldest beyond are lost, and that is told."""
CHECKPOINT_INTERVAL = 5.0
"""Seconds between two looks at the log's size."""
CHECKPOINT_BYTES = 4 << 20
RETRY_INTERVAL = 1.0
"""Seconds between two tries while nothing can be written."""
PRUNE_EVERY = 1000
"""Records after which what is not needed any more is counted."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS about (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS shards (
    id INTEGER PRIMARY KEY, sequence INTEGER NOT NULL, key BLOB NOT NULL, place BLOB NOT NULL, source TEXT NOT NULL,
    standing TEXT NOT NULL, time REAL NOT NULL, version INTEGER, reason TEXT NOT NULL, record BLOB NOT NULL,
    slots BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS shards_by_key ON shards (key);
CREATE INDEX IF NOT EXISTS shards_by_standing ON shards (standing, sequence);
"""


class Journal:
    """The journal of one daemon.

    Args:
        folder: Where it lies; made if it is not there.
        model: What tells one model from another: slots are written down by their index.
        sync: Whether each transaction is forced to disk.
        known_limit: Shards that are over and remembered all the same.

    Raises:
        StartError: The folder can't be used, another daemon uses it, or the journal is damaged or of another model.
    """

    def __init__(self, folder: Path, model: str, *, sync: bool, known_limit: int) -> None:
        self.folder = folder
        self.path = folder / FILE
        self._known_limit = known_limit
        self._backlog: OrderedDict[object, Entry] = OrderedDict()
        self._lost = 0
        self._failure = ""
        self._retry_at = 0.0
        self._written = 0
        self._stopping = threading.Event()
        self._lock = _lock(folder)
        try:
            self._database = _open(self.path, model, sync=sync)
            with contextlib.suppress(sqlite3.Error):  # it is no matter of life and death
                self._prune(PRUNE_EVERY)  # not only after so many records: none of many short lives may write as many
            self.memory = _read(self._database, self.path)
        except BaseException:
            os.close(self._lock)
            raise
        self._thread = threading.Thread(target=self._checkpoints, name="fusewire-journal", daemon=True)

    def start(self) -> None:
        """Begin to look after the log."""
        self._thread.start()

    def note(self, entries: Iterable[Entry]) -> None:
        """Take entries that are to be written with the next ones, or within a second."""
        for entry in entries:
            key = type(entry) if isinstance(entry, Standing) else (type(entry), entry.id)
            self._backlog[key] = entry
            self._backlog.move_to_end(key)
        while len(self._backlog) > BACKLOG:
            self._backlog.popitem(last=False)
            self._lost += 1

    def write(self, entries: Iterable[Entry]) -> bool:
        """Write entries down, with all that have not been written yet. Never raises.

        Returns:
            Whether everything is written down.
        """
        self.note(entries)
        if self._failure and time.monotonic() < self._retry_at:
            return False
        return self._flush()

    def retry(self) -> None:
        """Write what has been noted, or could not be written before."""
        if self._backlog:
            self.write(())

    @property
    def settled(self) -> bool:
        """Whether everything is written down."""
        return not self._backlog

    def health(self) -> str:
        """Return ``ok``, or why nothing can be written down."""
        if not self._failure:
            return "ok" if not self._lost else f"{self._lost} records were lost while nothing could be written"
        return f"{self._failure}; {len(self._backlog)} records wait to be written"

    def close(self) -> None:
        """Write what is left, and give everything back. May be called twice."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._flush()
        if self._thread.ident is not None:
            self._thread.join(1.0)
        with contextlib.suppress(sqlite3.Error):
            self._database.close()
        os.close(self._lock)

    def _flush(self) -> bool:
        if not self._backlog:
            return True
        try:
            with _transaction(self._database):
                for entry in self._backlog.values():
                    _write(self._database, entry)
            self._prune(len(self._backlog))
        except (sqlite3.Error, OSError, ValueError) as error:
            if not self._failure:
                log.error("journal.failed", reason=printable(error), remedy="it is tried again every second")  # noqa: TRY400
            self._failure = f"{self.path}: {printable(error)}"
            self._retry_at = time.monotonic() + RETRY_INTERVAL
            return False
        if self._failure:
            log.info("journal.works_again", records=len(self._backlog))
        self._failure = ""
        self._backlog.clear()
        return True

    def _prune(self, written: int) -> None:
        """Forget the oldest of those that are over, beyond the limit."""
        self._written += written
        if self._written < PRUNE_EVERY:
            return
        self._written = 0
        (count,) = self._database.execute("SELECT count(*) FROM shards WHERE standing = 'over'").fetchone()
        if count > self._known_limit:
            self._database.execute(
                "DELETE FROM shards WHERE id IN"
                " (SELECT id FROM shards WHERE standing = 'over' ORDER BY sequence LIMIT ?)",
                (count - self._known_limit,),
            )

    def _checkpoints(self) -> None:
        """Move the log into the database from time to time: that waits for the disk, and nobody waits for it here."""
        while not self._stopping.wait(CHECKPOINT_INTERVAL):
            try:
                if self.path.with_name(f"{FILE}-wal").stat().st_size < CHECKPOINT_BYTES:
                    continue
                with contextlib.closing(sqlite3.connect(self.path, timeout=1.0)) as own:
                    own.execute("PRAGMA wal_checkpoint(PASSIVE)")
            except (sqlite3.Error, OSError) as error:
                log.debug("journal.checkpoint_failed", reason=printable(error))


def _lock(folder: Path) -> int:
    """Take the folder for this process alone."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise StartError(
            f"state.path = {folder}: {error.strerror}. It has to be a folder that the daemon may write; "
            "make one, or set state.path"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(descriptor, 20, 0).decode(errors="replace").strip()
        os.close(descriptor)
        raise StartError(
            f"state.path = {folder}: another fusewire (process {printable(holder) or 'unknown'}) uses it; "
            "stop that one, or give each its own state.path"
        ) from error
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        os.close(descriptor)
        raise StartError(f"state.path = {folder}: {error.strerror}: make room, and start again") from error
    return descriptor


def _open(path: Path, model: str, *, sync: bool) -> sqlite3.Connection:
    remedy = (
        f"Move {path.parent} away to start from model.checkpoint and the drop folder; what was pushed then has to be "
        "pushed again"
    )
    try:
        database = sqlite3.connect(path, timeout=1.0, isolation_level=None)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute(f"PRAGMA synchronous = {'FULL' if sync else 'NORMAL'}")
        database.execute("PRAGMA wal_autocheckpoint = 0")
        database.executescript(_SCHEMA)
        (sound,) = database.execute("PRAGMA quick_check(1)").fetchone()
        if sound != "ok":
            raise StartError(f"the journal {path} is damaged: {printable(sound)}. {remedy}")
        about = dict(database.execute("SELECT key, value FROM about"))
        if not about:
            with _transaction(database):
                rows = [("format", str(FORMAT)), ("model", model)]
                database.executemany("INSERT INTO about VALUES (?, ?)", rows)
        elif about.get("format") != str(FORMAT):
            raise StartError(f"the journal {path} has format {printable(about.get('format'))}, not {FORMAT}. {remedy}")
        elif about.get("model") != model:
            raise StartError(f"the journal {path} is that of another model than model.config describes. {remedy}")
    except sqlite3.Error as error:
        raise StartError(f"the journal {path}: {printable(error)}. {remedy}") from error
    return database


def _read(database: sqlite3.Connection, path: Path) -> Memory:
    try:
        found = dict(database.execute("SELECT key, value FROM about"))
        standing = msgspec.json.decode(found["standing"], type=Standing) if "standing" in found else Standing()
        decode = msgspec.msgpack.Decoder(ShardRecord).decode
        shards = []
        columns = "SELECT record, key, place, standing, slots FROM shards ORDER BY sequence"
        for record, key, place, now, slots in database.execute(columns):
            held = {"standing": now, "slots": msgspec.msgpack.decode(slots, type=Runs)}
            shards.append(msgspec.structs.replace(decode(record), key=_text(key), place=_text(place), **held))
    except (sqlite3.Error, msgspec.MsgspecError) as error:
        raise StartError(f"the journal {path} can't be read: {printable(error)}. Move it away to start anew") from error
    return Memory(standing=standing, shards=tuple(shards))


def _write(database: sqlite3.Connection, entry: Entry) -> None:
    match entry:
        case ShardRecord():
            if entry.source == "folder":  # what was known of a file of that name is overtaken, unless slots rest on it
                database.execute(
                    "DELETE FROM shards WHERE key = ? AND standing = 'over' AND id <> ?", (_raw(entry.key), entry.id)
                )
            database.execute(
                "INSERT OR REPLACE INTO shards VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    entry.id,
                    entry.order,
                    _raw(entry.key),
                    _raw(entry.place),
                    entry.source,
                    entry.standing,
                    time.time(),
                    entry.version,
                    entry.reason,
                    msgspec.msgpack.encode(msgspec.structs.replace(entry, key="", place="", slots=())),
                    msgspec.msgpack.encode(entry.slots),
                ),
            )
        case Held():
            database.execute(
                "UPDATE shards SET standing = ?, slots = ? WHERE id = ?",
                (entry.standing, msgspec.msgpack.encode(entry.slots), entry.id),
            )
        case Standing():
            text = msgspec.json.encode(entry).decode()
            database.execute("INSERT OR REPLACE INTO about VALUES ('standing', ?)", (text,))


def _raw(name: str) -> bytes:
    """A file's name need not be text."""
    return name.encode("utf-8", "surrogatepass")


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


@contextlib.contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[None]:
    """All or nothing of what is done within."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            database.execute("ROLLBACK")
        raise
