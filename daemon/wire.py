"""Requests and answers of the ingest and control sockets, typed. Pure: bytes in, Structs out.

Every header is one JSON frame; unknown fields are refused, nothing is ever unpickled. Ingest: ``header`` and,
for ``put``, one payload frame that holds a whole safetensors shard. Control: one frame each way.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec

from .errors import ProtocolError, printable
from .events import AnyEvent
from .lifecycle import VersionState

HEADER_LIMIT = 8 * 1024 * 1024
"""Longest header of an ingest request, in bytes: a commit that lists all tensors of DeepSeek-V3 has 6 MB."""
CONTROL_LIMIT = 4 * 1024 * 1024
"""Longest control request, in bytes: a prompt of 131,072 token ids fits."""

Version = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Label = Annotated[str, msgspec.Meta(max_length=200)]
Xxh3 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
Names = Annotated[list[Annotated[str, msgspec.Meta(max_length=500)]], msgspec.Meta(min_length=1, max_length=200_000)]
TokenIds = Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(min_length=1)]


class _Request(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", forbid_unknown_fields=True):
    pass


# ---------------------------------------------------------------------------------------------- ingest


class Hello(_Request, frozen=True, kw_only=True, tag="hello"):
    """Ask for the limits before sending anything."""


class Put(_Request, frozen=True, kw_only=True, tag="put"):
    """One whole shard in the payload frame that follows."""

    version: Version | None = None
    """The trainer's step; None leaves it to the shard's metadata, else it is the rolling version."""
    name: Label | None = None
    """What to call the shard in answers, events and logs."""
    run: Label | None = None
    """The trainer's incarnation: a new one restarts the numbering of versions."""
    xxh3: Xxh3 | None = None
    """xxh3-128 of the shard's data section, as 32 hexadecimal digits: then the bytes are checked against it."""


class Begin(_Request, frozen=True, kw_only=True, tag="begin"):
    """A shard will come in chunks; the frame that follows is its head: 8 bytes of length and the JSON.

    Send nothing before `Credit` says so. Only over a DEALER: a REQ could not hear of credit.
    """

    stream: Label
    """What this client calls it; comes back in each `Credit` and in the `Answer`."""
    nbytes: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    """Size of the data section, which is what the chunks bring."""
    version: Version | None = None
    name: Label | None = None
    run: Label | None = None
    xxh3: Xxh3 | None = None
    shared: bool = False
    """Whether the chunks will lie in the shared segment."""


class Chunk(_Request, frozen=True, kw_only=True, tag="chunk"):
    """The next bytes of a shard's data section: in the frame that follows, or in a slot of the shared segment."""

    stream: Label
    offset: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    """Where they begin in the data section: chunks come in order, without holes."""
    slot: Annotated[int, msgspec.Meta(ge=0)] | None = None
    nbytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    """With ``slot``: how many of its bytes."""


class Cancel(_Request, frozen=True, kw_only=True, tag="cancel"):
    """The rest of a shard will not come; its answer is ``rejected``."""

    stream: Label


class Commit(_Request, frozen=True, kw_only=True, tag="commit"):
    """All of a version has been sent, or these are the tensors that it consists of; the rest is carried over."""

    version: Version
    tensors: Names | None = None
    """None: whatever has come when the last shard that is on its way is in place."""
    run: Label | None = None


class Abort(_Request, frozen=True, kw_only=True, tag="abort"):
    """Give a version up."""

    version: Version
    run: Label | None = None


IngestRequest = Hello | Put | Begin | Chunk | Cancel | Commit | Abort


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="welcome"):
    """Answer to ``hello``."""

    boot: str
    max_put_bytes: int
    chunk_bytes: int = 0
    shared: str = ""
    """Path of the shared segment, cut into slots of ``chunk_bytes``; empty: there is none."""


class Credit(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="credit"):
    """So many more chunks of a shard may be sent, each of ``chunk_bytes`` at most."""

    stream: str
    chunks: int = 0
    """Chunks that may come as frames."""
    slots: tuple[int, ...] = ()
    """Slots of the shared segment that may be written, if the client uses it: then ``chunks`` is 0."""


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="answer"):
    """Answer to ``put``.

    ``applied``: its tensors are in place or named in ``waiting``. ``accepted``: taken, its turn comes later.
    ``rejected``: nothing changed; ``reason`` is from the closed list. ``busy``: nothing taken, send it again.
    """

    status: Literal["applied", "accepted", "rejected", "busy"]
    shard: str = ""
    version: int | None = None
    reason: str | None = None
    detail: str = ""
    tensors: int = 0
    nbytes: int = 0
    fused: tuple[int, ...] = ()
    """Layers whose pair this shard completed."""
    waiting: tuple[str, ...] = ()
    """Tensors of this shard that wait for their partner."""
    durability: Literal["spool", "memory"] | None = None
    """Of a pushed shard that was applied: whether it survives a restart (``spool``) or has to be pushed again."""
    stream: str | None = None
    """What the client called the shard in ``begin``."""


