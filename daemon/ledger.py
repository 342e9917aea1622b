"""The ledger: what has come, what is waiting, and what is to be done next.

Two rules. Everything that decides the fate of a shard lives in this file (and, of versions, in `rollout`).
And it knows no clock, no path, no socket and no tensor: stimuli come in, each with the time at which it
happened; instructions go out, and the service is the one place that turns them into I/O. Failure of outside
work is a stimulus like any other.

The life of one shard is the table `TRANSITIONS` at the end of the file: for each state and stimulus the step
to take. What the table lacks cannot happen, short of a defect of ours::

    queued -> inspecting -> placing or streaming -> applied
       ^       |      |        |
       |       v      v        v
       +-- deferred  waiting  rejected     deferred: it is still being written, or changed while it was read
       ^                |                  waiting: for its version's turn to be staged
       +----------------+                  streaming: its bytes come from a client, as fast as that sends them

A shard is *inspected* (opened, its header checked against the slot table, nothing copied) before the ledger
decides whether it may be *placed*: a stale version never touches the model.
"""

from __future__ import annotations

import enum
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from . import events, wire
from .books import RETRIED, Books
from .errors import Reason, printable
from .progress import ROLLING, Coverage, Version
from .records import ShardRecord
from .rollout import Rollout
from .roster import Policy, Verdict, Versions
from .stimuli import (
    Committed,
    Compare,
    Expired,
    Freed,
    Gone,
    Inspect,
    Inspected,
    Instruction,
    Listed,
    NotReady,
    Ordered,
    Place,
    Placed,
    Publish,
    Recalled,
    Refused,
    Release,
    Reply,
    RolledBack,
    Seen,
    ShardStimulus,
    Stimulus,
    Stop,
    Tick,
    Verified,
)

IN_FLIGHT = 2
"""Shards that are inspected or placed at the same time: one being copied, one ready to follow."""
REMEMBERED_REJECTIONS = 100
RETRIES = 5
"""Times that a shard which changed while it was read is tried again."""
FIRST_DELAY = 0.002
LONGEST_DELAY = 2.0
"""Seconds between two looks at a file that is still being written: doubled from the first to the longest."""


RESTORING = Verdict("wait", "what was live before the restart is being restored")
NO_LONGER_NEEDED = Verdict("stale", "it is not needed any more: something newer is live")


class State(enum.StrEnum):
    """Where a shard stands."""

    QUEUED = "queued"
    INSPECTING = "inspecting"
    DEFERRED = "deferred"
    WAITING = "waiting"
    PLACING = "placing"
    STREAMING = "streaming"
    APPLIED = "applied"
    REJECTED = "rejected"


FINAL = frozenset({State.APPLIED, State.REJECTED})
WORKED_ON = frozenset({State.INSPECTING, State.PLACING, State.STREAMING})


@dataclass(slots=True)
class Shard:
    """One shard and what is known of it."""

    key: str
    name: str
    source: str
    held: int
    """Bytes of ours that it occupies until it is done."""
    identity: Hashable
    content: Hashable
    stream: bool = False
    state: State = State.QUEUED
    why: str = ""
    due: float = 0.0
    looks: int = 0
    """Times in a row that it was found unfinished."""
    retries: int = 0
    """Times that it changed while it was read."""
    again: Seen | None = None
    """It was seen anew while it was being worked on."""
    gone: bool = False
    changed: int = 0
    claimed: int | None = None
    """The version that its folder or its message names, before it has been looked into."""
    client: str = ""
    version: int | None = None
    slots: tuple[int, ...] = ()
    run: str | None = None
    skipped: int = 0
    nbytes: int = 0
    number: int = 0
    """What it is called in the books: another one for other bytes under the same key."""
    place: str = ""
    """Where its bytes lie, within what ``source`` says."""
    digest: str = ""
    opened: float = -math.inf
    """When the file was opened that ``identity`` speaks of."""


@dataclass(slots=True)
class Share:
    """What one client occupies."""

    held: int = 0
    """Bytes of its shards that are in our memory."""
    streams: int = 0
    """Its shards that come in chunks and are not done."""


