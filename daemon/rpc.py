"""One request, one reply, one deadline: what the client library is built on. Needs zmq and msgspec, no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import zmq

from . import wire
from .errors import DaemonUnreachable, FusewireError, ProtocolError
from .keys import ClientKeys, hint

Reply = TypeVar("Reply")
HEARTBEAT_MS = 5_000


class RequestFailed(FusewireError):
    """The daemon answered that it did not carry the request out; the message says why."""


class Closing:
    """A context manager whose end is `close`."""

    def close(self) -> None:
        """Give everything back."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Requester(Closing):
    """A REQ-like socket that can't get stuck: each request has a deadline, and late replies are never mistaken.

    Not thread-safe, like every zmq socket.

    Args:
        endpoint: The daemon's socket.
        timeout: Seconds until a reply is given up, unless a call says otherwise.
        curve: Keys, for a daemon that asks for them over TCP.
    """

    def __init__(self, endpoint: str, timeout: float, curve: ClientKeys | None = None) -> None:
        self.endpoint = endpoint
        self.timeout = timeout
        self.curve = curve
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._connect()

    def request(self, frames: Sequence[Any], decode: Callable[[bytes], Reply], timeout: float | None = None) -> Reply:
        """Send a request and wait for its reply.

        Args:
            frames: Header and perhaps a payload. Their memory must not change until this returns.
            decode: Reads the reply's frame.
            timeout: Seconds; None: the requester's own.

        Raises:
            DaemonUnreachable: No reply came in time.
            ProtocolError: The reply makes no sense.
        """
        timeout = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + timeout
        try:
            if not self._socket.poll(_milliseconds(deadline), zmq.POLLOUT):
                raise self._unreachable(timeout, "could not be reached")
            self._socket.send_multipart([b"", *frames], copy=False)
            if not self._socket.poll(_milliseconds(deadline)):
                raise self._unreachable(timeout, "did not answer")
            reply = self._socket.recv_multipart()
        except BaseException:
            self._reconnect()  # so that a reply that comes late is not taken for the next one
            raise
        if len(reply) != 2 or reply[0]:  # noqa: PLR2004 - the empty frame and the reply
            raise ProtocolError(f"{self.endpoint} sent {len(reply)} frames where one was expected")
        return decode(reply[1])

    def close(self) -> None:
        """Close the connection at once."""
        self._context.destroy(linger=0)

    def _connect(self) -> zmq.Socket[bytes]:
        made = self._context.socket(zmq.DEALER)
        made.linger = 0
        made.sndhwm = 1
        made.setsockopt(zmq.IMMEDIATE, 1)  # without a daemon there is nothing to queue for
        made.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        if self.curve is not None:
            self.curve.secure(made)
        made.connect(self.endpoint)
        return made

    def _reconnect(self) -> None:
        self._socket.close(0)
        if not self._context.closed:
            self._socket = self._connect()

    def _unreachable(self, timeout: float, what: str) -> DaemonUnreachable:
        return DaemonUnreachable(
            f"the daemon at {self.endpoint} {what} within {timeout:g} s: is it running (systemctl status fusewire), "
            "on this host if the endpoint is ipc, and may this user write to its socket?"
            f"{hint(self.endpoint, self.curve)}"
        )


class Control(Closing):
    """Questions to a daemon.

    Args:
        endpoint: Its control socket.
        timeout: Seconds that each call may take.
        curve: Keys, for a daemon that asks for them over TCP: an operator's, or to ask only, a subscriber's.

    Every call raises DaemonUnreachable when no reply came in time, and RequestFailed when the daemon refused.
    """

    def __init__(self, endpoint: str, timeout: float = 10.0, *, curve: ClientKeys | None = None) -> None:
        self._requester = Requester(endpoint, timeout, curve)

    def status(self) -> wire.Status:
        """Return what the daemon is and does."""
        return self._ask(wire.GetStatus(), wire.Status)

    def snapshot(self) -> wire.Snapshot:
        """Return the full state at a sequence number."""
        return self._ask(wire.GetSnapshot(), wire.Snapshot)

    def replay(self, since: int) -> wire.Replay:
        """Return the remembered events with ``seq >= since``."""
        return self._ask(wire.GetReplay(since=since), wire.Replay)

    def pending(self) -> tuple[wire.PendingHalf, ...]:
        """Return the halves that wait for their partner."""
        return self._ask(wire.GetPending(), wire.Pending).pending

    def versions(self) -> wire.VersionList:
        """Return all versions that anything is known of."""
        return self._ask(wire.GetVersions(), wire.VersionList)

    def commit(self, version: int | None = None) -> str:
        """Let a version go live: a verified one now, an open one once what it brings is in place.

        Args:
            version: Which; None: the one that is being staged.

        Returns:
            What was done, or will be.
        """
        return self._ask(wire.CommitVersion(version=version), wire.Done).detail

    def rollback(self) -> str:
        """Make the version before live again; return what was done."""
        return self._ask(wire.RollbackVersion(), wire.Done).detail

    def abort(self, version: int | None = None) -> str:
        """Give up a version that is not live (None: the one that is being staged); return what was done."""
        return self._ask(wire.AbortVersion(version=version), wire.Done).detail

    def generate(
        self, token_ids: Sequence[int], max_new_tokens: int = 24, timeout: float | None = None
    ) -> wire.Generated:
        """Continue token ids greedily with the live weights.

        Args:
            token_ids: The prompt.
            max_new_tokens: How many to add at most.
            timeout: Seconds; the daemon gives up a little earlier and says how far it came.
        """
        timeout = self._requester.timeout if timeout is None else timeout
        request = wire.Generate(token_ids=list(token_ids), max_new_tokens=max_new_tokens, timeout=0.9 * timeout)
        return self._ask(request, wire.Generated, timeout)

    def digest(self, timeout: float | None = None) -> wire.Digest:
        """Return the digest of all live weights.

        Args:
            timeout: Seconds; every byte of the weights is read.
        """
        timeout = self._requester.timeout if timeout is None else timeout
        return self._ask(wire.GetDigest(timeout=0.9 * timeout), wire.Digest, timeout)

    def close(self) -> None:
        """Close the connection."""
        self._requester.close()

    def _ask(self, request: wire.ControlRequest, kind: type[Reply], timeout: float | None = None) -> Reply:
        reply = self._requester.request([wire.encode(request)], wire.decode_control_reply, timeout)
        if isinstance(reply, wire.Failed):
            raise RequestFailed(reply.error)
        if not isinstance(reply, kind):
            raise ProtocolError(f"the daemon answered with {type(reply).__name__}, not {kind.__name__}")
        return reply


def _milliseconds(deadline: float) -> int:
    return max(0, round((deadline - time.monotonic()) * 1000))
