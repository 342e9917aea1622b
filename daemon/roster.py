"""Which version is being staged, which is live, and what comes next. A part of the ledger, and pure like it.

One version is staged at a time. Shards of others wait for their turn: files stay where they are, clients are told to
come again. A version that is complete among those that wait takes the place of an older one that is not; one whose
trainer has fallen silent gives way to whoever sends something newer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from . import events
from .lifecycle import Turn, VersionState
from .progress import ROLLING, Coverage, Version
from .records import Standing, slots_of

OPEN_VERSIONS = 64
"""Versions that are not over and that anything is remembered of; a newer one beyond these ends the oldest."""
ENDED_VERSIONS = 256
"""Versions whose end is remembered, so that what comes too late is told why."""
PAST_RUNS = 64
NAMED = 100
"""Missing tensors that are named in an event or a status; all are counted."""


class Verdict(NamedTuple):
    """What becomes of a shard that has been inspected."""

    kind: Literal["place", "compare", "wait", "stale"]
    why: str = ""
    short: bool = False
    """Of a wait: it is a matter of moments, so that a client need not be sent away."""


@dataclass(slots=True)
class Policy:
    """The part of the settings that versions depend on."""

    automatic: bool = True
    """Whether a verified version goes live by itself."""
    stale_after: float = 300.0
    """Seconds without growth after which a staged version counts as stalled."""


@dataclass(slots=True)
class Fused:
    """Layer -> the version that fused, or filled, it last."""

    fused: dict[int, int | None] = field(default_factory=dict)
    loaded: dict[int, int | None] = field(default_factory=dict)

    def with_(self, version: Version) -> Fused:
        """Return what is so once a version is live."""
        return Fused(
            self.fused | dict.fromkeys(version.fused, version.number),
            self.loaded | dict.fromkeys(version.loaded, version.number),
        )


class Versions:
    """All versions that are not over, and their order.

    Args:
        coverage: The model in numbers.
        policy: When a version goes live, and when it counts as stalled.
    """

    def __init__(self, coverage: Coverage, policy: Policy | None = None) -> None:
        self.coverage = coverage
        self.policy = policy or Policy()
        self.known: OrderedDict[int | None, Version] = OrderedDict()
        """The staged version and those that wait for their turn, in the order in which they came."""
        self.staged: Version | None = None
        self.serving: Version | None = None
        """The version that is live."""
        self.retired: Version | None = None
        """The version before, as long as nothing has been staged over it."""
        self.leased = 0
        """Requests that still read the weights that would be written next."""
        self.run: str | None = None
        self.ended: OrderedDict[int, tuple[VersionState, str]] = OrderedDict()
        self._endings = 0
        """How often what is remembered of versions that are over has changed."""
        self._floor = -1
        """Numbered versions up to this one are over, if nothing else is known of them."""
        self._past_runs: OrderedDict[str, None] = OrderedDict()
        self._next_rolling: Version | None = None
        self.busy = ""
        """What else keeps the next version from being staged for a moment: a rollback."""
        self._live_layers = Fused()
        self._retired_layers = Fused()

    # ------------------------------------------------------------------------------------- what is so

    @property
    def ready(self) -> bool:
        """Whether anything is live."""
        return self.serving is not None

    @property
    def live(self) -> int | None:
        """The number of the live version; None if it has none, or if nothing is live."""
        return None if self.serving is None else self.serving.number

    @property
    def layers(self) -> Fused:
        """The newest version that fused, or filled, each layer, the staged one included."""
        return self._live_layers if self.staged is None else self._live_layers.with_(self.staged)

    def numbered_floor(self) -> int:
        """The newest version that has ever been live in this run; -1 if none was."""
        return self._floor

    def past_runs(self) -> tuple[str, ...]:
        """The trainer's incarnations before the present one, the oldest first."""
        return tuple(self._past_runs)

    def revision(self) -> tuple[object, ...]:
        """Return something that differs whenever what has to be written down of the versions may have changed."""
        told = tuple(
            (v.number, v.promise, v.closed, v.approved, None if v.promised is None else len(v.promised))
            for v in self.known.values()
            if v.promise or v.approved
        )
        return (self.ready, self.live, self.run, self._floor, self._endings, told)

    def recall(self, standing: Standing, now: float) -> None:
        """Take over what was written down before a restart. Nothing is live until it has been restored."""
        self.run, self._floor = standing.run, standing.floor
        self._past_runs = OrderedDict.fromkeys(standing.past_runs)
        self.ended = OrderedDict((number, (state, why)) for number, state, why in standing.ended)
        if standing.ready:
            self.ended.pop(standing.live, None)  # type: ignore[arg-type]
            self.open(standing.live, now).restored = True
        for told in standing.open:
            version, _ = self.meet(told.number, now)
            version.promised = None if told.promised is None else slots_of(told.promised)
            version.closed, version.promise, version.approved = told.closed, told.promise, told.approved

    def stalled(self, now: float) -> bool:
        """Whether the staged version has stopped growing."""
        staged = self.staged
        return (
            staged is not None and staged.state is VersionState.OPEN and now - staged.grown >= self.policy.stale_after
        )

    def why_waiting(self) -> str:
        """Say why the next version can't be staged; empty if it can."""
        if self.staged is not None:
            doing = {
                VersionState.OPEN: "is being staged",
                VersionState.COMPLETE: "is being verified",
                VersionState.VERIFIED: "is verified and waits for its commit",
            }[self.staged.state]
            return f"{self.staged.label} {doing}"
        if self.busy:
            return self.busy
        if self.leased:
            return f"{self.leased} requests still read the weights of the version before"
        return ""

    # ------------------------------------------------------------------------------------- what comes

    def judge(self, number: int | None, run: str | None) -> Verdict:
        """Say what becomes of a shard of this version. Changes nothing."""
        if run is not None and run in self._past_runs:
            return Verdict("stale", f"run {run} is over: run {self.run} has begun")
        staged = self.staged
        over = None if number is ROLLING or (staged is not None and staged.number == number) else self._over(number)
        if over is not None:
            return over
        if staged is not None:
            if staged.number == number and staged.state is VersionState.OPEN:
                return Verdict("place")
            soon = staged.state is VersionState.COMPLETE or staged.committing
            return Verdict("wait", self.why_waiting(), short=soon)
        if self.busy or self.leased:
            return Verdict("wait", self.why_waiting(), short=bool(self.busy))
        return Verdict("place")

    def _over(self, number: int) -> Verdict | None:
        if self.serving is not None and number == self.serving.number:
            return Verdict("compare")
        if number in self.ended:
            state, why = self.ended[number]
            return Verdict("stale", f"version {number} was {state}" + (f": {why}" if why else ""))
        if number <= self._floor:
            newer = f"version {self.live} is live" if self.live is not None else f"version {self._floor} was live"
            return Verdict("stale", f"version {number} is over: {newer}")
        return None

    def new_run(self, run: str | None) -> bool:
        """Take note of a shard's run. Returns whether it is a new one, so that versions are counted anew."""
        if run is None or run == self.run or run in self._past_runs:
            return False
        before, self.run = self.run, run
        if before is not None:
            self._past_runs[before] = None
            while len(self._past_runs) > PAST_RUNS:
                self._past_runs.popitem(last=False)
        return before is not None or self._floor >= 0

    def count_anew(self) -> list[Version]:
        """Forget all numbers. Returns the versions that end by that."""
        numbered = [version for version in self.known.values() if version.number is not ROLLING]
        over = [version for version in numbered if not version.committing and not version.restored]
        for version in numbered:
            version.past = True
        for version in over:
            self._end(version, Turn.OVERTAKEN, f"run {self.run} has begun")
        self.ended.clear()
        self._endings += 1
        self._floor = -1
        for kept in (self.serving, self.retired):
            if kept is not None:
                self._rename(kept)
        return over

    @staticmethod
    def _rename(version: Version) -> None:
        """Its number stands for nothing that may come."""
        if version.number is not ROLLING:
            version.number, version.why = ROLLING, f"{version.label} of the run before"

    def meet(self, number: int | None, now: float) -> tuple[Version, list[Version]]:
        """Return a version's record, making one if need be, and the versions that end to make room for it."""
        version = self.known.get(number)
        if version is not None:
            return version, []
        version = (self._next_rolling if number is ROLLING else None) or Version(number, self.coverage, now, now)
        version.opened = version.grown = now
        self.known[number] = version
        waiting = [v for v in self.known.values() if v is not self.staged and v.number is not ROLLING]
        surplus = sorted(waiting, key=lambda v: v.number or 0)[: max(0, len(waiting) - OPEN_VERSIONS)]
        for old in surplus:
            self._end(old, Turn.OVERTAKEN, "too many newer versions have begun")
        return version, surplus

    def open(self, number: int | None, now: float) -> Version:
        """Begin to stage a version."""
        assert self.staged is None
        version, _ = self.meet(number, now)
        version.opened = version.grown = now
        self.staged, self.retired = version, None
        return version

    def retract(self) -> None:
        """Nothing has come of the staged version, and nothing will for now: it need not keep others from their turn."""
        assert self.staged is not None
        version, self.staged = self.staged, None
        if version.number is ROLLING:
            self._next_rolling = version
        if not version.queued and not version.promised and not version.closed:
            del self.known[version.number]

    # ------------------------------------------------------------------------------------- what follows

    def complete(self) -> bool:
        """Whether the staged version has become complete; if so, that is noted."""
        staged = self.staged
        if staged is None or staged.state is not VersionState.OPEN or not staged.is_complete(live=self.ready):
            return False
        staged.turn(Turn.FILLED)
        return True

    def commit(self, now: float, leased: int) -> tuple[Version, Version | None]:
        """The staged version is live. Returns it and the one before."""
        version, before = self.staged, self.serving
        assert version is not None
        version.turn(Turn.COMMITTED)
        self._retired_layers, self._live_layers = self._live_layers, self._live_layers.with_(version)
        if before is not None:
            if before.state is VersionState.LIVE:
                before.turn(Turn.REPLACED)
            before.why = f"{version.label} is live"
            self._remember(before)
        self.serving, self.retired, self.staged, self.leased = version, before, None, leased
        del self.known[version.number]
        if version.number is ROLLING:
            again = Version(ROLLING, self.coverage, now, now, filled=set(version.filled), missing=dict(version.missing))
            again.loaded = set(version.loaded)
            again.next_round()
            self._next_rolling = again
        elif version.past:
            self._rename(version)
        else:
            self._floor = max(self._floor, version.number)
            self._next_rolling = None
        return version, before

    def outdated(self) -> list[Version]:
        """End the waiting versions that are older than the live one; return them."""
        old = [v for v in self.known.values() if v.number is not ROLLING and v.number <= self._floor]
        for version in old:
            self._end(version, Turn.OVERTAKEN, f"version {self.live} is live")
        return old

    def rolled_back(self, leased: int) -> tuple[Version, Version]:
        """The version before is live again. Returns it and the one that was."""
        now_live, was_live = self.retired, self.serving
        assert now_live is not None
        assert was_live is not None
        self._endings += 1
        now_live.turn(Turn.RESTORED)
        was_live.turn(Turn.REPLACED)
        if was_live.number is not ROLLING:
            self.ended[was_live.number] = (VersionState.RETIRED, "it has been rolled back")
        if now_live.number is not ROLLING:
            self.ended.pop(now_live.number, None)
        self.serving, self.retired, self.leased = now_live, was_live, leased
        self._live_layers, self._retired_layers = self._retired_layers, self._live_layers
        return now_live, was_live

    def end(self, version: Version, turn: Turn, why: str) -> None:
        """A version is given up."""
        self._end(version, turn, why)

    def next_up(self) -> Version | None:
        """Return the version that is to be staged next, if one waits and nothing hinders it.

        That is the newest that is complete, else the one that came first.
        """
        if self.staged is not None or self.leased or self.busy:
            return None
        return self.newest_complete() or next((v for v in self.known.values() if v.queued), None)

    def newest_complete(self) -> Version | None:
        """Return the newest version of which everything that is needed waits for its turn."""
        for version in sorted(self.known.values(), key=lambda v: -1 if v.number is None else v.number, reverse=True):
            if version is self.staged or version.number is ROLLING or not version.queued:
                continue
            if len(version.expected) == len(self.coverage.layer_of):
                return version
            if self.ready and version.promised is not None and version.promised <= version.expected.keys():
                return version
        return None

    def overtaker(self, now: float) -> Version | None:
        """Return the version that waits and should take the staged one's place, if there is one.

        That is a newer one that is complete. Between shards with a version and those without, which is newer can't be
        told: there the later one waits until the other has stopped growing.
        """
        staged = self.staged
        if staged is None:
            return None
        if self.stalled(now):
            other_kind = (
                v for v in self.known.values() if v.queued and (v.number is ROLLING) ^ (staged.number is ROLLING)
            )
            found = next(other_kind, None)
            if found is not None:
                return found
        if staged.number is ROLLING:
            return None
        held = staged.state is VersionState.VERIFIED and not staged.committing
        if staged.state is not VersionState.OPEN and not held:
            return None
        newest = self.newest_complete()
        return newest if newest is not None and (newest.number or 0) > staged.number else None

    def unfill(self, slots: Iterable[tuple[int | None, int]]) -> None:
        """Take back (version, slot) pairs: their bytes were given up or could not be proven."""
        for number, slot in slots:
            version = self.known.get(number)
            if version is not None:
                version.unfill((slot,))

    def describe_missing(self, version: Version) -> tuple[tuple[str, ...], int]:
        """Return names of the tensors that a version lacks, and how many there are."""
        lacking = version.lacks() if version is self.staged else version.lacks() - version.expected.keys()
        return self.coverage.named(lacking, NAMED), len(lacking)

    def incomplete(self, version: Version, cause: str) -> events.VersionIncomplete:
        """Return the event that tells what a version lacks."""
        names, count = self.describe_missing(version)
        shown = ", ".join(names[:3]) + (f" and {count - 3} more" if count > 3 else "")  # noqa: PLR2004
        what = f"{count} tensors are missing: {shown}" if count else "nothing of it has come, or shards were rejected"
        return events.VersionIncomplete(
            version=version.number,
            message=f"{version.label} is incomplete ({cause}): {what}",
            missing=names,
            missing_count=count,
            cause=cause,
        )

    def validate(self) -> None:
        """Check the invariants; for tests."""
        totals = self.coverage.totals()
        for number, version in self.known.items():
            assert number == version.number
            assert version.state in {VersionState.OPEN, VersionState.COMPLETE, VersionState.VERIFIED}
            assert version is self.staged or version.state is VersionState.OPEN
            assert number is ROLLING or number > self._floor or self.run is not None or version.restored
            for layer, total in totals.items():
                filled = sum(1 for slot in version.filled if self.coverage.layer_of[slot] == layer)
                assert version.missing[layer] == total - filled
            assert version.blocked <= version.waits
        assert self.staged is None or self.known[self.staged.number] is self.staged
        assert self.staged is None or self.retired is None
        assert len(self.known) <= OPEN_VERSIONS + 2
        assert len(self.ended) <= ENDED_VERSIONS
        for live, state in ((self.serving, VersionState.LIVE), (self.retired, VersionState.RETIRED)):
            assert live is None or live.state is state

    def _end(self, version: Version, turn: Turn, why: str) -> None:
        version.turn(turn)
        version.why = why
        self.known.pop(version.number, None)
        if version is self.staged:
            self.staged = None
        if version is self._next_rolling:  # what comes next is another one, which has nothing of it
            self._next_rolling = None
        self._remember(version)

    def _remember(self, version: Version) -> None:
        if version.number is ROLLING:
            return
        self._endings += 1
        self.ended[version.number] = (version.state, version.why)
        self.ended.move_to_end(version.number)
        while len(self.ended) > ENDED_VERSIONS:
            self.ended.popitem(last=False)