NO_SHARE = Share()


class Ledger:
    """Feed it stimuli with `handle`; do what it returns, in order.

    Args:
        coverage: The model in numbers.
        held_limit: Bytes of shards that clients may have in our memory; one more is answered ``busy``.
        known_limit: Finished shards that are remembered, so that seeing them again does nothing.
        policy: When a version goes live, and when it counts as stalled.
        stream_limit: Shards whose bytes may be coming at the same time; one more is answered ``busy``.
        keep_pushed: Whether what clients push is kept, to survive a restart.
        client_stream_limit: The same for one client, so that others have room, too. For the same reason no client may
            have more than half of ``held_limit``, but for a single shard.
    """

    def __init__(
        self,
        coverage: Coverage,
        *,
        held_limit: int,
        known_limit: int,
        policy: Policy | None = None,
        stream_limit: int = 16,
        keep_pushed: bool = False,
        client_stream_limit: int = 16,
    ) -> None:
        self.books = Books()
        self.keep_pushed = keep_pushed
        self._restored: Version | None = None
        """What was live before a restart, while it is being restored."""
        self.held_limit = held_limit
        self.stream_limit = stream_limit
        self.client_stream_limit = client_stream_limit
        self.shares: dict[str, Share] = {}
        """Client -> what it occupies, of those that occupy anything."""
        self.known_limit = known_limit
        self.rollout = Rollout(coverage, policy or Policy(), self)
        self.versions: Versions = self.rollout.versions
        self.shards: dict[str, Shard] = {}
        self.queue: OrderedDict[str, None] = OrderedDict()
        self.finished: OrderedDict[str, None] = OrderedDict()
        self.in_flight: set[str] = set()
        self.deferred: set[str] = set()
        self.streams: set[str] = set()
        """Streams that are not done, in whatever state."""
        self.held = 0
        self.stopping = False
        self.filled = 0
        self.pending: tuple[wire.PendingHalf, ...] = ()
        self.pending_at = 0.0
        """When ``pending`` was told; its ages count from then."""
        self.rejected: deque[tuple[float, events.ShardRefused]] = deque(maxlen=REMEMBERED_REJECTIONS)
        self.counters: dict[str, float] = dict.fromkeys(
            (
                "shards_applied",
                "shards_rejected",
                "tensors_applied",
                "tensors_skipped",
                "tensors_duplicate",
                "bytes_applied",
                "layers_fused",
                "halves_expired",
            ),
            0,
        )

    def handle(self, stimulus: Stimulus) -> list[Instruction]:
        """Take in what happened and return what is to be done about it, in order."""
        out: list[Instruction] = []
        match stimulus:
            case ShardStimulus() if stimulus.key in self.shards:
                shard = self.shards[stimulus.key]
                step = TRANSITIONS.get((shard.state, type(stimulus)))
                if step is None:
                    raise AssertionError(f"{stimulus} for shard {shard.name}, which is {shard.state}")
                step(self, shard, stimulus, out)
            case Seen():
                self._meet(stimulus, out)
            case Gone() | Tick():
                pass
            case _:
                respond = RESPONSES.get(type(stimulus))
                if respond is None:
                    raise AssertionError(f"{stimulus}: nothing that the ledger knows of")
                respond(self, stimulus, out)
        self._wake(stimulus.now)
        if not self.stopping:
            self.rollout.review(stimulus.now, out)
        self._start_next(out)
        self.books.keep(self.versions, out)
        return out

    def next_due(self) -> float | None:
        """When the next deferred shard wants to be looked at, in the stimuli's time; None if none does."""
        return min((self.shards[key].due for key in self.deferred), default=None)

    @property
    def restoring(self) -> bool:
        """Whether what was live before a restart is being restored: until then, nothing else is placed."""
        return self._restored is not None and self.versions.staged is self._restored and not self.versions.ready

    @property
    def busy(self) -> bool:
        """Whether any shard is queued or being worked on."""
        return bool(self.queue or self.in_flight)

    def validate(self) -> None:
        """Check the invariants; for tests, after each step."""
        by_state: dict[State, set[str]] = {state: set() for state in State}
        for key, shard in self.shards.items():
            assert key == shard.key
            by_state[shard.state].add(key)
        assert by_state[State.INSPECTING] | by_state[State.PLACING] == self.in_flight
        assert len(self.in_flight) <= IN_FLIGHT
        assert self.streams == {key for key, shard in self.shards.items() if shard.stream and shard.state not in FINAL}
        assert by_state[State.STREAMING] <= self.streams
        assert len(self.streams) <= self.stream_limit
        assert by_state[State.DEFERRED] == self.deferred
        assert set(self.queue) == by_state[State.QUEUED]
        assert set(self.finished) == by_state[State.APPLIED] | by_state[State.REJECTED]
        assert len(self.finished) <= self.known_limit
        present = [shard for shard in self.shards.values() if shard.state not in FINAL]
        assert self.held == sum(shard.held for shard in present)
        for client in {shard.client for shard in present if shard.client} | set(self.shares):
            own = [shard for shard in present if shard.client == client]
            share = self.shares.get(client, NO_SHARE)
            assert share.held == sum(shard.held for shard in own)
            assert share.streams == sum(shard.stream for shard in own) <= self.client_stream_limit
        assert not self.queue or len(self.in_flight) == IN_FLIGHT or self.stopping
        assert by_state[State.WAITING] == {key for v in self.versions.known.values() for key in v.queued}
        self.versions.validate()

    # ------------------------------------------------------------------------ what the rollout may ask and tell

    def on_their_way(self, version: int | None) -> bool:
        """See `rollout.Shards`."""
        if self.restoring and self.versions.staged is not None and version == self.versions.staged.number:
            return True
        for keys in (self.in_flight, self.queue, self.deferred, self.streams):
            for key in keys:
                shard = self.shards[key]
                if version in {shard.claimed, shard.version} and (version is not None or shard.claimed is None):
                    return True
        return False

    def streaming(self, version: int | None) -> bool:
        """See `rollout.Shards`."""
        shards = (self.shards[key] for key in (*self.streams, *self.in_flight))
        return any(shard.state in {State.STREAMING, State.PLACING} and shard.version == version for shard in shards)

    def take_up(self, keys: Iterable[str]) -> None:
        """See `rollout.Shards`: they are looked at again, before all others and in their old order."""
        for key in reversed(list(keys)):
            self.shards[key].state, self.shards[key].why = State.QUEUED, ""
            self.queue[key] = None
            self.queue.move_to_end(key, last=False)

    def turn_away(self, keys: Iterable[str], why: str, now: float, out: list[Instruction]) -> None:
        """See `rollout.Shards`."""
        for key in keys:
            self._reject(self.shards[key], Reason.STALE_VERSION, why, now, out)

    # ------------------------------------------------------------------- steps: what the table refers to

    def _meet(self, seen: Seen, out: list[Instruction]) -> None:
        """A shard that is new to us."""
        detail = self._why_busy(seen)
        if detail:
            out.append(Reply(seen.key, wire.Answer(status="busy", shard=seen.name, detail=detail)))
            out.append(Release(seen.key))
            return
        shard = self.shards[seen.key] = Shard(
            seen.key,
            seen.name,
            seen.source,
            seen.held,
            seen.identity,
            seen.content,
            seen.stream,
            changed=seen.changed,
            claimed=seen.claimed,
            number=self.books.number() if seen.number is None else seen.number,
            place=seen.place,
            client=seen.client,
        )
        self.rollout.reconsider_marker(seen.claimed, seen.changed)
        self._occupy(shard)
        self.queue[seen.key] = None
        if seen.source == "journal":
            self.queue.move_to_end(seen.key, last=False)

    def _why_busy(self, seen: Seen) -> str:
        """Say why a new shard has to come again later; empty if it may stay."""
        share = self.shares.get(seen.client, NO_SHARE)
        if self.stopping:
            return "the daemon is stopping"
        if seen.stream and len(self.streams) >= self.stream_limit:
            return f"{len(self.streams)} shards are coming in chunks already (socket.streams)"
        if seen.stream and share.streams >= self.client_stream_limit:
            return f"{share.streams} shards of yours are coming in chunks already (socket.streams_per_client)"
        if seen.held and self.held and self.held + seen.held > self.held_limit:
            return f"shards of {self.held} bytes are in flight, the limit is {self.held_limit} (socket.in_flight_bytes)"
        if seen.held and share.held and share.held + seen.held > self.held_limit // 2:
            return (
                f"shards of yours of {share.held} bytes are in flight: one client may have half of {self.held_limit} "
                "(socket.in_flight_bytes)"
            )
        return ""

    def _occupy(self, shard: Shard) -> None:
        """It is with us now, and counts against the limits."""
        self.held += shard.held
        if shard.stream:
            self.streams.add(shard.key)
        if shard.client:
            share = self.shares.setdefault(shard.client, Share())
            share.held += shard.held
            share.streams += shard.stream

    def _vacate(self, shard: Shard) -> None:
        """Its room is free again."""
        self.held -= shard.held
        self.streams.discard(shard.key)
        share = self.shares.get(shard.client)
        if share is not None:
            share.held -= shard.held
            share.streams -= shard.stream
            if not share.held and not share.streams:
                del self.shares[shard.client]

    def _renew(self, shard: Shard, seen: Seen, _out: list[Instruction]) -> None:
        shard.identity, shard.content = seen.identity, seen.content

    def _look_now(self, shard: Shard, seen: Seen, _out: list[Instruction]) -> None:
        if seen.identity != shard.identity:
            shard.looks = 0
        shard.identity, shard.content = seen.identity, seen.content
        shard.due = seen.now  # whatever its looks: a file that was just closed need not differ from an open one

    def _remember(self, shard: Shard, seen: Seen, _out: list[Instruction]) -> None:
        if seen.looked >= shard.opened:
            shard.again, shard.gone = seen, False

    def _again_if_new_bytes(self, shard: Shard, seen: Seen, _out: list[Instruction]) -> None:
        """What was applied is applied again only for new bytes: a chmod must not bring old weights back."""
        if seen.content != shard.content and seen.looked >= shard.opened:
            self._requeue(shard, seen)

    def _again_if_changed(self, shard: Shard, seen: Seen, _out: list[Instruction]) -> None:
        """What was rejected is tried again for any change: a chmod may be the cure."""
        if seen.identity != shard.identity:
            self._requeue(shard, seen)

    def _lose(self, shard: Shard, gone: Gone, out: list[Instruction]) -> None:
        """It vanished before it could be read: that is an outcome, and it is told."""
        shard.gone = True
        self._reject(shard, Reason.VANISHED, "deleted or moved away before it could be read", gone.now, out)

    def _note_gone(self, shard: Shard, _gone: Gone, _out: list[Instruction]) -> None:
        shard.gone, shard.again = True, None

    def _forget_finished(self, shard: Shard, _gone: Gone, _out: list[Instruction]) -> None:
        self.rollout.cured(shard.claimed if shard.version is None else shard.version, shard.key)
        self._forget(shard)

    def _decide(self, shard: Shard, found: Inspected, out: list[Instruction]) -> None:
        if shard.gone and shard.stream:  # a file may still be read though it has no name any more
            self._lose(shard, Gone(key=shard.key, now=found.now), out)
            return
        self._identify(shard, found)
        shard.version, shard.slots = found.version, found.slots
        shard.skipped, shard.nbytes, shard.run = found.skipped, found.nbytes, found.run
        self.rollout.begin_run(found.run, found.now, out)
        verdict = self.versions.judge(found.version, found.run)
        if verdict.kind == "place":
            verdict = self._in_its_turn(shard, out) or verdict
        if verdict.kind == "wait" and shard.source == "socket" and self._silent(found.version, found.now):
            # A client can't keep its shard until the version is complete: it would wait for ever.
            self.rollout.supersede(f"it has not grown for long, and version {found.version} begins", found.now, out)
            verdict = self.versions.judge(found.version, found.run)
        match verdict.kind:
            case "stale":
                self._reject(shard, Reason.STALE_VERSION, verdict.why, found.now, out)
            case "wait":
                self._hold(shard, verdict, found.now, out)
            case "compare":
                self._work_on(shard)
                out.append(Compare(shard.key, found.version))
            case "place":
                if self.versions.staged is None:
                    self.versions.open(found.version, found.now)
                self._work_on(shard)
                keep = shard.number if self.keep_pushed and shard.source == "socket" else None
                out.append(Place(shard.key, found.version, keep))

    def _in_its_turn(self, shard: Shard, out: list[Instruction]) -> Verdict | None:
        """While what was live is being restored, nothing else is placed; and later, nothing is restored."""
        if shard.source == "journal":
            return None if self.restoring else NO_LONGER_NEEDED
        return RESTORING if self.restoring and not self._makes_up(shard.slots, out) else None

    def _makes_up(self, slots: Iterable[int], out: list[Instruction]) -> bool:
        """Whether what can't be restored need not be, since these slots and those that wait cover all that is missing.

        So it is when a trainer has replaced its one file while the daemon was down. Then the restoring is over, and
        what waits is taken up into the same version.
        """
        stuck = [key for key in self.deferred if self.shards[key].source == "journal"]
        staged = self._restored
        if not stuck or staged is None:
            return False
        if not set(range(len(staged.coverage.layer_of))) <= {*staged.came, *slots, *staged.expected}:
            return False
        self._restored = None
        for key in stuck:
            self.deferred.discard(key)
            out.append(Release(key))
            self._forget(self.shards[key])
        waiting = tuple(staged.queued)
        for key in waiting:
            staged.unexpect(key)
        self.take_up(waiting)
        return True

    def _identify(self, shard: Shard, found: Inspected) -> None:
        """What is open need not be what was seen: a file that was still being written has been closed since."""
        if found.identity is not None:
            shard.identity, shard.content, shard.opened = found.identity, found.identity[:4], found.opened
            if shard.again is not None and shard.again.looked < shard.opened:
                shard.again = None

    def _work_on(self, shard: Shard) -> None:
        shard.state = State.PLACING
        if shard.stream:  # it may take its client long: others are worked on meanwhile
            shard.state = State.STREAMING
            self.in_flight.discard(shard.key)

    def _silent(self, version: int | None, now: float) -> bool:
        """Whether the staged version has stopped growing, and this one is newer, or of the other kind."""
        staged = self.versions.staged
        if staged is None or not self.versions.stalled(now) or self.versions.judge(version, None).kind != "wait":
            return False
        if staged.number is ROLLING or version is ROLLING:
            return staged.number != version
        return version > staged.number

    def _hold(self, shard: Shard, verdict: Verdict, now: float, out: list[Instruction]) -> None:
        """Its version's turn has not come. A file stays where it is; a client is sent away, unless it is soon."""
        if shard.gone:
            self._lose(shard, Gone(key=shard.key, now=now), out)
            return
        if shard.source == "socket" and not verdict.short:
            busy = wire.Answer(status="busy", shard=shard.name, version=shard.version, detail=printable(verdict.why))
            out += [Reply(shard.key, busy), Release(shard.key)]
            self.in_flight.discard(shard.key)
            self._vacate(shard)
            self._forget(shard)
            return
        version, over = self.versions.meet(shard.version, now)
        for old in over:
            self.rollout.superseded(old, now, out)
        self.in_flight.discard(shard.key)
        again, shard.again = shard.again, None
        shard.state, shard.why = State.WAITING, printable(verdict.why)
        version.expect(shard.key, shard.slots)
        version.refused.discard(shard.key)
        out.append(Release(shard.key))
        if again is not None:
            self._look_anew(shard, again, out)

    def _look_anew(self, shard: Shard, seen: Seen, _out: list[Instruction]) -> None:
        """A file that waits was seen again: what was read of it may hold no more."""
        if seen.identity != shard.identity:
            self.versions.known[shard.version].unexpect(shard.key)
            shard.identity, shard.content, shard.version = seen.identity, seen.content, None
            shard.state = State.QUEUED
            self.queue[shard.key] = None

    def _lose_waiting(self, shard: Shard, gone: Gone, out: list[Instruction]) -> None:
        self.versions.known[shard.version].unexpect(shard.key)
        self._lose(shard, gone, out)

    def _take_list(self, shard: Shard, listed: Listed, out: list[Instruction]) -> None:
        """It tells what a version consists of."""
        shard.version = listed.version
        if listed.version is not None:
            beside = [s.changed for s in self.shards.values() if s.claimed == listed.version and s is not shard]
            last = bool(beside) and max(beside) <= shard.changed
            record = self.rollout.listed(listed, marked=shard.changed, last=last)
            if record is not None or listed.version == self.versions.live:
                self.books.listed(shard)
        answer = wire.Answer(status="applied", shard=shard.name, version=listed.version, detail=listed.what)
        self._finish(shard, State.APPLIED, answer, out)

    def _defer(self, shard: Shard, unready: NotReady, out: list[Instruction]) -> None:
        self._put_off(shard, unready.why, unready.now, out)
        if shard.source == "journal" and self.restoring:
            self._makes_up((), out)

    def _yield(self, shard: Shard, unready: NotReady, out: list[Instruction]) -> None:
        """It can't be placed before another one that is coming has come: it is looked at again."""
        out.append(Release(shard.key))
        self._put_off(shard, unready.why, unready.now, out)

    def _refuse(self, shard: Shard, refused: Refused, out: list[Instruction]) -> None:
        staged = self.versions.staged
        if staged is not None and shard.state in {State.PLACING, State.STREAMING} and staged.number == shard.version:
            staged.unfill(refused.unfilled)
            self.books.lost(refused.unfilled)
        needed = shard.source == "journal"  # there is nothing else that it could be restored from: it is tried again
        if needed or (refused.transient and shard.retries < RETRIES and not self.stopping):
            shard.retries += 1
            out.append(Release(shard.key))
            self._put_off(shard, f"{refused.reason}: {refused.detail}", refused.now, out)
        else:
            self._reject(shard, refused.reason, refused.detail, refused.now, out)

    def _settle(self, shard: Shard, placed: Placed, out: list[Instruction]) -> None:
        self.filled = placed.filled
        self.pending, self.pending_at = placed.pending, placed.now
        self._count(
            shards_applied=1,
            tensors_applied=len(shard.slots),
            tensors_skipped=shard.skipped,
            tensors_duplicate=placed.duplicates,
            bytes_applied=shard.nbytes,
            layers_fused=len(placed.fused),
        )
        shard.place, shard.digest = shard.place or placed.place, placed.digest
        self.books.applied(shard, staged=self.rollout.placed(shard.version, shard.key, placed, out))
        waiting = tuple(placed.waiting.values())
        message = f"shard {shard.name} applied: {len(shard.slots)} tensors"
        message += f", {len(waiting)} waiting for a partner" if waiting else ""
        message += f", {shard.skipped} skipped" if shard.skipped else ""
        out.append(
            Publish(
                events.ShardApplied(
                    version=shard.version,
                    message=message,
                    shard=shard.name,
                    source=shard.source,
                    tensors=len(shard.slots),
                    skipped=shard.skipped,
                    waiting=waiting,
                    nbytes=shard.nbytes,
                    seconds=placed.seconds,
                )
            )
        )
        answer = wire.Answer(
            status="applied",
            shard=shard.name,
            version=shard.version,
            detail=printable(message),
            tensors=len(shard.slots),
            nbytes=shard.nbytes,
            fused=placed.fused,
            waiting=waiting,
            durability=("spool" if shard.place else "memory") if shard.source == "socket" else None,
        )
        self._finish(shard, State.APPLIED, answer, out)

    # ----------------------------------------------------------------------------------- parts of steps

    def _put_off(self, shard: Shard, why: str, now: float, out: list[Instruction]) -> None:
        if shard.gone:
            self._lose(shard, Gone(key=shard.key, now=now), out)
            return
        if shard.again is not None:
            shard.identity, shard.content, shard.again = shard.again.identity, shard.again.content, None
        self.in_flight.discard(shard.key)
        self.deferred.add(shard.key)
        shard.state = State.DEFERRED
        shard.why = printable(why)
        shard.due = now + min(LONGEST_DELAY, FIRST_DELAY * 2 ** min(shard.looks, 16))
        shard.looks += 1

    def _reject(self, shard: Shard, reason: Reason, detail: str, now: float, out: list[Instruction]) -> None:
        detail = printable(detail)
        event = events.ShardRefused(
            version=shard.version,
            message=f"shard {shard.name} rejected: {reason}: {detail}",
            shard=shard.name,
            source=shard.source,
            reason=reason.value,
            detail=detail,
        )
        self.rejected.append((now, event))
        self.books.rejected(shard, reason, detail)
        self._count(shards_rejected=1)
        self.rollout.refused(shard.claimed if shard.version is None else shard.version, shard.key, now)
        out.append(Publish(event))
        answer = wire.Answer(
            status="rejected", shard=shard.name, version=shard.version, reason=reason.value, detail=detail
        )
        self._finish(shard, State.REJECTED, answer, out)

    def _finish(self, shard: Shard, state: State, answer: wire.Answer, out: list[Instruction]) -> None:
        out += [Reply(shard.key, answer), Release(shard.key)]
        self.in_flight.discard(shard.key)
        self.deferred.discard(shard.key)
        self.queue.pop(shard.key, None)
        self._vacate(shard)
        again, shard.again = shard.again, None
        shard.state, shard.slots, shard.why, shard.looks, shard.retries = state, (), "", 0, 0
        if shard.gone or shard.identity is None:  # nothing will show it again
            self._forget(shard)
            return
        self.finished[shard.key] = None
        while len(self.finished) > self.known_limit:
            del self.shards[self.finished.popitem(last=False)[0]]
        if again is not None:
            TRANSITIONS[state, Seen](self, shard, again, out)

    def _requeue(self, shard: Shard, seen: Seen) -> None:
        self.finished.pop(shard.key, None)
        shard.identity, shard.content, shard.version = seen.identity, seen.content, None
        shard.changed, shard.digest = seen.changed, ""
        shard.number = self.books.number() if seen.number is None else seen.number
        self.rollout.reconsider_marker(seen.claimed, seen.changed)
        shard.state = State.QUEUED
        self.shards[shard.key] = shard
        self._occupy(shard)
        self.queue[shard.key] = None

    def _forget(self, shard: Shard) -> None:
        self.finished.pop(shard.key, None)
        self.shards.pop(shard.key, None)

    def _count(self, **counts: float) -> None:
        for name, count in counts.items():
            self.counters[name] += count

    def _expire(self, expired: Expired, out: list[Instruction]) -> None:
        self.pending, self.pending_at = expired.pending, expired.now
        self._count(halves_expired=len(expired.halves))
        self.versions.unfill(expired.slots)
        staged = self.versions.staged
        if staged is not None:
            self.books.lost(slot for number, slot in expired.slots if number == staged.number)
        out += map(Publish, expired.halves)

    def _wake(self, now: float) -> None:
        for key in [key for key in self.deferred if self.shards[key].due <= now]:
            self.deferred.discard(key)
            self.shards[key].state = State.QUEUED
            self.queue[key] = None

    def _start_next(self, out: list[Instruction]) -> None:
        while self.queue and len(self.in_flight) < IN_FLIGHT and not self.stopping:
            shard = self.shards[self.queue.popitem(last=False)[0]]
            shard.state = State.INSPECTING
            self.in_flight.add(shard.key)
            out.append(Inspect(shard.key))

    def _stop(self, stop: Stop, out: list[Instruction]) -> None:
        """Files stay where they are for the next start; what a client sent must be answered."""
        self.stopping = True
        for shard in list(self.shards.values()):
            if shard.source == "socket" and shard.state not in FINAL | WORKED_ON:
                if shard.state is State.WAITING:
                    self.versions.known[shard.version].unexpect(shard.key)
                self._reject(shard, Reason.STOPPING, "the daemon is stopping; send it again later", stop.now, out)

    def _recall(self, recalled: Recalled, _out: list[Instruction]) -> None:
        """The daemon has been restarted: take over what it knew. What was live is opened, and has to come again."""
        memory, now = recalled.memory, recalled.now
        self.books.recall(memory)
        self.versions.recall(memory.standing, now)
        self._restored = self.versions.staged
        for record in memory.shards:
            if record.identity is not None and record.source == "folder" and record.standing != "staged":
                self._recall_finished(record)

    def _recall_finished(self, record: ShardRecord) -> None:
        """A file whose outcome stands: seeing it again does nothing, unless it has changed."""
        if record.reason in RETRIED or record.identity is None:
            return
        self.shards[record.key] = Shard(
            record.key,
            record.name,
            record.source,
            0,
            record.identity,
            record.identity[:4],
            state=State.REJECTED if record.reason else State.APPLIED,
            version=record.version,
            claimed=record.version,
            number=record.id,
            place=record.place,
        )
        self.finished[record.key] = None
        self.finished.move_to_end(record.key)

    def _free(self, _freed: Freed, _out: list[Instruction]) -> None:
        self.versions.leased = 0


