"""The control socket: answers questions about the daemon's state. Decides nothing; the reactor's thread only."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from typing import Literal, assert_never

from . import events, reports, wire
from .assembly import Parts
from .errors import ProtocolError, printable
from .router import Envelope

THROUGHPUT_WINDOW = 60.0
"""Seconds over which the throughput is averaged."""

Phase = Literal["starting", "serving", "stopping"]


class Control:
    """Replies to control requests.

    Args:
        parts: The daemon's parts.
        model_line: What the model is, for people.
        phase: Tells where the daemon is in its life.
    """

    def __init__(self, parts: Parts, model_line: str, phase: Callable[[], Phase]) -> None:
        self._parts = parts
        self._model_line = model_line
        self._phase = phase
        self._started = time.monotonic()
        self._epoch = time.time() - time.monotonic()
        self._recent: deque[tuple[float, int, float]] = deque()

    def note(self, applied: events.ShardApplied) -> None:
        """Take in a shard's size and time, for the throughput."""
        self._recent.append((time.monotonic(), applied.nbytes, applied.seconds))
        self._throughput()

    def answer(self) -> None:
        """Answer what has come in."""
        router = self._parts.control
        for request in router.requests():
            try:
                if len(request.body) != 1:
                    raise ProtocolError(f"a control request is one JSON frame, not {len(request.body)}")
                asked = wire.decode_control_request(request.body[0].bytes)
            except ProtocolError as error:
                router.reply(request.envelope, wire.Failed(error=printable(error)))
                continue
            reply = self._reply(asked, request.envelope)
            if reply is not None:
                router.reply(request.envelope, reply)

    def health(self) -> dict[str, str]:
        """Return each part without which the daemon does not do its work, and ``ok`` or what is wrong."""
        parts = self._parts
        health = {"loader": parts.loader.health(), "generate": parts.generator.health()}
        if parts.folder is not None:
            health["folder"] = parts.folder.health()
        return health

    def failures(self) -> dict[str, str]:
        """Return the parts whose threads have died or hang: what a restart would cure."""
        parts = self._parts
        failures = {part: told for part, told in self.health().items() if told != "ok" and part != "folder"}
        if parts.folder is not None and parts.folder.failure():
            failures["folder"] = parts.folder.failure()
        return failures

    def _reply(self, asked: wire.ControlRequest, envelope: Envelope) -> wire.ControlReply | None:
        """Return the reply, or None if it comes later from another thread."""
        parts, now = self._parts, time.monotonic()
        match asked:
            case wire.GetStatus():
                return self._status(now)
            case wire.GetSnapshot():
                return reports.snapshot(
                    parts.ledger, boot=parts.boot, seq=parts.publisher.seq, now=now, epoch=self._epoch
                )
            case wire.GetReplay():
                return parts.publisher.replay(asked.since)
            case wire.GetPending():
                return wire.Pending(pending=reports.pending(parts.ledger, now))
            case wire.Generate():
                return parts.generator.submit(envelope, asked, parts.ledger.versions.live)
            case _:
                assert_never(asked)

    def _status(self, now: float) -> wire.Status:
        parts, ledger = self._parts, self._parts.ledger
        phase = self._phase()
        counters = dict(ledger.counters)
        counters["events"] = parts.publisher.seq
        counters["replies_undeliverable"] = parts.control.unreachable
        if parts.ingest is not None:
            counters["messages_malformed"] = parts.ingest.malformed
        return wire.Status(
            boot=parts.boot,
            pid=os.getpid(),
            state=phase if phase != "serving" else "ready" if ledger.versions.ready else "not_ready",
            uptime=now - self._started,
            model=self._model_line,
            mode="in place: one generation, updated between forward passes",
            version=ledger.versions.live,
            versions=reports.versions(ledger),
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
            self._recent.popleft()
        seconds = sum(recent[2] for recent in self._recent)
        return sum(recent[1] for recent in self._recent) / seconds if seconds else 0.0
