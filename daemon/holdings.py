"""On which shard each slot's bytes rest: live, staged, and those of the version that can be gone back to. Pure.

Versions chain: a partial one leaves most slots resting on shards that came long before it. So what a restart needs, and
what may be thrown away, is a question about slots, never about versions.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import NamedTuple

from .records import Held, StandingOf, runs_of


class File(NamedTuple):
    """A shard that lies in the drop folder."""

    key: str
    version: int
    identity: Hashable


class Holdings:
    """Shards by number, and the slots that rest on them.

    Attributes:
        live: Slot -> shard, of what answers now.
        staged: The same, of what the staged version has brought.
        retired: The same, of the version before, while it can be gone back to; None: it can't.
    """

    def __init__(self) -> None:
        self.live: dict[int, int] = {}
        self.staged: dict[int, int] = {}
        self.retired: dict[int, int] | None = None
        self._files: dict[int, File] = {}
        """Files that retention may want to remove one day: shard -> file."""
        self._known: dict[int, StandingOf] = {}
        """Shards that are not over, and how they were last told to stand."""
        self._told: dict[int, int] = {}
        """Shards that slots of the live version rest on -> how many when that was last told."""

    def recall(self, shard: int, slots: Iterable[int]) -> None:
        """A shard on which live slots rest, as it was written down."""
        taken = dict.fromkeys(slots, shard)
        self.live |= taken
        self._known[shard] = "live"
        self._told[shard] = len(taken)

    def bring(self, shard: int, slots: Iterable[int], *, again: bool, file: File | None = None) -> tuple[int, ...]:
        """The staged version has got a shard. Returns the slots that rest on it now.

        Args:
            shard: Its number.
            slots: Those that it has brought.
            again: Whether slots that other shards have brought rest on this one now: so it is in the rolling version,
                while in a numbered one the bytes are the same.
            file: Where it lies, if it is a file of a numbered version.
        """
        staged = self.staged
        taken = tuple(slots) if again else tuple(slot for slot in slots if slot not in staged)
        staged |= dict.fromkeys(taken, shard)
        self._known[shard] = "staged"
        if file is not None:
            self._files[shard] = file
        return taken

    def note(self, shard: int, file: File) -> None:
        """A file belongs to a numbered version, though no slot rests on it: an index, a marker."""
        self._files[shard] = file

    def take_back(self, slots: Iterable[int]) -> None:
        """The staged version has lost these slots."""
        for slot in slots:
            self.staged.pop(slot, None)

    def commit(self) -> None:
        """What was staged is live, and stands on what was live before where it has brought nothing."""
        self.retired = self.live
        self.live = self.live | self.staged
        self.staged = {}

    def rollback(self) -> None:
        """The version before is live again."""
        assert self.retired is not None
        self.live, self.retired = self.retired, self.live

    def drop_staged(self, version: int | None) -> None:
        """The staged version has been given up. Its files stay: somebody may want to know what was wrong with them."""
        self.staged = {}
        self._files = {shard: file for shard, file in self._files.items() if file.version != version}

    def forget_retired(self) -> None:
        """There is no way back any more."""
        self.retired = None

    def settle(self) -> tuple[list[Held], list[int]]:
        """Return what has changed since the last time: what is to be written down, and the shards that are over."""
        resting: dict[int, list[int]] = {}
        for slot, shard in self.live.items():
            resting.setdefault(shard, []).append(slot)
        staged = set(self.staged.values())
        kept = set(self.retired.values()) if self.retired is not None else set()
        told, over = [], []
        for shard, before in list(self._known.items()):
            slots = resting.get(shard)
            if slots is not None:
                if before != "live" or self._told.get(shard) != len(slots):
                    told.append(Held(id=shard, standing="live", slots=runs_of(slots)))
                self._known[shard], self._told[shard] = "live", len(slots)
            elif shard in staged:
                continue
            elif shard in kept:  # its bytes may be needed again, though nothing rests on them at the moment
                if self._told.pop(shard, 0) or before != "live":
                    told.append(Held(id=shard, standing="live", slots=()))
                self._known[shard] = "live"
            else:
                del self._known[shard]
                self._told.pop(shard, None)
                told.append(Held(id=shard, standing="over"))
                over.append(shard)
        return told, over

    def needed(self) -> set[int]:
        """Return the shards on which anything rests, now or after a rollback."""
        return {*self.live.values(), *self.staged.values(), *(self.retired or {}).values()}

    def removable(self, kept: set[int | None]) -> dict[int, list[File]]:
        """Return, by version, the files on which nothing rests any more; they are told once.

        Args:
            kept: Versions whose files stay all the same: those that are live, staged, or can be gone back to.
        """
        resting = self.needed()
        needed = {file.version for shard, file in self._files.items() if shard in resting}
        found: dict[int, list[File]] = {}
        for shard, file in list(self._files.items()):
            if file.version not in needed and file.version not in kept:
                found.setdefault(file.version, []).append(file)
                del self._files[shard]
        return found
