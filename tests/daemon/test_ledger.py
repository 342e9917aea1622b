"""The ledger alone: stimuli in, instructions out, invariants after each step. No socket, file or tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fusewire.daemon import events, wire
from fusewire.daemon.errors import Reason
from fusewire.daemon.ledger import IN_FLIGHT, RETRIES, Ledger, State
from fusewire.daemon.progress import OPEN_VERSIONS, Coverage
from fusewire.daemon.stimuli import (
    DropVersion,
    Expired,
    Gone,
    Inspect,
    Inspected,
    Instruction,
    NotReady,
    Place,
    Placed,
    Publish,
    Refused,
    Release,
    Reply,
    Seen,
    Stimulus,
    Stop,
    Tick,
)

# Slots: 0 = embedding; layer 0: 1 = q_a, 2 = kv_a, 3 = rest; layer 1: 4, 5, 6.
COVERAGE = Coverage(layer_of=(None, 0, 0, 0, 1, 1, 1), fusions={0: (1, 2), 1: (4, 5)}, layers=2)
EVERYTHING = tuple(range(7))


class Driver:
    """A ledger whose invariants are checked after each step, and shorthands for what happens to it."""

    def __init__(self, *, held_limit: int = 100, known_limit: int = 1000) -> None:
        self.ledger = Ledger(COVERAGE, held_limit=held_limit, known_limit=known_limit)
        self.now = 0.0

    def __call__(self, stimulus: Stimulus) -> list[Instruction]:
        self.now = max(self.now, stimulus.now)
        out = self.ledger.handle(stimulus)
        self.ledger.validate()
        return out

    def seen(self, key: str, identity: Any = 1, content: Any = None, held: int = 0) -> list[Instruction]:
        content = identity if content is None else content
        return self(
            Seen(
                key=key,
                name=key,
                source="folder",
                identity=identity,
                content=content,
                held=held,
                now=self.now,
            )
        )

    def inspected(self, key: str, version: int | None = None, slots: tuple[int, ...] = (0,)) -> list[Instruction]:
        return self(Inspected(key=key, now=self.now, version=version, slots=slots, skipped=0, nbytes=10))

    def placed(self, key: str, fused: tuple[int, ...] = (), **changes: Any) -> list[Instruction]:
        waiting = changes.get("waiting", {})
        halves = [slot for layer in fused for slot in COVERAGE.fusions[layer]]
        slots = self.ledger.shards[key].slots
        fields: dict[str, Any] = {
            "arrived": tuple(sorted({slot for slot in slots if slot not in waiting} | set(halves))),
            "waiting": {},
            "pending": (),
            "duplicates": 0,
            "serving": False,
            "filled": 1,
            "seconds": 0.1,
        }
        return self(Placed(key=key, now=self.now, fused=fused, **(fields | changes)))

    def apply(self, key: str, version: int | None, slots: tuple[int, ...], **placed: Any) -> list[Instruction]:
        """Take a shard through its whole life; return what its placing led to."""
        self.seen(key)
        self.inspected(key, version, slots)
        return self.placed(key, **placed)


@pytest.fixture
def drive() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    driver.ledger.validate()


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
    assert drive.ledger.versions.fused == {0: 7}


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


def test_a_complete_version_goes_live_and_ends_the_older_ones(drive: Driver) -> None:
    drive.apply("old", 3, (1,), waiting={1: "q_a"})
    out = drive.apply("all", 5, EVERYTHING, fused=(0, 1), serving=True, filled=7)

    told = [i.event for i in out if isinstance(i, Publish)]
    kinds = [type(event) for event in told]
    assert kinds.index(events.VersionComplete) < kinds.index(events.VersionLive) < kinds.index(events.ModelReady)
    assert DropVersion(3) in out
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
    assert drive.inspected("a", 5, (0,)) == [Place("a", 5)]
    drive.placed("a")
    drive.seen("b")
    assert drive.inspected("b", None, (0,)) == [Place("b", None)]


def test_open_versions_are_bounded(drive: Driver) -> None:
    dropped = []
    for version in range(1, OPEN_VERSIONS + 5):
        drive.seen(f"s{version}")
        out = drive.inspected(f"s{version}", version, (0,))
        dropped += [i.version for i in out if isinstance(i, DropVersion)]
        drive.placed(f"s{version}")
    drive.seen("late")

    assert dropped == [1, 2, 3, 4]
    assert [a.reason for a in answers(drive.inspected("late", 4, (0,)))] == ["stale_version"]


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
    drive.apply("a", 2, (0, 3), fused=())
    drive.ledger.versions.progress[2].filled.add(1)
    drive.ledger.versions.progress[2].missing[0] -= 1
    event = events.FusionExpired(layer=0, tensor="q_a", age=9, nbytes=3, cause="age", message="given up")
    out = drive(Expired(now=9, halves=(event,), slots=((2, 1),), pending=()))

    assert published(out) == ["given up"]
    assert drive.ledger.counters["halves_expired"] == 1
    assert drive.ledger.versions.progress[2].missing[0] == 2


def test_unproven_bytes_unfill_their_slots(drive: Driver) -> None:
    drive.apply("a", 1, (3,))
    drive.seen("b")
    drive.inspected("b", 1, (3,))
    drive(Refused(key="b", now=0, reason=Reason.INTERNAL_ERROR, detail="", unfilled=(3,)))

    assert 3 not in drive.ledger.versions.progress[1].filled


def test_stopping_answers_clients_and_starts_nothing(drive: Driver) -> None:
    for n in range(5):
        drive.seen(f"s{n}", identity=None, held=1)
    out = drive(Stop(now=0))

    assert [(a.shard, a.reason) for a in answers(out)] == [(f"s{n}", "stopping") for n in range(2, 5)]
    assert [answer.status for answer in answers(drive.seen("new", identity=None, held=1))] == ["busy"]
    drive.inspected("s0")
    assert not any(isinstance(i, Inspect) for i in drive.placed("s0"))


def test_finished_shards_are_remembered_within_a_bound() -> None:
    drive = Driver(known_limit=3)
    for n in range(10):
        drive.apply(f"s{n}", None, (0,))

    assert list(drive.ledger.finished) == ["s7", "s8", "s9"]


class Life(RuleBasedStateMachine):
    """Sources and a loader that do anything they may, in any order: no shard is lost or answered twice."""

    def __init__(self) -> None:
        super().__init__()
        self.drive = Driver(held_limit=4, known_limit=6)
        self.to_inspect: list[str] = []
        self.to_place: list[str] = []
        self.asked: dict[str, int] = {}
        self.answered: dict[str, int] = {}
        self.count = 0

    def take(self, out: list[Instruction]) -> None:
        for instruction in out:
            match instruction:
                case Inspect(key):
                    self.to_inspect.append(key)
                case Place(key, _):
                    self.to_place.append(key)
                case Reply(key, _):
                    self.answered[key] = self.answered.get(key, 0) + 1
                case _:
                    pass

    @rule(name=st.integers(0, 3), identity=st.integers(0, 3), content=st.integers(0, 1))
    def file_seen(self, name: int, identity: int, content: int) -> None:
        self.take(self.drive.seen(f"f{name}", (identity, content), content))

    @rule(name=st.integers(0, 3))
    def file_gone(self, name: int) -> None:
        self.take(self.drive(Gone(key=f"f{name}", now=self.drive.now)))

    @rule(held=st.integers(1, 3))
    def client_puts(self, held: int) -> None:
        self.count += 1
        key = f"c{self.count}"
        self.asked[key] = 1
        out = self.drive(Seen(key=key, name=key, source="socket", held=held, now=self.drive.now))
        self.take(out)

    @rule(seconds=st.floats(0.0, 3.0))
    def time_passes(self, seconds: float) -> None:
        self.take(self.drive(Tick(now=self.drive.now + seconds)))

    @precondition(lambda self: self.to_inspect)
    @rule(version=st.sampled_from([None, *range(12)]), slots=st.sets(st.integers(0, 6), min_size=1))
    def is_fine(self, version: int | None, slots: set[int]) -> None:
        self.take(self.drive.inspected(self.to_inspect.pop(0), version, tuple(sorted(slots))))

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
    @rule(serving=st.booleans(), fused=st.sets(st.integers(0, 1)))
    def is_placed(self, serving: bool, fused: set[int]) -> None:
        serving = serving or self.drive.ledger.versions.ready
        out = self.drive.placed(self.to_place.pop(0), fused=tuple(sorted(fused)), serving=serving)
        self.take(out)

    @invariant()
    def the_ledger_waits_only_for_work_it_asked_for(self) -> None:
        assert sorted(self.to_inspect + self.to_place) == sorted(self.drive.ledger.in_flight)

    @invariant()
    def every_client_gets_exactly_one_answer(self) -> None:
        open_ = {key for key, shard in self.drive.ledger.shards.items() if key.startswith("c")}
        for key in self.asked:
            assert self.answered.get(key, 0) == (0 if key in open_ else 1)

    @invariant()
    def a_finished_client_shard_is_forgotten(self) -> None:
        finished = {State.APPLIED, State.REJECTED}
        assert not [s for s in self.drive.ledger.shards.values() if s.key[0] == "c" and s.state in finished]


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