RESPONSES: dict[type[Stimulus], Callable[[Ledger, Any, list[Instruction]], None]] = {
    Expired: Ledger._expire,
    Verified: lambda self, stimulus, out: self.rollout.verified(stimulus, out),
    Committed: lambda self, stimulus, out: self.rollout.committed(stimulus, out),
    RolledBack: lambda self, stimulus, out: self.rollout.rolled_back(stimulus, out),
    Ordered: lambda self, stimulus, out: self.rollout.ordered(stimulus, out),
    Freed: Ledger._free,
    Recalled: Ledger._recall,
    Stop: Ledger._stop,
}
"""Stimulus that is about no shard -> response."""

Step: TypeAlias = Callable[[Ledger, Shard, Any, list[Instruction]], None]

TRANSITIONS: dict[tuple[State, type[ShardStimulus]], Step] = {
    (State.QUEUED, Seen): Ledger._renew,
    (State.QUEUED, Gone): Ledger._lose,
    (State.INSPECTING, Seen): Ledger._remember,
    (State.INSPECTING, Gone): Ledger._note_gone,
    (State.INSPECTING, Inspected): Ledger._decide,
    (State.INSPECTING, Listed): Ledger._take_list,
    (State.INSPECTING, NotReady): Ledger._defer,
    (State.INSPECTING, Refused): Ledger._refuse,
    (State.DEFERRED, Seen): Ledger._look_now,
    (State.DEFERRED, Gone): Ledger._lose,
    (State.WAITING, Seen): Ledger._look_anew,
    (State.WAITING, Gone): Ledger._lose_waiting,
    (State.PLACING, Seen): Ledger._remember,
    (State.PLACING, Gone): Ledger._note_gone,
    (State.PLACING, Placed): Ledger._settle,
    (State.PLACING, NotReady): Ledger._yield,
    (State.PLACING, Refused): Ledger._refuse,
    (State.STREAMING, Placed): Ledger._settle,
    (State.STREAMING, NotReady): Ledger._yield,
    (State.STREAMING, Refused): Ledger._refuse,
    (State.APPLIED, Seen): Ledger._again_if_new_bytes,
    (State.APPLIED, Gone): Ledger._forget_finished,
    (State.REJECTED, Seen): Ledger._again_if_changed,
    (State.REJECTED, Gone): Ledger._forget_finished,
}
"""(state, stimulus) -> step: the whole life of a shard."""
