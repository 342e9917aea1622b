"""The ledger alone: stimuli in, instructions out, invariants after each step. No socket, file or tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from fusewire.daemon import events, wire
from fusewire.daemon.errors import Reason
from fusewire.daemon.ledger import IN_FLIGHT, RETRIES, State
from fusewire.daemon.lifecycle import VersionState
from fusewire.daemon.records import Memory, ShardRecord, Standing
from fusewire.daemon.roster import OPEN_VERSIONS, Policy
from fusewire.daemon.stimuli import (
    Answered,
    Commit,
    Committed,
    Compare,
    DropVersion,
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
    Publish,
    Recalled,
    Refused,
    Release,
    Reply,
    Rollback,
    RolledBack,
    Seen,
    Stop,
    Tick,
    Verified,
    Verify,
)

EVERYTHING = tuple(range(7))
Driver = Any
NewDriver = Callable[..., Any]


@pytest.fixture
def drive(new_driver: NewDriver) -> Driver:
    return new_driver()


def published(out: list[Instruction]) -> list[str]:
    return [instruction.event.message for instruction in out if isinstance(instruction, Publish)]


def answers(out: list[Instruction]) -> list[wire.Answer]:
    return [instruction.answer for instruction in out if isinstance(instruction, Reply)]


def test_a_shard_is_inspected_placed_and_announced(drive: Driver) -> None:
    assert drive.seen("a") == [Inspect("a")]
    assert drive.inspected("a", 7, (1, 2, 3)) == [Place("a", 7)]
    out = drive.placed("a", fused=(0,))

    assert published(out) == ["layer 0 fused", "layer 0 loaded", "shard a applied: 3 tensors"]
    assert all(i.event.version == 7 for i in out if isinstance(i, Publish))
    assert [(a.status, a.fused, a.version) for a in answers(out)] == [("applied", (0,), 7)]
    assert Release("a") in out
    assert drive.ledger.versions.layers.fused == {0: 7}


def test_events_precede_the_answer(drive: Driver) -> None:
    """Who got an answer may rely on the events having been sent."""
    out = drive.apply("a", None, (0,))
    kinds = [type(instruction) for instruction in out]

    assert kinds.index(Reply) > max(i for i, kind in enumerate(kinds) if kind is Publish)


def test_not_more_than_a_few_are_in_flight(drive: Driver) -> None:
    started = [drive.seen(f"s{n}") for n in range(10)]

    assert sum(len(out) for out in started) == IN_FLIGHT
    drive.inspected("s0")
    assert drive.placed("s0")[-1] == Inspect("s2")


def test_the_same_file_seen_again_does_nothing(drive: Driver) -> None:
    drive.apply("a", None, (0,))

    assert drive.seen("a", identity=1) == []


def test_a_chmod_does_not_bring_old_weights_back(drive: Driver) -> None:
    drive.seen("a", identity="x", content="bytes")
    drive.inspected("a")
    drive.placed("a")

    assert drive.seen("a", identity="y", content="bytes") == []
    assert drive.seen("a", identity="z", content="other bytes") == [Inspect("a")]


def test_a_chmod_may_cure_a_rejected_file(drive: Driver) -> None:
    drive.seen("a", identity="x", content="bytes")
    drive(Refused(key="a", now=0, reason=Reason.UNREADABLE, detail="permission denied"))

    assert drive.seen("a", identity="x", content="bytes") == []
    assert drive.seen("a", identity="y", content="bytes") == [Inspect("a")]


def test_a_rejection_is_told_everywhere_and_the_rest_goes_on(drive: Driver) -> None:
    drive.seen("bad")
    drive.seen("good")
    drive.seen("next")
    out = drive(Refused(key="bad", now=0, reason=Reason.WRONG_SHAPE, detail="x" * 500 + "\x1b"))

    assert published(out)[0].startswith("shard bad rejected: wrong_shape")
    (answer,) = answers(out)
    assert (answer.status, answer.reason, len(answer.detail)) == ("rejected", "wrong_shape", 200)
    assert out[-1] == Inspect("next")
    assert drive.ledger.rejected[0][1].shard == "bad"
    assert drive.ledger.counters["shards_rejected"] == 1


def test_a_file_still_being_written_is_looked_at_again(drive: Driver) -> None:
    drive.seen("a")
    assert drive(NotReady(key="a", now=1.0, why="a writer has it open")) == []
    due = drive.ledger.next_due()
    assert due is not None
    assert due > 1.0
    assert drive(Tick(now=due - 0.0001)) == []
    assert drive(Tick(now=due)) == [Inspect("a")]


def test_closing_a_deferred_file_is_heard_at_once(drive: Driver) -> None:
    drive.seen("a")
    for _ in range(12):
        drive(NotReady(key="a", now=drive.now, why="a writer has it open"))
        due = drive.ledger.next_due()
        assert due is not None
        drive(Tick(now=due))
    drive(NotReady(key="a", now=drive.now, why="a writer has it open"))
    due = drive.ledger.next_due()
    assert due is not None
    assert due - drive.now == pytest.approx(2.0)

    assert drive.seen("a") == [Inspect("a")]


def test_a_change_while_reading_is_tried_again_a_few_times(drive: Driver) -> None:
    changed = Reason.CHANGED_WHILE_READING
    drive.seen("a")
    for _ in range(RETRIES):
        drive.inspected("a")
        out = drive(Refused(key="a", now=drive.now, reason=changed, detail="", transient=True))
        assert out == [Release("a")]
        drive(Tick(now=drive.now + 10))
    drive.inspected("a")
    out = drive(Refused(key="a", now=drive.now, reason=changed, detail="", transient=True))

    assert [answer.reason for answer in answers(out)] == ["changed_while_reading"]


def test_a_file_rewritten_while_it_is_placed_is_placed_again(drive: Driver) -> None:
    drive.seen("a", identity=1)
    drive.inspected("a")
    drive.seen("a", identity=2)
    out = drive.placed("a")

    assert out[-1] == Inspect("a")


def test_a_file_that_grew_between_its_being_seen_and_opened_is_not_taken_for_another(drive: Driver) -> None:
    """Its creation is heard of, it is opened when it has been written, and then its closing is heard of."""
    drive.seen("a", identity=0)
    one, two = (0, 0, 1, 0), (0, 0, 2, 0)
    drive(Inspected(key="a", now=1.0, version=7, slots=(0,), skipped=0, nbytes=10, run=None, identity=one, opened=1.0))
    drive.seen("a", identity=one)

    assert Inspect("a") not in drive.placed("a")
    assert drive.seen("a", identity=one) == []
    assert drive.seen("a", identity=0, looked=0.9) == [], "an older look, told late"
    assert drive.seen("a", identity=two)[-1] == Inspect("a")


@pytest.mark.parametrize("state", ["queued", "deferred", "inspecting"])
def test_a_file_that_vanishes_unread_is_told(drive: Driver, state: str) -> None:
    if state == "queued":
        drive.seen("first")
        drive.seen("second")
    drive.seen("a")
    out: list[Instruction] = []
    if state == "deferred":
        drive(NotReady(key="a", now=0, why="writer"))
    out += drive(Gone(key="a", now=0))
    if state == "inspecting":
        assert out == []
        out += drive(Refused(key="a", now=0, reason=Reason.VANISHED, detail="gone"))

    assert [answer.reason for answer in answers(out)] == ["vanished"]
    assert "a" not in drive.ledger.shards


def test_a_file_that_vanishes_after_it_was_applied_is_forgotten_in_silence(drive: Driver) -> None:
    drive.apply("a", None, (0,))

    assert drive(Gone(key="a", now=0)) == []
    assert drive.seen("a") == [Inspect("a")]


def test_clients_that_send_too_much_at_once_are_told_to_wait(drive: Driver) -> None:
    drive.seen("a", identity=None, held=80)
    out = drive.seen("b", identity=None, held=30)

    assert [answer.status for answer in answers(out)] == ["busy"]
    assert Release("b") in out
    drive.inspected("a")
    drive.placed("a")
    assert drive.seen("b", identity=None, held=300) == [Inspect("b")], "alone, even a large one is taken"


def test_a_layer_is_fused_once_per_version(drive: Driver) -> None:
    drive.apply("a", 1, (1, 2), fused=(0,))
    out = drive.apply("b", 1, (1, 2), fused=(0,))

    assert not any("fused" in message for message in published(out))


def test_a_waiting_half_completes_nothing(drive: Driver) -> None:
    """All slots of layer 0 have come, but one half waits elsewhere: not loaded."""
    out = drive.apply("a", 1, (1, 2, 3), waiting={1: "q_a"})
    assert published(out) == ["shard a applied: 3 tensors, 1 waiting for a partner"]
    out = drive.apply("b", 1, (1,), fused=(0,))

    assert published(out)[:2] == ["layer 0 fused", "layer 0 loaded"]


def test_a_slot_that_comes_twice_counts_once(drive: Driver) -> None:
    drive.apply("a", 1, (3,))
    drive.apply("b", 1, (3,))
    out = drive.apply("c", 1, (3,))

    assert "layer 0 loaded" not in published(out)


def test_a_complete_version_takes_the_place_of_an_older_one(drive: Driver) -> None:
    drive.apply("old", 3, (1,), waiting={1: "q_a"})
    drive.seen("all")
    out = drive.inspected("all", 5, EVERYTHING)
    assert published(out) == ["version 3 superseded: version 5 is complete"]
    assert DropVersion(3) in out
    assert out[-1] == Inspect("all")
    drive.inspected("all", 5, EVERYTHING)
    out = drive.placed("all", fused=(0, 1), serving=True, filled=7)

    told = [i.event for i in out if isinstance(i, Publish)]
    kinds = [type(event) for event in told]
    order = [events.VersionComplete, events.VersionVerified, events.VersionLive, events.ModelReady]
    assert [kind for kind in kinds if kind in order] == order
    assert drive.ledger.versions.live == 5


@pytest.mark.parametrize("version", [0, 3, 4])
def test_a_shard_older_than_live_is_stale(drive: Driver, version: int) -> None:
    drive.apply("all", 5, EVERYTHING, fused=(0, 1), serving=True)
    drive.seen("late")
    out = drive.inspected("late", version, (0,))

    assert [answer.reason for answer in answers(out)] == ["stale_version"]
    assert not any(isinstance(instruction, Place) for instruction in out)


def test_the_live_version_and_the_rolling_one_are_never_stale(drive: Driver) -> None:
    drive.apply("all", 5, EVERYTHING, fused=(0, 1), serving=True)
    drive.seen("a")
    assert drive.inspected("a", 5, (0,)) == [Compare("a", 5)]
    drive.placed("a")
    drive.seen("b")
    assert drive.inspected("b", None, (0,)) == [Place("b", None)]


def test_open_versions_are_bounded(drive: Driver) -> None:
    """One is staged; of those that wait, the oldest end."""
    out: list[Instruction] = []
    for version in range(OPEN_VERSIONS + 4):
        drive.seen(f"s{version}")
        out += drive.inspected(f"s{version}", version, (0,))
        if version == 0:
            drive.placed("s0")

    ended = [message for message in published(out) if message.startswith("version")]
    assert ended == [f"version {v} superseded: too many newer versions have begun" for v in (1, 2, 3)]
    assert [a.reason for a in answers(out)] == ["stale_version"] * 3
    drive.seen("late")
    assert [a.reason for a in answers(drive.inspected("late", 2, (0,)))] == ["stale_version"]


def test_readiness_is_told_once(drive: Driver) -> None:
    out = drive.apply("a", None, EVERYTHING, fused=(0, 1), serving=True, filled=7)
    again = drive.apply("b", None, EVERYTHING, fused=(0, 1), serving=True, filled=7)

    assert "model ready: all 7 slots filled" in published(out)
    assert "rolling version live" in published(out)
    assert not any("ready" in message for message in published(again))


def test_the_rolling_version_tells_each_round_of_a_layer(drive: Driver) -> None:
    drive.apply("base", None, EVERYTHING, fused=(0, 1), serving=True)
    rounds = [published(drive.apply(f"u{n}", None, (1, 2, 3), fused=(0,), serving=True)) for n in range(3)]

    assert [told[:2] for told in rounds] == [["layer 0 fused", "layer 0 loaded"]] * 3


def test_an_expired_half_is_told_and_is_missing_again(drive: Driver) -> None:
    drive.apply("a", 2, (0, 1, 3), waiting={1: "q_a"})
    staged = drive.ledger.versions.staged
    assert staged is not None
    assert staged.came == {0, 1, 3}
    event = events.FusionExpired(layer=0, tensor="q_a", age=9, nbytes=3, cause="age", message="given up")
    out = drive(Expired(now=9, halves=(event,), slots=((2, 1),), pending=()))

    assert published(out) == ["given up"]
    assert drive.ledger.counters["halves_expired"] == 1
    assert staged.came == {0, 3}


def test_unproven_bytes_unfill_their_slots(drive: Driver) -> None:
    drive.apply("a", 1, (3,))
    drive.seen("b")
    drive.inspected("b", 1, (3,))
    drive(Refused(key="b", now=0, reason=Reason.INTERNAL_ERROR, detail="", unfilled=(3,)))

    assert drive.ledger.versions.staged is not None
    assert drive.ledger.versions.staged.filled == set()


def test_no_client_takes_all_the_room_there_is_for_shards_in_flight(drive: Driver) -> None:
    def send(key: str, client: str, held: int) -> list[str]:
        seen = Seen(key=key, name=key, source="socket", held=held, client=client, now=0)
        return [answer.detail for answer in answers(drive(seen))]

    assert send("a", "greedy", 40) == []
    assert send("b", "greedy", 10) == []
    (why,) = send("c", "greedy", 1)
    assert "one client may have half of 100" in why
    assert send("d", "modest", 50) == [], "there is room for others"
    drive.inspected("a")
    drive.placed("a")
    assert send("e", "greedy", 40) == []
    assert set(drive.ledger.shares) == {"greedy", "modest"}
    for key in ("b", "d", "e"):
        drive.inspected(key)
        drive.placed(key)
    assert drive.ledger.shares == {}
    assert send("f", "greedy", 90) == [], "a single one may be larger"


def test_no_client_takes_all_streams(new_driver: Callable[..., Driver]) -> None:
    drive = new_driver(stream_limit=3, client_stream_limit=2)

    def begin(key: str, client: str) -> list[str]:
        return [
            answer.detail
            for answer in answers(
                drive(Seen(key=key, name=key, source="socket", held=1, stream=True, client=client, now=0))
            )
        ]

    assert begin("a", "greedy") == begin("b", "greedy") == []
    (why,) = begin("c", "greedy")
    assert "socket.streams_per_client" in why
    assert begin("d", "modest") == []
    (why,) = begin("e", "modest")
    assert "(socket.streams)" in why
    drive(Refused(key="a", now=0, reason=Reason.CLIENT_SILENT, detail="", unfilled=()))
    assert begin("f", "greedy") == []


def test_stopping_answers_clients_and_starts_nothing(drive: Driver) -> None:
    for n in range(5):
        drive.seen(f"s{n}", identity=None, held=1)
    out = drive(Stop(now=0))

    assert [(a.shard, a.reason) for a in answers(out)] == [(f"s{n}", "stopping") for n in range(2, 5)]
    assert [answer.status for answer in answers(drive.seen("new", identity=None, held=1))] == ["busy"]
    drive.inspected("s0")
    assert not any(isinstance(i, Inspect) for i in drive.placed("s0"))


def test_finished_shards_are_remembered_within_a_bound(new_driver: NewDriver) -> None:
    drive = new_driver(known_limit=3)
    for n in range(10):
        drive.apply(f"s{n}", None, (0,))

    assert list(drive.ledger.finished) == ["s7", "s8", "s9"]


class Life(RuleBasedStateMachine):
    """Sources, a loader, requests and operators that do anything they may, in any order.

    No shard is lost or answered twice, and nothing waits without a reason.
    """

    driver: type[Any]

    def __init__(self) -> None:
        super().__init__()
        self.drive = self.driver(
            held_limit=4, known_limit=6, policy=Policy(automatic=self.automatic, stale_after=5.0), stream_limit=2
        )
        self.drive.versions_follow = False
        self.to_inspect: list[str] = []
        self.to_place: list[str] = []
        self.version_jobs: list[Instruction] = []
        self.asked: dict[str, int] = {}
        self.answered: dict[str, int] = {}
        self.orders: dict[str, int] = {}
        self.live: list[int | None] = []
        self.count = 0

    automatic = True

    def take(self, out: list[Instruction]) -> None:
        for instruction in out:
            match instruction:
                case Inspect(key):
                    self.to_inspect.append(key)
                case Place(key, _) | Compare(key, _):
                    self.to_place.append(key)
                case Reply(key, _):
                    self.answered[key] = self.answered.get(key, 0) + 1
                case Verify() | Commit() | Rollback():
                    self.version_jobs.append(instruction)
                case Answered(ticket, _, _):
                    self.orders[ticket] += 1
                case Publish(events.VersionLive() as event):
                    self.live.append(event.version)
                case _:
                    pass

    @rule(name=st.integers(0, 3), identity=st.integers(0, 3), content=st.integers(0, 1), claimed=st.booleans())
    def file_seen(self, name: int, identity: int, content: int, claimed: bool) -> None:
        self.take(self.drive.seen(f"f{name}", (identity, content), content, claimed=name if claimed else None))

    @rule(name=st.integers(0, 3))
    def file_gone(self, name: int) -> None:
        self.take(self.drive(Gone(key=f"f{name}", now=self.drive.now)))

    @rule(held=st.integers(1, 3), stream=st.booleans())
    def client_puts(self, held: int, stream: bool) -> None:
        self.count += 1
        key = f"c{self.count}"
        self.asked[key] = 1
        out = self.drive(Seen(key=key, name=key, source="socket", held=held, stream=stream, now=self.drive.now))
        self.take(out)

    @precondition(lambda self: self.drive.ledger.streams)
    @rule(data=st.data())
    def client_goes_away(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.drive.ledger.streams)))
        if self.drive.ledger.shards[key].state is not State.STREAMING:  # else the loader gives it up, and says so
            self.take(self.drive(Gone(key=key, now=self.drive.now)))

    @precondition(lambda self: self.to_place)
    @rule()
    def has_to_wait_for_another(self) -> None:
        self.take(self.drive(NotReady(key=self.to_place.pop(0), now=self.drive.now, why="another client")))

    @rule(seconds=st.floats(0.0, 3.0))
    def time_passes(self, seconds: float) -> None:
        self.take(self.drive(Tick(now=self.drive.now + seconds)))

    @precondition(lambda self: self.to_inspect)
    @rule(
        version=st.sampled_from([None, 0, 1, 2, 3]),
        slots=st.one_of(st.just(set(EVERYTHING)), st.sets(st.integers(0, 6), min_size=1)),
        run=st.sampled_from([None, None, None, "a", "b"]),
    )
    def is_fine(self, version: int | None, slots: set[int], run: str | None) -> None:
        self.take(self.drive.inspected(self.to_inspect.pop(0), version, tuple(sorted(slots)), run))

    @precondition(lambda self: any(key[0] == "f" for key in self.to_inspect))
    @rule(version=st.integers(0, 3), slots=st.one_of(st.none(), st.sets(st.integers(0, 6), min_size=1)))
    def is_an_index(self, version: int, slots: set[int] | None) -> None:
        key = next(key for key in self.to_inspect if key[0] == "f")
        self.to_inspect.remove(key)
        told = None if slots is None else tuple(sorted(slots))
        self.take(self.drive(Listed(key=key, now=self.drive.now, version=version, slots=told, what="index")))

    @precondition(lambda self: self.to_inspect)
    @rule()
    def is_being_written(self) -> None:
        self.take(self.drive(NotReady(key=self.to_inspect.pop(0), now=self.drive.now, why="writer")))

    @precondition(lambda self: self.to_inspect or self.to_place)
    @rule(transient=st.booleans(), late=st.booleans())
    def is_refused(self, transient: bool, late: bool) -> None:
        jobs = self.to_place if (late and self.to_place) or not self.to_inspect else self.to_inspect
        refused = Refused(key=jobs.pop(0), now=self.drive.now, reason=Reason.TRUNCATED, detail="", transient=transient)
        self.take(self.drive(refused))

    @precondition(lambda self: self.to_place)
    @rule(data=st.data())
    def is_placed(self, data: st.DataObject) -> None:
        key = self.to_place.pop(0)
        slots = set(self.drive.ledger.shards[key].slots)
        fused = tuple(layer for layer, halves in ((0, {1, 2}), (1, {4, 5})) if halves <= slots)
        lone = [half for layer, halves in ((0, {1, 2}), (1, {4, 5})) for half in halves & slots if layer not in fused]
        waiting = {half: "half" for half in lone if data.draw(st.booleans())}
        self.take(self.drive.placed(key, fused=fused, waiting=waiting))

    @precondition(lambda self: self.version_jobs)
    @rule(fails=st.booleans(), leased=st.integers(0, 2))
    def a_version_goes_on(self, fails: bool, leased: int) -> None:
        match self.version_jobs.pop(0):
            case Verify(version):
                out = self.drive(Verified(now=self.drive.now, version=version, failure="NaN" if fails else ""))
            case Commit(version):
                out = self.drive(Committed(now=self.drive.now, version=version, leased=leased))
            case Rollback(ticket):
                failure = "gone" if fails else ""
                out = self.drive(RolledBack(now=self.drive.now, ticket=ticket, failure=failure, leased=leased))
            case _:
                raise AssertionError
        self.take(out)

    @precondition(lambda self: self.drive.ledger.versions.leased)
    @rule()
    def requests_end(self) -> None:
        self.take(self.drive(Freed(now=self.drive.now)))

    @rule(
        order=st.sampled_from(["commit", "rollback", "abort"]),
        version=st.sampled_from([None, 0, 1, 2, 3]),
        by_trainer=st.booleans(),
        slots=st.one_of(st.none(), st.sets(st.integers(0, 6), min_size=1)),
    )
    def somebody_orders(self, order: Any, version: int | None, by_trainer: bool, slots: set[int] | None) -> None:
        ticket = f"t{len(self.orders)}"
        self.orders[ticket] = 0
        out = self.drive(
            Ordered(
                now=self.drive.now,
                ticket=ticket,
                order=order,
                version=version,
                by_trainer=by_trainer,
                slots=None if slots is None else tuple(sorted(slots)),
            )
        )
        self.take(out)

    @invariant()
    def the_ledger_waits_only_for_work_it_asked_for(self) -> None:
        ledger = self.drive.ledger
        coming = [shard.key for shard in ledger.shards.values() if shard.state is State.STREAMING]
        assert sorted(self.to_inspect + self.to_place) == sorted([*ledger.in_flight, *coming])

    @invariant()
    def every_client_gets_exactly_one_answer(self) -> None:
        open_ = {key for key, shard in self.drive.ledger.shards.items() if key.startswith("c")}
        for key in self.asked:
            assert self.answered.get(key, 0) == (0 if key in open_ else 1)
        assert all(count <= 1 for count in self.orders.values())

    @invariant()
    def a_finished_client_shard_is_forgotten(self) -> None:
        finished = {State.APPLIED, State.REJECTED}
        assert not [s for s in self.drive.ledger.shards.values() if s.key[0] == "c" and s.state in finished]

    @invariant()
    def nothing_waits_without_a_reason(self) -> None:
        versions = self.drive.ledger.versions
        waiting = [shard for shard in self.drive.ledger.shards.values() if shard.state is State.WAITING]
        assert not waiting or versions.why_waiting()

    def teardown(self) -> None:
        """Whatever happened: once all work is done and all requests have ended, only an open version is in the way."""
        for _ in range(200):
            if self.drive.ledger.versions.leased:
                self.take(self.drive(Freed(now=self.drive.now)))
            elif self.version_jobs:
                self.a_version_goes_on(fails=False, leased=0)
            elif self.to_place:
                self.take(self.drive.placed(self.to_place.pop(0)))
            elif self.to_inspect:
                self.take(self.drive.inspected(self.to_inspect.pop(0), 3, (0,)))
            elif self.drive.ledger.deferred:
                self.take(self.drive(Tick(now=self.drive.now + 10)))
            else:
                break
        ledger = self.drive.ledger
        assert not ledger.in_flight
        assert not ledger.queue
        assert not any(shard.state is State.STREAMING for shard in ledger.shards.values())
        staged = ledger.versions.staged
        waiting = [shard for shard in ledger.shards.values() if shard.state is State.WAITING]
        assert not waiting or (staged is not None and staged.state in {VersionState.OPEN, VersionState.VERIFIED})
        pending = [ticket for ticket, count in self.orders.items() if not count]
        assert not pending, "every order is answered"


@pytest.mark.parametrize("automatic", [True, False])
def test_any_life(automatic: bool, driver_class: type[Any]) -> None:
    class Concrete(Life):
        driver = driver_class

    Concrete.automatic = automatic
    run_state_machine_as_test(Concrete, settings=settings(max_examples=120, stateful_step_count=60, deadline=None))


# ------------------------------------------------------------------------------------ after a restart


def kept(number: int, **changes: Any) -> ShardRecord:
    """A shard as the journal has it."""
    fields: dict[str, Any] = {"source": "folder", "identity": (1, 2, 3, 4, number), "standing": "staged"}
    return ShardRecord(id=number, order=number, key="latest", name="latest", **(fields | changes))


def comes_back(drive: Driver, *records: ShardRecord) -> None:
    """A daemon starts again that had these, and nothing live."""
    drive(Recalled(now=0.0, memory=Memory(standing=Standing(), shards=records)))


def pushed_before(drive: Driver, number: int) -> str:
    key = f"spool:{number}"
    drive(Seen(key=key, name=key, source="spool", number=number, place=f"{number}.safetensors", now=0.0))
    return key


@pytest.mark.parametrize(
    ("reason", "over"), [(Reason.STOPPING, False), (Reason.MODEL_BUSY, False), (Reason.CONFLICT, True)]
)
def test_what_was_acknowledged_is_given_up_only_for_what_it_is(drive: Driver, reason: Reason, over: bool) -> None:
    """A stop, or a model that is busy, says nothing of a shard that a client will not send again."""
    comes_back(drive, kept(7, source="socket", identity=None))
    key = pushed_before(drive, 7)
    drive.inspected(key, version=3)
    drive(Refused(key=key, now=0.0, reason=reason, detail="", transient=False))
    standings = [entry.standing for entry in drive.written if isinstance(entry, ShardRecord)]
    assert (standings, drive.discarded) == ((["over"], [7]) if over else ([], []))


def test_a_file_keeps_its_number_though_another_of_its_name_is_live(drive: Driver) -> None:
    comes_back(drive, kept(1, standing="over"), kept(2))
    drive(Seen(key="latest", name="latest", source="folder", identity=(1, 2, 3, 4, 2), content=2, number=2, now=0.0))
    drive.inspected("latest", slots=(0, 1))
    drive.placed("latest", waiting={1: "0.q_a"})
    assert [entry.id for entry in drive.written if isinstance(entry, ShardRecord)] == [2]
