"""The ledger's book-keeping: what has to be written down, and what may be thrown away. Pure.

The ledger tells it of outcomes; whatever else there is to know it sees by looking at the versions after each step. So
no path through the rollout can forget to tell it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Protocol

from .errors import Reason
from .holdings import File, Holdings
from .progress import ROLLING, Version
from .records import Entry, Memory, OpenVersion, ShardRecord, Standing, StandingOf, runs_of, slots_of
from .roster import Versions
from .stimuli import Discard, Instruction, Record, Retire

RETRIED = frozenset(
    {
        Reason.VANISHED,
        Reason.STOPPING,
        Reason.INTERNAL_ERROR,
        Reason.MODEL_BUSY,
        Reason.CHANGED_WHILE_READING,
        Reason.UNREADABLE,
        Reason.CLIENT_SILENT,
    }
)
"""Reasons that need not hold after a restart."""


class Shard(Protocol):
    """What is written down of a shard."""

    number: int
    key: str
    name: str
    source: str
    place: str
    identity: Hashable
    digest: str
    version: int | None
    run: str | None
    nbytes: int
    slots: tuple[int, ...]


class Books:
    """What is known, as far as it has to outlive the process."""

    def __init__(self) -> None:
        self.holdings = Holdings()
        self._next = 1
        self._order = 0
        self._entries: list[Entry] = []
        self._over: list[int] = []
        """Shards of which nothing has come to rest."""
        self._staged: Version | None = None
        self._told = Standing()
        self._revision: tuple[object, ...] = ()
        self._moved = False
        """Whether slots have come to rest on other shards."""

    def number(self) -> int:
        """Return a number that no shard has had."""
        self._next += 1
        return self._next - 1

    def recall(self, memory: Memory) -> None:
        """Take over what was written down before."""
        for shard in memory.shards:
            self._next = max(self._next, shard.id + 1)
            self._order = max(self._order, shard.order)
            if shard.standing == "live":  # without slots: it was kept for a rollback, and is over now
                self.holdings.recall(shard.id, slots_of(shard.slots))
            numbered = shard.version is not ROLLING and shard.source == "folder"
            if numbered and shard.standing == "live" and shard.version is not None:
                self.holdings.note(shard.id, File(shard.key, shard.version, shard.identity))
        self._told = memory.standing
        self._moved = True

    # ------------------------------------------------------------------------------- what the ledger tells

    def applied(self, shard: Shard, *, staged: bool) -> None:
        """A shard's tensors are in place.

        Args:
            shard: Which.
            staged: Whether in the staged version; else it was compared with the live one.
        """
        if shard.source == "journal":  # it stands there already
            return
        slots: tuple[int, ...] = ()
        if staged:
            file = None
            if shard.source == "folder" and shard.version is not None:
                file = File(shard.key, shard.version, shard.identity)
            again = shard.version is ROLLING
            slots = self.holdings.bring(shard.number, shard.slots, again=again, file=file)
        elif shard.identity is None:
            self._over.append(shard.number)
            return
        self._moved = self._moved or not slots
        self._write(shard, "staged" if slots else "over", slots)

    def listed(self, shard: Shard) -> None:
        """An index or a marker of a version has been taken in. It is read again after a restart, and not kept."""
        if shard.version is not None:
            self.holdings.note(shard.number, File(shard.key, shard.version, shard.identity))

    def rejected(self, shard: Shard, reason: Reason, detail: str) -> None:
        """A shard has been refused."""
        if shard.source == "journal" or (shard.source == "spool" and reason in RETRIED):
            return  # it stands there already, and the next start tries it again: it was acknowledged
        self._write(shard, "over", (), reason.value, detail)
        if shard.source == "spool":
            self._over.append(shard.number)

    def lost(self, slots: Iterable[int]) -> None:
        """The staged version has lost slots that it had."""
        self.holdings.take_back(slots)

    def committed(self) -> None:
        """The staged version is live."""
        self.holdings.commit()
        self._staged, self._moved = None, True

    def rolled_back(self) -> None:
        """The version before is live again."""
        self.holdings.rollback()
        self._moved = True

    # ------------------------------------------------------------------------------- what comes of it

    def keep(self, versions: Versions, out: list[Instruction]) -> None:
        """After each step: see what has changed, and say what is to be written down and thrown away."""
        if versions.staged is not self._staged:
            if self._staged is not None:
                self.holdings.drop_staged(self._staged.number)
                self._moved = True
            self._staged = versions.staged
        if versions.retired is None and self.holdings.retired is not None:
            self.holdings.forget_retired()
            self._moved = True
        over, self._over = self._over, []
        if self._moved:
            self._moved = False
            held, ended = self.holdings.settle()
            self._entries += held
            over += ended
            kept = {v.number for v in (versions.staged, versions.serving, versions.retired) if v is not None}
            kept |= versions.known.keys()
            for version, files in self.holdings.removable(kept).items():
                out.append(Retire(version, tuple((file.key, file.identity) for file in files)))
        revision = versions.revision()
        if revision != self._revision:
            self._revision = revision
            standing = self._standing(versions)
            if standing != self._told:
                self._told = standing
                self._entries.append(standing)
        if self._entries:
            out.append(Record(tuple(self._entries)))
            self._entries = []
        if over:
            out.append(Discard(tuple(over)))

    def _write(
        self, shard: Shard, standing: StandingOf, slots: Iterable[int], reason: str = "", detail: str = ""
    ) -> None:
        self._order += 1
        self._entries.append(
            ShardRecord(
                id=shard.number,
                order=self._order,
                key=shard.key,
                name=shard.name,
                source="socket" if shard.source == "spool" else shard.source,
                place=shard.place,
                identity=tuple(shard.identity) if isinstance(shard.identity, tuple) else None,
                digest=shard.digest,
                version=shard.version,
                run=shard.run,
                nbytes=shard.nbytes,
                reason=reason,
                detail=detail,
                standing=standing,
                slots=runs_of(slots),
            )
        )

    def _standing(self, versions: Versions) -> Standing:
        told = self._told
        # While what was live is being restored, it is still what a restart has to come back to.
        live, ready = (versions.live, True) if versions.ready else (told.live, told.ready)
        if versions.staged is not None and versions.staged.restored and versions.staged.past:
            live = ROLLING  # its number stands for nothing that may come
        return Standing(
            ready=ready,
            live=live,
            run=versions.run,
            past_runs=versions.past_runs(),
            floor=versions.numbered_floor(),
            ended=tuple((number, state, why) for number, (state, why) in versions.ended.items()),
            open=tuple(
                OpenVersion(
                    number=version.number,
                    promised=None if version.promised is None else runs_of(version.promised),
                    closed=version.closed,
                    promise=version.promise,
                    approved=version.approved,
                )
                for version in versions.known.values()
                if version.number is not ROLLING and (version.promise or version.approved)
            ),
        )
