"""The events that the daemon publishes: one frozen Struct each, with its topic and frames.

Frames on the wire: ``topic | sequence, 8 bytes big-endian | JSON``. A topic ends in a slash, since a ZeroMQ
subscription is a prefix: without it, ``layer.fused/3`` would also hear of layer 30. Pure: no clock or socket.
"""

from __future__ import annotations

import struct

import msgspec

from .errors import ProtocolError, printable

_SEQUENCE = struct.Struct(">Q")


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", omit_defaults=False):
    """Fields that every event has.

    ``boot``, ``seq`` and ``time`` are filled in by the publisher at the moment of sending.
    """

    boot: str = ""
    """Incarnation of the daemon: another value means that its memory of earlier events is gone."""
    seq: int = 0
    """Grows by one with each event of a boot; a gap means that events were lost on the way."""
    time: float = 0.0
    """Unix time in seconds, for people; order is told by ``seq``."""
    version: int | None = None
    """The weights' version that the event is about; None is the rolling version."""
    message: str = ""
    """The same for a person to read: ``layer 3 fused``."""

    @property
    def topic(self) -> str:
        """The topic that it is published under: its tag and a slash."""
        return f"{self.__struct_config__.tag}/"


class _LayerEvent(Event, frozen=True, kw_only=True):
    layer: int

    @property
    def topic(self) -> str:
        return f"{self.__struct_config__.tag}/{self.layer}/"


class LayerFused(_LayerEvent, frozen=True, kw_only=True, tag="layer.fused"):
    """Both halves of every leaf of the layer's fused_qkv_a_proj_with_mqa are in place. Once per version."""


class LayerLoaded(_LayerEvent, frozen=True, kw_only=True, tag="layer.loaded"):
    """Every slot of the layer has been filled by this version. Once per version."""


class VersionComplete(Event, frozen=True, kw_only=True, tag="version.complete"):
    """All that the version brings is in place: every slot of the model, or what its index or its commit named."""

    cause: str = ""
    """``coverage``, ``index``, ``commit`` or ``STABLE``."""


class VersionIncomplete(Event, frozen=True, kw_only=True, tag="version.incomplete"):
    """The version can't go live as it is, though it should have been complete, or though it has stopped growing."""

    missing: tuple[str, ...]
    """Names of tensors, the first hundred."""
    missing_count: int
    cause: str
    """``index``, ``commit`` or ``STABLE``: what said that it was complete. ``stalled``: it has stopped growing."""


class VersionVerified(Event, frozen=True, kw_only=True, tag="version.verified"):
    """Its weights are finite, and the canary has run on them."""

    carried: int
    """Slots that were carried over from the live version, since their bytes differed; ``carried_bytes``: of those."""
    carried_bytes: int
    tokens: tuple[int, ...] = ()
    """What the canary's prompt would go on with, the most likely first; empty without a canary."""
    fingerprint: str = ""
    """A hash of the canary's logits: alike only for alike weights, on the same kind of machine."""
    seconds: float


class VersionLive(Event, frozen=True, kw_only=True, tag="version.live"):
    """The model answers with this version from the next forward pass on."""


class VersionRolledBack(Event, frozen=True, kw_only=True, tag="version.rolled_back"):
    """``version`` is live again, byte for byte as it was."""

    previous: int | None
    """The version that it takes the place of."""


class VersionAborted(Event, frozen=True, kw_only=True, tag="version.aborted"):
    """The version was given up, by order or because it was not fit; what is live was not touched."""

    cause: str


class VersionSuperseded(Event, frozen=True, kw_only=True, tag="version.superseded"):
    """The version was given up before it was live, for a newer one; what is live was not touched."""

    cause: str


class ModelReady(Event, frozen=True, kw_only=True, tag="model.ready"):
    """Every slot is filled and every pair is whole: ``generate`` answers from now on."""


class ShardApplied(Event, frozen=True, kw_only=True, tag="shard.applied"):
    """Every tensor of the shard is in place, or waits in the fusion cache (``waiting``)."""

    shard: str
    source: str
    tensors: int
    skipped: int
    waiting: tuple[str, ...] = ()
    nbytes: int
    seconds: float


class ShardRefused(Event, frozen=True, kw_only=True, tag="shard.rejected"):
    """Nothing of the shard was applied."""

    shard: str
    source: str
    reason: str
    detail: str


class FusionExpired(Event, frozen=True, kw_only=True, tag="fusion.expired"):
    """A waiting half was given up: its partner did not come in time, or room was needed."""

    layer: int
    tensor: str
    age: float
    """Seconds that it has waited."""
    nbytes: int
    cause: str
    """``age``, ``bytes`` or ``superseded``."""


class Heartbeat(Event, frozen=True, kw_only=True, tag="daemon.heartbeat"):
    """The daemon is alive. Also tells a subscriber, by ``seq``, whether it missed anything."""

    ready: bool


class Stopping(Event, frozen=True, kw_only=True, tag="daemon.stopping"):
    """The last event of a boot: what still waited is in the message and in ``waiting``."""

    waiting: tuple[str, ...] = ()


AnyEvent = (
    LayerFused
    | LayerLoaded
    | VersionComplete
    | VersionIncomplete
    | VersionVerified
    | VersionLive
    | VersionRolledBack
    | VersionAborted
    | VersionSuperseded
    | ModelReady
    | ShardApplied
    | ShardRefused
    | FusionExpired
    | Heartbeat
    | Stopping
)

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(AnyEvent)


def encode(event: Event) -> list[bytes]:
    """Turn an event into its three frames: topic, sequence, JSON."""
    return [event.topic.encode(), _SEQUENCE.pack(event.seq), _encoder.encode(event)]


def decode(frames: list[bytes]) -> AnyEvent:
    """Turn three frames back into an event.

    Raises:
        ProtocolError: The frames are not those of an event; the message says which and why.
    """
    if len(frames) != 3:  # noqa: PLR2004 - topic, sequence, JSON
        raise ProtocolError(f"an event has 3 frames (topic, sequence, JSON), not {len(frames)}")
    topic, sequence, body = frames
    if len(sequence) != _SEQUENCE.size:
        raise ProtocolError(f"an event's sequence frame has 8 bytes, not {len(sequence)}")
    try:
        event = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"event {printable(topic, 60)}: {printable(error)}") from error
    if event.seq != _SEQUENCE.unpack(sequence)[0] or event.topic.encode() != topic:
        raise ProtocolError(f"event {printable(topic, 60)}: its frames contradict each other")
    return event
