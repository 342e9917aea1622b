"""Coming back after a restart: which shards the live weights rested on, and how to get at them again.

They are loaded one after the other, in the order in which they were applied, each with the slots that rest on it and
no others. One that can't be had any more is named, and waited for: nothing is live before all of it is back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from .errors import ShardNotReady, ShardRejected, printable
from .loader import Restored, Source
from .payload import Identity, Payload
from .records import Memory, ShardRecord, slots_of
from .stimuli import Seen
from .versions import Claim

Open = Callable[[Path, Callable[[Identity], None]], Payload]
"""Opens a file after its identity has been approved of."""


class Recovery:
    """What a restart has to do.

    Args:
        memory: What was written down.
        folders: ``folder``, ``socket`` and ``checkpoint`` -> where the shards of such a source lie; a source that is
            not in use is missing.
        open_file: Opens and checks a file.
    """

    def __init__(self, memory: Memory, folders: Mapping[str, Path], open_file: Open) -> None:
        self._folders = folders
        self._open = open_file
        self._standing = memory.standing
        live = [record for record in memory.shards if record.standing == "live" and record.slots]
        self._left: deque[ShardRecord] = deque(live)
        self._staged = [record for record in memory.shards if record.standing == "staged"]
        self.total = sum(record.nbytes for record in live)
        """Bytes of the shards that are read again."""
        self.doing: ShardRecord | None = None
        """The one that is being restored."""

    @property
    def label(self) -> str:
        """What was live."""
        live = self._standing.live
        return "the rolling version" if live is None else f"version {live}"

    def next(self, now: float) -> tuple[Seen, Source] | None:
        """Return the next shard to be restored, and how to open it; None: all are in place."""
        self.doing = self._left.popleft() if self._left else None
        if self.doing is None:
            return None
        record, live = self.doing, self._standing.live
        restored = Restored(live, frozenset(slots_of(record.slots)))
        seen = Seen(
            key=f"restore:{record.id}", name=record.name, source="journal", number=record.id, claimed=live, now=now
        )
        opener = self._opener(record, f"needed to restore {self.label}")
        return seen, Source(record.name, opener, xxh3=record.digest or None, restored=restored)

    def staged(self, now: float) -> Iterator[tuple[Seen, Source | None]]:
        """Yield the shards of versions that were not live yet, in their order. Source None: it is a file as any other.

        What clients had pushed comes from where it was kept; or not at all, which its version then waits for.
        """
        for record in self._staged:
            identity = Identity(*record.identity) if record.identity is not None else None
            if record.source == "folder":
                seen = Seen(
                    key=record.key,
                    name=record.name,
                    source="folder",
                    identity=identity,
                    content=identity.content if identity is not None else None,
                    changed=identity.ctime_ns if identity is not None else 0,
                    claimed=record.version,
                    number=record.id,
                    place=record.place,
                    now=now,
                )
                yield seen, None
                continue
            key = f"spool:{record.id}"
            claims = () if record.version is None else (Claim("journal", record.version),)
            seen = Seen(
                key=key,
                name=record.name,
                source="spool",
                claimed=record.version,
                number=record.id,
                place=record.place,
                now=now,
            )
            opener = self._opener(record, "pushed before the restart", final=True)
            yield seen, Source(record.name, opener, claims, record.run, record.digest or None)

    def rests_on(self, checkpoint: Collection[str]) -> bool:
        """Whether all of a base checkpoint that is needed is part of this one."""
        return all(record.place in checkpoint for record in self._left if record.source == "checkpoint")

    def problems(self) -> tuple[str, ...]:
        """Name the shards that can't be read as they stand. Looks at every file; nothing is opened."""
        doing = () if self.doing is None else (self.doing,)
        found = []
        for record in (*doing, *self._left):
            try:
                path = self._path(record)
                _approve(record, Identity.of(path.lstat()))
            except OSError as error:
                found.append(f"{record.name}: {error.strerror}")
            except ShardNotReady as error:
                found.append(f"{record.name}: {error}")
        return tuple(map(printable, found))

    def _path(self, record: ShardRecord) -> Path:
        folder = self._folders.get(record.source)
        if not record.place:
            raise ShardNotReady("it was pushed and could not be kept: push a whole version")
        if folder is None:
            raise ShardNotReady(f"its source, {record.source}, is switched off in the settings")
        return folder / record.place

    def _opener(self, record: ShardRecord, what: str, *, final: bool = False) -> Callable[[], Payload]:
        def open_record() -> Payload:
            try:
                return self._open(self._path(record), lambda found: _approve(record, found))
            except ShardRejected as error:
                if final:
                    raise
                raise ShardNotReady(f"{what}, and can't be read: {error.detail}") from error
            except ShardNotReady as error:
                raise ShardNotReady(f"{what}: {error}") from error

        return open_record


def _approve(record: ShardRecord, found: Identity) -> None:
    """Whether a file is the one that was applied; with a digest its bytes will tell.

    Not by its device, which may be numbered anew when a machine starts, nor by ctime, which a chmod changes.
    """
    if record.digest or record.identity is None:
        return
    before = Identity(*record.identity)
    if (found.ino, found.size, found.mtime_ns) != (before.ino, before.size, before.mtime_ns):
        raise ShardNotReady("it is another file than the one that was applied; put that one back, with its times")
