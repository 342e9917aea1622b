"""What can go wrong, as types: whose fault it is and what to do stand in each message.

Rule: nothing in the core raises anything else on purpose. Foreign exceptions (OSError, zmq.ZMQError,
msgspec.ValidationError) are translated where they occur, at the edge that owns the foreign library.
"""

from __future__ import annotations

import enum

DETAIL_LIMIT = 200
"""Longest detail, in characters, that leaves the daemon in an answer or an event."""


class Reason(enum.StrEnum):
    """The closed list of reasons for which a shard is rejected. Values are part of the wire protocol."""

    MALFORMED_HEADER = "malformed_header"
    """The safetensors header breaks the format: JSON, offsets, holes, overlaps, sizes, duplicate keys."""
    TRUNCATED = "truncated"
    """Shorter than its own header says, and nobody is writing to it any more."""
    TRAILING_BYTES = "trailing_bytes"
    """Longer than its own header says."""
    TOO_LARGE = "too_large"
    """Over a limit of the settings; the detail names the limit."""
    UNKNOWN_TENSOR = "unknown_tensor"
    """A tensor name that is neither in the slot table nor among those known to be skipped."""
    WRONG_SHAPE = "wrong_shape"
    WRONG_DTYPE = "wrong_dtype"
    NO_KNOWN_TENSOR = "no_known_tensor"
    """Nothing in the shard belongs to this model."""
    NOT_A_FILE = "not_a_file"
    """A link, directory, device or pipe under a shard's name."""
    UNREADABLE = "unreadable"
    """Permission or I/O error; the detail says which, and the remedy."""
    VANISHED = "vanished"
    """Deleted or moved away before it was read."""
    CHANGED_WHILE_READING = "changed_while_reading"
    STALE_VERSION = "stale_version"
    """Older than the version that is live."""
    VERSION_CLOSED = "version_closed"
    """The version is live, and was complete without this tensor: changed weights need a new version."""
    DIGEST_MISMATCH = "digest_mismatch"
    """The bytes are not those that the sender's digest speaks of."""
    NOT_FINITE = "not_finite"
    """NaN or infinity in weights that would be applied in place."""
    MALFORMED_INDEX = "malformed_index"
    """An index of shards that can't be read, or that names tensors that the model does not have."""
    VERSION_DISAGREEMENT = "version_disagreement"
    """Message header, safetensors metadata and folder name do not agree on the version."""
    CONFLICT = "conflict"
    """Other bytes for a slot that this numbered version has already filled."""
    CLIENT_SILENT = "client_silent"
    """A client that sends a shard in chunks has sent nothing for too long."""
    MALFORMED_MESSAGE = "malformed_message"
    """The message around the shard breaks the wire protocol."""
    MODEL_BUSY = "model_busy"
    """Forward passes kept the weights for too long, again and again."""
    FUSION_CACHE_FULL = "fusion_cache_full"
    """A half that has to wait is larger than the whole bound of the fusion cache."""
    STOPPING = "stopping"
    """The daemon is shutting down; send it again to its successor."""
    INTERNAL_ERROR = "internal_error"
    """A defect of ours; the log has the traceback."""


class FusewireError(Exception):
    """Base of every error that fusewire raises on purpose."""


class SettingsError(FusewireError):
    """The settings file is missing, malformed or holds an impossible value. The message names the key."""


class KeyFileError(FusewireError):
    """A key file or a folder of them can't be used. The message names it, the reason and the remedy."""


class StartError(FusewireError):
    """The daemon can't start: an endpoint is in use, a folder is missing, a checkpoint is unusable."""


class ShardRejected(FusewireError):
    """The sender's fault (or the file's): the shard will not be applied as it stands."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class ShardNotReady(FusewireError):
    """Not yet: somebody is still writing the file. Look again later; the message says why."""


class ProtocolError(FusewireError):
    """A message broke the wire protocol. The message says which frame and how."""


class DaemonUnreachable(FusewireError):
    """A client's wait passed its deadline. The message names the endpoint and what to check."""


def printable(text: object, limit: int = DETAIL_LIMIT) -> str:
    r"""Make text from outside safe to print anywhere: one line, no control characters, bounded.

    Args:
        text: Anything; its ``str`` is taken.
        limit: Longest result, in characters; a cut is marked with an ellipsis.

    Returns:
        Text in which each control, format, surrogate and unassigned character is escaped (``\\x1b``), and each
        separator but the space: it can neither break a line nor drive a terminal.
    """
    raw = str(text)[: limit + 1]
    safe = "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in raw)
    return safe if len(safe) <= limit else safe[: limit - 1] + "…"