# --------------------------------------------------------------------------------------------- control


class GetStatus(_Request, frozen=True, kw_only=True, tag="status"):
    """Ask for a `Status`."""


class GetSnapshot(_Request, frozen=True, kw_only=True, tag="snapshot"):
    """Ask for a `Snapshot`: the full state at a sequence number."""


class GetReplay(_Request, frozen=True, kw_only=True, tag="replay"):
    """Ask for the events with a sequence number of ``since`` or more, as far as they are remembered."""

    since: Annotated[int, msgspec.Meta(ge=0)]


class GetPending(_Request, frozen=True, kw_only=True, tag="pending"):
    """Ask for the halves that wait."""


class CommitVersion(_Request, frozen=True, kw_only=True, tag="commit"):
    """Let a version go live: a verified one at once, an open one as soon as what it brings is in place."""

    version: Version | None = None
    """None: the one that is being staged."""


class RollbackVersion(_Request, frozen=True, kw_only=True, tag="rollback"):
    """Make the version before live again."""


class AbortVersion(_Request, frozen=True, kw_only=True, tag="abort"):
    """Give up a version that is not live."""

    version: Version | None = None
    """None: the one that is being staged."""


class GetVersions(_Request, frozen=True, kw_only=True, tag="versions"):
    """Ask for all versions that anything is known of."""


class Generate(_Request, frozen=True, kw_only=True, tag="generate"):
    """Continue token ids greedily with the live weights."""

    token_ids: TokenIds
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 24
    timeout: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 60.0
    """Seconds after which the daemon gives up and says so."""


class GetDigest(_Request, frozen=True, kw_only=True, tag="digest"):
    """Ask for the digest of all live weights: it reads every byte of them."""

    timeout: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 60.0
    """Seconds after which the daemon gives up and says so."""


ControlRequest = (
    GetStatus
    | GetSnapshot
    | GetReplay
    | GetPending
    | GetVersions
    | CommitVersion
    | RollbackVersion
    | AbortVersion
    | Generate
    | GetDigest
)


class PendingHalf(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor that waits for its partner."""

    version: int | None
    layer: int
    tensor: str
    missing: tuple[str, ...]
    """Tensors that the pair still lacks."""
    age: float
    """Seconds."""
    nbytes: int
    owned: bool
    """True: the fusion cache holds a copy; False: it already lies in its rows of the parameter."""


class RejectedShard(msgspec.Struct, frozen=True, kw_only=True):
    """One shard that was refused, kept for `status` (the newest ones)."""

    shard: str
    source: str
    reason: str
    detail: str
    time: float


class WaitingShard(msgspec.Struct, frozen=True, kw_only=True):
    """One shard that is known but not applied yet, and why."""

    shard: str
    source: str
    state: str
    why: str = ""


class Layers(msgspec.Struct, frozen=True, kw_only=True):
    """Layer numbers, sorted. ``fused`` is empty for a model without q_lora_rank: it has no pairs."""

    total: int
    fusable: int
    """How many layers have a pair to fuse."""
    fused: tuple[int, ...]
    loaded: tuple[int, ...]
    waiting: tuple[int, ...]


class VersionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How far one version has come."""

    version: int | None
    state: VersionState
    staged: bool = False
    """Whether its shards are being placed; of the versions that are not live or over, one is."""
    filled: int = 0
    """Slots that this version has filled, of ``Status.slots_total``."""
    waiting_shards: int = 0
    """Its shards that wait for its turn."""
    missing: tuple[str, ...] = ()
    """Names of tensors that it lacks to be complete, the first hundred."""
    missing_count: int = 0
    stalled: bool = False
    """It has not grown for ``versions.stale_after``."""
    idle: float = 0.0
    """Seconds since it last grew."""
    detail: str = ""
    """Why it ended, or what it waits for."""


class Status(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="status"):
    """What the daemon is and does, for `fusewire status` and for monitoring."""

    boot: str
    pid: int
    state: Literal["starting", "not_ready", "ready", "stopping"]
    uptime: float
    model: str
    """Architecture and size: ``deepseek_v2, 3 layers, float32``."""
    mode: str
    """``two generations``, one live and one staged; or ``in place``: one, updated between forward passes."""
    version: int | None
    """The live numbered version; None before there is one."""
    versions: tuple[VersionStatus, ...]
    run: str | None
    """The trainer's incarnation, if it has told."""
    staging_waits: str
    """Why nothing new can be staged now; empty if it can."""
    slots_filled: int
    slots_total: int
    layers: Layers
    pending: tuple[PendingHalf, ...]
    rejected: tuple[RejectedShard, ...]
    waiting_shards: tuple[WaitingShard, ...]
    counters: dict[str, float]
    """Totals since boot; keys as in the metrics: shards_applied, shards_rejected, bytes_applied, …"""
    throughput: float
    """Bytes per second applied over the last minute of activity."""
    health: dict[str, str]
    """Part of the daemon -> ``ok`` or what is wrong with it."""
    notes: tuple[str, ...] = ()
    """What an operator should know: polling instead of inotify, no read leases, …"""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="snapshot"):
    """The full state at ``seq``: apply the events after it and nothing is missed."""

    boot: str
    seq: int
    ready: bool
    version: int | None
    fused: tuple[tuple[int, int | None], ...]
    """(layer, version that fused it), newest version for each layer."""
    loaded: tuple[tuple[int, int | None], ...]
    pending: tuple[PendingHalf, ...]
    rejected: tuple[RejectedShard, ...]


