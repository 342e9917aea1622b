"""From shards to a live version: when a version is complete, verified, live, given up or gone back to.

The part of the ledger that speaks of versions, and pure like it: it decides, and returns instructions. Which versions
there are is kept by `roster`, the states that each goes through are the table in `lifecycle`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from . import events
from .books import Books
from .lifecycle import Turn, VersionState
from .progress import ROLLING, Coverage, Version
from .roster import Policy, Versions
from .stimuli import (
    Answered,
    Commit,
    Committed,
    DropVersion,
    Instruction,
    Listed,
    NewRun,
    Ordered,
    Placed,
    Publish,
    Rollback,
    RolledBack,
    Verified,
    Verify,
)

ROLLING_BATCH = 0.25
"""Seconds for which the rolling version may wait for more of its shards, if some are on their way, to go live."""

_LIVE = "is live already"
_NOTHING = "nothing has come of"


class Shards(Protocol):
    """What has to be asked of the ledger: it keeps the shards."""

    books: Books
    """What has to be written down."""

    def on_their_way(self, version: int | None) -> bool:
        """Whether shards of a version are known that have not been placed yet, those apart that wait for its turn."""

    def streaming(self, version: int | None) -> bool:
        """Whether the bytes of some shard of a version are being copied, or coming from a client, right now."""

    def take_up(self, keys: Iterable[str]) -> None:
        """The turn of these shards has come."""

    def turn_away(self, keys: Iterable[str], why: str, now: float, out: list[Instruction]) -> None:
        """These shards will not be placed, since their version is over."""


class Rollout:
    """Decides on versions.

    Args:
        coverage: The model in numbers.
        policy: When a version goes live, and when it counts as stalled.
        shards: The ledger's shards.
    """

    def __init__(self, coverage: Coverage, policy: Policy, shards: Shards) -> None:
        self.versions = Versions(coverage, policy)
        self.counters: dict[str, float] = dict.fromkeys(
            ("versions_live", "versions_aborted", "versions_superseded", "versions_rolled_back"), 0
        )
        self._shards = shards
        self._tickets: list[str] = []
        """Orders to commit the staged version that have not been answered."""

    # ------------------------------------------------------------------------------------ what happens

    def placed(self, version: int | None, key: str, placed: Placed, out: list[Instruction]) -> bool:
        """A shard of the staged version is in place; announce the layers that became whole by it.

        Returns:
            False: it was compared with what is live, or its version was given up meanwhile.
        """
        staged = self.versions.staged
        if staged is None or staged.number != version or staged.state is not VersionState.OPEN:
            return False
        out += map(Publish, staged.advance(placed.arrived, placed.fused))
        staged.waits.update(placed.waiting)
        staged.blocked.update(placed.blocked)
        staged.refused.discard(key)
        staged.grown, staged.told = placed.now, False
        return True

    def listed(self, listed: Listed, *, marked: int, last: bool) -> Version | None:
        """Something tells what a version consists of. Returns its record; None if the version is over.

        Args:
            listed: What.
            marked: When the file that tells it came, on the clock of all files.
            last: Whether it came after all files of its version that are known, and there are any. A marker that was
                copied before its shards (by name, it is often the first) says nothing.
        """
        assert listed.version is not None
        verdict = self.versions.judge(listed.version, None)
        if verdict.kind in {"stale", "compare"}:
            return None
        record, _ = self.versions.meet(listed.version, listed.now)
        if listed.slots is not None:
            record.promised = set(listed.slots)
        else:
            record.closed, record.marked = record.closed or last, marked
        record.promise, record.told = listed.what, False
        return record

    def reconsider_marker(self, version: int | None, changed: int) -> None:
        """A file of a version has come: a marker that is older did not speak of it."""
        record = self.versions.known.get(version) if version is not ROLLING else None
        if record is not None and record.closed and record.marked and changed > record.marked:
            record.closed = False

    def refused(self, version: int | None, key: str, now: float) -> None:
        """A shard was rejected: its version can't be taken for complete just because no more of it comes."""
        if version is not ROLLING and self.versions.judge(version, None).kind in {"place", "wait"}:
            self.versions.meet(version, now)[0].refused.add(key)

    def cured(self, version: int | None, key: str) -> None:
        """A shard that was rejected is no longer there."""
        record = self.versions.known.get(version)
        if record is not None:
            record.refused.discard(key)

    def begin_run(self, run: str | None, now: float, out: list[Instruction]) -> None:
        """Take note of a shard's run; a new one restarts the numbering."""
        staged = self.versions.staged
        if not self.versions.new_run(run):
            return
        for version in self.versions.count_anew():
            self._tell_superseded(version, now, out, was_staged=version is staged)
        if staged is None or not staged.restored:  # what is being restored keeps its number till it is live
            out.append(NewRun())

    def verified(self, verified: Verified, out: list[Instruction]) -> None:
        """The staged version has been verified, or has failed."""
        staged = self.versions.staged
        if staged is None or staged.number != verified.version or staged.state is not VersionState.COMPLETE:
            return  # given up meanwhile
        if verified.failure:
            self._abort(staged, Turn.FAILED, verified.failure, verified.now, out)
            return
        staged.turn(Turn.PASSED)
        out += map(Publish, staged.advance((), verified.fused))
        carried = f", {verified.carried} slots carried over" if verified.carried else ""
        canary = f", canary {' '.join(map(str, verified.tokens))} ({verified.fingerprint})" if verified.tokens else ""
        out.append(
            Publish(
                events.VersionVerified(
                    version=staged.number,
                    message=f"{staged.label} verified{carried}{canary}",
                    carried=verified.carried,
                    carried_bytes=verified.carried_bytes,
                    tokens=verified.tokens,
                    fingerprint=verified.fingerprint,
                    seconds=verified.seconds,
                )
            )
        )
        if self.versions.policy.automatic or staged.number is ROLLING or staged.approved or staged.restored:
            self._commit(staged, out)

    def committed(self, committed: Committed, out: list[Instruction]) -> None:
        """The staged version is live."""
        staged = self.versions.staged
        if committed.failure:
            if staged is not None:
                staged.committing = False
                self._abort(staged, Turn.WITHDRAWN, committed.failure, committed.now, out)
            return
        first = not self.versions.ready
        live, _ = self.versions.commit(committed.now, committed.leased)
        self._shards.books.committed()
        if live.restored and live.past:
            out.append(NewRun())
        late = tuple(live.queued)  # they came while it was verified: now they are compared with it
        for key in late:
            live.unexpect(key)
        self._shards.take_up(late)
        self.counters["versions_live"] += 1
        out.append(Publish(events.VersionLive(version=live.number, message=f"{live.label} live")))
        if first:
            message = f"model ready: all {len(live.coverage.layer_of)} slots filled"
            out.append(Publish(events.ModelReady(version=live.number, message=message)))
        for version in self.versions.outdated():
            self._tell_superseded(version, committed.now, out)
        out += [Answered(ticket, "", f"{live.label} is live") for ticket in self._tickets]
        self._tickets.clear()

    def rolled_back(self, outcome: RolledBack, out: list[Instruction]) -> None:
        """The version before is live again, or it could not be done."""
        self.versions.busy = ""
        if outcome.failure:
            out.append(Answered(outcome.ticket, outcome.failure, ""))
            return
        live, previous = self.versions.rolled_back(outcome.leased)
        self._shards.books.rolled_back()
        self.counters["versions_rolled_back"] += 1
        message = f"rolled back: {live.label} is live again, in the place of {previous.label}"
        out.append(Publish(events.VersionRolledBack(version=live.number, previous=previous.number, message=message)))
        out.append(Answered(outcome.ticket, "", message))

    def ordered(self, order: Ordered, out: list[Instruction]) -> None:
        """A trainer or an operator wants something."""
        failure, detail = {"commit": self._order_commit, "rollback": self._order_rollback, "abort": self._order_abort}[
            order.order
        ](order, out)
        if failure or detail:
            out.append(Answered(order.ticket, failure, detail))

    def review(self, now: float, out: list[Instruction]) -> None:
        """After whatever has happened: is the staged version complete or stalled, and whose turn is next?"""
        self._complete(now, out)
        waiting = self.versions.staged
        if waiting is not None and waiting.state is VersionState.VERIFIED and self.versions.policy.automatic:
            self._commit(waiting, out)  # it had waited for its commit, and the settings have changed
        overtaker = self.versions.overtaker(now)
        if overtaker is not None:
            complete = overtaker.number is not ROLLING and overtaker is self.versions.newest_complete()
            why = (
                f"{overtaker.label} is complete" if complete else f"it has stopped growing, and {overtaker.label} waits"
            )
            self.supersede(why, now, out)
        staged = self.versions.staged
        idle = staged is not None and not staged.fresh and staged.state is VersionState.OPEN
        if staged is not None and idle and not self._shards.on_their_way(staged.number):
            self.versions.retract()
            out.append(DropVersion(staged.number))  # rows that a refused shard may have begun to write
        upcoming = self.versions.next_up()
        if upcoming is not None:
            keys = tuple(upcoming.queued)
            for key in keys:
                upcoming.unexpect(key)
            self.versions.open(upcoming.number, now)
            self._shards.take_up(keys)
        self._tell_incomplete(now, out)

    def superseded(self, version: Version, now: float, out: list[Instruction]) -> None:
        """A version that waited for its turn has been given up to make room."""
        self._tell_superseded(version, now, out)

    def supersede(self, why: str, now: float, out: list[Instruction]) -> None:
        """Give the staged version up for a newer one."""
        staged = self.versions.staged
        assert staged is not None
        self.versions.end(staged, Turn.OVERTAKEN, why)
        self._tell_superseded(staged, now, out, was_staged=True)

    # --------------------------------------------------------------------------------- parts of these

    def _complete(self, now: float, out: list[Instruction]) -> None:
        staged = self.versions.staged
        if staged is None or staged.state is not VersionState.OPEN or not staged.is_complete(live=self.versions.ready):
            return
        if self._shards.streaming(staged.number):
            return
        whole = staged.whole() and staged.number is not ROLLING
        if staged.number is ROLLING:
            if self.versions.ready and now - staged.opened < ROLLING_BATCH and self._shards.on_their_way(ROLLING):
                return
        elif not whole and staged.promised is None and (staged.refused or self._shards.on_their_way(staged.number)):
            return
        staged.turn(Turn.FILLED)
        total = len(staged.coverage.layer_of)
        cause = "coverage" if staged.whole() else staged.promise or "coverage"
        what = f"all {total} slots filled" if staged.whole() else f"{len(staged.came)} of {total} slots came ({cause})"
        message = f"{staged.label} complete: {what}"
        out.append(Publish(events.VersionComplete(version=staged.number, message=message, cause=cause)))
        out.append(Verify(staged.number))

    def _commit(self, staged: Version, out: list[Instruction]) -> None:
        if not staged.committing:
            staged.committing = True
            out.append(Commit(staged.number))

    def _abort(self, version: Version, turn: Turn, why: str, now: float, out: list[Instruction]) -> None:
        was_staged = version is self.versions.staged
        self.versions.end(version, turn, why)
        self.counters["versions_aborted"] += 1
        message = f"{version.label} aborted: {why}"
        out.append(Publish(events.VersionAborted(version=version.number, cause=why, message=message)))
        self._dispose(version, message, now, out, was_staged=was_staged)

    def _tell_superseded(
        self, version: Version, now: float, out: list[Instruction], *, was_staged: bool = False
    ) -> None:
        self.counters["versions_superseded"] += 1
        message = f"{version.label} superseded: {version.why}"
        out.append(Publish(events.VersionSuperseded(version=version.number, cause=version.why, message=message)))
        self._dispose(version, message, now, out, was_staged=was_staged)

    def _dispose(self, version: Version, why: str, now: float, out: list[Instruction], *, was_staged: bool) -> None:
        if was_staged:
            out.append(DropVersion(version.number))
            if version.restored and version.past:
                out.append(NewRun())
            out += [Answered(ticket, why, "") for ticket in self._tickets]
            self._tickets.clear()
        keys = tuple(version.queued)
        version.queued.clear()
        version.expected.clear()
        self._shards.turn_away(keys, why, now, out)

    def _tell_incomplete(self, now: float, out: list[Instruction]) -> None:
        """Once for each time that it stops growing: what keeps a version from being complete."""
        versions, staged = self.versions, self.versions.staged
        if staged is None or staged.told or staged.state is not VersionState.OPEN:
            return
        if versions.stalled(now):
            cause = "stalled"
        elif staged.promise and not self._shards.on_their_way(staged.number):
            cause = staged.promise
        else:
            return
        staged.told = True
        out.append(Publish(versions.incomplete(staged, cause)))

    # ---------------------------------------------------------------------------------------- orders

    def _target(self, order: Ordered) -> tuple[Version | None, str]:
        """Return the version that an order is about, or why there is none."""
        versions = self.versions
        if order.version is None:
            return versions.staged, "" if versions.staged is not None else "no version is being staged"
        if order.version in versions.known:
            return versions.known[order.version], ""
        verdict = versions.judge(order.version, order.run)
        if verdict.kind == "compare":
            return None, f"version {order.version} {_LIVE}"
        if verdict.kind == "stale":
            return None, verdict.why
        return None, f"{_NOTHING} version {order.version}"

    def _order_commit(self, order: Ordered, out: list[Instruction]) -> tuple[str, str]:
        if order.unknown:
            return f"the model has no tensor {', '.join(order.unknown[:3])}", ""
        if order.by_trainer:
            self.begin_run(order.run, order.now, out)
        target, failure = self._target(order)
        if target is None and order.by_trainer and order.version is not None and _NOTHING in failure:
            target = self.versions.meet(order.version, order.now)[0]  # its shards are still on their way
        if target is None:
            return ("", failure) if _LIVE in failure else (failure, "")
        if target.state is VersionState.OPEN and target.number is not ROLLING:
            self._close(target, order.slots)
        if not order.by_trainer:
            target.approved = True
            if target.state is VersionState.VERIFIED:
                self._tickets.append(order.ticket)
                self._commit(target, out)
                return "", ""
        return "", self._prospects(target)

    def _close(self, target: Version, slots: tuple[int, ...] | None) -> None:
        """No more of a version will come than these slots, or than has come."""
        if slots is not None:
            target.promised = set(slots)
        elif target.promised is None:
            target.closed = True
        target.promise, target.told = target.promise or "commit", False

    def _prospects(self, target: Version) -> str:
        """Say when a version will go live."""
        if target.number is ROLLING:
            return "the rolling version goes live by itself, whenever nothing of it waits"
        if target.state is not VersionState.OPEN or target.is_complete(live=self.versions.ready):
            return f"{target.label} is complete, and goes live once it is verified"
        names, count = self.versions.describe_missing(target)
        if not count:
            return f"{target.label} goes live once its shards are in place"
        shown = ", ".join(names[:3]) + (f" and {count - 3} more" if count > 3 else "")  # noqa: PLR2004
        return f"{target.label} waits for {count} tensors: {shown}"

    def _order_rollback(self, order: Ordered, out: list[Instruction]) -> tuple[str, str]:
        versions = self.versions
        if versions.retired is None:
            staged = f": {versions.staged.label} is being staged over it" if versions.staged is not None else ""
            return f"there is no version to go back to{staged}", ""
        if versions.busy:
            return versions.busy, ""
        versions.busy = "a rollback is under way"
        out.append(Rollback(order.ticket))
        return "", ""

    def _order_abort(self, order: Ordered, out: list[Instruction]) -> tuple[str, str]:
        target, failure = self._target(order)
        if target is None:
            return failure, ""
        if target.committing or target.restored:
            what = "going live this moment" if target.committing else "what was live, and is being restored"
            return f"{target.label} is {what}", ""
        who = "its trainer" if order.by_trainer else "an operator"
        self._abort(target, Turn.WITHDRAWN, f"by order of {who}", order.now, out)
        return "", f"{target.label} is aborted; what is live was not touched"
