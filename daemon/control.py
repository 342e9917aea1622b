"""The control socket: answers questions about the daemon's state. Decides nothing; the reactor's thread only."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

from . import events, reports, wire
from .assembly import Parts
from .errors import ProtocolError, printable
from .router import Envelope
from .stimuli import Ordered, Stimulus

THROUGHPUT_WINDOW = 60.0
"""Seconds over which the throughput is averaged."""

UNANSWERED = 1000
"""Orders that may wait for their answer; the oldest beyond get none."""

DISKS = frozenset({"folder", "journal", "spool"})
"""Parts whose ills a restart would not cure: those of a disk. The folder has its own word for the others."""

Phase = Literal["starting", "serving", "stopping"]

QUESTIONS = (wire.GetStatus, wire.GetSnapshot, wire.GetReplay, wire.GetPending, wire.GetVersions)
"""What a subscriber's key is good for; the other requests are an operator's."""


class Control:
    """Replies to control requests.

    Args:
        parts: The daemon's parts.
        model_line: What the model is, for people.
        phase: Tells where the daemon is in its life.
        feed: Takes orders for the ledger.
    """

    def __init__(
        self, parts: Parts, model_line: str, phase: Callable[[], Phase], feed: Callable[[Stimulus], None]
    ) -> None:
        self._feed = feed
        self._orders: dict[str, Envelope] = {}
        self._count = 0
        self._parts = parts
        self._model_line = model_line
        self._phase = phase
        self._started = time.monotonic()
        self._epoch = time.time() - time.monotonic()
        self._replies = self._table()
        self._recent: deque[tuple[float, int, float]] = deque()
        self._recent_bytes, self._recent_seconds = 0, 0.0

    def note(self, applied: events.ShardApplied) -> None:
        """Take in a shard's size and time, for the throughput."""
        self._recent.append((time.monotonic(), applied.nbytes, applied.seconds))
        self._recent_bytes += applied.nbytes
        self._recent_seconds += applied.seconds
        self._throughput()

    def answer(self) -> None:
        """Answer what has come in."""
        router = self._parts.control
        for request in router.requests():
            try:
                if len(request.body) != 1:
                    raise ProtocolError(f"a control request is one JSON frame, not {len(request.body)}")
                asked = wire.decode_control_request(request.body[0].bytes)
                self._allow(asked, request.key)
            except ProtocolError as error:
                router.reply(request.envelope, wire.Failed(error=printable(error)))
                continue
            reply = self._reply(asked, request.envelope)
            if reply is not None:
                router.reply(request.envelope, reply)

    def _allow(self, asked: wire.ControlRequest, key: str) -> None:
        door = self._parts.doors.get("control")
        if door is not None and not isinstance(asked, QUESTIONS) and not door.is_operator(key):
            raise ProtocolError(
                f"{type(asked).__struct_config__.tag} is for operators, and this key is a subscriber's: put it into "
                "curve.operators"
            )

    def health(self) -> dict[str, str]:
        """Return each part without which the daemon does not do its work, and ``ok`` or what is wrong."""
        parts = self._parts
        health = {"loader": parts.loader.health(), "generate": parts.generator.health()}
        if parts.guard is not None:
            health["keys"] = parts.guard.health()
        if parts.folder is not None:
            health["folder"] = parts.folder.health()
        if parts.journal is not None:
            health["journal"] = parts.journal.health()
        if parts.spool is not None:
            health["spool"] = parts.spool.failure or "ok"
        return health

    def failures(self) -> dict[str, str]:
        """Return the parts whose threads have died or hang: what a restart would cure."""
        parts = self._parts
        failures = {part: told for part, told in self.health().items() if told != "ok" and part not in DISKS}
        if parts.folder is not None and parts.folder.failure():
            failures["folder"] = parts.folder.failure()
        return failures

    def _reply(self, asked: wire.ControlRequest, envelope: Envelope) -> wire.ControlReply | None:
        """Return the reply, or None if it comes later, from another thread or from the ledger."""
        return self._replies[type(asked)](asked, envelope)

    def _table(self) -> dict[type[wire.ControlRequest], Callable[[Any, Envelope], wire.ControlReply | None]]:
        """Request -> how it is answered; a test compares it with the protocol's list of them."""
        parts = self._parts
        return {
            wire.GetStatus: lambda *_: self._status(time.monotonic()),
            wire.GetSnapshot: lambda *_: reports.snapshot(
                parts.ledger, boot=parts.boot, seq=parts.publisher.seq, now=time.monotonic(), epoch=self._epoch
            ),
            wire.GetReplay: lambda asked, _: parts.publisher.replay(asked.since),
            wire.GetPending: lambda *_: wire.Pending(pending=reports.pending(parts.ledger, time.monotonic())),
            wire.GetVersions: lambda *_: wire.VersionList(
                live=parts.ledger.versions.live,
                staging_waits=self._staging_waits(),
                versions=reports.versions(parts.ledger, time.monotonic()),
            ),
            wire.CommitVersion: lambda asked, envelope: self._order(envelope, "commit", asked.version),
            wire.AbortVersion: lambda asked, envelope: self._order(envelope, "abort", asked.version),
            wire.RollbackVersion: lambda _, envelope: self._order(envelope, "rollback", None),
            wire.Generate: lambda asked, envelope: parts.generator.submit(envelope, asked),
            wire.GetDigest: lambda asked, envelope: parts.generator.submit(envelope, asked),
        }

    def settle(self, ticket: str, failure: str, detail: str) -> None:
        """Answer an order."""
        envelope = self._orders.pop(ticket, None)
        if envelope is not None:
            reply = wire.Failed(error=failure) if failure else wire.Done(detail=detail)
            self._parts.control.reply(envelope, reply)

    def _order(self, envelope: Envelope, order: Literal["commit", "rollback", "abort"], version: int | None) -> None:
        """Pass an order on; its answer comes by `settle`."""
        self._count += 1
        ticket = f"control:{self._count}"
        self._orders[ticket] = envelope
        while len(self._orders) > UNANSWERED:
            self._orders.pop(next(iter(self._orders)))
        self._feed(Ordered(now=time.monotonic(), ticket=ticket, order=order, version=version))

    def _staging_waits(self) -> str:
        """Say why nothing new can be staged; with the oldest lease, if it is for one."""
        versions = self._parts.ledger.versions
        why = versions.why_waiting()
        if versions.leased and versions.staged is None:
            held = self._parts.model.staging.staged_leases()
            why = (
                f"{held.leases} requests still read the weights of the version before, the oldest for {held.age:.1f} s"
            )
        return why

    def _mode(self) -> str:
        if self._parts.model.staging.in_place:
            return "in place: one generation, updated between forward passes"
        return "two generations: one live, one staged"

    def _status(self, now: float) -> wire.Status:
        parts, ledger = self._parts, self._parts.ledger
        phase = self._phase()
        counters = ledger.counters | ledger.rollout.counters
        counters["events"] = parts.publisher.seq
        counters["replies_undeliverable"] = parts.control.unreachable
        if parts.ingest is not None:
            counters["messages_malformed"] = parts.ingest.malformed
        if parts.guard is not None:
            counters |= {f"refused_at_{domain}": count for domain, count in parts.guard.refused.items()}
        return wire.Status(
            boot=parts.boot,
            pid=os.getpid(),
            state=phase if phase != "serving" else "ready" if ledger.versions.ready else "not_ready",
            uptime=now - self._started,
            model=self._model_line,
            mode=self._mode(),
            version=ledger.versions.live,
            versions=reports.versions(ledger, now),
            run=ledger.versions.run,
            staging_waits=self._staging_waits(),
            slots_filled=ledger.filled,
            slots_total=len(ledger.versions.coverage.layer_of),
            layers=reports.layers(ledger),
            pending=reports.pending(ledger, now),
            rejected=reports.rejected(ledger, self._epoch),
            waiting_shards=reports.waiting_shards(ledger),
            counters=counters,
            throughput=self._throughput(),
            health=self.health(),
            notes=parts.notes(),
        )

    def _throughput(self) -> float:
        while self._recent and self._recent[0][0] < time.monotonic() - THROUGHPUT_WINDOW:
            _, nbytes, seconds = self._recent.popleft()
            self._recent_bytes -= nbytes
            self._recent_seconds -= seconds
        return self._recent_bytes / self._recent_seconds if self._recent and self._recent_seconds > 0 else 0.0
