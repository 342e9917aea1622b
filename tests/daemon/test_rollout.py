"""Versions in the ledger alone: completion, verification, flips, waiting, giving up. No model, no file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusewire.daemon import events, lifecycle
from fusewire.daemon.errors import Reason
from fusewire.daemon.ledger import RESPONSES, State
from fusewire.daemon.lifecycle import LIFECYCLE, OVER, Turn, VersionState
from fusewire.daemon.roster import Policy
from fusewire.daemon.stimuli import (
    Answered,
    Commit,
    Committed,
    Compare,
    DropVersion,
    Freed,
    Inspect,
    Instruction,
    Listed,
    NewRun,
    Place,
    Publish,
    Refused,
    Retire,
    Rollback,
    RolledBack,
    Tick,
    Verified,
    Verify,
)

EVERYTHING = tuple(range(7))
DOCS = Path(__file__).parents[2] / "docs" / "versions.md"
Driver = Any


@pytest.fixture
def drive(new_driver: Callable[..., Any]) -> Driver:
    return new_driver()


@pytest.fixture
def by_hand(new_driver: Callable[..., Any]) -> Driver:
    return new_driver(policy=Policy(automatic=False))


def told(out: list[Instruction], kind: type[events.Event]) -> list[Any]:
    return [i.event for i in out if isinstance(i, Publish) and isinstance(i.event, kind)]


def replies(out: list[Instruction]) -> list[tuple[str, str]]:
    return [(i.failure, i.detail) for i in out if isinstance(i, Answered)]


def put_live(drive: Driver, version: int | None, key: str = "") -> list[Instruction]:
    out: list[Instruction] = drive.apply(key or f"all{version}", version, EVERYTHING, fused=(0, 1))
    return out


# ------------------------------------------------------------------------------------------- the table


def test_the_diagram_in_the_docs_is_the_table() -> None:
    assert f"```mermaid\n{lifecycle.diagram()}\n```" in DOCS.read_text()


def test_every_state_can_be_reached_and_nothing_leads_out_of_an_end() -> None:
    reached = {VersionState.OPEN} | set(LIFECYCLE.values())
    assert reached == set(VersionState)
    assert not {state for state, _ in LIFECYCLE} & OVER
    assert {turn for _, turn in LIFECYCLE} == set(Turn)


def test_every_response_is_to_a_stimulus_about_no_shard() -> None:
    assert len(RESPONSES) == 8


# ------------------------------------------------------------------------------------------ completion


def test_a_partial_version_is_complete_by_its_index(drive: Driver) -> None:
    put_live(drive, 1)
    drive.seen("i", claimed=2)
    drive(Listed(key="i", now=0, version=2, slots=(1, 3), what="index"))
    assert told(drive.apply("a", 2, (1,), waiting={1: "0.q_a"}), events.VersionComplete) == []
    out = drive.apply("b", 2, (3,))

    (complete,) = told(out, events.VersionComplete)
    assert (complete.version, complete.cause) == (2, "index")
    assert drive.ledger.versions.live == 2


def test_an_index_that_comes_last_completes_it(drive: Driver) -> None:
    put_live(drive, 1)
    drive.apply("a", 2, (1, 2), fused=(0,))
    drive.seen("i", claimed=2)
    out = drive(Listed(key="i", now=0, version=2, slots=(1, 2), what="index"))

    assert [event.version for event in told(out, events.VersionLive)] == [2]


def test_an_index_without_its_tensors_leaves_it_open_and_names_them(drive: Driver) -> None:
    put_live(drive, 1)
    drive.apply("a", 2, (1,), waiting={1: "0.q_a"})
    drive.seen("i", claimed=2)
    out = drive(Listed(key="i", now=0, version=2, slots=(1, 2, 6), what="index"))

    (incomplete,) = told(out, events.VersionIncomplete)
    assert (incomplete.missing, incomplete.missing_count, incomplete.cause) == (("0.kv_a", "1.rest"), 2, "index")
    assert told(drive(Tick(now=1)), events.VersionIncomplete) == [], "once"
    assert drive.ledger.versions.live == 1


def test_the_first_version_has_to_be_whole(drive: Driver) -> None:
    """There is nothing to carry over from."""
    drive.apply("a", 2, (1, 2), fused=(0,))
    out = drive.order("commit", 2, by_trainer=True)

    assert told(out, events.VersionComplete) == []
    assert drive.ledger.versions.live is None


@pytest.mark.parametrize("before", [True, False])
def test_a_commit_that_lists_tensors(before: bool, drive: Driver) -> None:
    put_live(drive, 1)
    commit = {"slots": (1, 6), "by_trainer": True}
    if before:
        out = drive.order("commit", 2, **commit)
        assert replies(out) == [("", "version 2 waits for 2 tensors: 0.q_a, 1.rest")]
    drive.apply("a", 2, (1,), waiting={1: "0.q_a"})
    out = drive.apply("b", 2, (6,))
    if not before:
        assert drive.ledger.versions.live == 1
        out = drive.order("commit", 2, **commit)
    assert [event.cause for event in told(out, events.VersionComplete)] == ["commit"]
    assert drive.ledger.versions.live == 2


def test_a_plain_commit_waits_for_the_shards_that_are_on_their_way(drive: Driver) -> None:
    put_live(drive, 1)
    drive.apply("a", 2, (3,))
    drive.seen("b", claimed=2)
    out = drive.order("commit", 2, by_trainer=True)
    assert (replies(out), drive.ledger.versions.live) == (
        [("", "version 2 is complete, and goes live once it is verified")],
        1,
    )
    drive.inspected("b", 2, (6,))
    drive.placed("b")
    assert drive.ledger.versions.live == 2


def test_a_marker_does_not_hide_a_shard_that_was_rejected(drive: Driver) -> None:
    put_live(drive, 1)
    drive.apply("a", 2, (3,))
    drive.seen("bad", claimed=2)
    drive(Refused(key="bad", now=0, reason=Reason.TRUNCATED, detail="short"))
    drive.seen("STABLE", claimed=2)
    out = drive(Listed(key="STABLE", now=0, version=2, slots=None, what="STABLE"))
    assert [event.cause for event in told(out, events.VersionIncomplete)] == ["STABLE"]
    assert drive.ledger.versions.live == 1

    drive.seen("bad", identity=2, claimed=2)
    drive.inspected("bad", 2, (6,))
    drive.placed("bad")
    assert drive.ledger.versions.live == 2


@pytest.mark.parametrize("order", ["marker first", "marker between", "marker last", "marker again"])
def test_a_marker_speaks_only_of_files_that_came_before_it(order: str, drive: Driver) -> None:
    """A copy in the order of names brings ``STABLE`` before the shards that it speaks of."""
    put_live(drive, 1)
    at = {"marker first": 1, "marker between": 3, "marker last": 5, "marker again": 1}[order]

    def mark(changed: int) -> None:
        drive.seen("STABLE", identity=changed, claimed=2, changed=changed)
        drive(Listed(key="STABLE", now=0, version=2, slots=None, what="STABLE"))

    for moment, (key, slot) in ((2, ("a", 3)), (4, ("b", 6))):
        if at < moment and "STABLE" not in drive.ledger.shards:
            mark(at)
        drive.seen(key, claimed=2, changed=moment)
        drive.inspected(key, 2, (slot,))
        drive.placed(key)
        if moment == 2 and at == 3:
            break  # b is seen only after the marker has been: by then the version is live
    if order in {"marker last", "marker again"}:
        assert drive.ledger.versions.live == 1
        mark(5)
    if order == "marker between":
        mark(3)
    assert drive.ledger.versions.live == (1 if order == "marker first" else 2)


def test_a_file_that_comes_after_the_marker_opens_the_version_again(drive: Driver) -> None:
    put_live(drive, 1)
    drive.seen("a", claimed=2, changed=2)
    drive.seen("STABLE", claimed=2, changed=3)
    drive.inspected("a", 2, (3,))
    drive(Listed(key="STABLE", now=0, version=2, slots=None, what="STABLE"))
    drive.seen("b", claimed=2, changed=4)
    drive.placed("a")
    drive.inspected("b", 2, (6,))
    drive.placed("b")
    assert drive.ledger.versions.live == 1


def test_a_commit_that_names_what_the_model_lacks_is_refused(drive: Driver) -> None:
    out = drive.order("commit", 2, by_trainer=True, unknown=("nonsense",))
    assert replies(out) == [("the model has no tensor nonsense", "")]


def test_a_half_that_can_not_be_placed_alone_keeps_it_open(drive: Driver) -> None:
    put_live(drive, 1)
    drive.seen("a")
    drive.inspected("a", 2, (1, 6))
    drive.placed("a", waiting={1: "0.q_a"}, blocked=(1,))
    out = drive.order("commit", 2, by_trainer=True)

    assert replies(out) == [("", "version 2 waits for 1 tensors: 0.q_a")]
    assert told(out, events.VersionIncomplete)[0].missing == ("0.q_a",)


# -------------------------------------------------------------------------------- verification, commit


def test_a_version_that_fails_is_aborted_and_never_comes_back(drive: Driver) -> None:
    put_live(drive, 1)
    drive.versions_follow = False
    assert Verify(2) in put_live(drive, 2)
    out = drive(Verified(now=0, version=2, failure="not finite: embed: 1 NaN of 9"))

    (aborted,) = told(out, events.VersionAborted)
    assert "NaN" in aborted.cause
    assert DropVersion(2) in out
    assert drive.ledger.versions.live == 1
    drive.seen("late")
    (answer,) = drive.answers(drive.inspected("late", 2, (0,)))
    assert (answer.reason, answer.detail) == (
        "stale_version",
        "version 2 was aborted: not finite: embed: 1 NaN of 9",
    )


def test_verified_tells_the_canary_and_what_was_carried(drive: Driver) -> None:
    put_live(drive, 1)
    drive.versions_follow = False
    drive.apply("a", 2, (1,), waiting={1: "0.q_a"})
    drive.order("commit", 2, by_trainer=True)
    out = drive(
        Verified(
            now=0, version=2, fused=(0,), carried=3, carried_bytes=99, tokens=(5, 1), fingerprint="ab", seconds=0.5
        )
    )
    (verified,) = told(out, events.VersionVerified)
    assert (verified.carried, verified.carried_bytes, verified.tokens, verified.fingerprint) == (3, 99, (5, 1), "ab")
    assert [event.layer for event in told(out, events.LayerFused)] == [0], "its other half is the live one"
    assert out[-1] == Commit(2)


def test_by_hand_a_verified_version_waits_for_its_commit(by_hand: Driver) -> None:
    put_live(by_hand, 1)
    assert by_hand.ledger.versions.staged.state is VersionState.VERIFIED
    assert replies(by_hand.order("commit", 9)) == [("nothing has come of version 9", "")]
    out = by_hand.order("commit", 1)
    assert replies(out) == [("", "version 1 is live")]
    assert replies(by_hand.order("commit", 1)) == [("", "version 1 is live already")]
    put_live(by_hand, None, "base")
    assert by_hand.ledger.versions.live is None, "the rolling version goes live by itself"


def test_what_waits_for_its_commit_goes_live_when_the_settings_change(by_hand: Driver) -> None:
    put_live(by_hand, 1)
    by_hand.ledger.versions.policy = Policy(automatic=True)
    assert [event.version for event in told(by_hand(Tick(now=1)), events.VersionLive)] == [1]


def test_by_hand_a_newer_complete_version_takes_the_place_of_one_that_waits(by_hand: Driver) -> None:
    put_live(by_hand, 1)
    by_hand.seen("all2")
    out = by_hand.inspected("all2", 2, EVERYTHING)
    assert [event.version for event in told(out, events.VersionSuperseded)] == [1]
    by_hand.inspected("all2", 2, EVERYTHING)
    by_hand.placed("all2", fused=(0, 1))
    by_hand.order("commit")
    assert by_hand.ledger.versions.live == 2


def test_shards_that_come_while_it_is_verified_are_compared_with_it(drive: Driver) -> None:
    drive.versions_follow = False
    put_live(drive, 1)
    drive.seen("again", identity=None, held=1)
    assert drive.inspected("again", 1, (0,))[-1] != Place("again", 1)
    assert drive.ledger.shards["again"].state is State.WAITING, "a matter of moments: not sent away"
    drive(Verified(now=0, version=1))
    out = drive(Committed(now=0, version=1, leased=0))
    assert out[-1] == Inspect("again")
    assert drive.inspected("again", 1, (0,)) == [Compare("again", 1)]
    (answer,) = drive.answers(drive.placed("again", duplicates=1))
    assert answer.status == "applied"


# ------------------------------------------------------------------------------------- waiting, leases


def test_files_of_another_version_wait_for_its_turn(drive: Driver) -> None:
    put_live(drive, 1)
    drive.apply("a", 2, (3,))
    drive.seen("b")
    drive.inspected("b", 3, (3,))
    shard = drive.ledger.shards["b"]
    assert (shard.state, shard.why) == (State.WAITING, "version 2 is being staged")
    out = drive.order("abort", 2)
    assert replies(out) == [("", "version 2 is aborted; what is live was not touched")]
    assert DropVersion(2) in out
    assert out[-1] == Inspect("b")
    assert drive.inspected("b", 3, (3,)) == [Place("b", 3)]


def test_a_client_is_sent_away_while_another_version_is_staged(drive: Driver) -> None:
    drive.apply("a", 2, (3,))
    drive.seen("b", identity=None, held=5)
    (answer,) = drive.answers(drive.inspected("b", 3, (3,)))
    assert (answer.status, answer.detail) == ("busy", "version 2 is being staged")
    assert drive.ledger.held == 0


def test_a_silent_version_gives_way_to_a_newer_one_that_is_pushed(new_driver: Callable[..., Any]) -> None:
    drive = new_driver(policy=Policy(stale_after=10.0))
    drive.apply("a", 2, (3,))
    out = drive(Tick(now=11.0))
    (incomplete,) = told(out, events.VersionIncomplete)
    assert (incomplete.cause, incomplete.missing_count, incomplete.missing[0]) == ("stalled", 6, "embed")
    drive.seen("b", identity=None, held=5)
    out = drive.inspected("b", 3, (3,))
    assert [event.version for event in told(out, events.VersionSuperseded)] == [2]
    assert out[-1] == Place("b", 3)
    drive.placed("b")
    drive.seen("late", identity=None, held=5)
    (answer,) = drive.answers(drive.inspected("late", 2, (3,)))
    assert answer.reason == "stale_version"


@pytest.mark.parametrize("pushed", [True, False])
@pytest.mark.parametrize(("first", "second"), [(None, 3), (3, None)])
def test_versions_and_the_rolling_one_do_not_wait_for_each_other_for_ever(
    first: int | None, second: int | None, pushed: bool, new_driver: Callable[..., Any]
) -> None:
    """A lone half without a version, or a version that nobody goes on with, and then shards of the other kind."""
    drive = new_driver(policy=Policy(stale_after=10.0))
    put_live(drive, 1)
    drive.apply("half", first, (1,), waiting={1: "0.q_a"})
    drive.seen("b", held=5 if pushed else 0, identity=None if pushed else 1)
    out = drive.inspected("b", second, (3,))
    if pushed:
        assert drive.answers(out)[0].status == "busy"
    out = drive(Tick(now=11.0))
    if pushed:
        drive.seen("b", identity=None, held=5)
        out = drive.inspected("b", second, (3,))
    assert [event.version for event in told(out, events.VersionSuperseded)] == [first]
    assert DropVersion(first) in out
    assert out[-1] == (Place("b", second) if pushed else Inspect("b"))


def test_staging_waits_for_the_requests_on_the_weights_before(drive: Driver) -> None:
    put_live(drive, 1)
    drive.leased = 2
    put_live(drive, 2)
    drive.seen("b")
    drive.inspected("b", 3, EVERYTHING)
    assert drive.ledger.shards["b"].why == "2 requests still read the weights of the version before"
    assert drive(Freed(now=0))[0] == Inspect("b")


def test_older_versions_that_wait_are_turned_away_once_a_newer_one_is_live(drive: Driver) -> None:
    put_live(drive, 1)
    drive.apply("c", 5, (3,))
    drive.seen("b")
    drive.inspected("b", 4, (3,))
    out = drive.order("commit", 5, by_trainer=True)
    assert [event.version for event in told(out, events.VersionSuperseded)] == [4]
    assert [answer.reason for answer in drive.answers(out)] == ["stale_version"]


def test_rolling_and_numbered_shards_do_not_mix(drive: Driver) -> None:
    put_live(drive, None, "base")
    drive.apply("half", None, (1,), waiting={1: "0.q_a"})
    drive.seen("b")
    drive.inspected("b", 3, (3,))
    assert drive.ledger.shards["b"].why == "rolling version is being staged"
    out = drive.apply("other half", None, (2,), fused=(0,))
    assert [event.version for event in told(out, events.VersionLive)] == [None]
    assert out[-1] == Inspect("b")


def test_the_rolling_version_goes_live_together_with_what_is_on_its_way(drive: Driver) -> None:
    put_live(drive, None, "base")
    drive.seen("a")
    drive.seen("b")
    drive.inspected("a", None, (3,))
    assert told(drive.placed("a"), events.VersionLive) == []
    drive.inspected("b", None, (6,))
    assert len(told(drive.placed("b"), events.VersionLive)) == 1
    drive.seen("a", identity=2)
    drive.seen("c")
    drive.inspected("a", None, (3,))
    drive.placed("a")
    assert len(told(drive(Tick(now=drive.now + 1)), events.VersionLive)) == 1, "but not for long"


def test_a_version_of_which_nothing_could_be_placed_is_in_nobodys_way(drive: Driver) -> None:
    drive.seen("a")
    drive.inspected("a", 2, (3,))
    drive(Refused(key="a", now=0, reason=Reason.UNREADABLE, detail="I/O error"))
    assert drive.ledger.versions.staged is None
    drive.seen("b")
    assert drive.inspected("b", 3, (3,)) == [Place("b", 3)]


# ------------------------------------------------------------------------------------ rollback and runs


def test_a_rollback_and_what_comes_after_it(drive: Driver) -> None:
    put_live(drive, 1)
    assert replies(drive.order("rollback")) == [("there is no version to go back to", "")]
    put_live(drive, 2)
    out = drive.order("rollback")
    assert Rollback("t") in out
    drive.seen("b")
    drive.inspected("b", 3, (3,))
    assert drive.ledger.shards["b"].why == "a rollback is under way"
    out = drive(RolledBack(now=0, ticket="t", leased=1))
    (event,) = told(out, events.VersionRolledBack)
    assert (event.version, event.previous, drive.ledger.versions.live) == (1, 2, 1)
    assert replies(out) == [("", "rolled back: version 1 is live again, in the place of version 2")]
    assert drive.ledger.shards["b"].why == "a rollback is under way"
    assert drive(Freed(now=0))[0] == Inspect("b")
    assert drive.inspected("b", 3, (3,)) == [Place("b", 3)]
    drive.placed("b")
    assert replies(drive.order("rollback")) == [
        ("there is no version to go back to: version 3 is being staged over it", "")
    ]
    drive.seen("late")
    (answer,) = drive.answers(drive.inspected("late", 2, (0,)))
    assert answer.detail == "version 2 was retired: it has been rolled back"


def test_a_rollback_that_fails_is_told(drive: Driver) -> None:
    put_live(drive, 1)
    put_live(drive, 2)
    drive.order("rollback")
    out = drive(RolledBack(now=0, ticket="t", failure="there is one generation only"))
    assert replies(out) == [("there is one generation only", "")]
    assert drive.ledger.versions.live == 2


def test_a_new_run_restarts_the_numbering(drive: Driver) -> None:
    drive.seen("a")
    drive.inspected("a", 57, EVERYTHING, run="first")
    drive.placed("a", fused=(0, 1))
    drive.apply("b", 58, (3,))
    drive.seen("c")
    out = drive.inspected("c", 1, EVERYTHING, run="second")
    assert NewRun() in out
    assert [event.version for event in told(out, events.VersionSuperseded)] == [58]
    assert out[-1] == Place("c", 1)
    drive.placed("c", fused=(0, 1))
    assert drive.ledger.versions.live == 1
    drive.seen("late")
    (answer,) = drive.answers(drive.inspected("late", 58, (0,), run="first"))
    assert answer.detail == "run first is over: run second has begun"


# -------------------------------------------------------------------------------------------- retention


def test_files_retire_once_a_whole_version_has_replaced_them(drive: Driver) -> None:
    put_live(drive, 1)
    drive.apply("part", 2, (3,))
    out = drive.order("commit", 2, by_trainer=True)
    assert drive.ledger.versions.live == 2
    assert not [i for i in out if isinstance(i, Retire)], "version 2 rests on what version 1 brought"
    out = put_live(drive, 3)
    assert not [i for i in out if isinstance(i, Retire)], "version 2 can be gone back to, and a restart would need both"
    drive.seen("all4")
    out = drive.inspected("all4", 4, EVERYTHING)  # it is staged over version 2
    drive.placed("all4", fused=(0, 1))
    assert [i for i in out if isinstance(i, Retire)] == [Retire(1, (("all1", 1),)), Retire(2, (("part", 1),))]
    drive.seen("all5")
    assert [i for i in drive.inspected("all5", 5, EVERYTHING) if isinstance(i, Retire)] == [Retire(3, (("all3", 1),))]
