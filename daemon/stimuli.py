"""What the ledger is told (stimuli) and what it asks for (instructions): plain frozen data, no behaviour."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

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
    duplicates: int
    serving: bool
    """Every slot is filled and every pair whole: the model can answer."""
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
class Release:
    """Close the shard, if it is open, and forget what was kept of it."""

    key: str


@dataclass(frozen=True, slots=True)
class DropVersion:
    """Give up all halves of a version that wait; answer with Expired."""

    version: int


@dataclass(frozen=True, slots=True)
class Publish:
    """Send an event to all subscribers."""

    event: events.AnyEvent


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer the client that sent the shard."""

    key: str
    answer: wire.Answer


Instruction = Inspect | Place | Release | DropVersion | Publish | Reply
