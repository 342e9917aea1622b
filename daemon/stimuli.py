"""What the ledger is told (stimuli) and what it asks for (instructions): plain frozen data, no behaviour."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Literal

from . import events, wire
from .errors import Reason

# -------------------------------------------------------------------------------------------- stimuli


@dataclass(frozen=True, slots=True, kw_only=True)
class Stimulus:
    """Something that happened. ``now`` is in seconds on a clock that never steps back."""

    now: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardStimulus(Stimulus):
    """Something that happened to one shard. ``key`` is chosen by the source and unique among live shards."""

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen(ShardStimulus):
    """A source shows a shard: a file was seen (again), a checkpoint lists it, a client sent it.

    ``identity`` tells one file from another under the same name; ``content`` is the part of it that changes
    only when the bytes may have changed (a chmod or a hard link changes the identity alone).
    """

    name: str
    source: str
    held: int = 0
    """Bytes of ours that it occupies until it is done: 0 for files."""
    identity: Hashable = None
    content: Hashable = None
    changed: int = 0
    """Of a file: when it came or was changed last, in nanoseconds of its file system's clock (ctime)."""
    stream: bool = False
    """Whether its bytes come bit by bit, from a client, once it may be placed."""
    claimed: int | None = None
    """The version that its folder or its message names, before anybody has looked into it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone(ShardStimulus):
    """The file is no longer there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspected(ShardStimulus):
    """The shard is open, well-formed, and every tensor of it fits the slot table."""

    version: int | None
    slots: tuple[int, ...]
    skipped: int
    nbytes: int
    run: str | None = None
    """The trainer's incarnation."""
    identity: Hashable = None
    """The state in which its file was opened, as in `Seen`; ``content`` likewise. None: it is no file."""
    content: Hashable = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed(ShardStimulus):
    """Not a shard after all, but word of what a version consists of: an index, or a marker that it is all there."""

    version: int | None
    slots: tuple[int, ...] | None
    """None: whatever has come is all."""
    what: str
    """``index`` or ``STABLE``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotReady(ShardStimulus):
    """The file is still being written."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed(ShardStimulus):
    """The shard's tensors are in place, or wait in the fusion cache."""

    arrived: tuple[int, ...]
    """Slots that are in place now: this shard's, and those that had waited for it. Not yet those that wait."""
    fused: tuple[int, ...]
    """Layers whose pair became whole with this shard."""
    waiting: Mapping[int, str]
    """Slot index -> name, of this shard's tensors that wait for their partner."""
    pending: tuple[wire.PendingHalf, ...]
    """All halves that wait now; ``age`` counts from ``now``."""
    blocked: tuple[int, ...] = ()
    """Those of ``waiting`` that can't be placed without their partner."""
    duplicates: int
    serving: bool
    """The model can answer."""
    filled: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(ShardStimulus):
    """Nothing of the shard was applied. ``transient``: worth another try, the file changed meanwhile."""

    reason: Reason
    detail: str
    transient: bool = False
    unfilled: tuple[int, ...] = ()
    """Slots that lost what they held, because the copy over them could not be proven good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expired(Stimulus):
    """The fusion cache gave up some halves (``halves``), and this still waits."""

    halves: tuple[events.FusionExpired, ...]
    slots: tuple[tuple[int | None, int], ...]
    """(version, slot index) of each."""
    pending: tuple[wire.PendingHalf, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified(Stimulus):
    """What came of a version's verification."""

    version: int | None
    failure: str = ""
    """Why it may not go live; empty if it may."""
    fused: tuple[int, ...] = ()
    """Layers whose pair became whole by carrying the other half over."""
    carried: int = 0
    carried_bytes: int = 0
    tokens: tuple[int, ...] = ()
    """The canary's most likely next tokens; empty without one."""
    fingerprint: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed(Stimulus):
    """The staged version is live; or it could not be made live, for this reason."""

    version: int | None
    leased: int
    """Requests that still read the weights of the one before."""
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack(Stimulus):
    """The version before is live again; or it could not be done, for this reason."""

    failure: str = ""
    leased: int = 0
    ticket: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Freed(Stimulus):
    """The last request that read the weights of the version before has ended: they may be written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordered(Stimulus):
    """A trainer or an operator wants something done with a version."""

    ticket: str
    """Whom to answer."""
    order: Literal["commit", "rollback", "abort"]
    version: int | None = None
    slots: tuple[int, ...] | None = None
    """With ``commit`` from a trainer: all that the version brings; None: whatever has come."""
    unknown: tuple[str, ...] = ()
    """Names among them that the model does not have."""
    by_trainer: bool = False
    run: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick(Stimulus):
    """Time has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop(Stimulus):
    """The daemon is asked to stop: what is being copied ends, nothing new begins."""


# --------------------------------------------------------------------------------------- instructions


@dataclass(frozen=True, slots=True)
class Inspect:
    """Open the shard and check it; answer with Inspected, NotReady or Refused."""

    key: str


@dataclass(frozen=True, slots=True)
class Place:
    """Copy the inspected shard into the model; answer with Placed or Refused."""

    key: str
    version: int | None


@dataclass(frozen=True, slots=True)
class Compare:
    """The shard belongs to the version that is live: see whether it says the same; answer with Placed or Refused."""

    key: str
    version: int | None


@dataclass(frozen=True, slots=True)
class Release:
    """Close the shard, if it is open, and forget what was kept of it."""

    key: str


@dataclass(frozen=True, slots=True)
class DropVersion:
    """Give up what a version has staged and all of its halves that wait; answer with Expired."""

    version: int | None


@dataclass(frozen=True, slots=True)
class Verify:
    """Carry over what the version did not bring, and see whether it is fit to go live; answer with Verified."""

    version: int | None


@dataclass(frozen=True, slots=True)
class Commit:
    """Make the staged version live; answer with Committed."""

    version: int | None


@dataclass(frozen=True, slots=True)
class Rollback:
    """Make the version before live again; answer with RolledBack."""

    ticket: str


@dataclass(frozen=True, slots=True)
class NewRun:
    """A trainer has begun to count anew."""


@dataclass(frozen=True, slots=True)
class Retire:
    """The files of a version may go, as far as the settings say so."""

    version: int
    keys: tuple[tuple[str, Hashable], ...]
    """Shards of the folder that were applied, each with the identity that it had then."""


@dataclass(frozen=True, slots=True)
class Answered:
    """Answer an order."""

    ticket: str
    failure: str
    detail: str


@dataclass(frozen=True, slots=True)
class Publish:
    """Send an event to all subscribers."""

    event: events.AnyEvent


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer the client that sent the shard."""

    key: str
    answer: wire.Answer


Instruction = (
    Inspect
    | Place
    | Compare
    | Release
    | DropVersion
    | Verify
    | Commit
    | Rollback
    | NewRun
    | Retire
    | Publish
    | Reply
    | Answered
)
