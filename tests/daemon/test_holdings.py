"""On which shard each slot rests: against a model that remembers everything."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fusewire.daemon.holdings import File, Holdings
from fusewire.daemon.records import runs_of, slots_of

SLOTS = 8
some_slots = st.sets(st.integers(0, SLOTS - 1), min_size=1)


class HoldingsMachine(RuleBasedStateMachine):
    """Versions that come, go live, are given up and gone back to; what is told is kept as a journal would."""

    @initialize()
    def begin(self) -> None:
        self.holdings = Holdings()
        self.next = 1
        self.live: dict[int, int] = {}
        self.staged: dict[int, int] = {}
        self.before: dict[int, int] | None = None
        self.written: dict[int, tuple[str, set[int]]] = {}
        """What a restart would read: shard -> how it stands, and its slots."""
        self.thrown_away: set[int] = set()

    @rule(slots=some_slots, again=st.booleans())
    def bring(self, slots: set[int], again: bool) -> None:
        taken = self.holdings.bring(self.next, sorted(slots), again=again)
        mine = {slot for slot in slots if again or slot not in self.staged}
        assert set(taken) == mine
        self.staged |= dict.fromkeys(mine, self.next)
        self.written[self.next] = ("staged", mine)
        self.next += 1
        if self.before is not None:  # a stage has begun: there is no way back
            self.before = None
            self.holdings.forget_retired()
            self.settle()

    @rule(slots=some_slots)
    def lose(self, slots: set[int]) -> None:
        self.holdings.take_back(slots)
        for slot in slots:
            self.staged.pop(slot, None)

    @rule()
    def commit(self) -> None:
        self.holdings.commit()
        self.before, self.live, self.staged = self.live, self.live | self.staged, {}
        self.settle()

    @rule()
    def give_up(self) -> None:
        self.holdings.drop_staged(None)
        self.staged = {}
        self.settle()

    @precondition(lambda self: self.before is not None and not self.staged)
    @rule()
    def go_back(self) -> None:
        self.holdings.rollback()
        assert self.before is not None
        self.live, self.before = self.before, self.live
        self.settle()

    @rule()
    def restart(self) -> None:
        """Only what was written down is known: what is live has to come out of it."""
        again = Holdings()
        for shard, (standing, slots) in self.written.items():
            if standing == "live":
                again.recall(shard, slots)
        assert again.live == self.live

    def settle(self) -> None:
        told, over = self.holdings.settle()
        for held in told:
            self.written[held.id] = (held.standing, slots_of(held.slots))
        self.thrown_away |= set(over)
        for shard in over:
            assert self.written[shard] == ("over", set())

    @invariant()
    def nothing_that_is_needed_is_thrown_away(self) -> None:
        if not hasattr(self, "holdings"):
            return
        needed = {*self.live.values(), *self.staged.values(), *(self.before or {}).values()}
        assert not needed & self.thrown_away
        assert self.holdings.needed() == needed

    def teardown(self) -> None:
        if hasattr(self, "holdings"):
            self.give_up()
            self.holdings.forget_retired()
            self.before = None
            self.settle()
            assert self.thrown_away == set(range(1, self.next)) - set(self.live.values()), "nothing is kept for ever"


TestHoldings = HoldingsMachine.TestCase
TestHoldings.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def test_files_of_a_version_go_together_and_once() -> None:
    holdings = Holdings()
    holdings.bring(1, (0, 1), again=False, file=File("a", 1, "ia"))
    holdings.bring(2, (2,), again=False, file=File("b", 1, "ib"))
    holdings.commit()
    holdings.bring(3, (0, 1), again=False, file=File("c", 2, "ic"))
    holdings.commit()
    holdings.forget_retired()
    assert holdings.removable({2}) == {}, "slot 2 rests on version 1's second file"
    holdings.bring(4, (2,), again=False, file=File("d", 3, "id"))
    holdings.commit()
    assert holdings.removable({2, 3}) == {}, "version 2 can be gone back to, and rests on version 1"
    holdings.forget_retired()
    assert holdings.removable({3}) == {1: [File("a", 1, "ia"), File("b", 1, "ib")]}
    assert holdings.removable({3}) == {}


def test_runs_are_sets() -> None:
    for slots in (set(), {0}, {3, 4, 5}, {0, 2, 4}, set(range(1000)) - {7, 500}):
        assert slots_of(runs_of(slots)) == slots
    assert runs_of({5, 3, 4, 9}) == ((3, 6), (9, 10))