class Replay(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="replay"):
    """Remembered events, oldest first. ``complete`` is False when some have already been forgotten."""

    boot: str
    complete: bool
    events: tuple[AnyEvent, ...]


class Pending(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="pending"):
    """Answer to ``pending``."""

    pending: tuple[PendingHalf, ...]


class Generated(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="generated"):
    """New tokens, without the prompt."""

    token_ids: tuple[int, ...]
    version: int | None
    """The version that was live when the request began: all tokens are its own."""
    seconds: float


class Digest(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="digest"):
    """Answer to ``digest``: alike for alike weights, whichever way they came, on any host and device."""

    digest: str
    """blake2b-128 over all parameters, in the order of their names, as 32 hexadecimal digits."""
    version: int | None
    nbytes: int
    seconds: float


class VersionList(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="versions"):
    """Answer to ``versions``."""

    live: int | None
    staging_waits: str
    versions: tuple[VersionStatus, ...]


class Done(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="done"):
    """An order was carried out, or will be; ``detail`` says which."""

    detail: str


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="error"):
    """The request was not carried out; ``error`` names the thing, the reason and the remedy."""

    error: str
    detail: tuple[str, ...] = ()


ControlReply = Status | Snapshot | Replay | Pending | Generated | Digest | VersionList | Done | Failed

IngestReply = Answer | Welcome | Credit

_Message = TypeVar("_Message")
_encoder = msgspec.json.Encoder()
_ingest_requests: msgspec.json.Decoder[IngestRequest] = msgspec.json.Decoder(IngestRequest)
_ingest_replies: msgspec.json.Decoder[IngestReply] = msgspec.json.Decoder(IngestReply)
_control_requests: msgspec.json.Decoder[ControlRequest] = msgspec.json.Decoder(ControlRequest)
_control_replies: msgspec.json.Decoder[ControlReply] = msgspec.json.Decoder(ControlReply)


def encode(message: msgspec.Struct) -> bytes:
    """Turn any request or answer of this module into its JSON frame."""
    return _encoder.encode(message)


def decode_ingest_request(frame: bytes) -> IngestRequest:
    """Read an ingest header. Raises ProtocolError, saying what is wrong with it."""
    return _decode(_ingest_requests, frame, "ingest request", HEADER_LIMIT)


def decode_ingest_reply(frame: bytes) -> IngestReply:
    """Read the answer to an ingest request. Raises ProtocolError, saying what is wrong with it."""
    return _decode(_ingest_replies, frame, "ingest answer")


def decode_control_request(frame: bytes) -> ControlRequest:
    """Read a control request. Raises ProtocolError, saying what is wrong with it."""
    return _decode(_control_requests, frame, "control request", CONTROL_LIMIT)


def decode_control_reply(frame: bytes) -> ControlReply:
    """Read a control reply. Raises ProtocolError, saying what is wrong with it."""
    return _decode(_control_replies, frame, "control reply")


def _decode(decoder: msgspec.json.Decoder[_Message], frame: bytes, what: str, limit: int | None = None) -> _Message:
    if limit is not None and len(frame) > limit:
        raise ProtocolError(f"{what} of {len(frame)} bytes: at most {limit} are allowed")
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{what}: {printable(error)}") from error
